"""Absurd sizes stop a run with the key and what is allowed, before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from data_helpers import byte_tokenizer, data_config, model_config
from test_data_private_runs import run_config
from tokenizers.processors import TemplateProcessing

from fedlora.config import config_container, load_config
from fedlora.data import build_task
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


@pytest.mark.parametrize(
    ("task", "row", "least"),
    [
        ("sequence-classification", {"text": "the cat sat", "label": "a"}, 3),
        ("sequence-classification", {"text": "the cat", "text_pair": "a dog ran", "label": "a"}, 4),
        ("token-classification", {"tokens": ["the", "cat"], "tags": ["a", "b"]}, 3),
        ("causal-lm", {"text": "the cat"}, 2),
        ("instruction", {"prompt": "the cat", "response": "sat"}, 2),
    ],
)
def test_a_length_without_room_for_text_is_refused_and_no_record_is_longer(
    task: str, row: dict[str, object], least: int
) -> None:
    """Tokenizers do not cut at all where the special tokens alone fill the length."""
    tokenizer = byte_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A <eos>", pair="<eos> $A <eos> $B <eos>", special_tokens=[("<eos>", 1)]
    )
    for length in range(1, least + 2):
        built = build_task(model_config(task), data_config(labels=["a", "b"], max_length=length), tokenizer)
        if length < least:
            with pytest.raises(
                DataError, match=rf"data\.max_length: got {length}; allowed is at least {least}"
            ):
                built.encode(row)
        else:
            assert len(built.encode(row).input_ids) <= length
