"""Decompositions of many small matrices at once: one kernel launch on a GPU, LAPACK on a CPU.

On a GPU with Triton nothing here synchronises with the host (`jacobi_cuda`); torch's own routines check a
status on the host for every call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

Tensor = torch.Tensor

_LARGEST: Final = 64
"""Largest side of a matrix that one program of the GPU kernel holds."""


class Spectrum(NamedTuple):
    """Eigenvalues (..., n), in no promised order, and eigenvectors (..., n, n) in columns."""

    values: Tensor
    vectors: Tensor

    def rebuilt(self, values: Tensor) -> Tensor:
        """Return the symmetric matrix with these eigenvectors and other eigenvalues."""
        return (self.vectors * values[..., None, :]) @ self.vectors.mT


class SmallSvd(NamedTuple):
    """u (..., n, n), s (..., n) descending and v (..., n, n) of matrix = u diag(s) v^T."""

    u: Tensor
    s: Tensor
    v: Tensor


def on_device(matrix: Tensor) -> bool:
    """Return whether the GPU kernel serves this matrix: a small one where Triton is installed."""
    return matrix.is_cuda and matrix.shape[-1] <= _LARGEST and importlib.util.find_spec("triton") is not None


def svd_many(matrices: Sequence[Tensor]) -> list[SmallSvd]:
    """Return the singular value decomposition of each batch of square matrices, in its own dtype.

    On a GPU, a column of u whose singular value is exactly 0 is zero.

    Args:
        matrices: (..., n, n) each; batches of one size share a launch.
    """
    if not all(on_device(matrix) for matrix in matrices):
        return [_lapack(matrix) for matrix in matrices]
    from fedlora.geometry.jacobi_cuda import svd

    sizes: dict[int, list[int]] = {}
    for number, matrix in enumerate(matrices):
        sizes.setdefault(matrix.shape[-1], []).append(number)
    out: list[SmallSvd | None] = [None] * len(matrices)
    for n, numbers in sizes.items():
        batches = [matrices[number].reshape(-1, n, n) for number in numbers]
        counts = [batch.shape[0] for batch in batches]
        parts = [torch.split(part.to(matrices[numbers[0]].dtype), counts) for part in svd(torch.cat(batches))]
        for number, u, s, v in zip(numbers, *parts, strict=True):
            shape = matrices[number].shape
            out[number] = SmallSvd(u.reshape(shape), s.reshape(shape[:-1]), v.reshape(shape))
    return [one for one in out if one is not None]


def spectra(matrices: Sequence[Tensor]) -> list[Spectrum]:
    """Return the eigendecomposition of each batch of symmetric positive semidefinite matrices.

    Args:
        matrices: (..., n, n) each, positive semidefinite up to rounding.
    """
    symmetric = [0.5 * (matrix + matrix.mT) for matrix in matrices]
    if all(on_device(matrix) for matrix in symmetric):
        return [Spectrum(found.s, found.v) for found in svd_many(symmetric)]
    return [Spectrum(*torch.linalg.eigh(matrix)) for matrix in symmetric]


def _lapack(matrix: Tensor) -> SmallSvd:
    u, s, vh = torch.linalg.svd(matrix)
    return SmallSvd(u, s, vh.mT)
