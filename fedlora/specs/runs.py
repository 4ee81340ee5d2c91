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

from fedlora.config import load_config
from fedlora.errors import DataError, FedLoraError
from fedlora.specs.dock import Dock, Match
from fedlora.specs.release import Label, describe
from fedlora.specs.types import TARGET, NotInDockError, PrivacyStatement, Specification, other_target
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
    facts = {**adapter_facts(run), TARGET: "run", **(label.metadata or {})}
    return describe(payload, replace(label, metadata=facts), run_statement(run))


def run_statement(run: Path) -> PrivacyStatement:
    """Return what a run's summary promises; "none" unless it is a finite differential-privacy figure with its meaning.

    A run that started from another run's adapter shows that one too: without a promise there, there is none here, and
    otherwise the larger figures of the two hold.

    Raises:
        DataError: if there is no readable summary.
    """
    own = _own_statement(run)
    if own.guarantee != "dp":
        return own
    place = _start_of(run)
    if place is None:
        return own
    try:
        before = run_statement(place)
    except (DataError, RecursionError):
        before = PrivacyStatement("none")
    if before.guarantee != "dp" or before.adjacency != own.adjacency:
        reason = f"started from {place.name!r}, which states no privacy that could be added"
        return PrivacyStatement("none", conditions=(reason,))
    note = (
        f"started from {place.name!r}: the larger epsilon and delta of both runs, for clients whose one ledger paid "
        "for both or that took part in one of them"
    )
    return replace(
        own,
        epsilon=max(own.epsilon or math.inf, before.epsilon or math.inf),
        delta=max(own.delta or 1.0, before.delta or 1.0),
        conditions=(*own.conditions, note),
    )


def _start_of(run: Path) -> Path | None:
    """Return the folder of the run that a run started from; a folder without a summary where nothing says so."""
    try:
        place = load_config(run / "config.yaml").adapter.init_from
    except (OSError, FedLoraError):
        return run / "unknown"
    if place is None:
        return None
    return Path(place) if Path(place).is_dir() else Path(place).parent


def _own_statement(run: Path) -> PrivacyStatement:
    try:
        summary: Mapping[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"run {run}: no readable summary.json; give the folder of a finished run") from error
    stated, epsilon = summary.get("statement") or {}, summary.get("epsilon")
    private = stated.get("privacy") == "differential privacy" and "assumption" not in stated
    if not private or not isinstance(epsilon, int | float) or not math.isfinite(epsilon) or not epsilon > 0:
        reason = str(
            stated.get("assumption") or stated.get("note") or stated.get("privacy") or "no statement"
        )
        return PrivacyStatement("none", conditions=(reason,))
    own = stated.get(
        "epsilon_from_this_runs_events"
    )  # a budget's calendar window may hold less than the whole run
    notes = ("post-processing of the run's adapter", str(stated.get("epsilon_is") or ""))
    return PrivacyStatement(
        "dp",
        epsilon=max(float(epsilon), float(own) if isinstance(own, int | float) else 0.0),
        delta=float(stated["delta"]),
        unit=str(stated["unit"]),
        adjacency=str(stated["adjacency"]),
        adversary=str(stated["adversary"]),
        accountant=str(stated["accountant"]),
        sampling=str(stated.get("sampling_assumption", "not stated")),
        num_events=_events(run, summary),
        conditions=tuple(note for note in notes if note),
    )


def _events(run: Path, summary: Mapping[str, Any]) -> int:
    """Return how many noised steps a client was charged for at most; the run's rounds where no ledger says it."""
    try:
        accounts = json.loads((run / "ledger.json").read_text(encoding="utf-8"))["accounts"]
        counts = [int(one["num_events"]) for one in accounts]
    except (OSError, ValueError, TypeError, KeyError):
        counts = []
    return max([*counts, int(summary.get("rounds") or 0), 1])


def best_start(dock: Dock, query: Specification, *, top_k: int = 20) -> Match:
    """Return the best matching model whose entry names an adapter and was made towards the query's own target.

    Raises:
        NotInDockError: if none of the best `top_k` does.
    """
    for match in dock.match(query, top_k):
        if isinstance(match.metadata.get(ADAPTER), str) and not other_target(query.metadata, match.metadata):
            return match
    raise NotInDockError(
        f"none of the {top_k} best matches of {query.name!r} names an adapter and has its target; add models with "
        "`fedlora dock spec --kind model --adapter RUN` and the same --target"
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
