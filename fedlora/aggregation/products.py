"""Modes on factors: `product`, `stack`, `aligned` and the baseline `factor_mean`.

The mean of the clients' changes is sum_k w_k s_k B_k A_k / sum_k w_k. `product` keeps it as a running
truncated SVD of bounded rank (exact while the summed ranks fit, with a tracked error bound after
that); `stack` keeps the stacked factors themselves. Each client's own scaling goes into one side of
the stack and is divided out again in whoever's scaling receives it. Nothing out x in is ever formed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import torch

from fedlora.aggregation.factors import (
    Pair,
    balanced_pair,
    extras_of,
    pad_rank,
    pair_of,
    payload_from_frames,
    rank_frames,
    write_pair,
)
from fedlora.aggregation.running_sum import RunningSum
from fedlora.aggregation.server_optimizer import ServerOptimizer
from fedlora.aggregation.types import Float64, Outcome, State
from fedlora.errors import InconsistentRepliesError
from fedlora.geometry import Frames, ProductSketch, expand, procrustes, product_distance, project_product
from fedlora.names import LORA_A, LORA_B, block_name
from fedlora.wire.payload import AdapterPayload, ModuleSpec, PayloadKind

STACK_RANK: Final = 512
"""Largest rank of `stack`'s untruncated mean per module, where `max_rank` is not set."""
SKETCH_BYTES: Final = 2**20
"""What a module's running mean may take in any case, where `max_rank` is not set."""


def running_rank(spec: ModuleSpec) -> int:
    """Return the default rank of a running mean: what fits into `SKETCH_BYTES`, between 2 and 8 times the adapter's.

    A large module then costs the memory of a few clients' factors (the error is in the residual), and a small one (up
    to 1024 x 1024 at rank 8) holds the mean of eight clients exactly. Up to 64 also beyond 8 times the adapter's.

    Example:
        >>> running_rank(ModuleSpec(4096, 4096, 16, 1.0)), running_rank(ModuleSpec(768, 768, 8, 1.0))
        (32, 64)
    """
    fits = SKETCH_BYTES // (8 * (spec.out_features + spec.in_features))
    return max(2 * spec.rank, min(fits, max(8 * spec.rank, 64)))


@dataclass
class _Merged:
    """One module's running sum of products: a sketch, and factors as they came (float32) that wait to be merged."""

    module: str
    sketch: ProductSketch
    weight: float = 0.0
    waiting: list[tuple[AdapterPayload, float]] = field(default_factory=list)

    def add(self, payload: AdapterPayload, weight: float) -> None:
        module = self.module
        spec = payload.modules[module]
        blocks = {
            name: payload.blocks[name] for name in (block_name(module, LORA_A), block_name(module, LORA_B))
        }
        one = replace(payload, blocks=blocks, modules={module: spec}, notes={})
        self.waiting.append((one, weight))
        self.weight += weight
        if sum(one.modules[module].rank for one, _ in self.waiting) >= max(self.sketch.max_rank, 32):
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            pairs = [(pair_of(one, self.module), weight) for one, weight in self.waiting]
            self.waiting = []
            left = torch.cat([pair.left * weight for pair, weight in pairs], dim=1)
            self.sketch = self.sketch.merge(left, torch.cat([pair.right for pair, _ in pairs], dim=0))

    def mean(self) -> ProductSketch:
        self.flush()
        return self.sketch.scaled(1.0 / self.weight)


class ProductMode:
    """Exact mean of products with bounded memory, sent as its best truncation to each rank.

    Args:
        optimizer: server optimiser; anything but the plain mean steps in the tangent space at the
            current adapter.
        max_rank: rank of the running sum per module; None takes `running_rank`.
    """

    kind: str = "product"
    uplink: PayloadKind = "factors"
    downlink: PayloadKind = "factors"
    linear: bool = False
    mixed: bool = True
    exact: bool = True

    def __init__(self, optimizer: ServerOptimizer, max_rank: int | None = None) -> None:
        """Keep the optimiser and the cap."""
        self._optimizer, self._max_rank = optimizer, max_rank
        self._current: AdapterPayload | None = None
        self._merged: dict[str, _Merged] = {}
        self._extra_sum = RunningSum()

    @property
    def current(self) -> AdapterPayload:
        """The global adapter of this round.

        Raises:
            InconsistentRepliesError: if no round has begun.
        """
        if self._current is None:
            raise InconsistentRepliesError("no round has begun: call begin(global payload, ...) first")
        return self._current

    def begin(self, current: AdapterPayload) -> None:
        """Start a round."""
        self._current, self._merged, self._extra_sum = current, {}, RunningSum()

    def add(self, payload: AdapterPayload, weight: float) -> None:
        """Merge one client's products; a module that it does not adapt is left out of that module's mean."""
        for module, spec in payload.modules.items():
            if module not in self._merged:
                empty = ProductSketch.empty(spec.out_features, spec.in_features, self._cap(module))
                self._merged[module] = _Merged(module, empty)
            self._make_room(self._merged[module], spec.rank)
            self._merged[module].add(payload, weight)
        self._extra_sum.add(extras_of(payload), weight)

    def _cap(self, module: str) -> int:
        """Return the rank to which a module's running sum is kept."""
        own = self.current.modules[module]
        return max(own.rank, running_rank(own) if self._max_rank is None else self._max_rank)

    def _make_room(self, merged: _Merged, rank: int) -> None:
        """Let a running sum without a limit of its own hold a client's rank: what comes back to it has that rank."""
        if self._max_rank is None and rank > merged.sketch.max_rank:
            merged.sketch = replace(merged.sketch, max_rank=rank)

    def finish(self) -> Outcome:
        """Average, step, and write the adapter in the layout's ranks and whole."""
        current = self.current
        frames: dict[str, Frames] = {}
        whole: dict[str, Frames] = {}
        lost = total = 0.0
        bounded = False
        for module, spec in current.modules.items():
            if module not in self._merged:
                frames[module] = whole[module] = rank_frames(pair_of(current, module), spec.rank)[0]
                continue
            mean = self._merged[module].mean()
            best, dropped = rank_frames(Pair(mean.u * mean.s, mean.v.mT), spec.rank)
            lost += (dropped + mean.error_limit) ** 2
            total += mean.norm_floor**2
            bounded = bounded or mean.error_bound > 0
            frames[module], whole[module] = self._step(module, best, mean)
        blocks = step_extras(current, self._extra_sum, self._optimizer)
        self._merged = {}
        residual = math.sqrt(lost / total) if total > 0 else 0.0
        return Outcome(
            payload=payload_from_frames(current, current.modules, frames, blocks),
            residual=residual,
            bounded=bounded,
            full=payload_from_frames(current, whole_specs(current.modules, whole), whole, blocks),
        )

    def _step(self, module: str, best: Frames, mean: ProductSketch) -> tuple[Frames, Frames]:
        if self._optimizer.plain:
            kept = max(int((mean.s > 0).sum()), 1)
            if mean.s.numel() == 0:
                return best, best
            return best, Frames(mean.u[:, :kept], torch.diag(mean.s[:kept]), mean.v[:, :kept])
        spec = self.current.modules[module]
        pair = pair_of(self.current, module)
        old, _ = rank_frames(pair, spec.rank)
        left = torch.cat([mean.u * mean.s, -pair.left], dim=1)
        right = torch.cat([mean.v.mT, pair.right], dim=0)
        step = self._optimizer.step_tangent(module, old, project_product(old, left, right))
        q_out, q_in, core = expand(old, step)
        new, _ = rank_frames(Pair(q_out @ core, q_in.mT), spec.rank)
        return new, new

    def downlink_for(self, current: AdapterPayload, modules: Mapping[str, ModuleSpec]) -> AdapterPayload:
        """Return the best approximation of `current` in a client's own ranks and scalings."""
        if dict(modules) == dict(current.modules):
            return current
        frames = {
            module: rank_frames(pair_of(current, module), spec.rank)[0] for module, spec in modules.items()
        }
        return payload_from_frames(current, modules, frames, extras_of(current))

    def state(self) -> State:
        """Return the moments."""
        return self._optimizer.state()

    def restore(self, state: State) -> None:
        """Take back the moments."""
        self._optimizer.restore(state)


class StackMode(ProductMode):
    """Keep the stacked factors: `full` is the mean itself, of rank sum r_k, until `max_rank` (or 512) is passed."""

    kind = "stack"

    def _cap(self, module: str) -> int:
        """Return the rank of the stack, beyond which it is compressed with a tracked error."""
        spec = self.current.modules[module]
        limit = min(spec.out_features, spec.in_features)
        return min(limit, STACK_RANK if self._max_rank is None else self._max_rank)

    def _make_room(self, merged: _Merged, rank: int) -> None:
        """Leave the stack's limit as it is."""


class FactorMean(ProductMode):
    """Baseline: averages lora_A and lora_B apart. NOT the mean of the changes; the residual says by how much.

    The result depends on how clients write their factors (their gauge). Lower ranks are padded by zeros.
    """

    kind = "factor_mean"
    exact: bool = False

    def __init__(self, optimizer: ServerOptimizer, max_rank: int | None = None) -> None:
        """Start without sums."""
        super().__init__(optimizer, max_rank)
        self._pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, current: AdapterPayload) -> None:
        """Start a round."""
        super().begin(current)
        self._pairs = {}

    def add(self, payload: AdapterPayload, weight: float) -> None:
        """Sum both factors apart; the exact mean of products is followed for the residual."""
        super().add(payload, weight)
        for module in payload.modules:
            pair = self.written(payload, module)
            left, right = self._pairs.get(module, (torch.zeros(()), torch.zeros(())))
            self._pairs[module] = (left + weight * pair.left, right + weight * pair.right)

    def written(self, payload: AdapterPayload, module: str) -> Pair:
        """Return the factors that are averaged: as they came, padded to the layout's rank."""
        return pad_rank(pair_of(payload, module), self.current.modules[module].rank)

    def finish(self) -> Outcome:
        """Average the factors; report the distance from the mean of products."""
        current = self.current
        pairs: dict[str, Pair] = {}
        lost = total = 0.0
        bounded = False
        for module in current.modules:
            if module not in self._merged:
                pairs[module] = pair_of(current, module)
                continue
            mean = self._merged[module].mean()
            weight = self._merged[module].weight
            left, right = (block / weight for block in self._pairs[module])
            pairs[module] = Pair(left, right)
            away = float(product_distance(mean.u * mean.s, mean.v.mT, left, right))
            lost += (away + mean.error_limit) ** 2
            total += mean.norm_floor**2
            bounded = bounded or mean.error_bound > 0
        blocks = step_extras(current, self._extra_sum, self._optimizer)
        self._merged = {}
        payload = payload_from_pairs(current, pairs, blocks)
        return Outcome(payload, math.sqrt(lost / total) if total > 0 else 0.0, bounded)


class AlignedMean(FactorMean):
    """Factor mean after each client's balanced factors are turned onto the current ones (Procrustes).

    Balancing (an SVD of each client's product) removes a client's gauge up to a rotation, and the
    Procrustes rotation min_Q ||W_k Q - W_ref||, W = [lora_B; lora_A^T], removes the rest: the result
    does not depend on how clients write their factors. It is still not the exact mean.
    """

    kind = "aligned"

    def written(self, payload: AdapterPayload, module: str) -> Pair:
        """Return balanced factors, padded to the layout's rank and aligned to the current adapter's."""
        rank = self.current.modules[module].rank
        pair = pad_rank(balanced_pair(pair_of(payload, module), rank), rank)
        reference = self._reference(module)
        turn = procrustes(torch.cat([pair.left, pair.right.mT]), reference)
        return Pair(pair.left @ turn, turn.mT @ pair.right)

    def _reference(self, module: str) -> torch.Tensor:
        spec = self.current.modules[module]
        pair = pair_of(self.current, module)
        if bool((pair.left != 0).any()):
            pair = pad_rank(balanced_pair(pair, spec.rank), spec.rank)
        return torch.cat([pair.left, pair.right.mT])


def step_extras(
    current: AdapterPayload, sums: RunningSum, optimizer: ServerOptimizer
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    """Average and step the extra parameters (values travel)."""
    means: dict[str, Float64] = sums.mean()
    blocks = {}
    for name, block in extras_of(current).items():
        step = optimizer.step_block(name, means[name] - block) if name in means else np.zeros(())
        blocks[name] = (block + step).astype(np.float32)
    return blocks


def whole_specs(specs: Mapping[str, ModuleSpec], frames: Mapping[str, Frames]) -> dict[str, ModuleSpec]:
    """Return specs with the frames' own ranks."""
    return {module: replace(spec, rank=frames[module].rank) for module, spec in specs.items()}


def payload_from_pairs(
    current: AdapterPayload,
    pairs: Mapping[str, Pair],
    extras: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]],
) -> AdapterPayload:
    """Write factors as they are (scaling divided out of lora_B)."""
    blocks = dict(extras)
    for module, pair in pairs.items():
        blocks.update(write_pair(module, pair, current.modules[module].scaling))
    return replace(current, blocks=blocks, notes={})
