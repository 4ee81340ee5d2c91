"""Specifications of finished runs: their global lora_B is a model vector (Eq. 1); nothing more is spent."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlora.errors import DataError
from fedlora.specs.dock import Dock, Match
from fedlora.specs.release import Label, describe
from fedlora.specs.types import NotInDockError, PrivacyStatement, Specification
from fedlora.training.starting import adapter_file, read_adapter

_PLAIN_PATH = re.compile(r"[\w./@:+~-]+")
"""Entries come from others, and the path becomes part of a command line."""
ADAPTER = "adapter"
ADAPTER_SHA256 = "adapter_sha256"


def file_sha256(path: Path) -> str:
    """Return sha256 (hex) of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def adapter_facts(place: str | Path) -> dict[str, str]:
    """Return the metadata that names an adapter: where it lies (a run folder or a file) and its hash.

    Raises:
        DataError: if it is not there.
    """
    return {ADAPTER: str(place), ADAPTER_SHA256: file_sha256(adapter_file(place))}


def describe_run(run: Path, label: Label) -> Specification:
    """Return the specification of a finished run's own adapter; nothing more is spent.

    Args:
        run: the folder of a finished run with mechanism lora_fa.
        label: name, licence and facts.

    Raises:
        DataError: if the folder has no adapter or summary.
        LayoutMismatchError: if its adapter has no common lora_A.
    """
    payload = read_adapter(run)
    facts = {**adapter_facts(run), **(label.metadata or {})}
    return describe(payload, replace(label, metadata=facts), run_statement(run))


def run_statement(run: Path) -> PrivacyStatement:
    """Return what a run's summary promises; "none" unless it is a finite differential-privacy figure with its meaning.

    Raises:
        DataError: if there is no readable summary.
    """
    try:
        summary: Mapping[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"run {run}: no readable summary.json; give the folder of a finished run") from error
    stated, epsilon = summary.get("statement") or {}, summary.get("epsilon")
    private = stated.get("privacy") == "differential privacy" and "assumption" not in stated
    if not private or not isinstance(epsilon, int | float) or not math.isfinite(epsilon):
        reason = str(
            stated.get("assumption") or stated.get("note") or stated.get("privacy") or "no statement"
        )
        return PrivacyStatement("none", conditions=(reason,))
    own = stated.get(
        "epsilon_from_this_runs_events"
    )  # a budget's calendar window may hold less than the whole run
    return PrivacyStatement(
        "dp",
        epsilon=max(float(epsilon), float(own) if isinstance(own, int | float) else 0.0),
        delta=float(stated["delta"]),
        unit=str(stated["unit"]),
        adjacency=str(stated["adjacency"]),
        adversary=str(stated["adversary"]),
        accountant=str(stated["accountant"]),
        sampling=str(stated.get("sampling_assumption", "not stated")),
        num_events=int(summary.get("rounds") or 0),
        conditions=("post-processing of the run's adapter", str(stated.get("epsilon_is", ""))),
    )


def best_start(dock: Dock, query: Specification, *, top_k: int = 20) -> Match:
    """Return the best matching model whose entry names an adapter.

    Raises:
        NotInDockError: if none of the best `top_k` does.
    """
    for match in dock.match(query, top_k):
        if isinstance(match.metadata.get(ADAPTER), str):
            return match
    raise NotInDockError(
        f"none of the {top_k} best matches of {query.name!r} names an adapter; add models with `fedlora dock describe` "
        "or `fedlora dock spec --adapter RUN`"
    )


def checked_adapter(match: Match) -> str:
    """Return the place of a match's adapter after comparing its hash.

    Raises:
        DataError: if it is not there or is another file than the one that was added.
    """
    place = str(match.metadata[ADAPTER])
    if not _PLAIN_PATH.fullmatch(place):
        raise DataError(
            f"entry {match.name!r}: its adapter's path has characters other than letters, digits and ./@:+~-_; "
            "copy the adapter to a plain path and set adapter.init_from yourself"
        )
    expected = match.metadata.get(ADAPTER_SHA256)
    if file_sha256(adapter_file(place)) != expected:
        raise DataError(
            f"adapter {place}: its sha256 is not what entry {match.name!r} states; do not start from it"
        )
    return place
