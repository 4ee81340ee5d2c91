"""Optimiser state that a client keeps between rounds; a function of noised updates only.

Kept only where the coordinates stay the same from round to round (a common frozen lora_A): moments of one
round's frames or factors mean nothing in the next round's. On disk, each client's state as of every checkpoint that
may be there is kept, so that a run that goes on from one finds the state as of it; states of rounds after that
checkpoint are dropped then (`drop_states_after`). A file that a killed worker left cut, in a round that ended
without its clients, gives way to the state before it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.numpy import save
from safetensors.torch import load_file

from fedlora.errors import FileAccessError
from fedlora.mechanisms.base import Mechanism

_LOG = logging.getLogger(__name__)
Slots = Mapping[str, torch.Tensor]
KEPT_CHECKPOINTS: Final = 2
"""While a round runs, the checkpoints of so many rounds before it are on disk; each may be gone on from."""
_SUFFIX = ".safetensors"


def keeps_slots(mechanism: Mechanism) -> bool:
    """Return whether a mechanism's optimiser state means something in the next round."""
    return mechanism.downlink == "lora_b" and mechanism.uplink == "lora_b"


class SlotStore:
    """Each client's optimiser state after its last rounds.

    Args:
        folder: where files go; None keeps the state in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        """Make the folder; what it holds is looked at when a state is first asked for."""
        self._folder = folder
        self._memory: dict[str, tuple[int, Slots]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def _rounds(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for path, number in [] if self._folder is None else _states(self._folder):
            found.setdefault(path.name.split(".")[0], []).append(number)
        return found

    def load(self, client: str, server_round: int) -> Slots | None:
        """Return the state that the client had before a round, or None if it has none."""
        known = self._memory.get(client)
        if known is not None and known[0] < server_round:
            return known[1]
        if self._folder is None:
            return None
        stem = _stem(client)
        for number in sorted(self._rounds.get(stem, ()), reverse=True):
            if number < server_round:
                path = self._path(self._folder, stem, number)
                try:
                    return load_file(path)
                except SafetensorError:  # its worker was killed, and its round ended without it
                    _LOG.warning("%s/%s: cut; the state before it is used", path.parent.name, path.name)
        return None

    def forget(self) -> None:
        """Drop what is in memory (another run begins); files stay."""
        self._memory = {}

    def save(self, client: str, server_round: int, slots: Slots) -> None:
        """Keep the state that a round left.

        Raises:
            FileAccessError: if it cannot be written; the state before it then stays the newest.
        """
        if not slots:
            return
        if self._folder is None:
            self._memory[client] = (server_round, slots)
            return
        stem = _stem(client)
        data = save({name: value.contiguous().numpy() for name, value in slots.items()})
        _write(self._path(self._folder, stem, server_round), data)
        self._memory[client] = (server_round, slots)
        rounds = {*self._rounds.get(stem, ()), server_round}
        kept = _needed(rounds, server_round)
        for old in rounds - kept:
            self._path(self._folder, stem, old).unlink(missing_ok=True)
        self._rounds[stem] = sorted(kept)

    @staticmethod
    def _path(folder: Path, stem: str, server_round: int) -> Path:
        return folder / f"{stem}.{server_round:06d}{_SUFFIX}"


def drop_states_after(folder: Path, server_round: int) -> None:
    """Drop the states of rounds after the checkpoint that a run goes on from: those rounds run anew, or otherwise."""
    for path, number in _states(folder):
        if number > server_round:
            path.unlink(missing_ok=True)


def _states(folder: Path) -> list[tuple[Path, int]]:
    """Return each state's file and round."""
    return [(path, int(path.name.split(".")[1])) for path in sorted(folder.glob(f"*{_SUFFIX}"))]


def _needed(rounds: set[int], server_round: int) -> set[int]:
    """Return the generations that a run which goes on from a checkpoint on disk may ask for.

    Example:
        >>> sorted(_needed({2, 5, 6, 7}, 7))
        [5, 6, 7]
        >>> sorted(_needed({2, 5, 7}, 7))
        [5, 7]
    """
    oldest = server_round - KEPT_CHECKPOINTS
    return {number for number in rounds if number > oldest} | {
        max((number for number in rounds if number <= oldest), default=server_round)
    }


def _write(path: Path, data: bytes) -> None:
    """Write a file or none: half a state would stop its client in every later process that reads it."""
    try:
        path.write_bytes(data)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise FileAccessError(
            f"{path.parent.name}/{path.name}: cannot be written ({error.strerror or type(error).__name__})"
        ) from None


def _stem(client: str) -> str:
    return hashlib.sha256(client.encode()).hexdigest()[:32]
