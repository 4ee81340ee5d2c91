"""Answers by generation, the untouched base model's row, and the matching non-private configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import torch

from fedlora.config.schema import FedLoraConfig, NoMechanism, NoPrivacy
from fedlora.data.chat import special_ids, turn_end
from fedlora.data.metrics import exact_match, number_accuracy
from fedlora.data.tasks.base import Encoded, Task
from fedlora.data.tasks.batching import batches, evaluating
from fedlora.errors import DataError

_UNKNOWN_WINDOW: Final = 10_000_000


def generate_answers(
    task: Task, model: Any, encoded: Sequence[Encoded], *, max_new_tokens: int = 128, batch_size: int = 8
) -> list[str]:
    """Generate an answer for each record greedily; prompts are padded at the left.

    Generation stops at the end token that training put after responses. PUBLIC records only,
    unless the result stays with the data owner.

    Raises:
        DataError: for a task whose records have no prompt.
    """
    answers: list[str] = [""] * len(encoded)
    tokenizer = task.tokenizer
    with evaluating(model):
        for places, records in batches(encoded, batch_size):
            prompts = []
            for record in records:
                if record.prompt is None:
                    raise DataError(f"task {task.name!r} has no prompts to generate from")
                prompts.append(record.prompt)
            prompts, new = _within_window(task, prompts, max_new_tokens)
            ids, mask = _pad_left(prompts, tokenizer.pad_token_id)
            device = next(model.parameters()).device
            out = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=stop_ids(task, records),
            )
            start = 0 if task.name == "seq2seq" else ids.shape[1]
            for place, tokens in zip(places, out[:, start:], strict=True):
                answers[place] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return answers


def _within_window(task: Task, prompts: list[list[int]], wanted: int) -> tuple[list[list[int]], int]:
    """Return prompts and the number of new tokens that fit the model's window together.

    A decoder's answer follows its prompt: the oldest tokens of a prompt make room for it, and an answer takes half the
    window at most. The number does not depend on the batch.
    """
    window = int(getattr(task.tokenizer, "model_max_length", 0) or 0)
    if task.name == "seq2seq" or not (0 < window < _UNKNOWN_WINDOW):
        return prompts, wanted
    new = max(1, min(wanted, window // 2))
    return [prompt[-max(1, window - new) :] for prompt in prompts], new


def stop_ids(task: Task, records: Sequence[Encoded]) -> list[int]:
    """Return the ids at which generation stops: the end token, and what ends responses, cut ones or not."""
    special = special_ids(task.tokenizer)
    found = {task.tokenizer.eos_token_id, turn_end(task.tokenizer)} - {None}
    for record in records:
        if isinstance(record.labels, list) and record.labels and record.labels[-1] in special:
            found.add(record.labels[-1])
    return sorted(found)


def answer_accuracy(
    task: Task,
    model: Any,
    encoded: Sequence[Encoded],
    *,
    kind: Literal["number", "exact"] = "exact",
    max_new_tokens: int = 128,
    batch_size: int = 8,
) -> dict[str, float]:
    """Return the share of right answers: the final number (GSM8K style) or the whole text."""
    answers = generate_answers(task, model, encoded, max_new_tokens=max_new_tokens, batch_size=batch_size)
    truth = [record.reference or "" for record in encoded]
    if kind == "number":
        return {"answer_accuracy": number_accuracy(truth, answers)}
    return {"exact_match": exact_match(truth, answers)}


@contextlib.contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Run the untouched base model inside a PEFT model (adapters and trained heads off)."""
    off = getattr(model, "disable_adapter", None)
    if off is None:
        yield
        return
    with off():
        yield


def evaluate_base(
    task: Task, model: Any, encoded: Sequence[Encoded], batch_size: int = 32
) -> dict[str, float]:
    """Evaluate the untouched base model: the first comparison row of every report."""
    with adapter_off(model):
        return task.evaluate(model, encoded, batch_size)


def non_private_config(config: FedLoraConfig) -> FedLoraConfig:
    """Return the same run without clipping and noise: the last comparison row of every report.

    Mechanisms that exist only with noise are replaced by ordinary LoRA. Only for records that may be
    trained on without privacy; a data owner's policy can refuse it.
    """
    changes: dict[str, Any] = {
        "run": config.run.model_copy(update={"name": f"{config.run.name}-without-privacy"}),
        "privacy": NoPrivacy(unit="none"),
    }
    if config.mechanism.kind in ("noisy_projection", "dp_sgd"):
        plain = config.federation.aggregation.model_copy(update={"kind": "product"})
        changes["mechanism"] = NoMechanism(kind="none")
        changes["federation"] = config.federation.model_copy(update={"aggregation": plain})
    return config.model_copy(update=changes)


def _pad_left(rows: Sequence[Sequence[int]], value: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(1, *(len(row) for row in rows))
    ids = torch.full((len(rows), width), value, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for place, row in enumerate(rows):
        if row:
            ids[place, width - len(row) :] = torch.tensor(list(row), dtype=torch.int64)
            mask[place, width - len(row) :] = 1
    return ids, mask
