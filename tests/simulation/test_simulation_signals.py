"""A signal that stops a run is not lost where its exception is swallowed: by Ray's start, or by a finaliser."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from simulation_helpers import configuration

from fedlora.errors import SimulationError
from fedlora.simulation import cluster
from fedlora.simulation.grid import InProcessGrid
from fedlora.simulation.run import simulate
from fedlora.simulation.terminations import check_stopped, kept_handlers, terminations

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before
    assert signal.set_wakeup_fd(wakeup) == wakeup


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def half_made(number: int, frame: object) -> None:
    raise AttributeError("removal_lock")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_that_is_swallowed_inside_is_raised_on_leaving(number: signal.Signals) -> None:
    def start() -> None:
        with kept_handlers():
            signal.signal(signal.SIGTERM, half_made)
            with suppress(AttributeError, KeyboardInterrupt):
                send(number)

    with terminations():
        with pytest.raises(KeyboardInterrupt):
            start()
        assert signal.getsignal(signal.SIGTERM) is not half_made


def test_without_a_signal_nothing_is_raised_and_another_s_handler_is_its_own_affair() -> None:
    with terminations(), kept_handlers():
        signal.signal(signal.SIGTERM, half_made)
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with kept_handlers():
            send(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("finished", [True, False])
def test_h32_a_start_of_ray_that_swallows_a_signal_is_undone(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, finished: bool
) -> None:
    import ray

    done: list[str] = []

    def init(**options: object) -> None:
        signal.signal(signal.SIGTERM, half_made)
        with suppress(AttributeError, KeyboardInterrupt):
            send(number)
        if not finished:
            raise AttributeError("removal_lock")
        done.append("started")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: done == ["started"])
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("ended"))
    with terminations(), pytest.raises(KeyboardInterrupt):
        cluster._start(1, 0.0, {})
    assert done == (["started", "ended"] if finished else [])


def test_a_start_that_fails_by_itself_is_no_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(**options: object) -> None:
        raise AttributeError("removal_lock")

    monkeypatch.setattr(ray, "init", init)
    with terminations(), pytest.raises(SimulationError, match="removal_lock"):
        cluster._start(1, 0.0, {})


@pytest.mark.parametrize("number", NUMBERS)
def test_a_swallowed_signal_ends_the_run_at_its_next_round(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    plain, rounds = InProcessGrid._submit, []

    def submit(self: Any, pending: Any) -> None:
        rounds.append(1)
        with suppress(KeyboardInterrupt):
            send(number)
        plain(self, pending)

    monkeypatch.setattr(InProcessGrid, "_submit", submit)
    with pytest.raises(KeyboardInterrupt):
        simulate(configuration(world, tmp_path), in_process=True)
    assert len(rounds) == 1
    check_stopped()


def test_ray_sets_no_handlers_of_its_own_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first one fails while a node is half made, and SIGTERM would wait for the end of the start."""
    import ray
    from ray._private import node, utils, worker

    plain, seen = utils.set_sigterm_handler, []

    def init(**options: object) -> None:
        before = signal.getsignal(signal.SIGTERM)
        node.ray._private.utils.set_sigterm_handler(half_made)
        worker.ray._private.utils.set_sigterm_handler(half_made)
        seen.append(signal.getsignal(signal.SIGTERM) is before)
        raise OSError("enough")

    monkeypatch.setattr(ray, "init", init)
    with terminations(), pytest.raises(OSError, match="enough"):
        cluster._start(1, 0.0, {})
    assert seen == [True]
    assert utils.set_sigterm_handler is plain
