"""Who holds what: the counts and the drawing in a simulation's run folder."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from simulation_helpers import configuration

from fedlora.simulation.counts import write_partition
from fedlora.simulation.prepare import make_federation

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "partition",
    [
        {"kind": "quantity", "clients": 4},
        {"kind": "dirichlet", "clients": 5, "alpha": 0.3, "column": "label"},
        {"kind": "column", "column": "user"},
    ],
)
def test_counts_and_drawing_of_a_partition(world: Path, tmp_path: Path, partition: dict[str, object]) -> None:
    federation = make_federation(configuration(world, tmp_path / "runs", data={"partition": partition}))
    folder = tmp_path / "run"
    table = json.loads(write_partition(folder, federation).read_text())["clients"]
    held = {client: len(index) for client, index in federation.parts.items()}
    assert {client: sum(row.values()) for client, row in table.items()} == held
    drawing = ElementTree.fromstring((folder / "partition.svg").read_text(encoding="utf-8"))
    texts = [node.text for node in drawing.iter(f"{SVG}text")]
    assert set(table) <= set(texts)
    titles = [node.text for node in drawing.iter(f"{SVG}title")]
    assert all(f"{label}: {count}" in titles for row in table.values() for label, count in row.items())
    assert not list(folder.glob("*.part"))
