"""Simulations on Ray workers: the same results as in one process; faults; what is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulation_helpers import configuration, container, metric_lines

from fedlora.procfs import descendants
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RoundRecord

pytestmark = pytest.mark.long


def workers_of(pid: int) -> list[int]:
    """Return the simulation's Ray workers below a process."""
    found = []
    for child in descendants(pid):
        try:
            name = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "NodeHost" in name:
            found.append(child)
    return found


def adapters(folder: Path) -> list[str]:
    return [line["adapter"] for line in metric_lines(folder)]


def test_ray_equals_one_process_and_h32_two_runs_work_in_one_process(world: Path, tmp_path: Path) -> None:
    alone = simulate(configuration(world, tmp_path / "alone", simulation={"workers": 2}), in_process=True)
    first = simulate(configuration(world, tmp_path / "first"))
    second = simulate(configuration(world, tmp_path / "second"))
    assert first.status == second.status == "finished"
    assert adapters(first.folder) == adapters(second.folder)
    # one node sums four clients, two nodes two each: equal up to float32 rounding of the sums
    assert alone.metrics is not None
    assert first.metrics is not None
    assert first.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)
    assert workers_of(os.getpid()) == []


@pytest.mark.parametrize("when", [1, 2])
def test_a_killed_worker_is_replaced_and_the_run_is_unchanged(world: Path, tmp_path: Path, when: int) -> None:
    whole = simulate(configuration(world, tmp_path / "whole"))
    killed: list[int] = []

    def kill(record: RoundRecord) -> None:
        if record.round == when and not killed:
            killed.append(workers_of(os.getpid())[0])
            os.kill(killed[0], signal.SIGKILL)

    part = simulate(configuration(world, tmp_path / "part"), progress=kill)
    assert killed
    assert [line["accepted"] for line in metric_lines(part.folder)[1:]] == [4, 4, 4, 4]
    assert adapters(part.folder) == adapters(whole.folder)
    assert part.epsilon == whole.epsilon
    assert part.memory["halved"] == {}, "it was not killed for its memory"


SCRIPT = """
import sys, time
from pathlib import Path
from fedlora.config import load_config
from fedlora.simulation.run import simulate
def note(record):
    print("round", record.round, flush=True)
    time.sleep(0.3)
simulate(load_config(sys.argv[1]), progress=note)
"""


def start(world: Path, root: Path, **changes: Any) -> subprocess.Popen[str]:
    root.mkdir(parents=True, exist_ok=True)
    config = root / "run.yaml"
    config.write_text(yaml.safe_dump(container(world, root / "runs", **changes)))
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )


def wait_for_round(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == f"round {number}":
            return
    raise AssertionError("the run ended early")


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_h32_no_process_is_left_after_a_signal(world: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = start(world, tmp_path, federation={"rounds": 200})
    wait_for_round(process, 2)
    below = list(descendants(process.pid))
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.send_signal(number)
    process.wait(timeout=180)
    assert process.returncode != 0
    deadline = time.monotonic() + 120
    while alive(below) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert alive(below) == []


STAGES = {"the guard starts": 1, "ray starts": 2, "agents start": 7, "workers load": 9, "all is loaded": 9}
"""Stage of a start to the number of processes that have been seen by then."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", STAGES)
def test_h32_no_process_is_left_after_a_signal_while_the_run_starts(
    world: Path, tmp_path: Path, number: signal.Signals, stage: str
) -> None:
    """Ctrl-C and SIGTERM while Ray starts left its agents behind for a minute and more, or were lost."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(container(world, tmp_path / "runs", federation={"rounds": 500})))
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlora.cli.main", "simulate", str(config), "--quiet"],
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).resolve().parents[2],
    )
    seen: dict[int, str] = {}
    deadline = time.monotonic() + 120
    while len(seen) < STAGES[stage] and time.monotonic() < deadline:
        seen |= descendants(process.pid)
        time.sleep(0.02)
    time.sleep(3.0 if stage == "all is loaded" else 0.0)
    process.send_signal(number)
    sent = time.monotonic()
    while process.poll() is None and time.monotonic() < sent + 60:
        seen |= descendants(process.pid)
        time.sleep(0.02)
    if process.poll() is None:
        process.kill()
        raise AssertionError(f"{number.name} was lost: the run went on")
    while alive(list(seen)) and time.monotonic() < sent + 60:
        time.sleep(0.1)
    assert alive(list(seen)) == []
    assert time.monotonic() - sent < 15
    assert process.returncode != 0


def test_h35_kill_9_of_the_driver_then_resume_is_bit_identical(world: Path, tmp_path: Path) -> None:
    changes = {"federation": {"rounds": 8}}
    whole = simulate(configuration(world, tmp_path / "whole", **changes))
    process = start(world, tmp_path / "part", **changes)
    wait_for_round(process, 4)
    process.kill()
    process.wait(timeout=180)
    folder = next(
        path for path in (tmp_path / "part" / "runs").iterdir() if path.is_dir() and path.name[:5] == "tiny-"
    )
    resumed = simulate(resume=folder)
    assert resumed.status == "finished"
    assert adapters(folder) == adapters(whole.folder)
    assert resumed.epsilon >= whole.epsilon


def test_a_stuck_worker_costs_one_timeout_and_is_replaced(world: Path, tmp_path: Path) -> None:
    stopped: list[int] = []

    def stop(record: RoundRecord) -> None:
        if record.round == 1 and not stopped:
            stopped.append(workers_of(os.getpid())[0])
            os.kill(stopped[0], signal.SIGSTOP)

    federation = {"round_timeout_seconds": 15.0, "min_replies": 1, "rounds": 4}
    result = simulate(configuration(world, tmp_path, federation=federation), progress=stop)
    assert result.status == "finished"
    lines = metric_lines(result.folder)
    assert [line["accepted"] for line in lines[1:3]] == [4, 2]
    assert lines[-1]["accepted"] == 4
    assert "no reply within" in next(iter(lines[2]["failed"].values()))
