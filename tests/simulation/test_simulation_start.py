"""The start of a run: what is wrong shows before anything is spent; the first evaluation holds nobody up."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from simulation_helpers import configuration, metric_lines

from fedlora.collector import held_collector
from fedlora.errors import ConfigError, DataError
from fedlora.ledger import load_secret, open_ledger
from fedlora.simulation import cluster, crew
from fedlora.simulation.grid import InProcessGrid
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RoundRecord


def charged(runs: Path) -> int:
    with open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key"), read_only=True) as book:
        return sum(report.num_events for report in book.reports(book.accounts()))


def figures(folder: Path) -> list[dict[str, Any]]:
    """Return the published rounds without times, and without bytes up: replies carry times in decimal."""
    timed = ("seconds", "bytes_up")
    return [{k: v for k, v in line.items() if k not in timed} for line in metric_lines(folder)]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcessGrid, "works_meanwhile", True)


def test_the_start_is_evaluated_while_the_first_round_trains_with_the_same_results(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = simulate(configuration(world, tmp_path / "before"), in_process=True)
    monkeypatch.setattr(InProcessGrid, "works_meanwhile", True)
    seen: list[str] = []
    submit = InProcessGrid._submit

    def noted(self: Any, pending: Any) -> None:
        seen.append("asked")
        submit(self, pending)

    monkeypatch.setattr(InProcessGrid, "_submit", noted)
    beside = simulate(
        configuration(world, tmp_path / "beside"),
        in_process=True,
        progress=lambda record: seen.append(f"round {record.round}"),
    )
    assert seen[:4] == ["asked", "round 0", "round 1", "asked"]
    assert figures(beside.folder) == figures(before.folder)


def test_a_reply_that_came_while_the_start_was_evaluated_is_not_late(
    world: Path, tmp_path: Path, meanwhile: None
) -> None:
    def slow(record: RoundRecord) -> None:
        if record.round == 0:
            time.sleep(1.2)

    config = configuration(world, tmp_path, federation={"rounds": 1, "round_timeout_seconds": 1.0})
    result = simulate(config, in_process=True, progress=slow)
    assert metric_lines(result.folder)[1]["accepted"] == 4


def test_a_public_record_that_does_not_fit_is_named_before_anything_is_spent(
    world: Path, tmp_path: Path, meanwhile: None
) -> None:
    public = tmp_path / "public.jsonl"
    lines = (world / "public.jsonl").read_text().splitlines()
    lines[-1] = json.dumps({"text": "red", "label": "neither"})
    public.write_text("\n".join(lines) + "\n")
    source = {"kind": "file", "paths": [str(public)]}
    config = configuration(world, tmp_path / "runs", data={"public_eval": {"source": source}})
    with pytest.raises(DataError, match=r"public\.jsonl.*40"):
        simulate(config, in_process=True)
    assert charged(tmp_path / "runs") == 0


def test_a_metric_that_does_not_exist_is_refused_before_anything_is_spent(
    world: Path, tmp_path: Path, meanwhile: None
) -> None:
    stopping = {"metric": "bleu", "patience": 2}
    config = configuration(world, tmp_path, data={"public_eval": {"early_stopping": stopping}})
    with pytest.raises(ConfigError, match="bleu"):
        simulate(config, in_process=True)
    assert charged(tmp_path) == 0


def test_a_run_that_fails_while_its_start_is_evaluated_goes_on_with_resume(
    world: Path, tmp_path: Path, meanwhile: None
) -> None:
    def broken(record: RoundRecord) -> None:
        raise RuntimeError("display")

    with pytest.raises(RuntimeError, match="display"):
        simulate(configuration(world, tmp_path), in_process=True, run_id="one", progress=broken)
    assert charged(tmp_path) == 4, "the first round was reserved: it stays spent"
    result = simulate(resume=tmp_path / "one", in_process=True)
    assert (result.status, charged(tmp_path)) == ("finished", 4 + 4 * 4)
    whole = simulate(configuration(world, tmp_path / "whole"), in_process=True)
    assert [line["adapter"] for line in figures(result.folder)] == [
        line["adapter"] for line in figures(whole.folder)
    ]


def test_the_collector_is_held_and_what_was_loaded_is_never_looked_at_again() -> None:
    script = """
import gc
from fedlora.collector import held_collector
with held_collector():
    held = gc.isenabled()
    import json
print(held, gc.isenabled(), gc.get_freeze_count() > 0)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_the_collector_is_let_go_after_a_failure() -> None:
    try:
        with pytest.raises(ValueError, match="no"), held_collector():
            raise ValueError("no")
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_worker_imports_nothing_heavy_before_its_collector_is_held() -> None:
    script = (
        "import sys, fedlora.simulation.actor, fedlora.simulation.node_spec\n"
        "print(sorted({'torch', 'transformers', 'flwr', 'peft', 'scipy', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_workers_environment_is_this_process_s_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    with cluster.environment_set(crew.worker_environment(2)):
        assert os.environ["OMP_NUM_THREADS"] == os.environ["RAYON_NUM_THREADS"] == "2"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "RAYON_NUM_THREADS" not in os.environ
