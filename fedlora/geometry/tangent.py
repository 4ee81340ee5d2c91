"""Tangent vectors of the rank-r matrices at Z = q_out @ core @ q_in^T, as two blocks.

A matrix G projects to X_out q_in^T + q_out X_in^T - q_out C q_in^T with X_out = G q_in,
X_in = G^T q_out and the shared core C = q_out^T X_out = (q_in^T X_in)^T; its squared norm is
||X_out||^2 + ||X_in||^2 - ||C||^2. The space has dimension r (out + in - r) at any core, zero included.

Reference: PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA, arXiv:2606.00944v1,
Eqs. 11-15 (projection, lift, norm) and Thm 3.1 (noise energy), here in frames instead of factors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedlora.errors import RankMismatchError
from fedlora.geometry.frames import Frames, working

Tensor = torch.Tensor


@dataclass(frozen=True)
class Tangent:
    """A tangent vector's blocks at some frames: consistent blocks share the core.

    Attributes:
        x_out: (..., out, r) = G @ q_in.
        x_in: (..., in, r) = G^T @ q_out.
    """

    x_out: Tensor
    x_in: Tensor

    def scaled(self, factor: float | Tensor) -> Tangent:
        """Return factor times this vector; a tensor broadcasts over leading axes."""
        if isinstance(factor, Tensor):
            factor = factor[..., None, None]
        return Tangent(self.x_out * factor, self.x_in * factor)

    def plus(self, other: Tangent) -> Tangent:
        """Return the sum of two vectors at the same frames."""
        return Tangent(self.x_out + other.x_out, self.x_in + other.x_in)


def project_dense(frames: Frames, matrix: Tensor) -> Tangent:
    """Return the tangent projection of a full matrix (..., out, in); for tests and small layers."""
    return Tangent(matrix @ frames.q_in, matrix.mT @ frames.q_out)


def project_product(frames: Frames, left: Tensor, right: Tensor) -> Tangent:
    """Return the tangent projection of left @ right without forming it.

    Args:
        frames: the base point.
        left: (..., out, k).
        right: (..., k, in).

    Raises:
        RankMismatchError: if the shapes do not fit the frames.
    """
    if left.shape[-1] != right.shape[-2] or (left.shape[-2], right.shape[-1]) != (
        frames.q_out.shape[-2],
        frames.q_in.shape[-2],
    ):
        raise RankMismatchError(
            f"a product of shapes {tuple(left.shape)} and {tuple(right.shape)} does not fit frames of "
            f"{frames.q_out.shape[-2]} x {frames.q_in.shape[-2]}"
        )
    left, right = working(left).to(frames.q_out), working(right).to(frames.q_out)
    return Tangent(left @ (right @ frames.q_in), right.mT @ (left.mT @ frames.q_out))


def project_change(base: Frames, new: Frames) -> tuple[Tangent, Tensor]:
    """Return the tangent projection of Z_new - Z_base at `base`, and the norm of what it dropped.

    Args:
        base: the common base point.
        new: the point after some local steps; its rank may differ.

    Returns:
        (tangent, dropped): dropped is (...,), ||(I - P)(Z_new - Z_base)||_F. It is a statement
        about private data wherever Z_new is not itself a private release.
    """
    left = torch.cat([new.q_out @ new.core, -(base.q_out @ base.core)], dim=-1)
    right = torch.cat([new.q_in, base.q_in], dim=-1).mT
    tangent = project_product(base, left, right)
    # (I - P_out) D (I - P_in) has no contribution from Z_base.
    normal_out = complement(base.q_out, new.q_out)
    normal_in = complement(base.q_in, new.q_in)
    r_out = torch.linalg.qr(normal_out, mode="r").R
    r_in = torch.linalg.qr(normal_in, mode="r").R
    return tangent, torch.linalg.matrix_norm(r_out @ new.core @ r_in.mT)


def complement(q: Tensor, x: Tensor) -> Tensor:
    """Return (I - q q^T) x, projected twice so that the result is orthogonal to q to rounding."""
    x = x - q @ (q.mT @ x)
    return x - q @ (q.mT @ x)


def tangent_core(frames: Frames, tangent: Tangent) -> Tensor:
    """Return the shared core C = q_out^T x_out, (..., r, r)."""
    return frames.q_out.mT @ tangent.x_out


def core_mismatch(frames: Frames, tangent: Tangent) -> Tensor:
    """Return ||q_out^T x_out - x_in^T q_in||_F, (...,): zero iff the blocks are one tangent vector."""
    difference = tangent_core(frames, tangent) - tangent.x_in.mT @ frames.q_in
    norm: Tensor = torch.linalg.matrix_norm(difference)
    return norm


def tangent_squared_norm(frames: Frames, tangent: Tangent) -> Tensor:
    """Return ||X_out||^2 + ||X_in||^2 - ||C||^2, (...,): the squared Frobenius norm of the vector."""
    core = tangent_core(frames, tangent)
    return _sum_squares(tangent.x_out) + _sum_squares(tangent.x_in) - _sum_squares(core)


def tangent_inner(frames: Frames, first: Tangent, second: Tangent) -> Tensor:
    """Return the Frobenius inner product of two tangent vectors at the same frames, (...,)."""
    cores = tangent_core(frames, first) * tangent_core(frames, second)
    return (
        (first.x_out * second.x_out).sum((-2, -1))
        + (first.x_in * second.x_in).sum((-2, -1))
        - cores.sum((-2, -1))
    )


def tangent_dense(frames: Frames, tangent: Tangent) -> Tensor:
    """Return the vector as a full matrix (..., out, in); for tests and small layers only."""
    core = tangent_core(frames, tangent)
    return (tangent.x_out - frames.q_out @ core) @ frames.q_in.mT + frames.q_out @ tangent.x_in.mT


def tangent_from_lift(frames: Frames, lift_out: Tensor, lift_in: Tensor) -> Tangent:
    """Return the blocks of lift_out @ q_in^T + q_out @ lift_in^T, whose cores add up.

    Unlike x_out and x_in, the two lifts need not agree on their core; this is the form of a
    direction whose blocks were preconditioned separately.

    Args:
        frames: the base point.
        lift_out: (..., out, r).
        lift_in: (..., in, r).
    """
    core_out = frames.q_out.mT @ lift_out
    core_in = lift_in.mT @ frames.q_in
    return Tangent(lift_out + frames.q_out @ core_in, lift_in + frames.q_in @ core_out.mT)


def split_core(frames: Frames, tangent: Tangent) -> tuple[Tensor, Tensor]:
    """Return the lift with the core split evenly: (X_out - Q_out C / 2, X_in - Q_in C^T / 2).

    The inverse of `tangent_from_lift` that treats both sides alike, so that the choice is
    covariant under rotations of both frames.
    """
    core = tangent_core(frames, tangent)
    return tangent.x_out - 0.5 * frames.q_out @ core, tangent.x_in - 0.5 * frames.q_in @ core.mT


def tangent_noise_from_normals(
    frames: Frames, normal_out: Tensor, normal_in: Tensor, core: Tensor
) -> Tangent:
    """Return isotropic tangent noise from i.i.d. standard normals: the two blocks share ONE core.

    Two independent cores would release the core twice (sensitivity sqrt(2) C).

    Args:
        frames: the base point.
        normal_out: (..., out, r), i.i.d. N(0, 1).
        normal_in: (..., in, r), i.i.d. N(0, 1).
        core: (..., r, r), i.i.d. N(0, 1), independent of the others.

    Returns:
        Blocks N_out, N_in, each with i.i.d. N(0, 1) entries; energy r (out + in - r).
    """
    n_out = normal_out + frames.q_out @ (core - frames.q_out.mT @ normal_out)
    n_in = normal_in + frames.q_in @ (core.mT - frames.q_in.mT @ normal_in)
    return Tangent(n_out, n_in)


def tangent_noise(
    frames: Frames, stddev: float | Tensor, *, generator: torch.Generator | None = None
) -> Tangent:
    """Return isotropic tangent noise of standard deviation `stddev` from a torch generator.

    For tests and analyses; a private release takes its normals from the mechanism's noise source
    and `tangent_noise_from_normals`.
    """
    like = frames.q_out
    draws = [
        torch.randn(t.shape, generator=generator, dtype=like.dtype, device=like.device)
        for t in (frames.q_out, frames.q_in, frames.core)
    ]
    return tangent_noise_from_normals(frames, *draws).scaled(stddev)


def tangent_dimension(out_features: int, in_features: int, rank: int) -> int:
    """Return r (out + in - r), the dimension of the tangent space (PRISM, Thm 3.1)."""
    return rank * (out_features + in_features - rank)


def transport_tangent(old: Frames, new: Frames, tangent: Tangent) -> Tangent:
    """Return the projection onto the tangent space at `new` of a tangent vector at `old`."""
    lift_out, lift_in = split_core(old, tangent)
    left = torch.cat([lift_out, old.q_out], dim=-1)
    right = torch.cat([old.q_in, lift_in], dim=-1).mT
    return project_product(new, left, right)


def _sum_squares(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1))
