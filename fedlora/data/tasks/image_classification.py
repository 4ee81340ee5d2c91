"""Image classification (ViT and the like): the one task without text."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlora.data.rows import Row
from fedlora.data.tasks.base import Encoded, Task
from fedlora.data.tasks.batching import model_inputs
from fedlora.data.tasks.sequence_classification import evaluate_head, head_loss
from fedlora.errors import DataError


class ImageClassification(Task):
    """Columns: image (a path, encoded bytes, a PIL image or an array) and label."""

    name: ClassVar[str] = "image-classification"
    required: ClassVar[tuple[str, ...]] = ("image", "label")

    def encode(self, row: Row) -> Encoded:
        """Decode the image, prepare it with the model's own processor, and number the label."""
        for name in self.required:
            if name not in row:
                raise DataError(f"column {name!r} is missing; map it with data.columns")
        image = open_image(row["image"])
        pixels = self.tokenizer(images=image, return_tensors="np")["pixel_values"][0]
        return Encoded(
            input_ids=[],
            labels=self.label_id(row["label"]),
            targets=1,
            extras={"pixel_values": np.asarray(pixels, dtype=np.float32)},
        )

    def collate(self, records: Sequence[Encoded]) -> dict[str, Tensor]:
        """Stack pixel values (records, channels, height, width) float32 and labels."""
        pixels = [torch.from_numpy(np.asarray(record.extras["pixel_values"])) for record in records]
        return {
            "pixel_values": torch.stack(pixels),
            "labels": torch.tensor([record.labels for record in records], dtype=torch.int64),
        }

    def per_record_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return each record's cross-entropy."""
        logits = model(**model_inputs(model, batch, "labels")).logits.float()
        return head_loss(logits, batch["labels"].to(logits.device), regression=False)

    def evaluate(self, model: Any, encoded: Sequence[Encoded], batch_size: int = 32) -> dict[str, float]:
        """Return accuracy, macro_f1, matthews, majority and loss."""
        return evaluate_head(self, model, encoded, batch_size, regression=False)


def open_image(value: Any) -> Any:
    """Return an RGB PIL image from a path, bytes, an array (height, width[, 3]) or a PIL image.

    Raises:
        DataError: if it cannot be read (nothing of it is shown).
    """
    try:
        from PIL import Image
    except ImportError as fault:
        raise DataError("image tasks need Pillow; run: pip install pillow") from fault
    if isinstance(value, Mapping):  # how the hub's data sets store undecoded images
        value = value.get("bytes") or value.get("path")
    try:
        if isinstance(value, (str, Path)):
            with Image.open(value) as opened:
                return opened.convert("RGB")
        if isinstance(value, (bytes, bytearray)):
            return Image.open(io.BytesIO(value)).convert("RGB")
        if isinstance(value, (list, tuple, np.ndarray)):
            return Image.fromarray(_levels(value)).convert("RGB")
        return value.convert("RGB")
    except DataError:
        raise
    except Exception as fault:
        raise DataError(f"the image cannot be read ({type(fault).__name__}); content withheld") from None


def _levels(value: Any) -> np.ndarray[Any, Any]:
    """Return an array of grey or colour levels, which are whole numbers from 0 to 255.

    Raises:
        DataError: for other numbers (fractions would all become black) and for an array without pixels.
    """
    found = np.asarray(value)
    if found.size == 0:
        raise DataError("the image has no pixels; repair or remove the record")
    whole = found.astype(np.uint8) if found.dtype.kind in "uif" else found
    if found.dtype.kind not in "uif" or not bool(np.all((found >= 0) & (found <= 255) & (found == whole))):
        raise DataError(
            "the image's values are not whole numbers from 0 to 255; scale it before; content withheld"
        )
    return whole
