"""fedlora: private federated fine-tuning of transformer models with LoRA.

The stable Python interface; everything is imported when it is first used:

    import fedlora
    config = fedlora.load_config("run.yaml", overrides=["privacy.target_epsilon=3"])
    result = fedlora.simulate(config)
    report = fedlora.accounting.epsilon_of(fedlora.accounting.PoissonGaussianEvent(1.0, 0.01).times(1000), 1e-5)
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "load_config": ("fedlora.config", "load_config"),
    "simulate": ("fedlora.simulation.run", "simulate"),
    "open_ledger": ("fedlora.ledger", "open_ledger"),
    "export_adapter": ("fedlora.adapters.export", "export_adapter"),
}


_PACKAGES = ("accounting", "config", "ledger")


def __getattr__(name: str) -> Any:
    """Import a public function or package when it is first used."""
    if name in _PACKAGES:
        return importlib.import_module(f"fedlora.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'fedlora' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """List the stable names."""
    return sorted(["__version__", *_LAZY, *_PACKAGES])
