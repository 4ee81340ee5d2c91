"""What a simulation's ledger knows about its records: changed, dealt out anew, or under a second name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulation_helpers import configuration, write_rows

from fedlora.ledger import LedgerReport, load_secret, open_ledger
from fedlora.simulation.run import simulate

ONE_ROUND: dict[str, Any] = {"federation": {"rounds": 1}}


def run(world: Path, runs: Path, **changes: Any) -> Any:
    return simulate(configuration(world, runs, **{**ONE_ROUND, **changes}), in_process=True)


def reports(runs: Path) -> list[LedgerReport]:
    secret = load_secret(runs / "ledger.key")
    with open_ledger(runs / "ledger.sqlite", secret=secret, read_only=True) as book:
        return [book.report(account) for account in book.accounts()]


def moved(result: Any) -> list[str]:
    return [text for text in result.warnings if "than in earlier runs" in text]


def test_a_repeated_run_says_nothing_about_its_records(world: Path, tmp_path: Path) -> None:
    for _ in range(2):
        assert moved(run(world, tmp_path)) == []
    assert all(report.num_events == 2 for report in reports(tmp_path))
    assert not any("records changed" in text for report in reports(tmp_path) for text in report.conditions)


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"partition": {"clients": 5}}},
        {"run": {"seed": 4}},
        {"data": {"source": {"paths": ["other.jsonl"]}}},
    ],
)
def test_changed_or_moved_records_keep_what_is_spent_and_are_said(
    world: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    run(world, tmp_path)
    if "source" in change.get("data", {}):
        path = write_rows(tmp_path / "other.jsonl", 160, 9)
        change = {"data": {"source": {"kind": "file", "paths": [str(path)]}}}
    second = run(world, tmp_path, **change)
    assert len(moved(second)) == 1, second.warnings
    first = [report for report in reports(tmp_path) if report.account.client != "client-0004"]
    assert all(report.num_events == 2 for report in first)
    changed = [report for report in first if any("records changed" in text for text in report.conditions)]
    assert len(changed) == 4


def test_a_data_set_under_a_second_name_is_said_in_a_simulation(world: Path, tmp_path: Path) -> None:
    run(world, tmp_path)
    run(world, tmp_path, data={"name": "words-again"})
    found = reports(tmp_path)
    assert len(found) == 8
    for report in found:
        assert any("the same records are charged as" in text for text in report.conditions)
