# mypy: ignore-errors
"""Singular value decompositions of many small matrices in one kernel launch (Triton), without synchronisation.

One-sided Jacobi in float64: pairs of columns are rotated until all are orthogonal; n/2 disjoint pairs at a time in a
round-robin order. One program holds one matrix. It finds small singular values to high relative accuracy, does not
square the condition number, and needs no status check or read-back, unlike the vendor's batched routines.

Reference: Demmel & Veselic, Jacobi's method is more accurate than QR, SIAM J. Matrix Anal. Appl. 13 (1992), Alg. 4.1.
"""

import torch
import triton
import triton.language as tl

MAX_SWEEPS = 20
TOLERANCE = 1e-15


@triton.jit
def _sweeps(x, v, N: tl.constexpr, SWEEPS: tl.constexpr, TOL: tl.constexpr):
    """Rotate rows of x (N x N, one column of the matrix in each row) and of v in place."""
    base = tl.program_id(0) * N * N
    pair = tl.arange(0, N // 2)[:, None]
    place = tl.arange(0, N)[None, :]
    sweep = 0
    worst = tl.full((), 1.0, tl.float64)
    while (sweep < SWEEPS) & (worst > TOL):
        worst = tl.full((), 0.0, tl.float64)
        for turn in range(N - 1):
            left = tl.where(pair == 0, N - 1, (turn + pair) % (N - 1))
            right = tl.where(pair == 0, turn, (turn + (N - 1) - pair) % (N - 1))
            first = base + tl.minimum(left, right) * N + place
            second = base + tl.maximum(left, right) * N + place
            a = tl.load(x + first)
            b = tl.load(x + second)
            va = tl.load(v + first)
            vb = tl.load(v + second)
            alpha = tl.sum(a * a, axis=1)
            beta = tl.sum(b * b, axis=1)
            gamma = tl.sum(a * b, axis=1)
            size = tl.sqrt(alpha) * tl.sqrt(beta)
            cosine = tl.where(size > 0.0, tl.abs(gamma) / tl.where(size > 0.0, size, 1.0), 0.0)
            turned = cosine > TOL
            zeta = (beta - alpha) / tl.where(turned, 2.0 * gamma, 1.0)
            tangent = tl.where(zeta >= 0.0, 1.0, -1.0) / (tl.abs(zeta) + tl.sqrt(1.0 + zeta * zeta))
            tangent = tl.where(turned, tangent, 0.0)
            c = 1.0 / tl.sqrt(1.0 + tangent * tangent)
            s = c * tangent
            swap = (alpha - tangent * gamma) < (beta + tangent * gamma)
            p = tl.where(swap, s, c)[:, None]
            q = tl.where(swap, c, -s)[:, None]
            r = tl.where(swap, c, s)[:, None]
            t = tl.where(swap, -s, c)[:, None]
            tl.debug_barrier()
            tl.store(x + first, p * a + q * b)
            tl.store(x + second, r * a + t * b)
            tl.store(v + first, p * va + q * vb)
            tl.store(v + second, r * va + t * vb)
            tl.debug_barrier()
            worst = tl.maximum(worst, tl.max(cosine, axis=0))
        sweep += 1


def svd(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (u, s, v) with matrices = u diag(s) v^T, singular values descending.

    Args:
        matrices: (batch, n, n), any floating dtype, on a CUDA device.

    Returns:
        float64; v is orthonormal; a column of u whose singular value is 0 is zero.
    """
    count, n = matrices.shape[0], matrices.shape[-1]
    size = max(4, triton.next_power_of_2(n))
    x = torch.zeros(count, size, size, dtype=torch.float64, device=matrices.device)
    x[:, :n, :n] = matrices.mT
    v = torch.eye(size, dtype=torch.float64, device=matrices.device).repeat(count, 1, 1)
    _sweeps[(count,)](x, v, N=size, SWEEPS=MAX_SWEEPS, TOL=TOLERANCE, num_warps=4)
    s, order = torch.linalg.vector_norm(x, dim=2).sort(dim=1, descending=True, stable=True)
    s, order = s[:, :n], order[:, :n]
    rows = order[..., None].expand(-1, -1, size)
    u = x.gather(1, rows)[..., :n] / torch.where(s > 0.0, s, 1.0)[..., None]
    return u.mT, s, v.gather(1, rows)[..., :n].mT
