"""A real federation whose server's disk is full in the middle of the run: run folders or state on a small disk."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_helpers import Federation, wait_for
from test_deploy_faults import charged

pytestmark = pytest.mark.long
ROUNDS = 5
SITE = "site-a"
BOUND = 150.0
"""Seconds within which a server with a full disk has ended."""


@pytest.fixture(params=["runs", "server-state"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Federation, Path]]:
    """A federation of one site; one of the server's folders is a disk of 8 MB."""
    made = Federation(tmp_path, rounds=ROUNDS, timeout=45.0, replies=1, sites=(SITE,)).make()
    folder = tmp_path / request.param
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a disk of its own needs the right to mount")
    try:
        yield made, folder
    finally:
        made.stop()
        for _ in range(20):  # what was killed may still be closing its files
            if subprocess.run(["umount", str(folder)], check=False).returncode == 0:
                break
            time.sleep(0.5)


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    path = folder / "fill"
    with path.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"0" * 4096)
        except OSError:
            return path


def test_a_server_whose_disk_is_full_ends_in_bounded_time_and_goes_on_when_there_is_room(
    small: tuple[Federation, Path],
) -> None:
    made, folder = small
    made.start_server()
    made.start_halves(SITE)
    wait_for("round 1", lambda: len(made.rounds_done()) >= 2, 200, made)
    filling = fill(folder)
    server = made.processes["server"]
    began = time.monotonic()
    assert wait_for("the server's end", lambda: server.poll() is not None, BOUND, made)
    print(f"ended after {time.monotonic() - began:.1f} s with {server.returncode}")
    assert server.returncode in {64, 70}, made.log("server")[-2000:]
    told = [line for line in made.log("server").splitlines() if line.startswith("fedlora: ")]
    assert len(told) == 1
    assert "cannot be written" in told[0]
    assert "Traceback" not in made.log("server")

    refused = made.start("again", "server", "run.yaml", "--resume")
    assert refused.wait(240) == 70, made.log("again")[-1000:]
    assert "cannot be written" in made.log("again")

    filling.unlink()
    last = made.start("last", "server", "run.yaml", "--resume")
    assert last.wait(240) == 0, made.log("last")[-2000:]
    assert [line["round"] for line in made.rounds_done()] == list(range(ROUNDS + 1))
    rounds = charged(made, SITE)
    assert set(range(1, ROUNDS + 1)) == set(rounds)
    assert len(rounds) == len(set(rounds)), "a round was charged twice"
    assert len([path for path in (made.root / "runs").iterdir() if path.is_dir()]) == 1
