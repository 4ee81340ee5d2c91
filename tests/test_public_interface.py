"""The stable Python names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fedlora


def test_stable_names_exist():
    assert [name for name in dir(fedlora) if name != "__version__"] == [
        "export_adapter",
        "load_config",
        "open_ledger",
        "simulate",
    ]
    for name in dir(fedlora):
        assert getattr(fedlora, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = fedlora.nothing


def test_packages_are_there_without_an_import_of_their_own():
    code = (
        "import fedlora\n"
        "event = fedlora.accounting.PoissonGaussianEvent(1.0, 0.01).times(1000)\n"
        "print(fedlora.accounting.epsilon_of(event, 1e-5, adjacency='add_or_remove').epsilon)\n"
        "fedlora.config.load_config, fedlora.ledger.open_ledger"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert 1.0 < float(done.stdout) < 3.0


@pytest.mark.parametrize("module", ["fedlora", "fedlora.accounting", "fedlora.ledger", "fedlora.config"])
def test_light_imports_stay_free_of_torch_and_flower(module):
    code = f"import {module}, sys; print([m for m in ('torch', 'flwr', 'transformers', 'ray') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"
