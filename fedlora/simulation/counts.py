"""Who holds what in a simulated federation: counts for the report, and a drawing.

Only simulations write this: exact counts are no private release, and a real site's never leave it.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from fedlora.data import Rows
from fedlora.data.partition_plot import partition_svg
from fedlora.errors import FedLoraError
from fedlora.files import replace_text
from fedlora.simulation.prepare import Federation

_ANY = "records"


def label_counts(federation: Federation) -> dict[str, dict[str, int]]:
    """Return client to records per label; per "records" where the task has no label, or a numeric target.

    Args:
        federation: SENSITIVE; simulated.
    """
    names = federation.config.data.labels
    values = _labels(federation.rows) if names is not None else None
    found = {}
    for client, index in sorted(federation.parts.items()):
        if values is None or names is None:
            found[client] = {_ANY: len(index)}
            continue
        counts = Counter(_name(values[int(place)], names) for place in index)
        found[client] = dict(sorted(counts.items()))
    return found


def _labels(rows: Rows) -> list[object] | None:
    try:
        return list(rows.column("label"))
    except FedLoraError:
        return None  # tags, prompts and the like: no one label a record


def _name(value: object, names: tuple[str, ...]) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names):
        return names[value]
    return str(value)


def write_partition(folder: Path, federation: Federation) -> Path:
    """Write `partition.json` (read by the report) and its drawing `partition.svg` into the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    table = label_counts(federation)
    replace_text(folder / "partition.svg", partition_svg(table))
    path = folder / "partition.json"
    replace_text(path, json.dumps({"clients": table}, indent=1) + "\n")
    return path
