"""Retraction: the best rank-r matrix near Z + step * tangent, in new frames.

One joint QR of [Q, (I - Q Q^T) X] on each side and an SVD of a 2r x 2r core (smaller where
out < 2r). The joint QR keeps the frames orthonormal where the block (I - P) X is rank-deficient
or zero; a separate QR of that block would not. Batched over modules of one shape, O((out + in) r^2).

Reference: PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA, arXiv:2606.00944v1, Eq. 22.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedlora.geometry.frames import Frames
from fedlora.geometry.small import spectra, svd_many
from fedlora.geometry.tangent import Tangent, complement, tangent_core

Tensor = torch.Tensor


def retract(frames: Frames, tangent: Tangent, step: float | Tensor = 1.0) -> Frames:
    """Return frames of the truncated SVD of Z + step * tangent.

    Properties (tested): frames orthonormal to rounding for rank-deficient and zero tangents,
    zero core and equal singular values; equal to Z + step * tangent up to O(step^2).

    On a GPU in float32 this is `retract_gram` (batched Householder QR runs one matrix after the
    other there). `retract_subspace` needs no device synchronisation at all.

    Args:
        frames: the base point, (..., out, r) and so on.
        tangent: consistent blocks at `frames`.
        step: a number, or a tensor over the leading axes; a descent step is negative.
    """
    if frames.core.is_cuda and frames.core.dtype == torch.float32:
        return retract_gram(frames, tangent, step)
    q_out, q_in, core = expand(frames, tangent, step)
    u, s, vh = torch.linalg.svd(core)
    r = frames.rank
    return Frames(q_out @ u[..., :, :r], torch.diag_embed(s[..., :r]), q_in @ vh[..., :r, :].mT)


def retract_subspace(
    frames: Frames, tangent: Tangent, step: float | Tensor = 1.0, *, iterations: int = 12
) -> Frames:
    """Like `retract`, by orthogonal iteration on the small core: QR only, no device synchronisation.

    Starts from the dominant half in the direction of the present frames, so the result is covariant
    under rotations of the frames. It converges to the truncated SVD at the rate
    (sigma_{r+1} / sigma_r)^2 per iteration; the result is on the manifold and is a first-order
    retraction for a core that dominates the step, after any number of iterations.

    Args:
        frames: the base point; its core must not be tiny beside the step (use `retract` at the start).
        tangent: consistent blocks at `frames`.
        step: a number, or a tensor over the leading axes.
        iterations: of the orthogonal iteration; fixed, so that no convergence test is read back.
    """
    q_out, q_in, core = expand(frames, tangent, step)
    r = frames.rank
    basis = torch.linalg.qr(core[..., :, :r]).Q
    right = basis
    for _ in range(iterations):
        right = torch.linalg.qr(core.mT @ basis).Q
        basis = torch.linalg.qr(core @ right).Q
    right, upper = torch.linalg.qr(core.mT @ basis)
    return Frames(q_out @ basis, upper.mT, q_in @ right)


def retract_many(
    frames: Sequence[Frames], tangents: Sequence[Tangent], step: float | Tensor = 1.0
) -> list[Frames]:
    """Return `retract` of each point; on a GPU in float32 all small problems share two kernel launches.

    Args:
        frames: base points, one batch of modules of one shape each.
        tangents: consistent blocks at each.
        step: a number, or a tensor over the leading axes that all share.
    """
    if all(f.core.is_cuda and f.core.dtype == torch.float32 for f in frames):
        return _retract_grams(frames, tangents, step)
    return [retract(f, t, step) for f, t in zip(frames, tangents, strict=True)]


def retract_gram(frames: Frames, tangent: Tangent, step: float | Tensor = 1.0) -> Frames:
    """Like `retract` in float32, with bases from float64 Gram matrices: matrix products and small problems only.

    Directions of (I - P) X below 1e-5 of its largest singular value get no basis vector (their part of the
    step is dropped); re-orthonormalisation by Newton-Schulz steps. A zero or rank-deficient block keeps the
    frames on the manifold, because a tie at singular value zero is decided for the present frames.

    Args:
        frames: the base point.
        tangent: consistent blocks at `frames`.
        step: a number, or a tensor over the leading axes.
    """
    return _retract_grams([frames], [tangent], step)[0]


def _retract_grams(
    frames: Sequence[Frames], tangents: Sequence[Tangent], step: float | Tensor
) -> list[Frames]:
    sides = [
        (q, complement(q, x))
        for f, t in zip(frames, tangents, strict=True)
        for q, x in ((f.q_out, t.x_out), (f.q_in, t.x_in))
    ]
    bases = _gram_bases(sides)
    wide = step.to(frames[0].core)[..., None, None] if isinstance(step, Tensor) else step
    cores, favoured = [], []
    for number, (f, t) in enumerate(zip(frames, tangents, strict=True)):
        up_out, up_in = bases[2 * number][1], bases[2 * number + 1][1]
        inner = f.core + wide * tangent_core(f, t)
        core = torch.cat(
            [
                torch.cat([inner, wide * up_in.mT], -1),
                torch.cat([wide * up_out, torch.zeros_like(inner)], -1),
            ],
            -2,
        )
        scale = torch.linalg.vector_norm(core, dim=(-2, -1))[..., None, None].clamp_min(1e-30)
        favour = torch.nn.functional.pad(
            torch.eye(f.rank, dtype=core.dtype, device=core.device), (0, f.rank) * 2
        )
        cores.append(core)
        favoured.append(core + (1e-7 * scale) * favour)
    new = []
    for number, (f, core, found) in enumerate(zip(frames, cores, svd_many(favoured), strict=True)):
        left, right = found.u[..., : f.rank], found.v[..., : f.rank]
        q_out = _polish(torch.cat([f.q_out, bases[2 * number][0]], -1) @ left)
        q_in = _polish(torch.cat([f.q_in, bases[2 * number + 1][0]], -1) @ right)
        new.append(Frames(q_out, left.mT @ core @ right, q_in))
    return new


def _gram_bases(sides: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return (basis, coordinates) of each block x = (I - q q^T) x; basis columns are orthonormal or zero."""
    wides = [x.double() for _, x in sides]
    found = spectra([wide.mT @ wide for wide in wides])
    bases = []
    for (q, x), wide, spectrum in zip(sides, wides, found, strict=True):
        values = spectrum.values
        keep = values > 1e-10 * values.amax(-1, keepdim=True).clamp_min(1e-60)
        inverse = torch.where(keep, values.clamp_min(1e-60).rsqrt(), 0.0)
        basis = (wide @ (spectrum.vectors * inverse[..., None, :])).to(x.dtype)
        basis = _polish(_polish(complement(q, basis)))
        bases.append((basis, basis.mT @ x))
    return bases


def _polish(q: Tensor) -> Tensor:
    """One Newton-Schulz step towards orthonormal columns; zero columns stay zero."""
    return 1.5 * q - 0.5 * (q @ (q.mT @ q))


def expand(frames: Frames, tangent: Tangent, step: float | Tensor = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (q_out, q_in, core) with Z + step * tangent = q_out @ core @ q_in^T exactly.

    Returns:
        q_out: (..., out, min(out, 2r)) and q_in: (..., in, min(in, 2r)), orthonormal; core between them.
    """
    if isinstance(step, Tensor):
        step = step.to(frames.core)[..., None, None]
    r = frames.rank
    q_out, r_out = torch.linalg.qr(torch.cat([frames.q_out, complement(frames.q_out, tangent.x_out)], dim=-1))
    q_in, r_in = torch.linalg.qr(torch.cat([frames.q_in, complement(frames.q_in, tangent.x_in)], dim=-1))
    inner = frames.core + step * tangent_core(frames, tangent)
    # [Q_out, X_out'] [[S + step C, step I], [step I, 0]] [Q_in, X_in']^T without forming the block matrix.
    a_out, b_out = r_out[..., :, :r], r_out[..., :, r:]
    a_in, b_in = r_in[..., :, :r], r_in[..., :, r:]
    core = a_out @ inner @ a_in.mT + step * (b_out @ a_in.mT + a_out @ b_in.mT)
    return q_out, q_in, core
