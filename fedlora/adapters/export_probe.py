"""Compare models on a fixed batch of random inputs: what an export must reproduce."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from fedlora.errors import ExportError

_RECORDS: Final = 4
_POSITIONS: Final = 12


@dataclass(frozen=True)
class LogitDifference:
    """How far two models' logits lie apart on the probe batch; PUBLIC.

    Attributes:
        max_abs: largest absolute difference.
        mean_abs: mean absolute difference.
        scale: largest absolute logit of the reference.
    """

    max_abs: float
    mean_abs: float
    scale: float


def probe_batch(model: Any, processor: Any = None) -> dict[str, Tensor]:
    """Return random inputs that fit a model, the same at every call.

    Args:
        model: a transformers model, wrapped by PEFT or not.
        processor: its tokenizer, which bounds the ids.
    """
    config = model.config
    generator = torch.Generator().manual_seed(0)
    if hasattr(config, "image_size") and not hasattr(config, "vocab_size"):
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        shape = (_RECORDS, getattr(config, "num_channels", 3), size, size)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    words = int(config.get_text_config().vocab_size)
    if processor is not None and hasattr(processor, "__len__"):
        words = min(words, len(processor))
    ids = torch.randint(0, words, (_RECORDS, _POSITIONS), generator=generator)
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and words > 1:
        ids = torch.where(ids == pad, (pad + 1) % words, ids)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids.flip(1)
    return batch


def probe_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return a model's logits on the probe batch, float64 on the CPU; its modes are restored."""
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)
    inputs = {
        name: value.to(device, dtype) if value.dtype.is_floating_point else value.to(device)
        for name, value in batch.items()
    }
    model.eval()
    try:
        with torch.no_grad():
            logits: Tensor = model(**inputs).logits
    finally:
        for module in training:
            module.training = True
    return logits.detach().to("cpu", torch.float64)


def difference(reference: Tensor, other: Tensor) -> LogitDifference:
    """Compare two models' logits; non-finite values give an infinite difference."""
    if reference.shape != other.shape or not bool(torch.isfinite(reference - other).all()):
        return LogitDifference(float("inf"), float("inf"), float("nan"))
    gap = (reference - other).abs()
    return LogitDifference(float(gap.max()), float(gap.mean()), float(reference.abs().max()))


def load_peft(base_model: Any, folder: Path) -> Any:
    """Load an adapter folder with plain PEFT.

    Raises:
        ExportError: if PEFT cannot read it.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PeftModel.from_pretrained(base_model, str(folder))
    except (KeyError, ValueError, RuntimeError, TypeError) as fault:
        raise ExportError(
            f"export: plain PEFT cannot load the adapter ({type(fault).__name__}: {fault})"
        ) from fault
