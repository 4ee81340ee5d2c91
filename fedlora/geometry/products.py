"""Sums of low-rank products and their best rank-r truncation, from factors alone.

sum_k w_k s_k B_k A_k is exact on the stacked factors [w_1 s_1 B_1, ...] [A_1; ...]; its truncated
SVD needs two thin QRs and a small SVD. `ProductSketch` does the same with bounded memory for many
clients and keeps a bound on what it dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from fedlora.errors import RankMismatchError
from fedlora.geometry.frames import Frames, check_rank, working

Tensor = torch.Tensor

PROBES: Final = 32
"""Gaussian vectors through which the sum of what a sketch dropped is seen."""
_LOW: Final = 0.185
_HIGH: Final = 3.0
"""||D Omega||^2 / (PROBES ||D||^2) lies between these but for 2e-6: P <= (x e^(1-x))^(PROBES / 2), any D (Chernoff)."""


def stack_products(
    lora_bs: Sequence[Tensor],
    lora_as: Sequence[Tensor],
    weights: Sequence[float],
    scalings: Sequence[float],
    output_scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return (left, right) with output_scaling * left @ right = sum_k w_k s_k B_k A_k exactly.

    Args:
        lora_bs: (out, r_k) each; ranks may differ.
        lora_as: (r_k, in) each.
        weights: w_k of each client (public under privacy).
        scalings: each client's own alpha / r.
        output_scaling: the scaling of the adapter that the result is loaded into.

    Raises:
        RankMismatchError: if there are no products, or lengths or shapes disagree.
    """
    if not lora_bs or not len(lora_bs) == len(lora_as) == len(weights) == len(scalings):
        raise RankMismatchError(
            f"need equally many factors, weights and scalings, at least one; got {len(lora_bs)}, "
            f"{len(lora_as)}, {len(weights)}, {len(scalings)}"
        )
    shape = (lora_bs[0].shape[-2], lora_as[0].shape[-1])
    for index, (b, a) in enumerate(zip(lora_bs, lora_as, strict=True)):
        if b.shape[-1] != a.shape[-2] or (b.shape[-2], a.shape[-1]) != shape:
            raise RankMismatchError(
                f"product {index} has shapes {tuple(b.shape)} and {tuple(a.shape)}; expected a "
                f"{shape[0]} x {shape[1]} product"
            )
    factors = [w * s / output_scaling for w, s in zip(weights, scalings, strict=True)]
    left = torch.cat([working(b) * f for b, f in zip(lora_bs, factors, strict=True)], dim=-1)
    return left, torch.cat([working(a) for a in lora_as], dim=-2)


def product_svd(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin SVD (u, s, v) of left @ right = u diag(s) v^T without forming it.

    Args:
        left: (..., out, k).
        right: (..., k, in).

    Returns:
        u (..., out, m), s (..., m) descending, v (..., in, m) with m = min(out, in, k).
    """
    q_left, r_left = torch.linalg.qr(working(left))
    q_right, r_right = torch.linalg.qr(working(right).mT)
    u, s, vh = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    return q_left @ u, s, q_right @ vh.mT


def truncate_product(left: Tensor, right: Tensor, rank: int) -> tuple[Frames, Tensor]:
    """Return the best rank-`rank` approximation of left @ right as frames, and the error's norm.

    Frames always have `rank` columns: where the product's rank is smaller, the frames are completed
    by orthonormal columns and the core has zeros.

    Returns:
        (frames, dropped): dropped is (...,), the Frobenius norm of what was cut off.
    """
    check_rank(left.shape[-2], right.shape[-1], rank)
    u, s, v = product_svd(left, right)
    dropped = torch.linalg.vector_norm(s[..., rank:], dim=-1)
    if s.shape[-1] >= rank:
        return Frames(u[..., :rank], torch.diag_embed(s[..., :rank]), v[..., :rank]), dropped
    missing = rank - s.shape[-1]
    core = torch.nn.functional.pad(torch.diag_embed(s), (0, missing, 0, missing))
    return Frames(complete_columns(u, rank), core, complete_columns(v, rank)), dropped


def complete_columns(q: Tensor, columns: int) -> Tensor:
    """Return q (..., d, k), orthonormal, extended by fixed orthonormal columns to (..., d, columns)."""
    d, k = q.shape[-2:]
    check_rank(d, d, columns)
    if columns <= k:
        return q[..., :columns]
    new = columns - k  # Householder QR gives orthonormal columns also where unit vectors lie in the span of q
    eye = torch.eye(d, new, dtype=q.dtype, device=q.device).expand(*q.shape[:-2], d, new)
    full = torch.linalg.qr(torch.cat([q, eye], dim=-1)).Q
    return torch.cat([q, full[..., k:columns]], dim=-1)


def product_norm(left: Tensor, right: Tensor) -> Tensor:
    """Return ||left @ right||_F, (...,), from two thin QRs."""
    r_left = torch.linalg.qr(working(left), mode="r").R
    r_right = torch.linalg.qr(working(right).mT, mode="r").R
    norm: Tensor = torch.linalg.matrix_norm(r_left @ r_right.mT)
    return norm


def product_distance(left1: Tensor, right1: Tensor, left2: Tensor, right2: Tensor) -> Tensor:
    """Return ||left1 @ right1 - left2 @ right2||_F, (...,), without forming either product."""
    left = torch.cat([working(left1), -working(left2)], dim=-1)
    return product_norm(left, torch.cat([working(right1), working(right2)], dim=-2))


@dataclass(frozen=True)
class ProductSketch:
    """A running sum of products with bounded rank: u diag(s) v^T plus an error of known bound.

    Attributes:
        u: (out, k), orthonormal columns.
        s: (k,), descending.
        v: (in, k), orthonormal columns.
        max_rank: k never exceeds it.
        error_bound: >= ||exact sum - u diag(s) v^T||_F (the dropped parts' norms add up).
        probe: (min(out, in), PROBES), the dropped parts' sum (from its shorter side) times fixed Gaussian vectors,
            float32; None while nothing was dropped.
    """

    u: Tensor
    s: Tensor
    v: Tensor
    max_rank: int
    error_bound: float
    probe: Tensor | None = None

    @staticmethod
    def empty(
        out_features: int,
        in_features: int,
        max_rank: int,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> ProductSketch:
        """Return the sketch of the zero matrix.

        Raises:
            RankMismatchError: if max_rank < 1.
        """
        if not max_rank >= 1:
            raise RankMismatchError(f"max_rank must be at least 1, got {max_rank}")
        return ProductSketch(
            torch.zeros(out_features, 0, dtype=dtype, device=device),
            torch.zeros(0, dtype=dtype, device=device),
            torch.zeros(in_features, 0, dtype=dtype, device=device),
            min(max_rank, out_features, in_features),
            0.0,
        )

    def merge(self, left: Tensor, right: Tensor) -> ProductSketch:
        """Return the sketch of this sum plus left @ right (out x k times k x in).

        Cost O((out + in)(max_rank + k)^2); merge several clients at once (`stack_products`) to save QRs.
        """
        if (left.shape[-2], right.shape[-1]) != (self.u.shape[0], self.v.shape[0]):
            raise RankMismatchError(
                f"a product of shapes {tuple(left.shape)} and {tuple(right.shape)} does not fit a sketch of "
                f"{self.u.shape[0]} x {self.v.shape[0]}"
            )
        u, s, v = product_svd(
            torch.cat([self.u * self.s, left.to(self.u)], dim=-1),
            torch.cat([self.v.mT, right.to(self.v)], dim=-2),
        )
        k = self.max_rank
        lost = float(torch.linalg.vector_norm(s[k:]))
        probe = self.probe if lost == 0.0 else self._probed(u[:, k:] * s[k:], v[:, k:])
        # Copies, because slices would keep the uncut buffers alive.
        u, s, v = (block[..., :k].clone(memory_format=torch.contiguous_format) for block in (u, s, v))
        return ProductSketch(u, s, v, k, self.error_bound + lost, probe)

    def _probed(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the probe of the dropped parts and left @ right^T."""
        seen = _see(left, right).float()
        return seen if self.probe is None else self.probe + seen

    @property
    def error_limit(self) -> float:
        """Like `error_bound`, and for many merges far smaller: what the probe shows where that is less.

        The dropped parts of many clients point in all directions, so the norm of their sum is far below the sum of
        their norms. Holds but for one case in a million over the Gaussian vectors, for sums that do not depend on them.
        """
        if self.probe is None:
            return self.error_bound
        seen = float(torch.linalg.vector_norm(self.probe)) * (1 + 1e-5)
        return min(self.error_bound, seen / math.sqrt(_LOW * PROBES))

    @property
    def norm_floor(self) -> float:
        """A lower bound of the exact sum's norm, as sure as `error_limit`; `norm` while nothing was dropped."""
        if self.probe is None:
            return self.norm
        seen = _see(self.u * self.s, self.v) + self.probe
        shown = float(torch.linalg.vector_norm(seen)) * (1 - 1e-5) / math.sqrt(_HIGH * PROBES)
        return max(self.norm - self.error_limit, shown)

    def scaled(self, factor: float) -> ProductSketch:
        """Return factor times the sum (factor >= 0)."""
        if not (factor >= 0 and math.isfinite(factor)):
            raise RankMismatchError(f"a sketch is scaled by a finite number >= 0, got {factor}")
        probe = None if self.probe is None else self.probe * factor
        return replace(self, s=self.s * factor, error_bound=self.error_bound * factor, probe=probe)

    def truncate(self, rank: int) -> tuple[Frames, float]:
        """Return rank-`rank` frames of the sum and a bound on their distance to the exact sum."""
        frames, dropped = truncate_product(self.u * self.s, self.v.mT, rank)
        return frames, float(dropped) + self.error_bound

    @property
    def norm(self) -> float:
        """||u diag(s) v^T||_F; the exact sum's norm is within `error_bound` of it."""
        return float(torch.linalg.vector_norm(self.s))


def _see(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right^T times the fixed Gaussian vectors, from its shorter side: (min(out, in), PROBES)."""
    if left.shape[0] > right.shape[0]:
        left, right = right, left
    normals = np.random.Generator(np.random.Philox(PROBES)).standard_normal((right.shape[0], PROBES))
    seen: Tensor = left @ (right.mT @ torch.from_numpy(normals).to(right))
    return seen
