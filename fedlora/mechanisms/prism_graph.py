"""PRISM's step after the noise as one CUDA graph: some hundred small kernels for one launch.

Only post-processing of the noised release is recorded (`prism_step.advance`): a fault here could cost accuracy, never
privacy. Forward, backward, clip and noise are not part of it; a Poisson draw gives them another shape at every step.

The first step of a kind runs as it is, the second is recorded, later ones are replayed. All three compute with the
same numbers on the device, so that a resumed run repeats an uninterrupted one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from fedlora.geometry import Frames, Tangent
from fedlora.mechanisms.prism_direction import PrismMoments
from fedlora.mechanisms.prism_state import PrismGroup, PrismState
from fedlora.mechanisms.prism_step import Advanced, Number, StepRule, advance

Tensor = torch.Tensor

_LOG = logging.getLogger(__name__)
_KEPT: Final = 4
"""Graphs kept for one mechanism: cohorts of other sizes beyond these take ordinary steps."""
_LARGEST: Final = 1 << 28
"""Bytes of state beyond which a step is not recorded: its kernels are large, and a graph keeps their memory."""


@dataclass(frozen=True)
class _Recorded:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    numbers: Sequence[Tensor]
    made: list[Advanced]

    def replay(self, inputs: Sequence[Tensor], numbers: Sequence[float]) -> list[Advanced]:
        """Run the step on other values; what is returned belongs to the caller."""
        torch._foreach_copy_(self.inputs, list(inputs))
        for place, number in zip(self.numbers, numbers, strict=True):
            place.fill_(number)
        self.graph.replay()
        groups, directions = [one.group for one in self.made], [one.direction for one in self.made]
        found = [*_state(groups), *_blocks(directions)]
        own = [torch.empty_like(one) for one in found]
        torch._foreach_copy_(own, found)
        rest = iter(own)
        moved = [_filled(group, rest) for group in groups]
        return [Advanced(group, Tangent(next(rest), next(rest))) for group in moved]


class StepGraphs:
    """Takes PRISM's steps; on a GPU by replaying what was recorded. One for each mechanism, kept over rounds."""

    def __init__(self) -> None:
        """Start with nothing recorded."""
        self._recorded: dict[Any, _Recorded] = {}
        self._seen: set[Any] = set()
        self._failed = False

    def __reduce__(self) -> tuple[type[StepGraphs], tuple[()]]:
        """Leave graphs behind when a mechanism goes to another process."""
        return StepGraphs, ()

    def step(
        self, rule: StepRule, own: PrismState, sums: Sequence[Tangent], variance: float, lr: float
    ) -> list[PrismGroup]:
        """Return every group at its next point; the first local step keeps its exact update.

        Args:
            rule: the mechanism's public settings.
            own: the present state.
            sums: noised sums of the groups' tangent blocks; PUBLIC.
            variance: of an entry's noise after the division by the batch size.
            lr: learning rate.
        """
        made = self._advance(rule, own.groups, sums, variance, lr)
        return [
            replace(one.group, update=one.direction.scaled(-lr) if own.steps == 0 else None) for one in made
        ]

    def _advance(
        self,
        rule: StepRule,
        groups: Sequence[PrismGroup],
        sums: Sequence[Tangent],
        variance: float,
        lr: float,
    ) -> list[Advanced]:
        inputs = [t.contiguous() for t in (*_state(groups), *_blocks(sums))]
        if not inputs or not _serves(rule, inputs):
            return advance(rule, groups, sums, variance, lr)
        steps = next((g.moments.steps for g in groups if g.moments is not None), 0)
        numbers = (lr, variance, float(steps))
        key = (rule, tuple((tuple(t.shape), t.dtype, t.device) for t in inputs), _kinds(groups))
        recorded = self._recorded.get(key)
        if recorded is None and key in self._seen and len(self._recorded) < _KEPT and not self._failed:
            recorded = self._record(rule, groups, inputs, key)
        self._seen.add(key)
        if recorded is not None:
            made = recorded.replay(inputs, numbers)
        else:
            made = _ordinary(rule, groups, inputs, _device_numbers(inputs[0].device, numbers))
        return [_carried(group, one, int(steps) + 1) for group, one in zip(groups, made, strict=True)]

    def _record(
        self, rule: StepRule, groups: Sequence[PrismGroup], inputs: Sequence[Tensor], key: Any
    ) -> _Recorded | None:
        """Record the step on copies of its inputs; None (and no further attempt) where that fails."""
        try:
            self._recorded[key] = recorded = _record(rule, groups, [t.clone() for t in inputs])
        except RuntimeError as problem:
            self._failed = True
            _LOG.warning("prism: its steps are not recorded as a CUDA graph (%s)", type(problem).__name__)
            return None
        return recorded


def _ordinary(
    rule: StepRule, groups: Sequence[PrismGroup], inputs: Sequence[Tensor], numbers: Sequence[Tensor]
) -> list[Advanced]:
    """Take a step from its inputs, in the order of `_state` and `_blocks`, and its numbers on the device."""
    rest = iter(inputs)
    own = [_at_step(_filled(group, rest), numbers[2]) for group in groups]
    sums = [Tangent(next(rest), next(rest)) for _ in groups]
    return advance(rule, own, sums, numbers[1], numbers[0])


def _record(rule: StepRule, groups: Sequence[PrismGroup], inputs: list[Tensor]) -> _Recorded:
    """Record the step on tensors that stay in place."""
    device = inputs[0].device
    numbers = _device_numbers(device, (0.0, 1.0, 1.0))
    with torch.cuda.device(device):
        aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):  # kernels are loaded and libraries prepared before the recording
            _ordinary(rule, groups, inputs, numbers)
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = _ordinary(rule, groups, inputs, numbers)
    return _Recorded(graph, inputs, numbers, made)


def _serves(rule: StepRule, inputs: Sequence[Tensor]) -> bool:
    if not all(t.is_cuda and t.dtype == torch.float32 for t in inputs) or rule.proximal_mu > 0.0:
        return False
    return sum(t.numel() for t in inputs) * 4 <= _LARGEST


def _device_numbers(device: torch.device, numbers: Sequence[float]) -> list[Tensor]:
    return [torch.full((), number, dtype=torch.float64, device=device) for number in numbers]


def _kinds(groups: Sequence[PrismGroup]) -> tuple[tuple[bool, bool], ...]:
    return tuple((g.moments is not None, g.momentum is not None) for g in groups)


def _at_step(group: PrismGroup, steps: Number) -> PrismGroup:
    if group.moments is None:
        return group
    return replace(group, moments=replace(group.moments, steps=steps))


def _carried(given: PrismGroup, made: Advanced, steps: int) -> Advanced:
    """Return what a step made with everything else of the group that it was given (a recording has another's)."""
    new = _at_step(made.group, steps)
    return Advanced(
        replace(given, frames=new.frames, moments=new.moments, momentum=new.momentum), made.direction
    )


def _state(groups: Sequence[PrismGroup]) -> list[Tensor]:
    """Return the tensors of the groups' present points, in an order that `_filled` undoes."""
    found: list[Tensor] = []
    for group in groups:
        found += [group.frames.q_out, group.frames.core, group.frames.q_in]
        if group.moments is not None:
            m = group.moments
            found += [m.m_out, m.m_in, m.v_out, m.v_in]
        if group.momentum is not None:
            found += [group.momentum.x_out, group.momentum.x_in]
    return found


def _blocks(tangents: Sequence[Tangent]) -> list[Tensor]:
    return [t for tangent in tangents for t in (tangent.x_out, tangent.x_in)]


def _filled(group: PrismGroup, rest: Any) -> PrismGroup:
    """Return the group with its tensors taken from an iterator."""
    frames = Frames(next(rest), next(rest), next(rest))
    moments, momentum = group.moments, group.momentum
    if moments is not None:
        moments = PrismMoments(next(rest), next(rest), next(rest), next(rest), moments.steps)
    if momentum is not None:
        momentum = Tangent(next(rest), next(rest))
    return replace(group, frames=frames, moments=moments, momentum=momentum)
