"""PEFT bridge: find layers, inject, read, write, fingerprint; shared lora_A recipe; taps for per-record gradients."""

from fedlora.adapters.adapted import ADAPTER, AdaptedModel
from fedlora.adapters.blocks import BlockTable, FlatBlocks
from fedlora.adapters.inject import inject
from fedlora.adapters.recipe import ARecipe
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.views import LayerView, view_blocks

__all__ = [
    "ADAPTER",
    "ARecipe",
    "AdaptedModel",
    "BlockTable",
    "FlatBlocks",
    "LayerView",
    "RecordAxis",
    "inject",
    "view_blocks",
]
