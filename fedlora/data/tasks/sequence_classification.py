"""Sequence classification (one label per text or text pair) and regression (`num_labels: 1`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlora.data.metrics import classification_metrics, correlations
from fedlora.data.rows import Row
from fedlora.data.tasks.base import Encoded, Task, field_text
from fedlora.data.tasks.batching import batches, collate_tokens, evaluating, model_inputs
from fedlora.errors import DataError

_LARGEST_TARGET = 1e18
"""Largest regression label: its square is a loss, which must be a finite float32."""


class SequenceClassification(Task):
    """Columns: text (or a template), label; optional text_pair."""

    name: ClassVar[str] = "sequence-classification"
    required: ClassVar[tuple[str, ...]] = ("text", "label")

    @property
    def is_regression(self) -> bool:
        """One output and a real-valued label (for example similarity scores)."""
        return self.model_config.num_labels == 1

    def encode(self, row: Row) -> Encoded:
        """Tokenise the text (and pair), cut at the end, and number the label."""
        text, cut = self.clip_text(self.text_of(row))
        pair = None
        if "text_pair" in row:
            pair, cut_pair = self.clip_text(field_text(row, "text_pair"))
            cut = cut or cut_pair
        self.refuse_narrow(self.tokenizer.num_special_tokens_to_add(pair is not None))
        full = self.tokenizer(text, pair, truncation=True, max_length=self.window, verbose=False)
        if not cut:
            limit = self.window
            cut = len(full["input_ids"]) == limit and len(self._untruncated(text, pair)) > limit
        if cut:
            self.refuse_if_overlong()
        extras = {"token_type_ids": full["token_type_ids"]} if "token_type_ids" in full else {}
        return Encoded(
            input_ids=list(full["input_ids"]), labels=self._label(row), targets=1, cut=cut, extras=extras
        )

    def collate(self, records: Sequence[Encoded]) -> dict[str, Tensor]:
        """Pad at the right; labels are (records,) int64, or float32 for regression."""
        kind = torch.float32 if self.is_regression else torch.int64
        return collate_tokens(records, self.tokenizer.pad_token_id) | {
            "labels": torch.tensor([record.labels for record in records], dtype=kind)
        }

    def per_record_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each record's cross-entropy, or squared error for regression."""
        logits = model(**model_inputs(model, batch, "labels")).logits.float()
        return head_loss(logits, batch["labels"].to(logits.device), self.is_regression)

    def evaluate(self, model: Any, encoded: Sequence[Encoded], batch_size: int = 32) -> dict[str, float]:
        """Return accuracy, macro_f1, matthews, majority and loss; or pearson and spearman."""
        return evaluate_head(self, model, encoded, batch_size, self.is_regression)

    def _untruncated(self, text: str, pair: str | None) -> list[int]:
        return list(self.tokenizer(text, pair, truncation=False, verbose=False)["input_ids"])

    def _label(self, row: Row) -> int | float:
        if "label" not in row:
            raise DataError("column 'label' is missing; map it with data.columns")
        if not self.is_regression:
            return self.label_id(row["label"])
        try:
            value = float(row["label"])
        except (TypeError, ValueError):
            raise DataError("the label of a regression must be a number; value withheld") from None
        if not (abs(value) <= _LARGEST_TARGET):
            raise DataError(
                "the label of a regression must be finite (as float32, with its square); value withheld"
            )
        return value


def head_loss(logits: Tensor, labels: Tensor, regression: bool) -> Tensor:
    """Return (records,) float32 losses of a head with one row of logits per record."""
    if regression:
        return (logits.squeeze(-1) - labels).square()
    return F.cross_entropy(logits, labels, reduction="none")


def evaluate_head(
    task: Task, model: Any, encoded: Sequence[Encoded], batch_size: int, regression: bool
) -> dict[str, float]:
    """Run a model with one row of logits per record over all records and compute its metrics."""
    truth: list[float] = []
    guess: list[float] = []
    losses: list[float] = []
    with evaluating(model):
        for _, records in batches(encoded, batch_size):
            batch = task.collate(records)
            logits = model(**model_inputs(model, batch, "labels")).logits.float()
            labels = batch["labels"].to(logits.device)
            losses += head_loss(logits, labels, regression).tolist()
            guess += (logits.squeeze(-1) if regression else logits.argmax(dim=-1)).tolist()
            truth += labels.tolist()
    loss = {"loss": float(np.mean(losses)) if losses else float("nan")}
    if regression:
        return loss | correlations(np.asarray(truth), np.asarray(guess))
    return loss | classification_metrics([int(each) for each in truth], [int(each) for each in guess])
