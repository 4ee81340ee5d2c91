"""One run folder, one driver; a resumed run spends from the ledger that it began with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulation_helpers import configuration, container

from fedlora.config import load_config
from fedlora.errors import CheckpointError, FileAccessError, FolderInUseError, LedgerError
from fedlora.files import FolderLock
from fedlora.ledger import load_secret, open_ledger
from fedlora.simulation.run import simulate
from fedlora.simulation.sweep import SweepPlan, run_sweep

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from fedlora.files import FolderLock
lock = FolderLock(Path(sys.argv[1]), "run folder")
started = subprocess.Popen(["sleep", "600"], close_fds=False, stdout=subprocess.DEVNULL)
heard, told = os.pipe()
forked = os.fork()
if forked == 0:
    os.write(told, b"!")
    time.sleep(600)
    os._exit(0)
os.read(heard, 1)  # the child runs
print(started.pid, forked, flush=True)
time.sleep(600)
"""


def charged(runs: Path, name: str = "ledger") -> int:
    with open_ledger(
        runs / f"{name}.sqlite", secret=load_secret(runs / f"{name}.key"), read_only=True
    ) as book:
        return sum(report.num_events for report in book.reports(book.accounts()))


def test_two_resumes_of_one_run_at_once_do_not_both_run(world: Path, tmp_path: Path) -> None:
    config = configuration(world, tmp_path)
    first = simulate(config, in_process=True, stop_after=1)
    refused: list[int] = []

    def resume_again(_record: Any) -> None:
        before = charged(tmp_path), (first.folder / "attempts").read_text()
        with pytest.raises(FolderInUseError, match=f"in use by process {os.getpid()}"):
            simulate(resume=first.folder, in_process=True)
        assert (charged(tmp_path), (first.folder / "attempts").read_text()) == before
        refused.append(1)

    result = simulate(resume=first.folder, in_process=True, progress=resume_again)
    assert len(refused) == 3
    assert (result.status, charged(tmp_path)) == ("finished", 4 * 4)


def test_a_running_run_is_not_resumed(world: Path, tmp_path: Path) -> None:
    def resume_it(_record: Any) -> bool:
        (folder,) = [path for path in tmp_path.iterdir() if path.is_dir() and "replies" not in path.name]
        with pytest.raises(FolderInUseError):
            simulate(resume=folder, in_process=True)
        return True

    assert simulate(configuration(world, tmp_path), in_process=True, progress=resume_it).rounds <= 1


def test_a_killed_process_gives_its_folder_up_though_its_children_live(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    left = [int(one) for one in holder.stdout.readline().split()]
    try:
        assert len(left) == 2
        with pytest.raises(FolderInUseError, match=f"process {holder.pid} "):
            FolderLock(tmp_path, "run folder")
        holder.kill()
        holder.wait()
        assert all(Path(f"/proc/{one}").exists() for one in left)
        with FolderLock(tmp_path, "run folder"):
            pass
    finally:
        for one in left:
            os.kill(one, 9)


def test_a_forked_child_neither_holds_nor_gives_up_the_folder(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "run folder"):
        child = os.fork()
        if child == 0:
            try:
                FolderLock(tmp_path, "run folder")
            except FolderInUseError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(FolderInUseError):
            FolderLock(tmp_path, "run folder")
    FolderLock(tmp_path, "run folder").close()


def test_two_sweeps_in_one_folder_at_once_do_not_both_run(world: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(container(world, tmp_path / "runs", federation={"rounds": 1})))
    plan, out = SweepPlan(str(path), seeds=(1, 2)), tmp_path / "sweep"

    def sweep_again(*_values: Any) -> None:
        with pytest.raises(FolderInUseError, match="sweep folder"):
            run_sweep(plan, out, in_process=True)

    assert len(run_sweep(plan, out, in_process=True, progress=sweep_again)) == 2


@pytest.mark.parametrize("unit", ["record", "client"])
def test_a_sweep_and_a_run_over_one_data_set_add_up(world: Path, tmp_path: Path, unit: str) -> None:
    values = container(world, tmp_path / "runs", federation={"rounds": 1})
    if unit == "client":
        values["privacy"] = {
            "unit": "client", "noise_multiplier": 1.0, "target_delta": 1e-4, "clipping_norm": 1.0,
            "adjacency": "add_or_remove", "noise_source": "seeded-test-only",
            "budget": {"epsilon": 50.0, "delta": 1e-4, "on_exhausted": "refuse"},
        }  # fmt: skip
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    ran = simulate(load_config(path), in_process=True)
    swept = run_sweep(SweepPlan(str(path), seeds=(1,)), tmp_path / "sweep", in_process=True)
    assert ran.epsilon is not None
    assert swept[0].spent is not None, swept[0]
    assert swept[0].spent > ran.epsilon


def test_a_run_resumed_from_elsewhere_spends_from_its_own_ledger(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    first = simulate(configuration(world, Path("runs")), in_process=True, stop_after=2)
    monkeypatch.chdir(elsewhere)
    simulate(resume=home / first.folder, in_process=True)
    assert charged(home / "runs") == 4 * 4
    assert not list(elsewhere.iterdir())


def test_a_resumed_run_goes_on_with_the_ledger_that_was_named(world: Path, tmp_path: Path) -> None:
    named = tmp_path / "books" / "mine.sqlite"
    first = simulate(configuration(world, tmp_path / "runs"), in_process=True, stop_after=2, ledger=named)
    with pytest.raises(CheckpointError, match="spends from"):
        simulate(resume=first.folder, in_process=True, ledger=tmp_path / "other.sqlite")
    simulate(resume=first.folder, in_process=True, stop_after=3)
    assert charged(named.parent, "mine") == 3 * 4
    assert not (tmp_path / "runs" / "ledger.sqlite").exists()
    moved = tmp_path / "moved"
    named.parent.rename(moved)
    with pytest.raises(LedgerError):
        simulate(resume=first.folder, in_process=True)
    simulate(resume=first.folder, in_process=True, ledger=moved / "mine.sqlite")
    assert charged(moved, "mine") == 4 * 4


def test_a_lock_that_cannot_be_made_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "in-use.lock").mkdir()
    with pytest.raises(FileAccessError, match="cannot be locked"):
        FolderLock(tmp_path, "run folder")
