"""Forward and backward passes of a cohort: buckets by length, micro-batches, halving on out-of-memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.records import RecordAxis, to_device
from fedlora.errors import ModelError
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.clip import zero_sum
from fedlora.mechanisms.per_record import per_record_gradients
from fedlora.mechanisms.stages import ClippedSum

_LOG = logging.getLogger(__name__)

_PACKED = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "packed"})
_BUCKET_TOKENS = {"cpu": 256, "cuda": 16384}
"""A pass smaller than this is not split further to save padding: launching it would cost more."""
_BUCKET_RATIO = 0.75
"""Records shorter than this part of a pass's longest one go to the next pass (once the pass is large enough)."""


class PassTask(Protocol):
    """Collates records and computes per-record losses."""

    def collate(self, records: list[Any]) -> dict[str, torch.Tensor]:
        """Pad encoded records to one batch."""
        ...

    def per_record_loss(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return (records,) losses."""
        ...


@dataclass(frozen=True)
class _Drawn:
    """SENSITIVE. One drawn record, its owner's number and its length."""

    client: int
    record: Any
    length: int


class PassRunner:
    """Turns the draws of one step into clipped sums per client.

    Args:
        adapted: the model.
        task: collates and computes losses.
        max_records: records in one pass at most (micro-batch); None for no limit.
    """

    def __init__(self, adapted: AdaptedModel, task: PassTask, max_records: int | None = None) -> None:
        """Start without a memory limit; the first out-of-memory sets one."""
        self._adapted, self._task = adapted, task
        self._max_records = max_records
        self.max_tokens: int | None = None
        """Padded tokens in one pass at most; halved whenever a pass does not fit in memory. Kept between rounds."""

    def clipped_sums(
        self, mechanism: Mechanism, state: LocalState, draws: Sequence[Sequence[Any]]
    ) -> ClippedSum:
        """Return each client's clipped sum over its draw; empty draws give zero.

        Micro-batches of one logical batch add up here, before the one noise draw.

        Args:
            mechanism: the stages.
            state: K clients' values.
            draws: SENSITIVE. K lists of encoded records, possibly empty.
        """
        adapted, dtype = self._adapted, self._adapted.compute_dtype
        low = state.values
        if low.flat.dtype != dtype:
            low = low.like(low.flat.to(dtype))
        drawn = [_Drawn(k, record, len(record)) for k, draw in enumerate(draws) for record in draw]
        total: ClippedSum | None = None
        pending = self._plan(drawn)
        while pending:
            chunk = pending.pop(0)
            try:
                part = self._one_pass(mechanism, state, low, chunk)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as problem:
                if not _out_of_memory(problem):
                    raise
                self._halve(chunk)
                pending = self._plan(chunk) + pending
                continue
            total = part if total is None else _add(total, part)
        if total is None:
            axis = RecordAxis.of([0] * len(draws), adapted.device)
            bound = mechanism.privacy.max_grad_norm
            return zero_sum(mechanism.coordinates.table, axis, mechanism.metric, bound, state.values.flat)
        return total

    def _plan(self, drawn: Sequence[_Drawn]) -> list[list[_Drawn]]:
        """Cut records into passes of similar length, longest first."""
        floor = _BUCKET_TOKENS.get(self._adapted.device.type, 256)
        passes: list[list[_Drawn]] = []
        longest = 0
        for one in sorted(drawn, key=lambda each: -each.length):
            current = passes[-1] if passes else []
            tokens = (len(current) + 1) * longest
            full = self._max_records is not None and len(current) >= self._max_records
            heavy = self.max_tokens is not None and tokens > self.max_tokens
            short = len(current) * longest >= floor and one.length < _BUCKET_RATIO * longest
            if not current or full or heavy or short:
                passes.append([one])
                longest = one.length
            else:
                current.append(one)
        return passes

    def _halve(self, chunk: Sequence[_Drawn]) -> None:
        """Halve the pass size after an out-of-memory.

        Raises:
            ModelError: if a single record does not fit.
        """
        if len(chunk) == 1:
            raise ModelError(
                "memory: one record alone does not fit; lower data.max_length, use a smaller model or dtype, or "
                "switch model.gradient_checkpointing on"
            ) from None
        tokens = len(chunk) * max(one.length for one in chunk)
        self.max_tokens = tokens // 2
        _LOG.warning("out of memory: passes are limited to half their size from now on")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _one_pass(
        self, mechanism: Mechanism, state: LocalState, low: FlatBlocks, chunk: Sequence[_Drawn]
    ) -> ClippedSum:
        """Run one forward and backward for some records of some clients."""
        adapted, num_clients = self._adapted, state.values.flat.shape[0]
        ordered = sorted(chunk, key=lambda one: one.client)
        counts = [0] * num_clients
        for one in ordered:
            counts[one.client] += 1
        records = RecordAxis.of(counts, adapted.device)
        batch = self._task.collate([one.record for one in ordered])
        refuse_packed(batch)
        moved = {
            name: to_device(value, adapted.device) if isinstance(value, torch.Tensor) else value
            for name, value in batch.items()
        }
        views = mechanism.stages.views(mechanism, state, low, records)
        extras = {name: low[name] for name in mechanism.coordinates.extras}
        gradients = per_record_gradients(
            adapted,
            mechanism.coordinates,
            mechanism.metric,
            views,
            extras,
            records,
            lambda: self._task.per_record_loss(adapted.model, moved),
        )
        return mechanism.clip(gradients)


def refuse_packed(batch: Mapping[str, Any]) -> None:
    """Refuse batches that pack several records into one row: their gradients cannot be told apart.

    Raises:
        ModelError: naming the field.
    """
    packed = sorted(_PACKED & set(batch))
    if packed:
        raise ModelError(
            f"batch: field {packed[0]} says that records are packed into rows; switch packing off"
        )


def _add(total: ClippedSum, part: ClippedSum) -> ClippedSum:
    return replace(total, blocks=total.blocks.like(total.blocks.flat + part.blocks.flat))


def _out_of_memory(problem: BaseException) -> bool:
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(problem)
    return "can't allocate memory" in text or "out of memory" in text
