"""H31: workers that the kernel or Ray's memory monitor kills without warning, in a round and in their start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulation_helpers import configuration, container, metric_lines

from fedlora.errors import SimulationError
from fedlora.ledger import load_secret, open_ledger
from fedlora.procfs import descendants
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RoundRecord

pytestmark = pytest.mark.long
GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT = 0


def workers_of(pid: int) -> list[int]:
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if b"NodeHost" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return sorted(found)


class Tight:
    """A memory cgroup that leaves a process nothing but what it has: its next pages make the kernel kill it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def take(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            (self._folder / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        text = (self._folder / "memory.oom_control").read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@pytest.fixture
def tight() -> Iterator[Tight]:
    folder = GROUPS / f"fedlora-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
    except OSError as error:
        pytest.skip(f"a memory cgroup of its own needs root ({error.strerror})")
    try:
        yield Tight(folder)
    finally:
        deadline = time.monotonic() + 10
        while folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.1)


def charged(runs: Path) -> dict[str, int]:
    with open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key"), read_only=True) as book:
        return {
            account.client: sum(row.steps_charged for row in book.report(account).rounds)
            for account in book.accounts()
        }


def in_round(number: int, action: Callable[[], None]) -> Callable[[RoundRecord], None]:
    """Do something once, after one round is over and before the next one's messages leave."""
    done: list[int] = []

    def progress(record: RoundRecord) -> None:
        if record.round == number - 1 and not done:
            done.append(number)
            action()

    return progress


def test_h31_a_worker_that_the_kernel_kills_in_a_round_is_replaced_and_nothing_is_lost(
    world: Path, tmp_path: Path, tight: Tight
) -> None:
    rounds = {"federation": {"rounds": 8}}
    whole = simulate(configuration(world, tmp_path / "whole", **rounds))
    take = in_round(2, lambda: tight.take(workers_of(os.getpid())[0]))
    part = simulate(configuration(world, tmp_path / "part", **rounds), progress=take)
    assert tight.kills() == 1
    assert set(part.memory["halved"].values()) == {1}
    assert [line["accepted"] for line in metric_lines(part.folder)[1:]] == [4] * 8
    assert part.metrics is not None
    assert whole.metrics is not None
    assert part.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5), "a cohort of another size"
    assert part.epsilon == whole.epsilon
    assert charged(tmp_path / "part") == charged(tmp_path / "whole")


def test_h31_a_message_whose_workers_are_killed_twice_fails_by_name_and_stays_charged(
    world: Path, tmp_path: Path, tight: Tight
) -> None:
    """The second kill hits the replacement while it starts; the third worker goes on with the run."""
    ending = threading.Event()
    hunters: list[threading.Thread] = []

    def hunt(spared: int) -> None:
        while tight.kills() < 2 and not ending.is_set():
            for pid in workers_of(os.getpid()):
                if pid != spared:
                    tight.take(pid)
            time.sleep(0.02)

    def begin() -> None:
        spared = workers_of(os.getpid())[1]
        hunters.append(threading.Thread(target=hunt, args=(spared,)))
        hunters[0].start()

    federation = {"min_replies": 1, "rounds": 8}
    try:
        part = simulate(configuration(world, tmp_path, federation=federation), progress=in_round(2, begin))
    finally:
        ending.set()
        for thread in hunters:
            thread.join()
    assert tight.kills() >= 2
    assert part.status == "finished"
    lines = metric_lines(part.folder)[1:]
    (bad,) = [line for line in lines if line["accepted"] != 4]
    assert (bad["round"] > 1, bad["accepted"], len(bad["failed"])) == (True, 2, 2)
    assert all("died 2 times" in reason for reason in bad["failed"].values())
    assert set(charged(tmp_path).values()) == {8}, "what the interrupted clients reserved stays spent"


def test_a_worker_that_dies_while_it_starts_is_started_again_and_one_that_always_does_ends_the_run(
    world: Path, tmp_path: Path
) -> None:
    """Before anything is spent: the first workers' imports are the largest growth of memory in a run."""
    killed: set[int] = set()
    ending = threading.Event()

    def hunt(most: int) -> None:
        while len(killed) < most and not ending.is_set():
            for pid in workers_of(os.getpid()):
                if pid not in killed:
                    killed.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def run(most: int, name: str) -> Any:
        killed.clear()
        thread = threading.Thread(target=hunt, args=(most,))
        thread.start()
        try:
            return simulate(configuration(world, tmp_path / name))
        finally:
            ending.set()
            thread.join()
            ending.clear()

    result = run(2, "some")
    assert len(killed) == 2
    assert (result.status, result.metrics is not None) == ("finished", True)
    assert set(charged(tmp_path / "some").values()) == {4}
    with pytest.raises(SimulationError, match="died while starting, 3 times"):
        run(1000, "always")
    assert charged(tmp_path / "always") == {}


MONITORED = """
import json, sys, time
from pathlib import Path
from fedlora.config import load_config
from fedlora.simulation.run import simulate
def note(record):
    print("round", record.round, flush=True)
    time.sleep(1.0)
result = simulate(load_config(sys.argv[1]), progress=note)
print(json.dumps({"folder": str(result.folder), "status": result.status, "memory": dict(result.memory)}))
"""


def memory() -> tuple[int, int]:
    """Return all of the machine's memory and what of it is used, in bytes."""
    fields = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
    }
    return fields["MemTotal"], fields["MemTotal"] - fields["MemAvailable"]


def test_h31_a_worker_that_rays_memory_monitor_kills_is_replaced_and_gets_half_the_clients(
    world: Path, tmp_path: Path
) -> None:
    """Another program takes the memory until Ray kills a worker, and gives it back."""
    total, used = memory()
    if total - used < 10 * 2**30:
        pytest.skip("10 GB of free memory are needed")
    config = tmp_path / "run.yaml"
    changes: dict[str, Any] = {"federation": {"rounds": 14, "min_replies": 1}}
    config.write_text(yaml.safe_dump(container(world, tmp_path / "runs", **changes)))
    monitor = {
        "RAY_memory_usage_threshold": f"{(used + 5 * 2**30) / total:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", MONITORED, str(config)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **monitor}, cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    try:
        while process.stdout.readline().strip() != "round 1":
            assert process.poll() is None
        before = workers_of(process.pid)
        held: list[bytes] = []
        while set(before) <= set(workers_of(process.pid)) and len(held) < 72:
            held.append(os.urandom(2**20) * 128)
        held.clear()
        told = process.stdout.read()
    finally:
        process.kill()
        process.wait()
    result = json.loads(told.splitlines()[-1])
    assert result["status"] == "finished"
    lines = metric_lines(Path(result["folder"]))[1:]
    assert all(line["accepted"] + len(line["failed"]) == 4 for line in lines)
    assert lines[-1]["accepted"] == 4
    assert set(result["memory"]["halved"].values()) <= {1}
    assert result["memory"]["halved"]
    assert set(charged(tmp_path / "runs").values()) == {14}
