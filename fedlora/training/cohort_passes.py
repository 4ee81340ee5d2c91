"""Forward and backward passes of a cohort: buckets by length, micro-batches, halving on out-of-memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.records import RecordAxis, batch_to_device
from fedlora.errors import ModelError
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.clip import add_sums, zero_sum
from fedlora.mechanisms.per_record import per_record_gradients
from fedlora.mechanisms.stages import ClippedSum
from fedlora.training.cohort_retry import RecordTooLargeError, free_memory, out_of_memory

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
    """SENSITIVE. Drawn records in one list, with each one's owner and length."""

    records: list[Any]
    clients: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, draws: Sequence[Sequence[Any]]) -> _Drawn:
        """Join all clients' draws, in client order."""
        records = [record for draw in draws for record in draw]
        clients = np.repeat(np.arange(len(draws)), [len(draw) for draw in draws])
        return cls(records, clients, np.fromiter(map(len, records), dtype=np.int64, count=len(records)))


Places = npt.NDArray[np.int64]
"""Numbers of the drawn records of one pass, ascending (so that they are sorted by client)."""


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
        self.round_records = adapted.device.type == "cuda"
        """Fill a cohort's pass with idle copies of its last record, so that few shapes occur."""
        self.max_tokens: int | None = None
        """Padded tokens in one pass at most; halved whenever a pass does not fit in memory. Kept between rounds."""
        self.seconds = 0.0
        """Time in forward and backward passes so far (on a GPU: until they are launched)."""

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
        drawn = _Drawn.of(draws)
        total: ClippedSum | None = None
        pending = self._plan(drawn, np.arange(len(drawn.records)))
        while pending:
            chunk = pending.pop(0)
            try:
                part = self._one_pass(mechanism, state, low, drawn, chunk)
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as problem:
                if not out_of_memory(problem):
                    raise
                part = None
            if part is None:  # outside the handler, which would keep the failed pass alive
                self._halve(drawn, chunk)
                pending = self._plan(drawn, chunk) + pending
                continue
            total = part if total is None else add_sums(total, part)
        if total is None:
            axis = RecordAxis.of([0] * len(draws), adapted.device)
            bound = mechanism.privacy.max_grad_norm
            return zero_sum(mechanism.coordinates.table, axis, mechanism.metric, bound, state.values.flat)
        return total

    def _plan(self, drawn: _Drawn, places: Places) -> list[Places]:
        """Cut records into passes of similar length, longest first."""
        floor = _BUCKET_TOKENS.get(self._adapted.device.type, 256)
        order = places[np.argsort(-drawn.lengths[places], kind="stable")]
        passes: list[Places] = []
        first, longest = 0, 0
        for number, length in enumerate(drawn.lengths[order].tolist()):
            count = number - first
            full = self._max_records is not None and count >= self._max_records
            heavy = self.max_tokens is not None and (count + 1) * longest > self.max_tokens
            short = count * longest >= floor and length < _BUCKET_RATIO * longest
            if count > 0 and (full or heavy or short):
                passes.append(np.sort(order[first:number]))
                first = number
            if number == first:
                longest = length
        if len(order) > first:
            passes.append(np.sort(order[first:]))
        return passes

    def _halve(self, drawn: _Drawn, chunk: Places) -> None:
        """Halve the pass size after an out-of-memory.

        Raises:
            RecordTooLargeError: if a single record does not fit.
        """
        if len(chunk) == 1:
            raise RecordTooLargeError(
                "memory: one record alone does not fit; lower data.max_length, use a smaller model or dtype, or "
                "switch model.gradient_checkpointing on"
            )
        tokens = len(chunk) * int(drawn.lengths[chunk].max())
        self.max_tokens = tokens // 2
        _LOG.warning("out of memory: passes are limited to half their size from now on")
        free_memory()

    def _one_pass(
        self, mechanism: Mechanism, state: LocalState, low: FlatBlocks, drawn: _Drawn, chunk: Places
    ) -> ClippedSum:
        """Run one forward and backward for some records of some clients."""
        adapted, num_clients = self._adapted, state.values.flat.shape[0]
        real = len(chunk)
        if self.round_records and num_clients > 1 and self._max_records is None:
            chunk = np.concatenate([chunk, np.repeat(chunk[-1], rounded(real) - real)])
        counts = np.bincount(drawn.clients[chunk], minlength=num_clients).tolist()
        records = RecordAxis.of(counts, adapted.device)
        batch = self._task.collate([drawn.records[place] for place in chunk.tolist()])
        refuse_packed(batch)
        moved = batch_to_device(batch, adapted.device)
        views = mechanism.stages.views(mechanism, state, low, records)
        extras = {name: low[name] for name in mechanism.coordinates.extras}
        started = time.perf_counter()
        with attention_kernels(adapted.device):
            gradients = per_record_gradients(
                adapted,
                mechanism.coordinates,
                mechanism.metric,
                views,
                extras,
                records,
                lambda: only_first(self._task.per_record_loss(adapted.model, moved), real),
                mechanism.left_out,
            )
        self.seconds += time.perf_counter() - started
        return mechanism.clip(gradients, state)


def rounded(count: int) -> int:
    """Return the least of few sizes that is >= count, at most a sixteenth above it (or 7 records).

    A GPU's matrix library plans anew for each shape, and every Poisson draw has another number of records. On average
    half of that is filling, which a large model feels; draws of n records on average meet about sqrt(n) / 4 sizes.
    """
    step = max(8, 1 << max(0, count.bit_length() - 5))
    return -(-count // step) * step


def only_first(losses: torch.Tensor, count: int) -> torch.Tensor:
    """Zero the losses of filling records, whose gradients then are exactly zero. SENSITIVE."""
    if losses.dim() != 1 or losses.shape[0] <= count:
        return losses
    return torch.where(torch.arange(losses.shape[0], device=losses.device) < count, losses, 0.0)


@contextmanager
def attention_kernels(device: torch.device) -> Iterator[None]:
    """Leave cuDNN's attention out: it plans anew for each shape, and every Poisson draw has another one.

    Measured on an H200 (256 records of 64 tokens, 6 layers): 115 ms of a 159 ms step under the profiler.
    """
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        yield


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever the process asked for, and restore its setting.

    TF32 keeps 10 bits of a factor: frames lose orthonormality (2e-4 after one product), and norm, clip
    and noise need it. Autocast around training is switched off for the same reason; a task's loss may switch it on for
    its own forward pass.
    """
    asked = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(asked)


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
