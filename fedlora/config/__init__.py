"""Typed, strict configuration: OmegaConf reads and merges, pydantic checks."""

from __future__ import annotations

from fedlora.config.schema import FedLoraConfig

__all__ = ["FedLoraConfig"]
