"""Records that do not fit the task are named before the first round of a simulation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from test_data_awkward_runs import run
from test_data_private_runs import run_config, save_model

from fedlora.data import Rows, check_records
from fedlora.data.rows import ListStore
from fedlora.errors import DataError


class _Task:
    """Takes texts only; counts what it saw."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def encode(self, row: dict) -> None:
        if not isinstance(row["text"], str):
            raise DataError(f"column 'text' must be text, not {type(row['text']).__name__}")
        self.seen.append(row["text"])


def _rows(*texts: object) -> Rows:
    return Rows(ListStore([{"text": text} for text in texts], "site.jsonl"))


def test_the_first_unfit_record_in_the_source_is_named_without_its_content() -> None:
    parts = {"b": np.array([0, 3]), "a": np.array([1, 2])}
    with pytest.raises(DataError, match=r"^site.jsonl, row 3: column 'text' must be text, not list$"):
        check_records(_Task(), _rows("x", "y", ["topsecret"], None), parts)


def test_every_training_record_is_checked_once_and_held_out_ones_are_not() -> None:
    task = _Task()
    assert check_records(task, _rows("a", "b", None, "c"), {"x": np.array([3]), "y": np.array([0, 1])}) == 3
    assert task.seen == ["a", "b", "c"]
    assert check_records(task, _rows(), {}) == 0


def test_the_check_takes_bounded_time() -> None:
    task = _Task()
    assert check_records(task, _rows("a", "b"), {"x": np.array([0, 1])}, seconds=-1.0) == 0
    assert task.seen == []


@pytest.mark.parametrize(
    "fault",
    [{"text": ["topsecret"], "label": "a"}, {"text": "topsecret", "label": "other"}, {"text": "topsecret"}],
    ids=["kind", "label", "column"],
)
def test_a_bad_record_stops_a_simulation_before_its_first_round(tmp_path: Path, fault: dict) -> None:
    rows = [
        {"text": f"the cat {number}", "label": "ab"[number % 2], "site": "xy"[number % 2]}
        for number in range(20)
    ]
    with pytest.raises(DataError, match=r"rows.jsonl, row 8: ") as caught:
        run(tmp_path, [*rows[:7], {"site": "x", **fault}, *rows[7:]], labels=["a", "b"])
    assert "topsecret" not in str(caught.value)
    assert not list(tmp_path.glob("**/metrics.jsonl"))


def test_check_names_a_bad_record_before_anything_runs(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedlora.cli.main import app
    from fedlora.config import save_resolved

    rows = [
        {"text": f"the cat {number}", "label": "ab"[number % 2], "site": "xy"[number % 2]}
        for number in range(9)
    ]
    rows[4]["text"] = None
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    source = {"kind": "file", "paths": [str(tmp_path / "rows.jsonl")]}
    data = {"source": source, "name": "unfit", "max_length": 16, "labels": ["a", "b"]}
    data["partition"] = {"kind": "column", "column": "site"}
    task = "sequence-classification"
    config = run_config(task, tmp_path, save_model(task, tmp_path / "base"), data=data)
    save_resolved(config, tmp_path / "run.yaml")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "run.yaml"), "--json"])
    assert isinstance(result.exception, DataError)
    assert "rows.jsonl, row 5: column 'text' must be text, not NoneType" in str(result.exception)
