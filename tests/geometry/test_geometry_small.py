"""Many small decompositions: LAPACK on a CPU; the GPU kernel through Triton's interpreter where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from fedlora.geometry import (
    Frames,
    Tangent,
    random_frames,
    retract,
    retract_gram,
    retract_many,
    spectra,
    svd_many,
)

KERNEL = """
import torch
from fedlora.geometry.jacobi_cuda import svd
torch.manual_seed(0)
for n in (3, 6):
    a = torch.randn(4, n, n, dtype=torch.float64)
    a[1] = a[1][:, :1] @ a[1][:1, :]
    a[2] *= torch.logspace(0, -9, n, dtype=torch.float64)
    a[3] = 0.0
    u, s, v = svd(a)
    eye = torch.eye(n, dtype=torch.float64)
    assert (u @ torch.diag_embed(s) @ v.mT - a).abs().max() < 1e-13
    assert (v.mT @ v - eye).abs().max() < 1e-13
    assert (u[2].mT @ u[2] - eye).abs().max() < 1e-13
    assert torch.allclose(s, torch.linalg.svdvals(a), rtol=1e-12, atol=1e-14)
    assert (s[:, :-1] >= s[:, 1:]).all()
print("exact")
"""


def test_jacobi_kernel_is_exact_for_rank_deficient_graded_and_zero_matrices():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "exact", done.stderr[-2000:]


def test_svd_and_spectra_of_several_sizes_rebuild_their_matrices():
    torch.manual_seed(0)
    matrices = [torch.randn(2, 3, n, n, dtype=torch.float64) for n in (4, 7, 4)]
    for matrix, found in zip(matrices, svd_many(matrices), strict=True):
        assert torch.allclose((found.u * found.s[..., None, :]) @ found.v.mT, matrix, atol=1e-12)
    grams = [m.mT @ m for m in matrices]
    for gram, spectrum in zip(grams, spectra(grams), strict=True):
        assert torch.allclose(spectrum.rebuilt(spectrum.values), gram, atol=1e-11)


def test_retract_many_and_gram_equal_one_at_a_time():
    torch.manual_seed(0)
    points, tangents = [], []
    for out, inn in ((24, 18), (40, 18)):
        start = random_frames(out, inn, 3, seed=out, batch=(2,))
        frames = Frames(start.q_out, torch.randn(2, 3, 3), start.q_in)
        g = torch.randn(2, out, inn)
        points.append(frames)
        tangents.append(Tangent(g @ frames.q_in, g.mT @ frames.q_out))
    together = retract_many(points, tangents, -0.1)
    for frames, tangent, new in zip(points, tangents, together, strict=True):
        assert torch.allclose(new.dense(), retract(frames, tangent, -0.1).dense(), atol=1e-5)
        assert torch.allclose(new.dense(), retract_gram(frames, tangent, -0.1).dense(), atol=1e-5)
