"""sha256 over the canonical JSON of a configuration."""

from __future__ import annotations

import hashlib
import json

from fedlora.config import config_container
from fedlora.config.schema import FedLoraConfig


def hash_of(config: FedLoraConfig) -> str:
    """Return sha256 (hex) over the configuration's canonical JSON."""
    text = json.dumps(config_container(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
