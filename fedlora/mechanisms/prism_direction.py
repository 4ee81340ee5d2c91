"""PRISM's adaptive direction in frames: rank-space moments of noised tangents (post-processing).

With X the noised tangent divided by the public batch size b and s^2 = (sigma C / (w_g b))^2 the variance
of its entries (core block included, i.i.d.):

```
D_out = X_out - Q_out C / 2            D_in = X_in - Q_in C^T / 2        (even split of the core)
M     = EMA(D)                         V_out = EMA(X_out^T X_out / out), V_in likewise
step  = M_out (V_out + floor)^(-1/2) Q_in^T + Q_out (M_in (V_in + floor)^(-1/2))^T
```

The noise's part of E V is exactly s^2 I, so it is subtracted as a scalar (eigenvalues clamped at 0) and
the floor is s^2. Everything transforms correctly under the residual gauge O(r) x O(r), and Z = 0 is an
ordinary state. Between frames M_out and V_out move with O_in = Q_in,old^T Q_in,new, the others with O_out.

Corrects PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA, arXiv:2606.00944v1,
Eqs. 24-26, whose factor form is invariant under orthogonal gauges only (see `prism_paper`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedlora.geometry import (
    Frames,
    Spectrum,
    Tangent,
    frame_overlap,
    spectra,
    split_core,
    tangent_from_lift,
    transport_first_moment,
)

Tensor = torch.Tensor

SMALLEST_FLOOR = 1e-16
"""Floor of the second moment where there is no noise (Adam's eps = 1e-8, squared)."""


@dataclass(frozen=True)
class PrismMoments:
    """PUBLIC (after noise). Exponential averages at the present frames, without bias correction.

    Attributes:
        m_out: (..., out, r); m_in: (..., in, r): first moments of the evenly split lift.
        v_out: (..., r, r); v_in: (..., r, r): second moments in rank space.
        steps: updates that entered the averages; a tensor of no axes while a step is recorded on a GPU.
    """

    m_out: Tensor
    m_in: Tensor
    v_out: Tensor
    v_in: Tensor
    steps: float | Tensor = 0

    @staticmethod
    def zeros(frames: Frames) -> PrismMoments:
        """Return empty averages for these frames."""
        zero = torch.zeros_like
        return PrismMoments(zero(frames.q_out), zero(frames.q_in), zero(frames.core), zero(frames.core))


def update_moments(
    moments: PrismMoments, frames: Frames, tangent: Tangent, *, beta1: float, beta2: float
) -> PrismMoments:
    """Return the averages with one noised tangent added.

    Args:
        moments: averages at `frames`.
        frames: where the tangent lives.
        tangent: noised and divided by the public batch size; PUBLIC.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
    """
    lift_out, lift_in = split_core(frames, tangent)
    gram_out = tangent.x_out.mT @ tangent.x_out / tangent.x_out.shape[-2]
    gram_in = tangent.x_in.mT @ tangent.x_in / tangent.x_in.shape[-2]
    return PrismMoments(
        m_out=torch.lerp(lift_out, moments.m_out, beta1),
        m_in=torch.lerp(lift_in, moments.m_in, beta1),
        v_out=torch.lerp(gram_out, moments.v_out, beta2),
        v_in=torch.lerp(gram_in, moments.v_in, beta2),
        steps=moments.steps + 1,
    )


def spectra_of(moments: Sequence[PrismMoments]) -> list[tuple[Spectrum, Spectrum]]:
    """Return the eigendecompositions of (v_out, v_in) of each group, all in one launch on a GPU."""
    found = spectra([v for m in moments for v in (m.v_out, m.v_in)])
    return [(found[2 * i], found[2 * i + 1]) for i in range(len(moments))]


def precondition(
    moments: PrismMoments,
    frames: Frames,
    *,
    beta1: float,
    beta2: float,
    noise_variance: float | Tensor,
    known: tuple[Spectrum, Spectrum] | None = None,
) -> Tangent:
    """Return the adaptive direction as consistent tangent blocks at `frames`.

    Args:
        moments: averages at `frames`, at least one update in them.
        frames: the present point.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        noise_variance: s^2 = (sigma C / (w_g b))^2, a number or a tensor over the leading axes; 0 without noise.
        known: eigendecompositions of (v_out, v_in), where `spectra_of` has them already.
    """
    out, inn = spectra_of([moments])[0] if known is None else known
    correct1 = 1.0 - beta1**moments.steps
    correct2 = 1.0 - beta2**moments.steps
    root_out, root_in = (_inverse_root(side, correct2, noise_variance) for side in (out, inn))
    return tangent_from_lift(
        frames, (moments.m_out / correct1) @ root_out, (moments.m_in / correct1) @ root_in
    )


def transport_moments(
    moments: PrismMoments,
    old: Frames,
    new: Frames,
    *,
    beta2: float,
    noise_variance: float | Tensor,
    known: tuple[Spectrum, Spectrum] | None = None,
) -> PrismMoments:
    """Return the averages moved from the frames `old` to the frames `new`; `known` as in `precondition`."""
    out, inn = spectra_of([moments])[0] if known is None else known
    overlap_out, overlap_in = frame_overlap(old, new)
    weight = 1.0 - beta2**moments.steps
    return PrismMoments(
        m_out=transport_first_moment(moments.m_out, overlap_in),
        m_in=transport_first_moment(moments.m_in, overlap_out),
        v_out=_moved(out, overlap_in, noise_variance, weight),
        v_in=_moved(inn, overlap_out, noise_variance, weight),
        steps=moments.steps,
    )


def _moved(
    second: Spectrum, overlap: Tensor, noise_variance: float | Tensor, weight: float | Tensor
) -> Tensor:
    """Return O^T [V - f I]_+ O + f I with f = weight * noise_variance (see `transport_second_moment`)."""
    values = second.values
    floor = noise_variance.to(values)[..., None] * weight if isinstance(noise_variance, Tensor) else None
    shift = noise_variance * weight if floor is None else floor
    signal = overlap.mT @ second.rebuilt((values - shift).clamp_min(0.0)) @ overlap
    eye = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
    return signal + (shift if floor is None else floor[..., None]) * eye


def _inverse_root(second: Spectrum, correct: float | Tensor, noise_variance: float | Tensor) -> Tensor:
    """Return ([V / correct - s^2 I]_+ + max(s^2, tiny) I)^(-1/2)."""
    values = second.values / correct
    if isinstance(noise_variance, Tensor):
        variance = noise_variance.to(values)[..., None]
        return second.rebuilt(
            ((values - variance).clamp_min(0.0) + variance.clamp_min(SMALLEST_FLOOR)).rsqrt()
        )
    floor = max(noise_variance, SMALLEST_FLOOR)
    return second.rebuilt(((values - noise_variance).clamp_min(0.0) + floor).rsqrt())
