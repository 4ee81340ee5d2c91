"""Frames of a low-rank matrix: Z = q_out @ core @ q_in^T with orthonormal q_out and q_in.

Every function is batched over leading axes (modules of one shape, clients), works in the
dtype it is given (float32 or better; half precision is raised to float32) and mutates nothing.
Shapes: q_out (..., out, r), core (..., r, r), q_in (..., in, r), with r <= min(out, in).

Reference: PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA,
arXiv:2606.00944v1, App. A.14 (stable projectors), here carried as the state itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedlora.errors import NotOnManifoldError, RankMismatchError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Frames:
    """A point Z = q_out @ core @ q_in^T; PUBLIC if its history is.

    Attributes:
        q_out: (..., out, r), orthonormal columns.
        core: (..., r, r), any matrix; zero is an ordinary state.
        q_in: (..., in, r), orthonormal columns.
    """

    q_out: Tensor
    core: Tensor
    q_in: Tensor

    @property
    def rank(self) -> int:
        """The number r of frame vectors on each side."""
        return int(self.core.shape[-1])

    def dense(self) -> Tensor:
        """Return Z as a full matrix (..., out, in); for tests and small layers only."""
        return self.q_out @ self.core @ self.q_in.mT

    def to(self, *args: object, **kwargs: object) -> Frames:
        """Return the same frames on another device or in another dtype (see torch.Tensor.to)."""
        return Frames(*(t.to(*args, **kwargs) for t in (self.q_out, self.core, self.q_in)))  # type: ignore[call-overload]


def working(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 or better (half precision is raised, float64 kept)."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def check_rank(out_features: int, in_features: int, rank: int) -> None:
    """Refuse a rank that no pair of frames can have.

    Raises:
        RankMismatchError: unless 1 <= rank <= min(out_features, in_features).
    """
    if not 1 <= rank <= min(out_features, in_features):
        raise RankMismatchError(
            f"rank {rank} does not fit a {out_features} x {in_features} matrix: "
            f"allowed are 1 to {min(out_features, in_features)}; lower adapter.rank or set rank_pattern"
        )


def frames_from_factors(lora_b: Tensor, lora_a: Tensor, scaling: float | Tensor = 1.0) -> Frames:
    """Return frames of Z = scaling * lora_b @ lora_a by two thin QR factorisations.

    A zero or rank-deficient factor is fine: Householder QR gives orthonormal columns anyway
    and the core is then singular. The result for another gauge (R lora_a, lora_b R^-1) differs
    by rotations of the frames only where both factors have full column rank.

    Args:
        lora_b: (..., out, r).
        lora_a: (..., r, in).
        scaling: lora_alpha / r or what the adapter uses; a tensor broadcasts over leading axes.

    Raises:
        RankMismatchError: if shapes do not fit or r > min(out, in).
    """
    if lora_b.shape[-1] != lora_a.shape[-2]:
        raise RankMismatchError(
            f"lora_B has {lora_b.shape[-1]} columns but lora_A has {lora_a.shape[-2]} rows: they must agree"
        )
    check_rank(lora_b.shape[-2], lora_a.shape[-1], lora_b.shape[-1])
    q_out, r_out = torch.linalg.qr(working(lora_b))
    q_in, r_in = torch.linalg.qr(working(lora_a).mT)
    core = r_out @ r_in.mT
    if isinstance(scaling, Tensor):
        scaling = scaling.to(core)[..., None, None]
    return Frames(q_out, core * scaling, q_in)


def frames_to_factors(
    frames: Frames, scaling: float | Tensor = 1.0, *, balanced: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (lora_b, lora_a) with scaling * lora_b @ lora_a = Z.

    Args:
        frames: the point.
        scaling: the adapter's scaling, divided out of lora_b.
        balanced: give both factors equal Gram matrices (through an SVD of the core); otherwise
            lora_a = q_in^T and lora_b carries the core.
    """
    if isinstance(scaling, Tensor):
        scaling = scaling.to(frames.core)[..., None, None]
    if not balanced:
        return frames.q_out @ (frames.core / scaling), frames.q_in.mT.contiguous()
    u, s, vh = torch.linalg.svd(frames.core / scaling)
    root = s.sqrt()[..., None, :]
    return (frames.q_out @ u) * root, ((frames.q_in @ vh.mT) * root).mT.contiguous()


def random_frames(
    out_features: int, in_features: int, rank: int, *, seed: int, batch: tuple[int, ...] = ()
) -> Frames:
    """Return Haar-random frames with a zero core: the state Z = 0 with a public, data-free tangent space.

    Drawn on the CPU in float64 by numpy's Philox generator and orthonormalised there, so every
    party gets the same frames up to LAPACK's rounding; frames are transmitted, never recomputed.

    Args:
        out_features: rows of Z.
        in_features: columns of Z.
        rank: r.
        seed: public seed (it must not be the noise's).
        batch: leading axes.

    Returns:
        float32 frames.
    """
    check_rank(out_features, in_features, rank)
    generator = np.random.Generator(np.random.Philox(seed))
    q = []
    for features in (out_features, in_features):
        normal = torch.from_numpy(generator.standard_normal((*batch, features, rank)))
        basis, upper = torch.linalg.qr(normal)
        signs = torch.where(torch.diagonal(upper, dim1=-2, dim2=-1) < 0, -1.0, 1.0)
        q.append((basis * signs[..., None, :]).float())
    return Frames(q[0], torch.zeros((*batch, rank, rank)), q[1])


def orthonormality_residual(q: Tensor) -> Tensor:
    """Return ||q^T q - I||_F over the leading axes: (...,); non-finite input gives NaN."""
    gram = q.mT @ q
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    residual: Tensor = torch.linalg.matrix_norm(gram - eye)
    return residual


def check_frames(frames: Frames, *, tolerance: float | None = None) -> float:
    """Refuse frames whose columns are not orthonormal; norm, clip and noise all depend on it.

    Args:
        frames: the point to check (reads one number back from the device).
        tolerance: allowed ||Q^T Q - I||_F; default 1e-4 in float32, 1e-10 in float64.

    Returns:
        The largest residual over both frames and all leading axes.

    Raises:
        RankMismatchError: if the three shapes do not fit together.
        NotOnManifoldError: if a residual is above the tolerance or not finite, or the core is not finite.
    """
    r = frames.core.shape[-1]
    if frames.core.shape[-2] != r or frames.q_out.shape[-1] != r or frames.q_in.shape[-1] != r:
        raise RankMismatchError(
            f"frames have {frames.q_out.shape[-1]} and {frames.q_in.shape[-1]} columns and a core of "
            f"{tuple(frames.core.shape[-2:])}: all must be the same rank"
        )
    check_rank(frames.q_out.shape[-2], frames.q_in.shape[-2], r)
    if tolerance is None:
        tolerance = 1e-10 if frames.q_out.dtype == torch.float64 else 1e-4
    worst = torch.stack(
        [orthonormality_residual(working(q)).max() for q in (frames.q_out, frames.q_in)]
    ).max()
    residual = float(worst)
    if not bool(torch.isfinite(frames.core).all()):
        raise NotOnManifoldError("the frames' core is not finite", residual=residual)
    if not residual <= tolerance:
        raise NotOnManifoldError(
            f"frames are not orthonormal: ||Q^T Q - I|| = {residual:.3g}, allowed is {tolerance:.3g}; "
            "re-orthonormalise them (orthonormalize) or send them in float32",
            residual=residual,
        )
    return residual


def orthonormalize(frames: Frames) -> Frames:
    """Return frames of the same Z with columns orthonormal to working precision.

    For frames that were rounded on the way (bf16, int8): Q = Q' R, and the R factors move into the core.
    """
    q_out, r_out = torch.linalg.qr(working(frames.q_out))
    q_in, r_in = torch.linalg.qr(working(frames.q_in))
    return Frames(q_out, r_out @ working(frames.core) @ r_in.mT, q_in)


def rotate_frames(frames: Frames, rotation_out: Tensor, rotation_in: Tensor) -> Frames:
    """Return the same Z in frames (q_out @ rotation_out, q_in @ rotation_in): the gauge O(r) x O(r)."""
    return Frames(
        frames.q_out @ rotation_out,
        rotation_out.mT @ frames.core @ rotation_in,
        frames.q_in @ rotation_in,
    )


def gauge_factors(lora_b: Tensor, lora_a: Tensor, gauge: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the same product in another gauge: (lora_b @ R^-1, R @ lora_a).

    Args:
        lora_b: (..., out, r).
        lora_a: (..., r, in).
        gauge: an invertible R (..., r, r), or a number c != 0 for R = c I.

    Raises:
        RankMismatchError: if R is not r x r.
    """
    if not isinstance(gauge, Tensor):
        return lora_b / gauge, lora_a * gauge
    if gauge.shape[-2:] != (lora_a.shape[-2],) * 2:
        raise RankMismatchError(f"a gauge of shape {tuple(gauge.shape)} does not fit rank {lora_a.shape[-2]}")
    return torch.linalg.solve(gauge, lora_b, left=False), gauge @ lora_a
