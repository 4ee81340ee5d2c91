"""Awkward records and clients, from the file to a finished private run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_private_runs import run_config, save_model

from fedlora.errors import ConfigError, DataError
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RunResult

TASK = "sequence-classification"


def run(where: Path, rows: list[dict[str, Any]], *, task: str = TASK, **data: Any) -> RunResult:
    targets = save_model(task, where / "base")
    (where / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    section = {
        "source": {"kind": "file", "paths": [str(where / "rows.jsonl")]},
        "name": "awkward",
        "max_length": 48,
        "partition": {"kind": "column", "column": "site"},
        **data,
    }
    return simulate(run_config(task, where, targets, data=section), in_process=True)


def finite(result: RunResult) -> bool:
    from safetensors.numpy import load_file

    assert result.status == "finished"
    assert result.epsilon is not None
    assert result.epsilon > 0
    assert result.adapter is not None, result.warnings
    values = load_file(result.adapter / "adapter_model.safetensors").values()
    return all(np.isfinite(value).all() for value in values)


@pytest.mark.parametrize("held_out", [0.2, 0.999])
def test_h29_clients_of_one_two_and_four_rows_train_together(tmp_path: Path, held_out: float) -> None:
    sizes = {"one": 1, "two": 2, "four": 4}
    rows = [
        {"text": f"the cat {number}", "label": "ab"[number % 2], "site": site}
        for site, count in sizes.items()
        for number in range(count)
    ]
    result = run(tmp_path, rows, validation_fraction=held_out)
    assert finite(result)
    records = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["accepted"] for record in records if record["round"] > 0] == [3, 3]


@pytest.mark.parametrize("task", ["causal-lm", "instruction", "seq2seq"])
def test_h28_a_huge_record_without_blanks_costs_bounded_time(task: str, tmp_path: Path) -> None:
    huge = "x" * 200_000
    columns = {
        "causal-lm": ("text",),
        "instruction": ("prompt", "response"),
        "seq2seq": ("source", "target"),
    }[task]
    rows = [dict.fromkeys(columns, huge) | {"site": site} for site in "ab" for _ in range(3)]
    rows += [dict.fromkeys(columns, "the cat") | {"site": site} for site in "ab" for _ in range(3)]
    started = time.process_time()
    assert finite(run(tmp_path, rows, task=task, max_length=None))
    assert time.process_time() - started < 60


def test_h30_text_of_every_script_trains(tmp_path: Path) -> None:
    texts = ["नमस्ते 🙏🏽", "مرحبا \u202e abc", "👩‍👩‍👧‍👦 x3", "ABC", "e\u0301 é", "\u200b", "𝔘𝔫𝔦"]
    rows = [{"text": text, "label": "ab"[n % 2], "site": "ab"[n % 2]} for n, text in enumerate(texts)]
    rows += [{"text": text, "label": "ba"[n % 2], "site": "ab"[n % 2]} for n, text in enumerate(texts)]
    assert finite(run(tmp_path, rows))


@pytest.mark.parametrize("key", ["sampler", "drop_last", "batch_sampler", "class_weights"])
def test_h39_a_samplers_key_never_starts_a_run(key: str, tmp_path: Path) -> None:
    from fedlora.config import config_container, config_from_container

    container = config_container(run_config(TASK, tmp_path, ["query"]))
    container["training"][key] = True
    with pytest.raises(ConfigError, match=f"training.{key}"):
        config_from_container(container)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "topsecret", "site": "a"}], "needs the column\\(s\\) label"),
        (
            [{"text": "a", "label": "x"}, {"text": "topsecret", "label": "y", "site": "a"}],
            "row 1: column 'site'",
        ),
        ([{"text": "a", "label": float("nan"), "site": "a"}], "row 1"),
        ([{"text": "topsecret", "label": {"x": 1}, "site": "a"}], "row 1: a label must be text or a number"),
    ],
)
def test_schema_errors_stop_a_run_before_anything_is_spent(
    rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        run(tmp_path, rows)
    assert "topsecret" not in str(caught.value)
    assert not (tmp_path / "runs" / "ledger.sqlite").exists()
