"""Sequence to sequence (T5, BART and the like): the decoder learns the target text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from fedlora.data.rows import Row
from fedlora.data.tasks.base import IGNORED, Encoded, Task, field_text
from fedlora.data.tasks.batching import collate_tokens, model_inputs, own_mean, pad_right, token_loss
from fedlora.data.tasks.causal_lm import evaluate_tokens


class Seq2Seq(Task):
    """Columns: source (or a template) and target."""

    name: ClassVar[str] = "seq2seq"
    required: ClassVar[tuple[str, ...]] = ("source", "target")

    def encode(self, row: Row) -> Encoded:
        """Tokenise source and target, each cut at the end to the window."""
        source, cut_source = self.clip_text(self.text_of(row, "source"))
        target, cut_target = self.clip_text(field_text(row, "target"))
        ids, over = self.fit(list(self.tokenizer(source, verbose=False)["input_ids"]), cut_source)
        labels = list(self.tokenizer(text_target=target, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and not cut_target and (not labels or labels[-1] != end):
            labels.append(end)
        labels, over_target = self.fit(labels, cut_target)
        return Encoded(
            input_ids=ids,
            labels=labels,
            targets=len(labels),
            cut=over or over_target,
            prompt=ids,
            reference=target,
        )

    def collate(self, records: Sequence[Encoded]) -> dict[str, Tensor]:
        """Pad source and target at the right; labels carry IGNORED on padding."""
        labels = [record.labels if isinstance(record.labels, list) else [] for record in records]
        return collate_tokens(records, self.tokenizer.pad_token_id) | {"labels": pad_right(labels, IGNORED)}

    def per_record_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each record's mean negative log-likelihood over its own target tokens."""
        return own_mean(*self.token_sums(model, batch))

    def token_sums(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return per-record (sum of token losses, number of targets)."""
        inputs = model_inputs(model, batch)
        labels = inputs.pop("labels")
        shifted = shift_right(labels, model.config)
        logits = model(**inputs, decoder_input_ids=shifted, use_cache=False).logits
        return token_loss(logits, labels)

    def evaluate(self, model: Any, encoded: Sequence[Encoded], batch_size: int = 8) -> dict[str, float]:
        """Return perplexity over target tokens and the mean loss per token."""
        return evaluate_tokens(self, model, encoded, batch_size)


def shift_right(labels: Tensor, model_config: Any) -> Tensor:
    """Return the decoder's input: the start token, then the labels without the last.

    Args:
        labels: (records, positions) int64.
        model_config: transformers configuration with decoder_start_token_id and pad_token_id.
    """
    pad = model_config.pad_token_id if model_config.pad_token_id is not None else 0
    start = model_config.decoder_start_token_id
    shifted = labels.new_full(labels.shape, pad)
    shifted[:, 1:] = labels[:, :-1]
    shifted[:, 0] = pad if start is None else start
    return shifted.masked_fill(shifted == IGNORED, pad)
