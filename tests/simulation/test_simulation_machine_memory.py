"""What a control group leaves, of either version, at any depth; and the kernel's count of kills."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedlora.simulation import machine_memory
from fedlora.simulation.memory import free_memory_here

GB = 10**9
NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def group(folder: Path, version: int, limit: int | str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit_name, used_name, cache_name = NAMES[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / used_name).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{cache_name} {cache}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 20 GB free."""
    monkeypatch.setattr(machine_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine_memory, "_GROUPS", tmp_path / "groups")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1 kB\nMemAvailable: 20000000 kB\n")
    return tmp_path


def belongs(machine: Path, version: int, path: str) -> Path:
    line = f"0::{path}" if version == 2 else f"7:cpu,cpuacct:/\n5:memory:{path}"
    (machine / "proc" / "self" / "cgroup").write_text(line + "\n")
    return machine / "groups" if version == 2 else machine / "groups" / "memory"


@pytest.mark.parametrize("version", [1, 2])
def test_h31_the_tightest_group_around_the_process_decides(machine: Path, version: int) -> None:
    root = belongs(machine, version, "/box/job")
    group(root / "box", version, 4 * GB, 3 * GB, GB)
    assert machine_memory.free_bytes() == 2 * GB, "cached file pages can be had back"
    group(root / "box" / "job", version, 2 * GB, GB)
    assert machine_memory.free_bytes() == GB
    group(root / "box" / "job", version, "max" if version == 2 else 2**63 - 4096, GB)
    assert machine_memory.free_bytes() == 2 * GB
    assert free_memory_here(2, "cpu", 0.0) == int(0.8 * 2 * GB / 2)
    group(root / "box", version, GB, 3 * GB)
    assert machine_memory.free_bytes() == 0


@pytest.mark.parametrize("version", [1, 2])
def test_h31_inside_a_container_the_mounts_root_is_the_group(machine: Path, version: int) -> None:
    root = belongs(machine, version, "/docker/0123abcd")
    group(root, version, 4 * GB, GB)
    assert machine_memory.free_bytes() == 3 * GB


def test_without_groups_the_machine_decides_and_without_proc_nothing_does(machine: Path) -> None:
    assert machine_memory.free_bytes() == 20 * 10**6 * 1024
    assert machine_memory.kernel_kills() is None
    (machine / "proc" / "vmstat").write_text("pgfault 9\noom_kill 7\noom_kill_local 1\n")
    assert machine_memory.kernel_kills() == 7
    for path in (machine / "proc" / "meminfo", machine / "proc" / "vmstat"):
        path.unlink()
    assert machine_memory.free_bytes() is None
    assert free_memory_here(2, "cpu", 0.0) is None


def test_this_machine_tells() -> None:
    kills = machine_memory.kernel_kills()
    assert kills is None or kills >= 0
    free = machine_memory.free_bytes()
    assert free is None or free > 0


@pytest.mark.parametrize(
    ("address", "kills", "halves"),
    [
        (None, (3, 4), True),
        (None, (3, 3), False),
        (None, (None, None), True),
        ("10.0.0.1:6379", (3, 3), True),
    ],
)
def test_h31_a_sudden_death_halves_a_cohort_unless_this_machine_killed_nobody_for_memory(
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    kills: tuple[int | None, int | None],
    halves: bool,
) -> None:
    """Ray's text names the kernel's killer for every sudden death; kill -9 by a person is no reason to halve."""
    from ray.exceptions import ActorDiedError, OutOfMemoryError

    from fedlora.simulation import raygrid

    grid: Any = raygrid.RayGrid.__new__(raygrid.RayGrid)
    grid._crew = SimpleNamespace(config=SimpleNamespace(address=address))
    grid._kernel_kills = kills[0]
    monkeypatch.setattr(raygrid, "kernel_kills", lambda: kills[1])
    sudden: Any = ActorDiedError()
    sudden.error_msg = "(1) the process was killed by the OOM killer due to high memory usage, (2) ray stop"
    monkeypatch.setattr(ActorDiedError, "__str__", lambda self: self.error_msg)
    assert grid._for_memory(sudden) is halves
    sudden.error_msg = "its node has died"
    assert grid._for_memory(sudden) is False
    assert grid._for_memory(OutOfMemoryError("low")) is True
