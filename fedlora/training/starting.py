"""The adapter that a run starts from: a fresh one, or an earlier run's (`adapter.init_from`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fedlora.config import load_config
from fedlora.config.schema import FedLoraConfig, NoPrivacy
from fedlora.errors import ConfigError, DataError, LayoutMismatchError
from fedlora.training.port import decode_packet
from fedlora.training.session import Workbench
from fedlora.wire.codec import from_arrays
from fedlora.wire.payload import AdapterPayload, Array

ADAPTER_FILE: Final = "adapter.flr"
_MAX_BYTES: Final = 8_000_000_000


def adapter_file(place: str | Path) -> Path:
    """Return the adapter file of a run folder, or the file itself.

    Raises:
        DataError: if there is none.
    """
    path = Path(place)
    found = path / ADAPTER_FILE if path.is_dir() else path
    if not found.is_file():
        raise DataError(f"adapter {place}: not there; give a run's folder or its {ADAPTER_FILE}")
    return found


def read_adapter(place: str | Path) -> AdapterPayload:
    """Read an adapter in its own coordinates.

    Raises:
        DataError: if the file is not there.
        WireError: if it is damaged.
    """
    packet = decode_packet(adapter_file(place).read_bytes(), _MAX_BYTES)
    arrays = {name: array.copy() for name, array in packet.arrays.items()}  # decoded arrays are read-only
    return from_arrays(packet.header["payload"], arrays, max_bytes=_MAX_BYTES)


def starting_payload(bench: Workbench) -> AdapterPayload:
    """Return the global adapter of a run's first round.

    With `adapter.init_from` the adapted layers come from that file. Trained extra modules (a head) come along only if
    the file's run folder states the very same labels; otherwise they start as without the key.

    Args:
        bench: the run's workbench.

    Raises:
        DataError: if the file is not there.
        LayoutMismatchError: if it is of another base model, lora_A recipe, layer or rank.
    """
    fresh = bench.initial_payload()
    place = bench.config.adapter.init_from
    if place is None:
        return fresh
    given = read_adapter(place)
    _check_fit(fresh, given, place)
    blocks: dict[str, Array] = dict(fresh.blocks)
    with_head = _same_labels(bench, place)
    for name, block in given.blocks.items():
        adapted = name.rpartition("|")[0] in fresh.modules
        if name in blocks and (adapted or (with_head and blocks[name].shape == block.shape)):
            blocks[name] = block
    return AdapterPayload(fresh.kind, blocks, fresh.modules, fresh.recipe, fresh.base_fingerprint)


def _check_fit(fresh: AdapterPayload, given: AdapterPayload, place: str) -> None:
    facts: Mapping[str, tuple[object, object]] = {
        "base model": (given.base_fingerprint, fresh.base_fingerprint),
        "coordinates": (given.kind, fresh.kind),
        "lora_A recipe": (given.recipe, fresh.recipe),
        "layers and ranks": (dict(given.modules), dict(fresh.modules)),
    }
    for what, (theirs, ours) in facts.items():
        if theirs != ours:
            shown = f": {str(theirs)[:16]} there, {str(ours)[:16]} here" if isinstance(ours, str) else ""
            raise LayoutMismatchError(
                f"adapter.init_from {place}: {what} differ{shown}; a run can only go on from an adapter of the same "
                "base model, mechanism, run.seed, target_modules, rank and lora_alpha"
            )


def _same_labels(bench: Workbench, place: str) -> bool:
    """Return whether the adapter's run folder states the run's own labels."""
    path = Path(place) / "config.yaml"
    if not path.is_file():
        return False
    try:
        theirs = load_config(path)
    except ConfigError:
        return False
    mine = bench.config
    same = theirs.data.labels == mine.data.labels and theirs.model.num_labels == mine.model.num_labels
    return same and theirs.model.task == mine.model.task


def starting_warnings(config: FedLoraConfig) -> tuple[str, ...]:
    """Return what a reader of the run's epsilon must know about the adapter that it started from."""
    place = config.adapter.init_from
    if place is None or isinstance(config.privacy, NoPrivacy):
        return ()
    try:
        summary = json.loads((Path(place) / "summary.json").read_text(encoding="utf-8"))
        private = (summary.get("statement") or {}).get("privacy") == "differential privacy"
    except (OSError, ValueError, AttributeError):
        private = False
    if private:
        return ()
    return (
        f"started from {place}, which states no privacy: this run's epsilon does not cover what that adapter shows of "
        "the records it was trained on",
    )
