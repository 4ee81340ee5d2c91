"""Whole runs over partitions that leave clients empty, give all to one, or hold one label only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from simulation_helpers import configuration, metric_lines

from fedlora.errors import DataError
from fedlora.ledger import load_secret, open_ledger
from fedlora.simulation.run import simulate


def charged(runs: Path) -> dict[str, int]:
    with open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key"), read_only=True) as book:
        return {
            account.client: sum(row.steps_charged for row in book.report(account).rounds)
            for account in book.accounts()
        }


@pytest.mark.parametrize(
    ("partition", "clients"),
    [
        ({"kind": "quantity", "clients": 8, "alpha": 1e-9}, 8),
        ({"kind": "dirichlet", "column": "label", "clients": 8, "alpha": 1e-9}, 8),
        ({"kind": "quantity", "clients": 160}, 160),
        ({"kind": "column", "column": "user", "clients": 1}, 1),
    ],
    ids=["all to one", "a label to one", "a record each", "one client"],
)
def test_empty_and_tiny_clients_send_noise_and_are_charged_like_all_others(
    world: Path, tmp_path: Path, partition: dict[str, Any], clients: int
) -> None:
    config = configuration(
        world, tmp_path, data={"partition": partition}, federation={"rounds": 2, "min_replies": 1}
    )
    result = simulate(config, in_process=True)
    assert [line["accepted"] for line in metric_lines(result.folder)[1:]] == [clients, clients]
    spent = charged(tmp_path)
    assert len(spent) == clients
    assert set(spent.values()) == {2}
    shares = json.loads((result.folder / "partition.json").read_text())
    assert len(shares["clients"]) == clients


def test_more_clients_than_records_are_refused_with_both_numbers(world: Path, tmp_path: Path) -> None:
    config = configuration(world, tmp_path, data={"partition": {"kind": "quantity", "clients": 161}})
    with pytest.raises(DataError, match="161 for 160 records"):
        simulate(config, in_process=True)
    assert not list(tmp_path.iterdir())


def test_records_of_one_label_train_where_the_labels_are_named(world: Path, tmp_path: Path) -> None:
    rows = [{"text": "red blue", "label": "warm"} for _ in range(20)]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    data = {
        "source": {"kind": "file", "paths": [str(tmp_path / "one.jsonl")]}, "labels": ["cold", "warm"],
        "partition": {"kind": "dirichlet", "column": "label", "clients": 4, "alpha": 0.5},
    }  # fmt: skip
    result = simulate(
        configuration(world, tmp_path / "runs", data=data, federation={"rounds": 2}), in_process=True
    )
    assert result.status == "finished"
    assert set(charged(tmp_path / "runs").values()) == {2}
