"""Optimiser state that a client keeps between rounds; a function of noised updates only.

Kept only where the coordinates stay the same from round to round (a common frozen lora_A): moments of one
round's frames or factors mean nothing in the next round's. On disk, two generations per client are kept,
so that a run that goes on from a checkpoint finds the state as of that checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fedlora.mechanisms.base import Mechanism

Slots = Mapping[str, torch.Tensor]
_KEEP = 2


def keeps_slots(mechanism: Mechanism) -> bool:
    """Return whether a mechanism's optimiser state means something in the next round."""
    return mechanism.downlink == "lora_b" and mechanism.uplink == "lora_b"


class SlotStore:
    """Each client's optimiser state after its last rounds.

    Args:
        folder: where files go; None keeps the state in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        """Start with what the folder holds."""
        self._folder = folder
        self._memory: dict[str, tuple[int, Slots]] = {}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def load(self, client: str, server_round: int) -> Slots | None:
        """Return the state that the client had before a round, or None if it has none."""
        known = self._memory.get(client)
        if known is not None and known[0] < server_round:
            return known[1]
        if self._folder is None:
            return None
        earlier = [path for path in self._files(client) if _round_of(path) < server_round]
        return load_file(earlier[-1]) if earlier else None

    def forget(self) -> None:
        """Drop what is in memory (another run begins); files stay."""
        self._memory = {}

    def save(self, client: str, server_round: int, slots: Slots) -> None:
        """Keep the state that a round left."""
        if not slots:
            return
        self._memory[client] = (server_round, slots)
        if self._folder is None:
            return
        path = self._folder / f"{_stem(client)}.{server_round:06d}.safetensors"
        part = path.with_suffix(".part")
        save_file({name: value.contiguous().clone() for name, value in slots.items()}, part)
        os.replace(part, path)
        for old in self._files(client)[:-_KEEP]:
            old.unlink(missing_ok=True)

    def _files(self, client: str) -> list[Path]:
        if self._folder is None:
            return []
        return sorted(self._folder.glob(f"{_stem(client)}.*.safetensors"))


def _stem(client: str) -> str:
    return hashlib.sha256(client.encode()).hexdigest()[:32]


def _round_of(path: Path) -> int:
    return int(path.name.split(".")[1])
