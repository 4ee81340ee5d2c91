"""A Ray cluster of several machines, emulated on one: the result of the local run, and a machine lost on the way."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulation_helpers import configuration, container, metric_lines

from fedlora.ledger import load_secret, open_ledger
from fedlora.procfs import descendants
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RoundRecord
from fedlora.simulation.sweep import SweepPlan, finished_trials, plan_trials, run_sweep

pytestmark = pytest.mark.long


def adapters(folder: Path) -> list[str]:
    return [line["adapter"] for line in metric_lines(folder)]


@pytest.fixture
def machines() -> Iterator[Any]:
    """A head without CPUs and two nodes with two each."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}, connect=False
    )
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


def node_with_a_worker(cluster: Any) -> Any:
    """Return a machine on which one of the simulation's workers runs."""
    for node in cluster.worker_nodes:
        raylet = node.all_processes["raylet"][0].process.pid
        for child in descendants(raylet):
            try:
                if b"NodeHost" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return node
            except OSError:
                continue
    raise AssertionError("no machine has a worker")


def test_a_cluster_gives_the_local_result_and_a_lost_machine_is_survived(
    world: Path, tmp_path: Path, machines: Any
) -> None:
    local = simulate(configuration(world, tmp_path / "local"))
    remote = {"workers": 2, "ray": {"address": machines.address}}
    whole = simulate(configuration(world, tmp_path / "whole", simulation=remote))
    assert (whole.status, whole.epsilon) == ("finished", local.epsilon)
    assert adapters(whole.folder) == adapters(local.folder)
    assert whole.memory["free"] > 0

    lost: list[Any] = []

    def lose(record: RoundRecord) -> None:
        if record.round == 1 and not lost:
            lost.append(node_with_a_worker(machines))
            machines.remove_node(lost[0], allow_graceful=False)

    started = time.monotonic()
    part = simulate(configuration(world, tmp_path / "part", simulation=remote), progress=lose)
    assert time.monotonic() - started < 240
    assert lost
    assert (part.status, part.epsilon) == ("finished", local.epsilon)
    assert [line["accepted"] for line in metric_lines(part.folder)[1:]] == [4, 4, 4, 4]
    assert adapters(part.folder) == adapters(local.folder)


SWEEP = """
import sys
from pathlib import Path
from fedlora.simulation.sweep import SweepPlan, run_sweep
plan = SweepPlan(sys.argv[1], grid={"training.optimizer.lr": ["0.01", "0.1"]}, seeds=(1, 2))
run_sweep(plan, Path(sys.argv[2]), parallel=2, progress=lambda result, done, total: print("done", done, flush=True))
"""


def test_a_sweep_runs_side_by_side_resumes_after_kill_9_and_adds_up(world: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "run.yaml", tmp_path / "sweep"
    config.write_text(yaml.safe_dump(container(world, tmp_path / "runs", federation={"rounds": 6})))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SWEEP), str(config), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "done 2":
            break
    time.sleep(0.2)  # the third is under way and the fourth has begun; a whole one takes half a second
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=180)
    plan = SweepPlan(str(config), grid={"training.optimizer.lr": ["0.01", "0.1"]}, seeds=(1, 2))
    before = set(finished_trials(out))
    assert 2 <= len(before) < 4
    seen: list[str] = []
    results = run_sweep(
        plan,
        out,
        parallel=2,
        cpus_per_trial=0.5,
        progress=lambda result, done, total: seen.append(result.name),
    )
    assert {one.status for one in results} == {"finished"}
    assert set(seen) == {trial.name for trial in plan_trials(plan)} - before
    assert side_by_side([Path(one.folder) for one in results])
    steps = charged(tmp_path / "runs")  # the ledger that plain runs use as well
    assert len(steps) == 4
    assert all(24 <= count <= 36 for count in steps.values()), "four trials of six, and what was begun twice"
    assert max(one.spent or 0.0 for one in results) > max(one.epsilon or 0.0 for one in results)


def side_by_side(folders: list[Path]) -> bool:
    """Return whether two runs were under way at the same time."""
    spans = sorted(
        ((one / "config.yaml").stat().st_mtime, (one / "summary.json").stat().st_mtime) for one in folders
    )
    return any(after[0] < before[1] for before, after in itertools.pairwise(spans))


def charged(runs: Path) -> dict[str, int]:
    ledger = open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key"), read_only=True)
    with ledger:
        return {
            account.client: sum(row.steps_charged for row in ledger.report(account).rounds)
            for account in ledger.accounts()
        }
