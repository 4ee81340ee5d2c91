"""Token classification: one label per word, learned at the word's first sub-token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from fedlora.data.metrics import classification_metrics, span_f1
from fedlora.data.rows import Row
from fedlora.data.tasks.base import CHARACTERS_PER_TOKEN, IGNORED, Encoded, Task
from fedlora.data.tasks.batching import (
    batches,
    collate_tokens,
    evaluating,
    model_inputs,
    own_mean,
    pad_right,
    token_loss,
)
from fedlora.errors import DataError


class TokenClassification(Task):
    """Columns: tokens (words) and tags (one each); both lists, or texts separated by blanks."""

    name: ClassVar[str] = "token-classification"
    required: ClassVar[tuple[str, ...]] = ("tokens", "tags")

    def encode(self, row: Row) -> Encoded:
        """Tokenise the words, label first sub-tokens, cut at the end to the window."""
        words, tags = _as_list(row, "tokens"), _as_list(row, "tags")
        if len(words) != len(tags):
            raise DataError(f"the record has {len(words)} tokens but {len(tags)} tags")
        if not all(isinstance(word, str) for word in words):
            raise DataError("column 'tokens' must hold texts")
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError("token classification needs a fast tokenizer (tokenizer.json)")
        if not words:
            return Encoded(input_ids=[], labels=[], targets=0)
        self.refuse_narrow(self.tokenizer.num_special_tokens_to_add())
        limit = self.window * CHARACTERS_PER_TOKEN
        kept = [word[:limit] for word in words[: self.window]]  # a word gives a token, so no more can fit
        found = self.tokenizer(
            kept, is_split_into_words=True, truncation=True, max_length=self.window, verbose=False
        )
        places = found.word_ids()
        labels = [
            IGNORED if place is None or place == before else self.label_id(tags[place])
            for place, before in zip(places, [None, *places[:-1]], strict=True)
        ]
        last = max((place for place in places if place is not None), default=-1)
        cut = last + 1 < len(words)
        if cut:
            self.refuse_if_overlong()
        extras = {"token_type_ids": found["token_type_ids"]} if "token_type_ids" in found else {}
        targets = sum(label != IGNORED for label in labels)
        return Encoded(
            input_ids=list(found["input_ids"]), labels=labels, targets=targets, cut=cut, extras=extras
        )

    def collate(self, records: Sequence[Encoded]) -> dict[str, Tensor]:
        """Pad at the right; labels carry IGNORED on padding and inner sub-tokens."""
        labels = [record.labels if isinstance(record.labels, list) else [] for record in records]
        return collate_tokens(records, self.tokenizer.pad_token_id) | {"labels": pad_right(labels, IGNORED)}

    def per_record_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each record's mean cross-entropy over its own words."""
        logits = model(**model_inputs(model, batch, "labels")).logits
        return own_mean(*token_loss(logits, batch["labels"].to(logits.device)))

    def evaluate(self, model: Any, encoded: Sequence[Encoded], batch_size: int = 32) -> dict[str, float]:
        """Return accuracy, macro_f1 and matthews over words, and span_f1 where labels are BIO tags."""
        truth: list[list[int]] = []
        guess: list[list[int]] = []
        with evaluating(model):
            for _, records in batches(encoded, batch_size):
                batch = self.collate(records)
                best = model(**model_inputs(model, batch, "labels")).logits.argmax(dim=-1).cpu()
                for want, got in zip(batch["labels"], best, strict=True):
                    chosen = want != IGNORED
                    truth.append(want[chosen].tolist())
                    guess.append(got[chosen].tolist())
        metrics = classification_metrics(
            [label for each in truth for label in each], [label for each in guess for label in each]
        )
        names = self.labels
        if names is not None and any(name.startswith("B-") for name in names):
            metrics["span_f1"] = span_f1(
                [[names[label] for label in each] for each in truth],
                [[names[label] for label in each] for each in guess],
            )
        return metrics


def _as_list(row: Row, name: str) -> list[Any]:
    if name not in row:
        raise DataError(f"column {name!r} is missing; map it with data.columns")
    value = row[name]
    if isinstance(value, str):
        return value.split()
    if isinstance(value, (list, tuple)):
        return list(value)
    raise DataError(f"column {name!r} must be a list or text separated by blanks, not {type(value).__name__}")
