"""PRISM's equations as the paper writes them, on factors; kept for comparison only.

Implements PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA, arXiv:2606.00944v1,
Eqs. 14 (lift), 15 (norm), 19 (noise), 22 (retraction), 24-26 (moments, direction, floors) and App. A.24
(Procrustes alignment), in the paper's letters: Z = A B^T with A (out, r), B (in, r), M = A^T A, N = B^T B.
PEFT's names: A = scaling * lora_B, B = lora_A^T.

Three differences from `prism_direction` that matter, all measured in the tests and the documentation:
the direction changes under (cA, B/c), which Lemma A.30 does not cover (it treats orthogonal gauges);
tr(N^-1), tr(M^-1) in the floors are not invariant, contrary to App. A.26; and N^-1 does not exist at
B = 0, LoRA's usual start. The *release* (clipped, noised tangent) is the same Gaussian mechanism.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedlora.geometry import inverse_sqrt, procrustes, truncate_product

Tensor = torch.Tensor


@dataclass(frozen=True)
class PaperState:
    """Factors and moments of Eqs. 24-26.

    Attributes:
        a: (..., out, r).
        b: (..., in, r).
        m_a: (..., out, r); m_b: (..., in, r): first moments.
        v_a: (..., r, r); v_b: (..., r, r): second moments.
    """

    a: Tensor
    b: Tensor
    m_a: Tensor
    m_b: Tensor
    v_a: Tensor
    v_b: Tensor

    @staticmethod
    def start(a: Tensor, b: Tensor) -> PaperState:
        """Return empty moments at Z = a b^T."""
        zero = torch.zeros(*a.shape[:-2], a.shape[-1], a.shape[-1], dtype=a.dtype, device=a.device)
        return PaperState(a, b, torch.zeros_like(a), torch.zeros_like(b), zero, zero)


def paper_lift(a: Tensor, b: Tensor, grad_a: Tensor, grad_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lifted tangent gradient of Eq. 14 from g_A = G B and g_B = G^T A."""
    out, inn = (
        grad_a @ torch.linalg.pinv(b.mT @ b, hermitian=True),
        grad_b @ torch.linalg.pinv(a.mT @ a, hermitian=True),
    )
    return out - 0.5 * _project(a, out), inn - 0.5 * _project(b, inn)


def paper_squared_norm(a: Tensor, b: Tensor, lift_a: Tensor, lift_b: Tensor) -> Tensor:
    """Return ||lift_a b^T + a lift_b^T||_F^2 by Eq. 15, (...,)."""
    cross = (a.mT @ lift_a) @ (b.mT @ lift_b)
    return (
        ((lift_a.mT @ lift_a) * (b.mT @ b)).sum((-2, -1))
        + ((lift_b.mT @ lift_b) * (a.mT @ a)).sum((-2, -1))
        + 2.0 * torch.diagonal(cross, dim1=-2, dim2=-1).sum(-1)
    )


def paper_noise(a: Tensor, b: Tensor, normal_a: Tensor, normal_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor noise of Eq. 19 from i.i.d. standard normals of the factors' shapes."""
    xi_a = (normal_a - _project(a, normal_a)) @ inverse_sqrt(b.mT @ b)
    return xi_a, normal_b @ inverse_sqrt(a.mT @ a)


def paper_step(
    state: PaperState,
    lift_a: Tensor,
    lift_b: Tensor,
    *,
    noise_variance: float,
    beta1: float,
    beta2: float,
    lr: float,
    align: bool = True,
) -> PaperState:
    """Return the state after Eqs. 24-26 and the retraction of Eq. 22.

    Args:
        state: factors and moments.
        lift_a: noised lift, averaged (Delta A^dp of Eq. 17).
        lift_b: likewise.
        noise_variance: (sigma C / b)^2.
        beta1: first moment's decay (the paper gives no bias correction).
        beta2: second moment's decay.
        lr: eta.
        align: rotate the new balanced factors onto the old ones (App. A.24), so that moments keep their meaning.
    """
    r = state.a.shape[-1]
    moved = replace(
        state,
        m_a=torch.lerp(lift_a, state.m_a, beta1),
        m_b=torch.lerp(lift_b, state.m_b, beta1),
        v_a=torch.lerp(lift_a.mT @ lift_a / lift_a.shape[-2], state.v_a, beta2),
        v_b=torch.lerp(lift_b.mT @ lift_b / lift_b.shape[-2], state.v_b, beta2),
    )
    floor_a = noise_variance * _trace_inverse(state.b) / r
    floor_b = noise_variance * _trace_inverse(state.a) / r
    u_a = moved.m_a @ inverse_sqrt(moved.v_a, floor_a)
    u_b = moved.m_b @ inverse_sqrt(moved.v_b, floor_b)
    left = torch.cat([state.a - lr * u_a, -lr * state.a], dim=-1)
    frames, _ = truncate_product(left, torch.cat([state.b, u_b], dim=-1).mT, r)
    root = torch.diagonal(frames.core, dim1=-2, dim2=-1).sqrt()[..., None, :]
    a, b = frames.q_out * root, frames.q_in * root
    if align:
        rotation = procrustes(torch.cat([a, b], dim=-2), torch.cat([state.a, state.b], dim=-2))
        a, b = a @ rotation, b @ rotation
    return replace(moved, a=a, b=b)


def _project(basis: Tensor, x: Tensor) -> Tensor:
    """Return basis (basis^T basis)^+ basis^T x."""
    projected: Tensor = basis @ (torch.linalg.pinv(basis.mT @ basis, hermitian=True) @ (basis.mT @ x))
    return projected


def _trace_inverse(factor: Tensor) -> Tensor:
    """Return tr((factor^T factor)^-1), (...,); infinite where the factor is rank-deficient."""
    trace: Tensor = (1.0 / torch.linalg.svdvals(factor).square()).sum(-1)
    return trace
