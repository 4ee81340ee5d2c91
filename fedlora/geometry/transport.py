"""Orthogonal alignment, and moving an optimiser's rank-space moments between frames.

First moments M are lifts (out, r) or (in, r): their columns live in the frame of the other side and
move with O = Q_old^T Q_new of that side. Second moments V are (r, r) in the same frame.

O contracts (its singular values are cosines), so V - s^2 I is moved and s^2 I added back, with the
noise's part s^2 known: the plain form O^T V O would lose noise energy and turn negative after debiasing.
"""

from __future__ import annotations

import torch

from fedlora.geometry.frames import Frames

Tensor = torch.Tensor


def procrustes(source: Tensor, reference: Tensor) -> Tensor:
    """Return the orthogonal Q (..., r, r) that minimises ||source @ Q - reference||_F.

    Args:
        source: (..., d, r).
        reference: (..., d, r).
    """
    u, _, vh = torch.linalg.svd(source.mT @ reference)
    rotation: Tensor = u @ vh
    return rotation


def align_factors(lora_b: Tensor, lora_a: Tensor, reference_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same product with lora_b rotated onto `reference_b`: (B Q, Q^T A)."""
    rotation = procrustes(lora_b, reference_b)
    return lora_b @ rotation, rotation.mT @ lora_a


def frame_overlap(old: Frames, new: Frames) -> tuple[Tensor, Tensor]:
    """Return (O_out, O_in) = (Q_out,old^T Q_out,new, Q_in,old^T Q_in,new), (..., r, r) each."""
    return old.q_out.mT @ new.q_out, old.q_in.mT @ new.q_in


def transport_first_moment(moment: Tensor, overlap: Tensor) -> Tensor:
    """Return M @ O: M_out moves with O_in and M_in with O_out."""
    return moment @ overlap


def transport_second_moment(
    moment: Tensor, overlap: Tensor, noise_variance: float | Tensor, noise_weight: float = 1.0
) -> Tensor:
    """Return O^T [V - s^2 I]_+ O + s^2 I with s^2 = noise_weight * noise_variance.

    Args:
        moment: (..., r, r), symmetric; V_out moves with O_in and V_in with O_out.
        overlap: (..., r, r).
        noise_variance: the noise's part of E V (sigma C / (w_g b))^2.
        noise_weight: 1 for a bias-corrected V, 1 - beta^t for a plain exponential average.
    """
    eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    floor = noise_variance * noise_weight
    if isinstance(floor, Tensor):
        floor = floor.to(moment)[..., None, None]
    signal = positive_part(moment - floor * eye)
    return overlap.mT @ signal @ overlap + floor * eye


def positive_part(matrix: Tensor) -> Tensor:
    """Return the symmetric matrix (..., r, r) with its negative eigenvalues set to zero."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    positive: Tensor = (vectors * values.clamp_min(0.0)[..., None, :]) @ vectors.mT
    return positive


def inverse_sqrt(matrix: Tensor, floor: float | Tensor = 0.0) -> Tensor:
    """Return ([matrix]_+ + floor I)^(-1/2), (..., r, r), symmetric positive definite.

    Args:
        matrix: (..., r, r), symmetric; negative eigenvalues count as zero.
        floor: > 0 number, or tensor over the leading axes.
    """
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    if isinstance(floor, Tensor):
        floor = floor.to(values)[..., None]
    root: Tensor = (vectors * (values.clamp_min(0.0) + floor).rsqrt()[..., None, :]) @ vectors.mT
    return root
