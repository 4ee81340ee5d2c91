"""PRISM's step after the noise: recorded once and replayed, it is the same step."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedlora.geometry import Frames, Tangent, frames_from_factors, project_dense
from fedlora.mechanisms import prism_graph
from fedlora.mechanisms.prism_direction import PrismMoments
from fedlora.mechanisms.prism_graph import StepGraphs
from fedlora.mechanisms.prism_state import PrismGroup, PrismState
from fedlora.mechanisms.prism_step import Advanced, StepRule

RULE = StepRule(0.9, 0.99, 0.0, 0.0, 0.0, 4.0, shared_core=True)
KINDS = {
    "moments": RULE,
    "momentum": replace(RULE, momentum=0.9),
    "plain": RULE,
    "decay": replace(RULE, decay=0.01),
    "not private": replace(RULE, shared_core=False),
}
VARIANCE = 1e-3


def normal(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def start(kind: str, clients: int = 2, device: str = "cpu") -> PrismState:
    groups = []
    for number, (out, inn, modules) in enumerate(((12, 9, 3), (10, 16, 1))):
        b, a = normal(1, modules, out, 3, seed=number), normal(1, modules, 3, inn, seed=number + 5)
        f = frames_from_factors(b.to(device), a.to(device))
        base = Frames(f.q_out, f.core, f.q_in)
        own = Frames(*(t.repeat(clients, 1, 1, 1) for t in (f.q_out, f.core, f.q_in)))
        moments = PrismMoments.zeros(own) if kind in ("moments", "decay", "not private") else None
        names = tuple(f"{number}.{i}" for i in range(modules))
        groups.append(PrismGroup(names, base, own, moments))
    return PrismState(tuple(groups))


def in_a_larger_row(block: torch.Tensor) -> torch.Tensor:
    """Return the block as flat storage holds it: each client's part of a longer row."""
    clients, size = block.shape[0], block[0].numel()
    row = torch.full((clients, size + 7), torch.nan, device=block.device)
    row[:, 3 : 3 + size] = block.reshape(clients, size)
    return row[:, 3 : 3 + size].unflatten(1, block.shape[1:])


def sums(state: PrismState, seed: int) -> list[Tangent]:
    """Noised sums of each group as the noise stage leaves them: consistent tangent vectors."""
    found = []
    for number, group in enumerate(state.groups):
        f = group.frames
        shape = (*f.core.shape[:2], f.q_out.shape[-2], f.q_in.shape[-2])
        found.append(project_dense(f, normal(*shape, seed=100 * seed + number, device=str(f.core.device))))
    return found


def walk(graphs: StepGraphs, kind: str, steps: int = 5, device: str = "cpu") -> list[PrismState]:
    states = [start(kind, device=device)]
    for number in range(steps):
        own = states[-1]
        lr = 0.05 / (1 + number)
        groups = graphs.step(KINDS[kind], own, sums(own, number), VARIANCE, lr)
        states.append(PrismState(tuple(groups), own.steps + 1))
    return states


def tensors(state: PrismState) -> list[torch.Tensor]:
    updates = [t for g in state.groups if g.update is not None for t in (g.update.x_out, g.update.x_in)]
    return [*prism_graph._state(state.groups), *updates]


class Replayed:
    """In place of a GPU's graph: computes the step from the recorded places into the recorded places."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.calls = arguments, 0
        self.made = [
            Advanced(_copied(one.group), Tangent(*(t.clone() for t in vars(one.direction).values())))
            for one in prism_graph._ordinary(*arguments)
        ]

    def replay(self) -> None:
        self.calls += 1
        for old, new in zip(self.made, prism_graph._ordinary(*self.arguments), strict=True):
            places = [*prism_graph._state([old.group]), *prism_graph._blocks([old.direction])]
            values = [*prism_graph._state([new.group]), *prism_graph._blocks([new.direction])]
            for place, value in zip(places, values, strict=True):
                place.copy_(value)


def _copied(group: PrismGroup) -> PrismGroup:
    return prism_graph._filled(group, iter([t.clone() for t in prism_graph._state([group])]))


def record(rule: StepRule, groups: Sequence[PrismGroup], inputs: list[torch.Tensor]) -> Any:
    numbers = prism_graph._device_numbers(inputs[0].device, (0.0, 1.0, 1.0))
    graph = Replayed(rule, groups, inputs, numbers)
    return prism_graph._Recorded(graph, inputs, numbers, graph.made)  # type: ignore[arg-type]


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prism_graph, "_serves", lambda rule, inputs: True)
    monkeypatch.setattr(prism_graph, "_record", record)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_replayed_step_is_the_ordinary_step_for_other_values_and_rates(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = StepGraphs()
    replayed = walk(graphs, kind)
    assert sum(one.graph.calls for one in graphs._recorded.values()) >= 3  # type: ignore[attr-defined]
    monkeypatch.undo()
    for got, want in zip(replayed, walk(StepGraphs(), kind), strict=True):
        assert [g.moments and g.moments.steps for g in got.groups] == [
            g.moments and g.moments.steps for g in want.groups
        ]
        assert [g.update is None for g in got.groups] == [g.update is None for g in want.groups]
        for one, other in zip(tensors(got), tensors(want), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("recording")
def test_a_later_replay_leaves_earlier_states_alone() -> None:
    graphs = StepGraphs()
    states = walk(graphs, "moments", steps=3)
    kept = [t.clone() for state in states for t in tensors(state)]
    own = states[-1]
    graphs.step(KINDS["moments"], own, sums(own, 9), VARIANCE, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(kept, (t for s in states for t in tensors(s)), strict=True))


@pytest.mark.usefixtures("recording")
def test_a_replay_in_a_later_round_keeps_that_rounds_base_and_modules() -> None:
    graphs = StepGraphs()
    walk(graphs, "moments", steps=3)
    later = start("moments")
    groups = tuple(
        replace(g, base=Frames(*(2.0 * t for t in vars(g.base).values())), modules=(f"other.{i}",))
        for i, g in enumerate(later.groups)
    )
    own = PrismState(groups, 1)
    made = graphs.step(KINDS["moments"], own, sums(own, 4), VARIANCE, 0.1)
    assert all(one.base is group.base for one, group in zip(made, groups, strict=True))
    assert [one.modules for one in made] == [("other.0",), ("other.1",)]
    assert all(one.update is None for one in made)


@pytest.mark.usefixtures("recording")
def test_other_rules_and_shapes_have_recordings_of_their_own_and_few_are_kept() -> None:
    graphs = StepGraphs()
    for clients in (1, 2, 3, 4, 5, 6):
        for _ in range(3):
            own = start("plain", clients)
            graphs.step(RULE, own, sums(own, clients), VARIANCE, 0.1)
    assert len(graphs._recorded) == prism_graph._KEPT
    own = start("plain", 6)
    assert graphs.step(RULE, own, sums(own, 6), VARIANCE, 0.1)[0].frames.core.shape[0] == 6


def test_a_recording_that_fails_is_not_tried_again_and_the_step_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def refuse(*arguments: Any) -> Any:
        tried.append(arguments)
        raise RuntimeError("no capture here")

    monkeypatch.setattr(prism_graph, "_serves", lambda rule, inputs: True)
    monkeypatch.setattr(prism_graph, "_record", refuse)
    states = walk(StepGraphs(), "moments", steps=4)
    assert len(tried) == 1
    assert states[-1].groups[0].moments is not None
    assert states[-1].groups[0].moments.steps == 4
    assert sum("not recorded" in message for message in caplog.messages) == 1


def test_graphs_stay_behind_when_a_mechanism_is_pickled() -> None:
    graphs = StepGraphs()
    graphs._recorded["key"] = object()  # type: ignore[assignment]
    assert pickle.loads(pickle.dumps(graphs))._recorded == {}


def test_on_a_gpu_a_replay_repeats_the_ordinary_step_exactly() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for kind in sorted(KINDS):
        plain, graphs = StepGraphs(), StepGraphs()
        plain._failed = True
        ordinary, replayed = walk(plain, kind, device="cuda"), walk(graphs, kind, device="cuda")
        assert graphs._recorded
        assert not graphs._failed
        for got, want in zip(replayed, ordinary, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(want), strict=True))
