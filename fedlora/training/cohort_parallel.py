"""Several devices for one logical batch: records are shared out, sums are added, noise is drawn once.

Every process holds the same state. The first one draws the batches and the noise; the others never touch a noise
source, so neither the batch nor the noise is doubled, and the accounting event stays that of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fedlora.adapters.blocks import FlatBlocks
from fedlora.errors import UnsupportedCombinationError
from fedlora.mechanisms.base import Mechanism
from fedlora.mechanisms.stages import ClippedSum, NoisyUpdate


class DataParallel:
    """One process of a group that trains the same clients together (torch.distributed, any backend).

    Args:
        mechanism: checked for stages that draw by themselves.
        group: the process group; None for the default one.

    Raises:
        UnsupportedCombinationError: for mechanisms whose `prepare` draws in each process.
    """

    def __init__(self, mechanism: Mechanism, group: dist.ProcessGroup | None = None) -> None:
        """Refuse mechanisms whose processes would disagree."""
        if mechanism.kind == "noisy_projection":
            raise UnsupportedCombinationError(
                "noisy_projection on several devices: each process would draw its own projection; train on one device"
            )
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def share(self, draw: Callable[[], list[Sequence[Any]]]) -> list[Sequence[Any]]:
        """Draw in the first process and return this process's part of every client's records. SENSITIVE."""
        box: list[Any] = [draw() if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        whole: list[Sequence[Any]] = box[0]
        return [list(records)[self.rank :: self.size] for records in whole]

    def add(self, clipped: ClippedSum) -> ClippedSum:
        """Add all processes' sums. SENSITIVE."""
        flat = clipped.blocks.flat.clone()
        dist.all_reduce(flat, group=self._group)
        return replace(clipped, blocks=clipped.blocks.like(flat))

    def noise(self, mechanism: Mechanism, make: Callable[[], NoisyUpdate], blocks: FlatBlocks) -> NoisyUpdate:
        """Draw the noise in the first process; every process returns the same update. PUBLIC."""
        flat = torch.empty_like(blocks.flat)
        update: NoisyUpdate | None = None
        if self.rank == 0:
            update = make()
            flat = update.blocks.flat.contiguous()
        dist.broadcast(flat, src=0, group=self._group)
        box: list[Any] = [None if update is None else (dict(update.noise_stddev), update.event)]
        dist.broadcast_object_list(box, src=0, group=self._group)
        stddev, event = box[0]
        return NoisyUpdate(blocks.like(flat), stddev, event)
