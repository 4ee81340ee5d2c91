"""Typed, strict configuration: OmegaConf reads and merges, pydantic checks."""

from __future__ import annotations

from fedlora.config.layers import split_overrides
from fedlora.config.load import Loaded, config_container, config_from_container, load, load_config
from fedlora.config.schema import FedLoraConfig

__all__ = [
    "FedLoraConfig",
    "Loaded",
    "config_container",
    "config_from_container",
    "load",
    "load_config",
    "split_overrides",
]
