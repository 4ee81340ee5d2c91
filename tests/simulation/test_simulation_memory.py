"""H31: the memory plan before a run, and what happens when memory runs out all the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulation_helpers import configuration, container, metric_lines

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mechanisms"))
from engine_zoo import ZooTask, adapted_model, config, moved_payload, records

from fedlora.cli.simulate import as_object, run_simulation
from fedlora.errors import PrivacyParameterError
from fedlora.ledger import load_secret, open_ledger
from fedlora.mechanisms import build_mechanism
from fedlora.mechanisms.noise import OsNoise, SeededNoise
from fedlora.simulation.host import NodeHost
from fedlora.simulation.memory import (
    ClientNeed,
    MemoryPlan,
    clients_of_a_worker,
    free_memory_here,
    measure_need,
    plan_memory,
)
from fedlora.simulation.prepare import complete, make_federation
from fedlora.simulation.run import simulate
from fedlora.simulation.trim import Trimmer, resident_bytes
from fedlora.training.cohort import ClientJob, ClientUpdate, CohortEngine
from fedlora.training.cohort_passes import PassRunner
from fedlora.training.cohort_retry import TooLargeError
from fedlora.training.sampling import KeptCoins

PROBLEMS = [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
]
DRAWS = [
    [(3, 9), (5,), (2, 2, 31)],
    [(), (7, 4), ()],
    [(1,), (), (6, 6, 2, 14)],
    [(4,), (8,), (3,)],
    [(), (), ()],
]


def make_engine(kind: str = "lora_fa", privacy: Any = None) -> tuple[CohortEngine, Any]:
    adapted = adapted_model("bert", torch.float32)
    adam = {"optimizer": {"kind": "adam", "lr": 0.01}, "steps_per_round": 3}
    run = config(kind, training=adam, privacy=privacy)
    mechanism = build_mechanism(run, adapted.layout)
    start = mechanism.initial_payload(adapted)
    if kind != "prism":  # frames stay orthonormal
        start = moved_payload(start)
    return CohortEngine(adapted, mechanism, ZooTask("bert"), run), start


class Counted:
    """Prepared batches of one client; counts how often it is drawn from."""

    def __init__(self, number: int, lengths: Sequence[Sequence[int]]) -> None:
        self.batches = [records("bert", one, 10 * number + i, torch.float32) for i, one in enumerate(lengths)]
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        return self.batches[self.calls - 1]


def make_jobs(noise: Callable[[], Any] | None = None) -> tuple[list[ClientJob], list[Counted]]:
    draws = [Counted(k, lengths) for k, lengths in enumerate(DRAWS)]
    return [
        ClientJob(f"client-{k}", draw, SeededNoise(3, f"client-{k}", 1) if noise is None else noise())
        for k, draw in enumerate(draws)
    ], draws


def fail_above(
    monkeypatch: pytest.MonkeyPatch, limit: int, problem: Exception, steps: int = 1
) -> list[tuple[int, int]]:
    """Let memory run out in the noise of step `steps` (counted per attempt) where more than `limit` clients train."""
    seen: list[tuple[int, int]] = []
    plain = CohortEngine._noisy_sums
    count = {"step": 0, "clients": 0}

    def tight(self: Any, mechanism: Any, state: Any, jobs: Any, sources: Any) -> Any:
        fresh = torch.equal(state.values.flat, state.start)
        count["step"] = 1 if fresh else count["step"] + 1
        result = plain(self, mechanism, state, jobs, sources)
        seen.append((len(jobs), count["step"]))
        if len(jobs) > limit and count["step"] >= steps:
            raise problem
        return result

    monkeypatch.setattr(CohortEngine, "_noisy_sums", tight)
    return seen


def same(one: Sequence[ClientUpdate], two: Sequence[ClientUpdate]) -> None:
    assert [(a.client, a.steps, a.event) for a in one] == [(b.client, b.steps, b.event) for b in two]
    for a, b in zip(one, two, strict=True):
        for name, value in a.payload.blocks.items():
            assert np.linalg.norm(b.payload.blocks[name] - value) <= 1e-5 * max(np.linalg.norm(value), 1e-3)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("kind", ["lora_fa", "factor", "prism"])
def test_h31_a_cohort_halves_with_nothing_lost_and_nothing_drawn_twice(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, kind: str
) -> None:
    engine, payload = make_engine(kind)
    expected = engine.train(payload, make_jobs()[0], 3)
    jobs, draws = make_jobs()
    seen = fail_above(monkeypatch, 2, problem, steps=2)
    got = engine.train(payload, jobs, 3)
    same(expected, got)
    assert [draw.calls for draw in draws] == [3] * 5
    assert engine.cohort == 2
    assert seen[0] == (5, 1)
    seen.clear()
    same(expected, engine.train(payload, make_jobs()[0], 3))
    assert max(clients for clients, _ in seen) == 2, "the limit that was found is kept"


def test_h31_private_noise_of_a_failed_attempt_is_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, payload = make_engine()
    drawn: list[torch.Tensor] = []
    plain = OsNoise.gaussians

    def watched(self: Any, *arguments: Any) -> torch.Tensor:
        drawn.append(plain(self, *arguments))
        return drawn[-1].clone()

    monkeypatch.setattr(OsNoise, "gaussians", watched)
    fail_above(monkeypatch, 3, MemoryError())
    engine.train(payload, make_jobs(OsNoise)[0], 1)
    assert len(drawn) >= 3
    rows = torch.cat([one.flatten().unfold(0, 4, 1) for one in drawn])
    assert len(torch.unique(rows, dim=0)) == len(rows), "every attempt has numbers of its own"


def test_h31_a_cohort_halves_where_no_single_record_fits_beside_the_others() -> None:
    engine, payload = make_engine()
    expected = engine.train(payload, make_jobs()[0], 3)
    engine._passes = PassRunner(engine.adapted, ZooTask("bert"))
    plain, clients = engine._passes._one_pass, []

    def tight(mechanism: Any, state: Any, *rest: Any) -> Any:
        clients.append(state.values.flat.shape[0])
        if clients[-1] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(mechanism, state, *rest)

    engine._passes._one_pass = tight  # type: ignore[method-assign]
    same(expected, engine.train(payload, make_jobs()[0], 3))
    assert engine.cohort == 1
    assert engine.passes.max_tokens is None, "limits of failed cohorts do not stay"


def test_h31_a_client_that_never_fits_fails_alone() -> None:
    engine, payload = make_engine()
    expected = engine.train(payload, make_jobs()[0], 3)

    class Heavy(ZooTask):
        def per_record_loss(self, model: Any, batch: Any) -> torch.Tensor:
            if batch["input_ids"].shape[1] >= 31:
                raise MemoryError
            return super().per_record_loss(model, batch)

    engine._passes = PassRunner(engine.adapted, Heavy("bert"))
    with pytest.raises(TooLargeError, match="one record alone") as caught:
        engine.train(payload, make_jobs()[0], 3)
    assert list(caught.value.clients) == ["client-0"]
    same(expected[1:], caught.value.done)


def test_another_error_is_no_reason_to_halve(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, payload = make_engine()
    fail_above(monkeypatch, 0, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        engine.train(payload, make_jobs()[0], 1)
    assert engine.cohort is None


# -- whole runs -------------------------------------------------------------------------------------


def charged(runs: Path) -> dict[str, int]:
    ledger = open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key"), read_only=True)
    with ledger:
        return {
            account.client: sum(row.steps_charged for row in ledger.report(account).rounds)
            for account in ledger.accounts()
        }


@pytest.mark.parametrize("problem", PROBLEMS[:2], ids=lambda one: type(one).__name__)
def test_h31_a_run_goes_on_when_memory_runs_out(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    whole = simulate(configuration(world, tmp_path / "whole"), in_process=True)
    fail_above(monkeypatch, 1, problem)
    lines: list[str] = []
    result = simulate(configuration(world, tmp_path / "tight"), in_process=True, announce=lines.append)
    assert (result.status, result.rounds, result.epsilon) == ("finished", 4, whole.epsilon)
    assert [line["accepted"] for line in metric_lines(result.folder)[1:]] == [4] * 4
    assert result.metrics is not None
    assert whole.metrics is not None
    assert result.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)
    assert charged(tmp_path / "tight") == charged(tmp_path / "whole")
    assert result.memory["halved"] == {"1001": 1}
    assert len(lines) == 1
    assert "4 of 4 clients at once" in lines[0]


def test_h31_the_plan_is_printed_once_and_kept(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    changes = {"federation": {"rounds": 1}, "model": {"device": "cpu"}}
    path.write_text(json.dumps(container(world, tmp_path / "runs", **changes)))
    options: dict[str, Any] = {"resume": None, "ledger": None, "in_process": True, "quiet": False}
    result = run_simulation(str(path), ["simulation.cohort=3"], None, **options)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memory: ")]
    assert len(said) == 1
    assert "1 worker (cpu)" in said[0]
    assert "3 of 4 clients at once" in said[0]
    kept = json.loads((result.folder / "plan.json").read_text())
    assert kept == as_object(result)["memory"]
    assert (kept["cohort"], kept["clients"], kept["chosen_by"]) == (3, 4, "configuration")
    assert kept["worker"] >= kept["base"] + 3 * kept["client"]
    seconds = as_object(result)["seconds"]
    assert 0 < seconds["workers_passes"] < seconds["wall"]


def test_h31_a_resumed_run_keeps_its_cohort(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_above(patch, 2, MemoryError())
        part = simulate(configuration(world, tmp_path), in_process=True, stop_after=2)
    resumed = simulate(resume=part.folder, in_process=True)
    assert (part.memory["cohort"], part.memory["halved"]) == (4, {"1001": 2})
    assert (resumed.memory["cohort"], resumed.memory["chosen_by"]) == (2, "earlier part of this run")


# -- the plan ---------------------------------------------------------------------------------------


def test_the_largest_cohort_that_fits_is_taken() -> None:
    need = ClientNeed(state=1_000, record=500, records=4)
    for most in (1, 7, 1000):
        for free in (-1, 0, 5_000, 60_000, 10**9):
            count = need.fitting(free, most)
            assert 1 <= count <= most
            assert count == 1 or need.cohort(count) <= free
            assert count == most or need.cohort(count + 1) > free
    limited = replace(need, most=8)
    assert limited.cohort(100) == 100 * 1_000 + 8 * 500


def test_memory_decides_the_cohort_and_a_tight_machine_is_told(world: Path, tmp_path: Path) -> None:
    bench = complete(make_federation(configuration(world, tmp_path)).config).bench
    need = measure_need(bench)
    loose = plan_memory(bench, 40, 2, None)
    assert (loose.cohort, loose.chosen_by) == (40, "memory")
    base = loose.base
    half = plan_memory(bench, 40, 2, base + 50_000_000 + need.cohort(20))
    assert half.cohort >= 20
    tight = plan_memory(bench, 40, 2, 1)
    assert tight.cohort == 1
    assert "may not fit" in tight.line()
    assert "may not fit" not in loose.line()
    assert plan_memory(bench, 40, 2, None, earlier=6).cohort == 6
    assert "\n" not in loose.line()


def test_a_record_is_measured_as_what_its_pass_really_takes(world: Path, tmp_path: Path) -> None:
    """Against torch's own count of every allocation in one pass of eight records."""
    config = configuration(world, tmp_path, model={"device": "cpu"})  # whose memory the profiler counts
    bench = complete(make_federation(config).config).bench
    from fedlora.training.groups import public_records

    need = measure_need(bench)
    engine = CohortEngine(bench.adapted, bench.mechanism, bench.task, bench.config)
    drawn = public_records(bench.task, 8, bench.config.data.max_length)
    payload = bench.initial_payload()

    def peak(count: int) -> int:
        job = ClientJob("x", lambda: drawn[:count], OsNoise())
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as seen:
            engine.train(payload, [job], 1)
        results: Any = seen.profiler.kineto_results  # type: ignore[union-attr]
        changes = [(one.start_ns(), one.nbytes()) for one in results.events() if one.name() == "[memory]"]
        total = best = 0
        for _, change in sorted(changes):
            total += change
            best = max(best, total)
        return best

    slope = (peak(8) - peak(2)) / 6
    assert 0.7 * slope <= need.record <= 2.0 * slope


def test_clients_of_a_worker_follow_the_sampling(world: Path, tmp_path: Path) -> None:
    def most(asked: Any, shares: list[int]) -> int:
        run = configuration(world, tmp_path, federation={"clients_per_round": asked})
        return clients_of_a_worker(run, shares)

    assert most("all", [5, 4]) == 5
    assert most(3, [5, 4]) == 3
    assert most(4, [3, 2]) == 3
    assert 50 < most(0.01, [5000, 5000]) < 100


def test_free_memory_is_shared_by_the_workers() -> None:
    one, four = free_memory_here(1, "cpu", 0.0), free_memory_here(4, "cpu", 0.0)
    assert one is not None
    assert four is not None
    assert four == pytest.approx(one / 4, rel=0.3)


def test_the_plan_never_stops_a_run(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> MemoryPlan:
        raise ValueError("no")

    monkeypatch.setattr("fedlora.simulation.run.plan_memory", broken)
    result = simulate(configuration(world, tmp_path, federation={"rounds": 1}), in_process=True)
    assert result.status == "finished"
    assert result.memory == {}


# -- a second worker --------------------------------------------------------------------------------


def test_h31_a_second_worker_draws_the_very_same_batches(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every message is answered twice, as if the first worker had died before its answer left."""
    seen: list[list[list[int]]] = []
    sums, plain = PassRunner.clipped_sums, NodeHost.process

    def watched(self: Any, mechanism: Any, state: Any, draws: Any) -> Any:
        seen.append([[id(record) for record in draw] for draw in draws])
        return sums(self, mechanism, state, draws)

    def twice(self: Any, *arguments: Any) -> Any:
        plain(self, *arguments)
        return plain(self, *arguments)

    monkeypatch.setattr("fedlora.simulation.run._plan_memory", lambda *arguments: None)
    monkeypatch.setattr(NodeHost, "process", twice)
    monkeypatch.setattr(NodeHost, "prepare", prepared_first(NodeHost.prepare, monkeypatch, watched))
    changes: dict[str, Any] = {"privacy": {"noise_source": "os"}, "training": {"steps_per_round": 2}}
    simulate(configuration(world, tmp_path, **changes), in_process=True)
    assert len(seen) == 4 * 2 * 2
    rounds = [seen[first : first + 4] for first in range(0, 16, 4)]
    assert all(one[:2] == one[2:] for one in rounds), "two steps, and the same two steps again"
    assert len({str(one) for one in rounds}) == 4, "every round and step has coins of its own"
    assert all(one[0] != one[1] for one in rounds)


def prepared_first(prepare: Any, monkeypatch: pytest.MonkeyPatch, watched: Any) -> Any:
    """Watch passes from the moment on that a node's self-checks are done."""

    def wrapped(self: Any) -> Any:
        ready = prepare(self)
        monkeypatch.setattr(PassRunner, "clipped_sums", watched)
        return ready

    return wrapped


def test_kept_coins_repeat_for_one_client_and_round_only() -> None:
    key = bytes(range(32))
    first = KeptCoins(key, "a", 1).words(1000)
    again = KeptCoins(key, "a", 1)
    assert np.array_equal(np.concatenate([again.words(400), again.words(600)]), first)
    for other in (KeptCoins(key, "b", 1), KeptCoins(key, "a", 2), KeptCoins(bytes(32), "a", 1)):
        assert not np.intersect1d(other.words(1000), first).size
    assert abs(np.mean(KeptCoins(key, "c", 1).words(100_000) / 2.0**64) - 0.5) < 0.005
    with pytest.raises(PrivacyParameterError, match="needed 32"):
        KeptCoins(b"short", "a", 1)


def test_h31_memory_is_given_back_only_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, calls = iter([1000, 800, 870, 890, 700, 760, 771, 650]), []
    monkeypatch.setattr("fedlora.simulation.trim.resident_bytes", lambda: next(sizes))
    trimmer = Trimmer(1.1)
    trimmer._trim = lambda pad: calls.append(pad)
    trimmer()  # 1000: nothing is known yet, given back, 800 stay
    trimmer()  # 870 < 880
    assert len(calls) == 1
    trimmer()  # 890: given back, 700 stay
    trimmer()  # 760 < 770
    trimmer()  # 771: given back
    assert calls == [0, 0, 0]
    trimmer._trim = None
    trimmer()


def test_h31_freed_gaps_go_back_to_the_system() -> None:
    """Small blocks between large ones keep the heap from shrinking by itself."""
    trimmer = Trimmer()
    if trimmer._trim is None:
        pytest.skip("no malloc_trim in this C library")
    kept, gaps = [], []
    for _ in range(400):
        gaps.append(torch.zeros(25_000))
        kept.append(torch.zeros(16))
    full = resident_bytes()
    gaps.clear()
    trimmer()
    assert resident_bytes() < full - 20_000_000
    assert len(kept) == 400
