"""Several `fedlora simulate` on one machine at once: no collision, and each result is that of the run alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulation_helpers import container, metric_lines

from fedlora.ledger import load_secret, open_ledger

pytestmark = pytest.mark.long
ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, world: Path, runs: Path, **changes: Any) -> Path:
    path.write_text(yaml.safe_dump(container(world, runs, **changes)))
    return path


def begin(config: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedlora.cli.main", "simulate", str(config), *overrides, "--json", "--quiet"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def together(*begun: subprocess.Popen[str]) -> list[dict[str, Any]]:
    said = [process.communicate(timeout=400) for process in begun]
    for process, (_, error) in zip(begun, said, strict=True):
        assert process.returncode == 0, error
    return [json.loads(out) for out, _ in said]


def figures(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what a run published, times left out."""
    names = ("round", "status", "accepted", "epsilon_by_client", "metrics", "adapter")
    return [tuple(line[name] for name in names) for line in metric_lines(Path(result["folder"]))]


def charged(runs: Path) -> dict[str, int]:
    with open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key"), read_only=True) as book:
        return {
            account.client: sum(row.steps_charged for row in book.report(account).rounds)
            for account in book.accounts()
        }


def test_three_runs_at_once_give_what_each_gives_alone(world: Path, tmp_path: Path) -> None:
    """Two of one file into folders of their own, one of another file."""
    one = write(tmp_path / "one.yaml", world, tmp_path / "alone-1")
    other = write(
        tmp_path / "other.yaml", world, tmp_path / "alone-2", run={"seed": 8}, mechanism={"kind": "factor"},
        federation={"aggregation": {"kind": "product"}, "rounds": 5},
    )  # fmt: skip
    (alone,) = together(begin(one))
    (alone_other,) = together(begin(other))
    results = together(
        begin(one, f"run.dir={tmp_path / 'a'}"),
        begin(one, f"run.dir={tmp_path / 'b'}"),
        begin(other, f"run.dir={tmp_path / 'c'}"),
    )
    assert figures(results[0]) == figures(results[1]) == figures(alone)
    assert figures(results[2]) == figures(alone_other)
    assert results[0]["epsilon"] == results[1]["epsilon"] == alone["epsilon"]
    assert charged(tmp_path / "a") == charged(tmp_path / "b") == charged(tmp_path / "alone-1")
    assert not os.environ.get("RAY_ADDRESS")


def test_runs_at_once_over_one_ledger_add_up(world: Path, tmp_path: Path) -> None:
    """Which of two rounds is charged first is chance; the adapters are those of a run alone, the sum is exact."""
    config = write(tmp_path / "run.yaml", world, tmp_path / "alone")
    (alone,) = together(begin(config))
    shared = f"run.dir={tmp_path / 'shared'}"
    results = together(begin(config, shared), begin(config, shared), begin(config, shared))
    assert len({one["folder"] for one in results}) == 3
    for one in results:
        lines = metric_lines(Path(one["folder"]))
        assert [line["accepted"] for line in lines[1:]] == [4, 4, 4, 4]
        assert [line["adapter"] for line in lines] == [
            line["adapter"] for line in metric_lines(Path(alone["folder"]))
        ]
    assert charged(tmp_path / "shared") == {
        client: 3 * n for client, n in charged(tmp_path / "alone").items()
    }
    assert max(one["epsilon"] for one in results) > alone["epsilon"]
