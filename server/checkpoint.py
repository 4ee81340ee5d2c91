"""A checkpoint per round: atomic, checksummed, the previous one kept.

A file is `sha256 | packet`, the packet holding a JSON header and arrays. A truncated or altered file is
noticed by its checksum, and the one before it is used.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedlora.errors import CheckpointError, FedLoraError
from fedlora.training.port import Packet, decode_packet, encode_packet
from fedlora.training.slots import KEPT_CHECKPOINTS
from fedlora.wire.codec import from_arrays, to_arrays
from fedlora.wire.payload import AdapterPayload
from server.folder import write_atomically

_LOG = logging.getLogger(__name__)
_VERSION: Final = 1
_DIGEST: Final = 32
_LIMIT: Final = 8_000_000_000


@dataclass(frozen=True)
class Checkpoint:
    """PUBLIC. Everything the server carries from round to round.

    Attributes:
        round: last completed round.
        config_hash: hash of the resolved configuration.
        payload: global adapter after that round.
        state: aggregator and server optimiser (flat: arrays and JSON scalars).
        memory: the server's own records (mirror of the ledgers, counters), JSON.
    """

    round: int
    config_hash: str
    payload: AdapterPayload
    state: Mapping[str, Any]
    memory: Mapping[str, Any]


def _file(folder: Path, server_round: int) -> Path:
    return folder / f"round-{server_round:06d}.ckpt"


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint and forget all but the newest two."""
    header, arrays = to_arrays(checkpoint.payload)
    packed = {f"payload/{name}": array for name, array in arrays.items()}
    scalars: dict[str, Any] = {}
    for name, value in checkpoint.state.items():
        if isinstance(value, np.ndarray):
            packed[f"state/{name}"] = value
        else:
            scalars[name] = value
    record = {
        "version": _VERSION,
        "round": checkpoint.round,
        "config_hash": checkpoint.config_hash,
        "payload": header,
        "scalars": scalars,
        "memory": dict(checkpoint.memory),
    }
    data = encode_packet(Packet(record, packed))
    path = _file(folder, checkpoint.round)
    write_atomically(path, hashlib.sha256(data).digest() + data)
    for old in sorted(folder.glob("round-*.ckpt"))[:-KEPT_CHECKPOINTS]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> Checkpoint:
    """Read one checkpoint.

    Raises:
        CheckpointError: if it is truncated, altered or from another version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.name}: cannot be read ({error.strerror})") from None
    if len(data) <= _DIGEST or hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
        raise CheckpointError(f"checkpoint {path.name}: truncated or altered (its checksum does not hold)")
    try:
        packet = decode_packet(data[_DIGEST:], _LIMIT)
        record = packet.header
        if record["version"] != _VERSION:
            raise CheckpointError(
                f"checkpoint {path.name}: version {record['version']}; this fedlora reads {_VERSION}"
            )
        arrays = {name[8:]: value for name, value in packet.arrays.items() if name.startswith("payload/")}
        state = dict(record["scalars"])
        state |= {name[6:]: value for name, value in packet.arrays.items() if name.startswith("state/")}
        return Checkpoint(
            round=int(record["round"]),
            config_hash=str(record["config_hash"]),
            payload=from_arrays(record["payload"], arrays, max_bytes=_LIMIT),
            state=state,
            memory=record["memory"],
        )
    except CheckpointError:
        raise
    except (FedLoraError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"checkpoint {path.name}: malformed ({type(error).__name__})") from None


def load_newest(folder: Path, config_hash: str) -> Checkpoint:
    """Read the newest usable checkpoint; a damaged one is passed over with a warning.

    Raises:
        CheckpointError: if there is none, or it belongs to another configuration.
    """
    found = sorted(folder.glob("round-*.ckpt"), reverse=True)
    for path in found:
        try:
            checkpoint = load(path)
        except CheckpointError as error:
            _LOG.warning("%s; trying the one before", error)
            continue
        if checkpoint.config_hash != config_hash:
            raise CheckpointError(
                f"checkpoint {path.name}: belongs to configuration {checkpoint.config_hash[:12]}, this run has "
                f"{config_hash[:12]}; resume with the run folder's own config.yaml"
            )
        return checkpoint
    raise CheckpointError(
        f"checkpoint: none usable among {len(found)} in {folder}; start the run anew (what was spent stays spent)"
    )
