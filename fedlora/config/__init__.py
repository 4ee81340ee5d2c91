"""Typed, strict configuration: OmegaConf reads and merges, pydantic checks."""

from __future__ import annotations

from fedlora.config.layers import split_overrides
from fedlora.config.load import Loaded, config_container, config_from_container, load, load_config
from fedlora.config.resolve import (
    canonical_json,
    check_derived,
    config_hash,
    derive_noise,
    save_resolved,
    total_steps,
)
from fedlora.config.schema import FedLoraConfig

__all__ = [
    "FedLoraConfig",
    "Loaded",
    "canonical_json",
    "check_derived",
    "config_container",
    "config_from_container",
    "config_hash",
    "derive_noise",
    "load",
    "load_config",
    "save_resolved",
    "split_overrides",
    "total_steps",
]
