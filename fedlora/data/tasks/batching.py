"""Padding, batches and losses per record that the tasks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from fedlora.data.tasks.base import IGNORED, Encoded, EncodedRows

_READ_AT_ONCE: Final = 1000


def pad_right(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Pad integer rows at the right to one (records, longest) int64 tensor (at least one column)."""
    filled = _filled(rows)
    out = np.full(filled.shape, value, dtype=np.int64)
    out[filled] = np.fromiter(chain.from_iterable(rows), np.int64, int(filled.sum()))
    return torch.from_numpy(out)


def _filled(rows: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
    """Return where rows have an entry, (records, longest or 1)."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return np.arange(max(lengths.max(initial=0), 1)) < lengths[:, None]


def collate_tokens(records: Sequence[Encoded], pad_id: int) -> dict[str, Tensor]:
    """Pad token ids, attention mask and token types; a record without tokens sees one pad token."""
    ids = [record.input_ids for record in records]
    seen = _filled(ids)
    seen[:, 0] = True
    batch = {"input_ids": pad_right(ids, pad_id), "attention_mask": torch.from_numpy(seen.astype(np.int64))}
    if records and all("token_type_ids" in record.extras for record in records):
        batch["token_type_ids"] = pad_right([record.extras["token_type_ids"] for record in records], 0)
    return batch


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return per-record sums of token losses and numbers of targets, float32.

    Args:
        logits: (records, positions, classes).
        labels: (records, positions) int64, IGNORED where there is no target.
    """
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.view(labels.shape).sum(dim=1), (labels != IGNORED).sum(dim=1).to(torch.float32)


def own_mean(sums: Tensor, targets: Tensor) -> Tensor:
    """Divide each record's sum by its own number of targets; 0 where it has none."""
    return torch.where(targets > 0, sums / targets.clamp(min=1), torch.zeros_like(sums))


def model_inputs(model: Any, batch: Mapping[str, Tensor], *leave_out: str) -> dict[str, Tensor]:
    """Move a batch to the model's device, without the named entries."""
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items() if name not in leave_out}


def batches(
    encoded: Sequence[Encoded], batch_size: int, max_tokens: int | None = None
) -> Iterator[tuple[list[int], list[Encoded]]]:
    """Yield (positions, records) in batches of similar length.

    Args:
        encoded: the records.
        batch_size: largest number of records in a batch.
        max_tokens: largest number of padded tokens in a batch (one record always fits).
    """
    lengths = [
        len(one)
        for start in range(0, len(encoded), _READ_AT_ONCE)
        for one in encoded[start : start + _READ_AT_ONCE]
    ]
    places: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest = lengths[place]  # lengths only grow
        full = max_tokens is not None and (len(places) + 1) * longest > max_tokens
        if places and (len(places) == batch_size or full):
            yield places, _taken(encoded, places)
            places = []
        places = [*places, place]
    if places:
        yield places, _taken(encoded, places)


def _taken(encoded: Sequence[Encoded], places: Sequence[int]) -> list[Encoded]:
    if isinstance(encoded, EncodedRows):
        return encoded.take(places)
    return [encoded[place] for place in places]


class evaluating:
    """Context: eval mode without gradients; the modules' former modes come back afterwards."""

    def __init__(self, model: Any) -> None:
        """Remember which modules train."""
        self._model = model
        self._training = [module for module in model.modules() if module.training]
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        """Switch to evaluation."""
        self._model.eval()
        self._no_grad.__enter__()

    def __exit__(self, *fault: Any) -> None:
        """Restore."""
        self._no_grad.__exit__(*fault)
        for module in self._training:
            module.training = True
