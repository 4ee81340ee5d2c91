"""The noisy projection M2's pure parts: fresh projections, noise of the right law, folding into the weights.

One step draws a fresh A (r x in, entries N(0, 1/r)) after the weights are fixed and releases
(sum_i clip(G_i) + sigma C Xi) A^T with Xi an i.i.d. out x in Gaussian that is never drawn: Xi A^T has
independent rows N(0, A A^T), so it equals Omega L^T in law, with Omega out x r and L L^T = A A^T. The weights
then change by -lr / b times (the release) A.

Reference: LoRA and Privacy: When Random Projections Help (and When They Don't), Def. 3 (M2), Thm 5, Alg. 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fedlora.adapters.projection_recipe import check_projection
from fedlora.errors import PrivacyParameterError
from fedlora.geometry import Frames, ProductSketch, frames_to_factors

Tensor = torch.Tensor


def projection_from_normals(standard: Tensor) -> Tensor:
    """Return A with entries N(0, 1/r) from i.i.d. standard normals (..., r, in)."""
    check_projection(standard.shape[-2], standard.shape[-1])
    return standard / math.sqrt(standard.shape[-2])


def noise_factor(projection: Tensor) -> Tensor:
    """Return R (..., r, r) float64 with R^T R = A A^T, by a QR of A^T = Q R in float64.

    Omega @ R then has independent rows N(0, A A^T). A Cholesky factor L of A A^T gives Omega @ L^T; Omega @ L
    would be wrong.
    """
    upper: Tensor = torch.linalg.qr(projection.double().mT, mode="r").R
    return upper


def projected_noise(standard: Tensor, projection: Tensor, stddev: float | Tensor = 1.0) -> Tensor:
    """Return noise of the law stddev * Xi @ A^T from r numbers a row instead of in.

    Args:
        standard: Omega, (..., out, r), i.i.d. N(0, 1) from the mechanism's noise source.
        projection: A, (..., r, in).
        stddev: sigma C.
    """
    return standard @ (noise_factor(projection).to(standard)) * stddev


@dataclass(frozen=True)
class FoldedUpdate:
    """PUBLIC. Everything that one layer's weight has received: W - W0 as a bounded low-rank sum.

    Attributes:
        sketch: W - W0.
        steps: releases folded in.
    """

    sketch: ProductSketch
    steps: int = 0

    @staticmethod
    def empty(out_features: int, in_features: int, rank_cap: int | None = None) -> FoldedUpdate:
        """Return W = W0; `rank_cap` bounds the memory, None keeps the sum exact."""
        cap = min(out_features, in_features) if rank_cap is None else rank_cap
        return FoldedUpdate(ProductSketch.empty(out_features, in_features, cap))

    def fold(self, release: Tensor, projection: Tensor, step: float) -> FoldedUpdate:
        """Return W - step * release @ A; step = lr / b with the public divisor b.

        Args:
            release: (out, r), noised. PUBLIC.
            projection: A of that step, (r, in). PUBLIC.
            step: finite.

        Raises:
            PrivacyParameterError: if the step is not finite.
        """
        if not math.isfinite(step):
            raise PrivacyParameterError(f"fold: step must be finite, got {step}; check lr and the divisor")
        return replace(self, sketch=self.sketch.merge(-step * release, projection), steps=self.steps + 1)

    def export(self, rank: int, scaling: float) -> FoldedExport:
        """Return one LoRA adapter of `rank` with the truncation error stated.

        Args:
            rank: of the exported adapter.
            scaling: its lora_alpha / rank.
        """
        frames, bound = self.sketch.truncate(rank)
        lora_b, lora_a = frames_to_factors(frames, scaling, balanced=True)
        norm = self.sketch.norm
        return FoldedExport(lora_b, lora_a, frames, bound, bound / norm if norm > 0 else 0.0)


@dataclass(frozen=True)
class FoldedExport:
    """One adapter that stands for many folded steps.

    Attributes:
        lora_b: (out, rank); lora_a: (rank, in): balanced, scaling * lora_b @ lora_a approximates W - W0.
        frames: the same in frames.
        truncation_error: >= ||W - W0 - scaling * lora_b @ lora_a||_F.
        relative_error: that over ||W - W0||_F (0 if nothing was folded).
    """

    lora_b: Tensor
    lora_a: Tensor
    frames: Frames
    truncation_error: float
    relative_error: float


def check_unclipped(gradient_bound: float | None) -> float:
    """Return the stated a-priori bound on ||G_i||_F that replaces clipping.

    The guarantee then rests on an assumption that fedlora cannot check (it is never verified on private
    records, since refusing would itself release something); reports repeat it.

    Reference: LoRA and Privacy: When Random Projections Help (and When They Don't), Alg. 4.

    Raises:
        PrivacyParameterError: if no finite positive bound is stated.
    """
    if gradient_bound is None or not (gradient_bound > 0 and math.isfinite(gradient_bound)):
        raise PrivacyParameterError(
            f"mechanism.gradient_bound: got {gradient_bound}; projection without clipping needs a finite bound > 0 "
            "on every record's ||G||_F that holds for all data; state it, or set mechanism.clipping: true"
        )
    return gradient_bound
