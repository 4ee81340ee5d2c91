from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_helpers import byte_tokenizer, data_config, model_config, tiny_model

from fedlora.data import build_task, load_rows
from fedlora.data.evaluation import (
    adapter_off,
    answer_accuracy,
    evaluate_base,
    generate_answers,
    non_private_config,
)
from fedlora.errors import DataError


def train(task: Any, model: Any, records: list[Any], steps: int, lr: float) -> None:
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        task.per_record_loss(model, task.collate(records)).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["instruction", "seq2seq"])
def test_generation_answers_and_stops_at_the_learned_end(kind: str) -> None:
    task = build_task(model_config(kind), data_config(), byte_tokenizer())
    names = ("source", "target") if kind == "seq2seq" else ("prompt", "response")
    pairs = [("the cat", "1 2 3"), ("a dog ran home", "#### 7")]
    records = [task.encode(dict(zip(names, pair, strict=True))) for pair in pairs]
    model = tiny_model("t5" if kind == "seq2seq" else "gpt2").train(False)
    train(task, model, records, 150, 1e-2)
    answers = generate_answers(task, model, records, max_new_tokens=40)
    assert answers == ["1 2 3", "#### 7"]
    assert generate_answers(task, model, records[::-1], max_new_tokens=40, batch_size=1) == answers[::-1]
    assert answer_accuracy(task, model, records, kind="exact") == {"exact_match": 1.0}
    assert answer_accuracy(task, model, records[1:], kind="number") == {"answer_accuracy": 1.0}


@pytest.mark.parametrize("wanted", [1, 20, 500])
def test_generation_never_leaves_the_models_window(wanted: int) -> None:
    task = build_task(model_config("instruction"), data_config(), byte_tokenizer(64))
    model = tiny_model("gpt2", window=64)
    records = [task.encode({"prompt": "dog " * count, "response": "x"}) for count in (1, 30, 400)]
    answers = generate_answers(task, model, records, max_new_tokens=wanted)
    assert len(answers) == 3
    assert answers == generate_answers(task, model, records, max_new_tokens=wanted, batch_size=1)


def test_tasks_without_prompts_refuse_generation() -> None:
    task = build_task(model_config("causal-lm"), data_config(), byte_tokenizer())
    with pytest.raises(DataError, match="no prompts"):
        generate_answers(task, tiny_model("gpt2"), [task.encode({"text": "the cat"})])


def test_the_untouched_base_model_is_a_comparison_row() -> None:
    import peft

    task = build_task(model_config("causal-lm"), data_config(), byte_tokenizer())
    records = [task.encode({"text": text}) for text in ("the cat sat", "hello world")]
    base = tiny_model("gpt2")
    before = task.evaluate(base, records)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    train(task, adapted, records, 20, 1e-1)
    assert task.evaluate(adapted, records)["loss"] < before["loss"] - 0.1
    assert evaluate_base(task, adapted, records) == pytest.approx(before)
    with adapter_off(tiny_model("gpt2")):
        pass


def test_speaker_blocks_become_clients(tmp_path: Path) -> None:
    text = "First Citizen:\nBefore we proceed.\nNote: this\n\nAll:\nSpeak.\n\nFirst Citizen:\nYou are\nall.\n"
    (tmp_path / "play.txt").write_text("\ufeff" + text, encoding="utf-8")
    target = "fedlora.data.factories:speaker_blocks"

    def rows(**arguments: Any) -> Any:
        where = {
            "kind": "factory",
            "target": target,
            "arguments": {"path": str(tmp_path / "play.txt")} | arguments,
        }
        return load_rows(data_config(source=where))

    assert [(row["speaker"], row["text"]) for row in rows()] == [
        ("All", "Speak."),
        ("First Citizen", "Before we proceed.\nNote: this"),
        ("First Citizen", "You are\nall."),
    ]
    assert len(rows(min_speeches=2)) == 2
    assert [row["text"] for row in rows(part="test", test_every=2)] == ["You are\nall."]
    assert len(rows(part="train", test_every=2)) == 2
    with pytest.raises(DataError, match="must be train, test or all"):
        rows(part="dev")
    with pytest.raises(DataError, match="cannot be read"):
        rows(path=str(tmp_path / "none.txt"))


def test_the_non_private_row_drops_clipping_and_noise_only() -> None:
    from fedlora.config.schema import DpSgdMechanism, FedLoraConfig

    text = (Path(__file__).parent / "golden" / "run.yaml").read_text()
    import yaml

    config = FedLoraConfig.model_validate_json(__import__("json").dumps(yaml.safe_load(text)))
    other = non_private_config(config)
    assert other.privacy.unit == "none"
    assert other.mechanism == config.mechanism
    assert other.federation == config.federation
    assert other.training == config.training
    assert other.adapter == config.adapter
    noisy = config.model_copy(update={"mechanism": DpSgdMechanism(kind="dp_sgd")})
    assert non_private_config(noisy).mechanism.kind == "none"
    assert non_private_config(noisy).federation.aggregation.kind == "product"
    assert config.privacy.unit == "record"
