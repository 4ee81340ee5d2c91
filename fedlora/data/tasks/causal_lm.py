"""Plain language modelling: every token of a record predicts the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from torch import Tensor

from fedlora.data.metrics import perplexity
from fedlora.data.rows import Row
from fedlora.data.tasks.base import IGNORED, Encoded, Task
from fedlora.data.tasks.batching import (
    batches,
    collate_tokens,
    evaluating,
    model_inputs,
    own_mean,
    pad_right,
    token_loss,
)

_TOKENS_AT_ONCE: Final = 2048
"""Padded tokens per evaluation batch: their logits over a vocabulary of 50,000 take 0.4 GB."""


class CausalLm(Task):
    """Columns: text (or a template). An end token follows a record that fits the window."""

    name: ClassVar[str] = "causal-lm"
    required: ClassVar[tuple[str, ...]] = ("text",)

    def encode(self, row: Row) -> Encoded:
        """Tokenise the text, append the end token, cut at the end; all tokens but the first are targets."""
        self.refuse_narrow(1)  # nothing precedes the first token
        text, cut = self.clip_text(self.text_of(row))
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and not cut and (not ids or ids[-1] != end):
            ids.append(end)
        # An end token alone does not make a record overlong.
        ids, cut = self.fit(ids[:-1] if len(ids) == self.window + 1 and ids[-1] == end else ids, cut)
        labels = [IGNORED, *ids[1:]] if ids else []
        return Encoded(input_ids=ids, labels=labels, targets=max(0, len(ids) - 1), cut=cut)

    def collate(self, records: Sequence[Encoded]) -> dict[str, Tensor]:
        """Pad at the right; labels carry IGNORED on padding, wherever pad and end token coincide."""
        return collate_tokens(records, self.tokenizer.pad_token_id) | {
            "labels": pad_right([_token_labels(record) for record in records], IGNORED)
        }

    def per_record_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each record's mean negative log-likelihood over its own target tokens."""
        return own_mean(*self.token_sums(model, batch))

    def token_sums(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return per-record (sum of token losses, number of targets)."""
        logits = model(**model_inputs(model, batch, "labels"), use_cache=False).logits
        labels = batch["labels"].to(logits.device)
        return token_loss(logits[:, :-1], labels[:, 1:])

    def evaluate(self, model: Any, encoded: Sequence[Encoded], batch_size: int = 8) -> dict[str, float]:
        """Return perplexity (over all target tokens) and the mean loss per token."""
        return evaluate_tokens(self, model, encoded, batch_size)


def evaluate_tokens(task: Any, model: Any, encoded: Sequence[Encoded], batch_size: int) -> dict[str, float]:
    """Sum token losses over all records; records without targets weigh nothing."""
    total = tokens = 0.0
    with evaluating(model):
        for _, records in batches(encoded, batch_size, _TOKENS_AT_ONCE):
            sums, counts = task.token_sums(model, task.collate(records))
            total += float(sums.double().sum())
            tokens += float(counts.double().sum())
    loss = total / tokens if tokens > 0 else float("nan")
    found = {"loss": loss, "perplexity": perplexity(total, tokens), "tokens": tokens}
    return found | _answers(task, model, encoded, batch_size)


def _answers(task: Task, model: Any, encoded: Sequence[Encoded], batch_size: int) -> dict[str, float]:
    """Score generated answers where `data.public_eval.answers` asks for it and records have prompts."""
    wanted = task.data_config.public_eval
    if wanted is None or wanted.answers is None or len(encoded) == 0 or encoded[0].prompt is None:
        return {}
    from fedlora.data.evaluation import answer_accuracy

    return answer_accuracy(
        task, model, encoded, kind=wanted.answers, max_new_tokens=wanted.max_new_tokens, batch_size=batch_size
    )


def _token_labels(record: Encoded) -> list[int]:
    labels = record.labels
    if not isinstance(labels, list):
        raise TypeError("a language-modelling record carries one label per token")
    return labels
