"""The stable Python names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fedlora


def test_stable_names_exist():
    assert [name for name in dir(fedlora) if name != "__version__"] == [
        "accounting",
        "config",
        "export_adapter",
        "ledger",
        "load_config",
        "open_ledger",
        "simulate",
    ]
    for name in dir(fedlora):
        assert getattr(fedlora, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = fedlora.nothing


def test_the_pages_example_runs_as_it_is_printed(tmp_path, monkeypatch, capsys):
    """All of it but the training, which other tests do: `simulate` gives what a finished run gave."""
    from types import SimpleNamespace

    from fedlora.cli.main import main
    from fedlora.ledger import load_or_create_secret, open_ledger

    page = (Path(fedlora.__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    example = page.split("```python\n", 1)[1].split("```", 1)[0]
    assert main(["init", str(tmp_path / "job")]) == 0
    monkeypatch.chdir(tmp_path / "job")
    (tmp_path / "job" / "runs").mkdir()
    open_ledger("runs/ledger.sqlite", secret=load_or_create_secret(Path("runs/ledger.key"))).close()
    done = SimpleNamespace(epsilon=2.75, statement={"unit": "one record"})
    monkeypatch.setattr("fedlora.simulation.run.simulate", lambda config: done if config.run.name else None)
    capsys.readouterr()
    exec(compile(example, "api.md", "exec"), {})
    said = capsys.readouterr().out
    assert "2.75" in said
    assert "one record" in said


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
