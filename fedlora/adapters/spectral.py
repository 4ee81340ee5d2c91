"""`init: spectral`: the adapter starts as the base weight's leading part, and the base keeps the residual.

With W = U diag(s) V^T and rank r: scaling lora_B lora_A = U_r diag(s_r) V_r^T; the frozen weight becomes W minus that
product ("PiSSA: Principal Singular Values and Singular Vectors Adaptation", arXiv:2404.02948v4, Sec. 3). The start
computes what the base computes. The product depends on W alone (not on signs or bases that a library chooses), so every
party finds the same residual to rounding; where the product is not determined, the layer is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from fedlora.errors import ModelError
from fedlora.wire.payload import Array

_GAP: Final = 1e-7
"""Smallest gap behind the r-th singular value, relative to the largest: float64 then fixes the product to 1e-8."""


@dataclass(frozen=True)
class RemovedPart:
    """PUBLIC. What was taken out of one base weight: scaling * lora_b @ lora_a.

    Attributes:
        lora_a: (rank, in) float32.
        lora_b: (out, rank) float32.
        scaling: the layer's scaling at the start.
    """

    lora_a: Array
    lora_b: Array
    scaling: float


def split_base(name: str, layer: Any, adapter: str) -> RemovedPart:
    """Move the leading part of a layer's base weight into its adapter.

    The base weight is replaced, not changed in place: a module that shares it keeps the whole weight.

    Args:
        name: for messages.
        layer: PEFT's LoRA layer, float32 or float64 base; its factors and its base weight are set.
        adapter: the adapter's name in PEFT.

    Raises:
        ModelError: if the base is quantised or of a dtype in which the residual would be rounded visibly, or the
            rank-r part is not determined by the weight.
    """
    weight = layer.get_base_layer().weight
    if weight.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"adapter.init: spectral needs a float32 base, because the residual is stored in its dtype; {name} has "
            f"{str(weight.dtype).removeprefix('torch.')}; set model.dtype to float32 or choose another init"
        )
    matrix = weight.detach().to(torch.float64)
    matrix = matrix.t() if layer.fan_in_fan_out else matrix
    rank, scaling = int(layer.r[adapter]), float(layer.scaling[adapter])
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    behind = float(values[rank]) if rank < len(values) else 0.0
    determined = rank >= len(values) or float(values[rank - 1]) - behind > _GAP * float(values[0])
    if not determined:
        raise ModelError(
            f"adapter.init: spectral: singular values {rank} and {rank + 1} of {name} are equal, so its leading part "
            "is not determined; choose another rank or another init"
        )
    root = (values[:rank] / scaling).sqrt()
    lora_b = (left[:, :rank] * root).to(torch.float32)
    lora_a = (root[:, None] * right[:rank]).to(torch.float32)
    residual = matrix - scaling * (lora_b.double() @ lora_a.double())
    residual = residual.t() if layer.fan_in_fan_out else residual
    base = layer.get_base_layer()
    base.weight = nn.Parameter(residual.contiguous().to(weight), requires_grad=False)
    layer.lora_A[adapter].weight.data.copy_(lora_a)
    layer.lora_B[adapter].weight.data.copy_(lora_b)
    return RemovedPart(lora_a.cpu().numpy(), lora_b.cpu().numpy(), scaling)


def residual_fingerprint(fingerprint: str, ranks: Mapping[str, int]) -> str:
    """Return the fingerprint of a base that keeps residuals: adapters of the whole base do not fit it."""
    text = "|".join([fingerprint, "residual", *(f"{name}:{ranks[name]}" for name in sorted(ranks))])
    return hashlib.sha256(text.encode()).hexdigest()


def with_removed(lora_a: Array, lora_b: Array, scaling: float, part: RemovedPart) -> tuple[Array, Array]:
    """Return factors of twice the rank that do on the whole base what (lora_a, lora_b) do on the residual.

    scaling [lora_b, -f part.lora_b] [lora_a; part.lora_a] = scaling lora_b lora_a - part, f = part.scaling / scaling.
    """
    away = -(part.scaling / scaling) * part.lora_b.astype(np.float64)
    return np.vstack([lora_a, part.lora_a]), np.hstack([lora_b, away.astype(np.float32)])
