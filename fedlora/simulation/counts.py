"""Who holds what in a simulated federation, for the report's partition plot.

Only simulations write this: exact counts are no private release, and a real site's never leave it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from fedlora.data import Rows
from fedlora.errors import FedLoraError
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
    """Write `partition.json` into the run folder, where the report finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "partition.json"
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps({"clients": label_counts(federation)}, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
    return path
