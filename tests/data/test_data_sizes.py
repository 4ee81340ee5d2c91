"""Absurd sizes stop a run with the key and what is allowed, before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_data_private_runs import run_config

from fedlora.config import config_container, load_config
from fedlora.data.partition import partition_rows
from fedlora.data.rows import ListStore, Rows
from fedlora.errors import ConfigError, DataError


@pytest.mark.parametrize("value", [10**13, 10**400])
@pytest.mark.parametrize(
    "key",
    [
        "adapter.rank",
        "data.max_length",
        "data.public_eval.max_new_tokens",
        "model.num_labels",
        "training.expected_batch_size",
        "training.nominal_records",
        "training.steps_per_round",
        "training.micro_batch_size",
        "federation.rounds",
        "federation.min_replies",
    ],
)
def test_absurd_sizes_are_refused_by_key_before_anything_is_loaded(
    key: str, value: int, tmp_path: Path
) -> None:
    container = config_container(run_config("causal-lm", tmp_path, ["c_attn"]))
    (tmp_path / "run.yaml").write_text(json.dumps({k: v for k, v in container.items() if k != "derived"}))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml", [f"{key}={value}"])
    assert any(problem.startswith(f"{key}: got 1") for problem in caught.value.problems), caught.value


def test_rounds_times_steps_are_bounded_together(tmp_path: Path) -> None:
    container = config_container(run_config("causal-lm", tmp_path, ["c_attn"]))
    (tmp_path / "run.yaml").write_text(json.dumps({k: v for k, v in container.items() if k != "derived"}))
    with pytest.raises(ConfigError, match="problem") as caught:
        load_config(
            tmp_path / "run.yaml", [f"federation.rounds={10**7}", f"training.steps_per_round={10**7}"]
        )
    assert "allowed are 1e+12 in all" in str(caught.value.problems)


@pytest.mark.parametrize("kind", ["quantity", "dirichlet"])
def test_more_clients_than_records_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    alpha = 1.0 if kind == "dirichlet" else None
    data = {
        "source": {"kind": "file", "paths": ["x.jsonl"]},
        "name": "n",
        "partition": {"kind": kind, "clients": 10**11, "alpha": alpha},
    }
    partition = run_config("causal-lm", tmp_path, ["c_attn"], data=data).data.partition
    with pytest.raises(DataError, match=r"data\.partition\.clients: got 100000000000 for 3 records"):
        partition_rows(Rows(ListStore([{"label": 1}] * 3, "s"), {}), partition, 1)
