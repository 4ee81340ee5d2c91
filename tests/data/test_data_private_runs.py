"""Every task end to end under record-level privacy, on tiny random models, without Ray."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import WORDS, byte_tokenizer, tiny_model

from fedlora.config.schema import FedLoraConfig
from fedlora.figures import at_least_digits

TASKS: dict[str, tuple[str, list[str]]] = {
    "sequence-classification": ("bert", ["query", "value"]),
    "token-classification": ("bert-tokens", ["query", "value"]),
    "causal-lm": ("gpt2", ["c_attn"]),
    "instruction": ("gpt2", ["c_attn", "c_fc"]),
    "seq2seq": ("t5", ["q", "v"]),
    "image-classification": ("vit", []),
}


def write_rows(task: str, path: Path, count: int = 24) -> None:
    words = " ".join(WORDS).split()
    rows: list[dict[str, Any]] = []
    for number in range(count):
        text = " ".join(words[number % 7 : number % 7 + 3 + number % 4])
        label = "abc"[number % 3]
        if task == "sequence-classification":
            rows.append({"text": text, "label": label})
        elif task == "token-classification":
            rows.append({"tokens": text.split(), "tags": [label for _ in text.split()]})
        elif task == "causal-lm":
            rows.append({"text": text})
        elif task == "instruction":
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": label}]
            rows.append({"messages": turns * (1 + number % 2)})
        elif task == "seq2seq":
            rows.append({"source": text, "target": text[::-1]})
        else:
            image = np.random.default_rng(number).integers(0, 255, (8, 8, 3)).tolist()
            rows.append({"image": image, "label": label})
    path.write_text("\n".join(json.dumps(row) for row in rows))


def save_model(task: str, folder: Path) -> list[str]:
    kind, targets = TASKS[task]
    model = tiny_model(kind)
    model.save_pretrained(folder)
    if task == "image-classification":
        from transformers import ViTImageProcessor

        ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)
        names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
        return ["q_proj", "v_proj"] if "q_proj" in names else ["query", "value"]
    tokenizer = byte_tokenizer()
    if task == "instruction":
        tokenizer.chat_template = (
            "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}"
        )
    tokenizer.save_pretrained(folder)
    return targets


def run_config(task: str, where: Path, targets: list[str], **changes: Any) -> FedLoraConfig:
    container: dict[str, Any] = {
        "schema": 1,
        "run": {"name": task, "seed": 1, "dir": str(where / "runs")},
        "model": {"name_or_path": str(where / "base"), "task": task, "device": "cpu"},
        "adapter": {"rank": 2, "lora_alpha": 4, "target_modules": targets},
        "data": {
            "source": {"kind": "file", "paths": [str(where / "rows.jsonl")]},
            "name": task,
            "max_length": 48,
            "partition": {"kind": "quantity", "clients": 2},
            "public_eval": {"fraction": 0.25, "every_rounds": 1},
        },
        "mechanism": {"kind": "lora_fa"},
        "privacy": {
            "unit": "record",
            "adjacency": "add_or_remove",
            "noise_multiplier": 2.0,
            "target_delta": 1e-3,
            "max_grad_norm": 1.0,
            "group_weights": "equal",
            "budget": {"epsilon": 50.0, "delta": 1e-3, "on_exhausted": "refuse"},
            "noise_source": "os",
        },
        "training": {
            "expected_batch_size": 3,
            "nominal_records": 9,
            "steps_per_round": 1,
            "optimizer": {"kind": "adam", "lr": 0.01},
        },
        "federation": {"rounds": 2, "min_replies": 2, "aggregation": {"kind": "mean_b"}},
    }
    for name, section in changes.items():
        container[name] = section
    return FedLoraConfig.model_validate_json(json.dumps(container))


@pytest.mark.parametrize("task", TASKS)
def test_each_task_trains_evaluates_and_exports_under_privacy(task: str, tmp_path: Path) -> None:
    from fedlora.simulation.run import simulate

    targets = save_model(task, tmp_path / "base")
    write_rows(task, tmp_path / "rows.jsonl")
    result = simulate(run_config(task, tmp_path, targets), in_process=True)
    assert result.status == "finished"
    assert result.rounds == 2
    assert result.epsilon is not None
    assert 0 < result.epsilon < 50
    metric = "accuracy" if "classification" in task else "perplexity"
    assert result.metrics is not None
    assert np.isfinite(result.metrics[metric])
    assert not [warning for warning in result.warnings if "export" in warning]
    assert result.adapter is not None
    assert (result.adapter / "adapter_model.safetensors").is_file()


def test_the_runs_own_card_says_what_the_ledgers_say_at_its_end(tmp_path: Path) -> None:
    """A second run on the same records, two clients that share one: both are known only after the server's export."""
    from fedlora.simulation.run import simulate

    targets = save_model("causal-lm", tmp_path / "base")
    rows = [{"text": f"the cat {number % 3}"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = {
        "source": {"kind": "file", "paths": [str(tmp_path / "rows.jsonl")]},
        "name": "shared",
        "max_length": 48,
        "partition": {"kind": "quantity", "clients": 2},
    }
    config = run_config("causal-lm", tmp_path, targets, data=data)
    for _ in range(2):
        result = simulate(config, in_process=True)
        assert result.adapter is not None
        facts = json.loads((result.adapter / "fedlora.json").read_text())
        summary = json.loads((result.folder / "summary.json").read_text())
        assert facts["epsilon"] == summary["epsilon"] == result.epsilon
        assert summary["warnings"] == list(result.warnings)
        assert any("sit at several of 2 clients" in warning for warning in result.warnings)
        assert any(warning.startswith("some records sit at several clients") for warning in facts["warnings"])
        card = (result.adapter / "README.md").read_text()
        assert f"| {at_least_digits(result.epsilon or 0.0)} |" in card
        assert all(f"- {warning}" in card for warning in facts["warnings"])
        assert not [name for name in ("client-0000", "client-0001") if name in card]


def test_export_command_reads_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedlora.cli.main import main
    from fedlora.simulation.run import simulate

    targets = save_model("sequence-classification", tmp_path / "base")
    write_rows("sequence-classification", tmp_path / "rows.jsonl")
    result = simulate(run_config("sequence-classification", tmp_path, targets), in_process=True)
    capsys.readouterr()
    assert main(["export", str(result.folder), "-o", str(tmp_path / "adapter"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["kind"] == "peft"
    assert written["reload"]["max_abs"] <= written["limit"]
    card = (tmp_path / "adapter" / "README.md").read_text()
    assert f"| {at_least_digits(result.epsilon)} |" in card
    assert "one record (per record, not per person)" in card
    assert main(["export", str(result.folder), "--merged", "--json"]) == 0
    merged = json.loads(capsys.readouterr().out)
    assert merged["reload"]["max_abs"] <= merged["limit"]
    assert (result.folder / "merged" / "model.safetensors").is_file()
    assert main(["export", str(tmp_path), "--json"]) == 62
    assert "finished run" in json.loads(capsys.readouterr().out)["message"]


@pytest.mark.parametrize("client", ["only long prompts", "one of four", "empty text"])
def test_h27_clients_without_targets_train_on_and_stay_charged(client: str, tmp_path: Path) -> None:
    from fedlora.simulation.run import simulate

    task = "causal-lm" if client == "empty text" else "instruction"
    targets = save_model(task, tmp_path / "base")
    empty: dict[str, Any] = {"prompt": "dog " * 2000, "response": "yes"}
    full: dict[str, Any] = {"prompt": "cat", "response": "yes"}
    if client == "empty text":
        empty, full = {"text": ""}, {"text": "the cat"}
    rows = [empty | {"site": "a"}] * (3 if client == "one of four" else 4)
    rows += [full | {"site": "a"}] * (4 - len(rows)) + [full | {"site": "b"}] * 4
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = {
        "source": {"kind": "file", "paths": [str(tmp_path / "rows.jsonl")]},
        "name": "h27",
        "max_length": 48,
        "partition": {"kind": "column", "column": "site"},
    }
    result = simulate(run_config(task, tmp_path, targets, data=data), in_process=True)
    assert result.status == "finished"
    assert result.epsilon is not None
    assert result.epsilon > 0
    assert result.adapter is not None
    from safetensors.numpy import load_file

    for values in load_file(result.adapter / "adapter_model.safetensors").values():
        assert np.isfinite(values).all()
