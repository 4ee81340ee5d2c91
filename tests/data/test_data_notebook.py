"""The notebook's cells are valid Python that use names the library has."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "simulate.ipynb"


def test_notebook_cells_parse_and_their_imports_exist() -> None:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 4
    assert all(cell["outputs"] == [] for cell in found["cells"] if cell["cell_type"] == "code")
    for node in ast.walk(ast.parse("\n".join(cells))):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("fedlora"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names)
