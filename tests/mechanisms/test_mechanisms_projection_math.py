"""Noisy projection: the noise's law, fresh projections, folding and export."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedlora.adapters.projection_recipe import new_projection_seed, projection_from_seed
from fedlora.errors import PrivacyParameterError, RankMismatchError
from fedlora.mechanisms.projection_math import (
    FoldedUpdate,
    check_unclipped,
    noise_factor,
    projected_noise,
    projection_from_normals,
)

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize(("rank", "inp"), [(1, 5), (4, 12), (6, 6)])
def test_noise_factor_is_a_square_root_of_the_gram_matrix(rank: int, inp: int) -> None:
    a = projection_from_normals(normal(2, rank, inp))
    r = noise_factor(a)
    assert torch.allclose(r.mT @ r, a @ a.mT, atol=1e-12)


def whiten_statistic(noise: torch.Tensor, a: torch.Tensor) -> float:
    """z-score of the total Mahalanobis energy of rows under N(0, A A^T)."""
    gram = a @ a.mT
    rows = noise.reshape(-1, a.shape[0])
    energy = (rows @ torch.linalg.inv(gram) * rows).sum().item()
    freedom = rows.numel()
    return (energy - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("scale", [1.0, 0.95, 1.05])
def test_projected_noise_has_rows_of_the_stated_law(scale: float) -> None:
    a = projection_from_normals(normal(4, 12, seed=1))
    noise = projected_noise(normal(5000, 8, 4, seed=2), a, 0.7 * scale) / 0.7
    assert (abs(whiten_statistic(noise, a)) < 4.5) == (scale == 1.0)
    if scale == 1.0:
        rows = noise.reshape(-1, 4)
        covariance = (rows.mT @ rows / len(rows)).numpy()
        assert np.abs(covariance - (a @ a.mT).numpy()).max() < 0.08


def test_the_transposed_factor_would_have_another_law() -> None:
    """Omega L instead of Omega L^T is wrong, and the test above sees it."""
    a = projection_from_normals(normal(4, 12, seed=1))
    wrong = normal(5000, 8, 4, seed=2) @ noise_factor(a).mT
    assert abs(whiten_statistic(wrong, a)) > 10


def test_it_equals_the_noise_of_the_full_matrix_in_law() -> None:
    a = projection_from_normals(normal(3, 9, seed=1))
    full = normal(20000, 9, seed=5) @ a.mT
    short = projected_noise(normal(20000, 3, seed=6), a)
    assert torch.allclose(full.mT @ full, short.mT @ short, atol=0.04 * 20000 * (a @ a.mT).max().item())


def test_shared_projections_repeat_for_a_seed_and_differ_by_module_and_seed() -> None:
    seed = new_projection_seed()
    assert len(seed) == 64
    assert seed != new_projection_seed()
    a = projection_from_seed(seed, "q", 4, 32)
    assert torch.equal(a, projection_from_seed(seed, "q", 4, 32))
    assert not torch.equal(a, projection_from_seed(seed, "v", 4, 32))
    many = projection_from_seed(seed, "wide", 16, 5000).double()
    assert many.var().item() == pytest.approx(1 / 16, rel=0.03)


@pytest.mark.parametrize("seed", ["", "42", "zz" * 32, "ab" * 31])
def test_guessable_projection_seeds_are_refused(seed: str) -> None:
    with pytest.raises(PrivacyParameterError, match="64 hex"):
        projection_from_seed(seed, "q", 4, 32)


@pytest.mark.parametrize(("rank", "inp"), [(9, 8), (0, 8), (17, 16)])
def test_rank_above_the_width_is_refused(rank: int, inp: int) -> None:
    with pytest.raises(RankMismatchError, match="singular"):
        projection_from_normals(torch.zeros(rank, inp))


@pytest.mark.parametrize("cap", [None, 6, 3])
def test_folding_tracks_the_weights_and_export_states_its_error(cap: int | None) -> None:
    folded, dense = FoldedUpdate.empty(10, 8, cap), torch.zeros(10, 8, dtype=F64)
    for step in range(6):
        release, a = normal(10, 2, seed=2 * step), projection_from_normals(normal(2, 8, seed=2 * step + 1))
        folded = folded.fold(release, a, 0.1)
        dense -= 0.1 * release @ a
    assert folded.steps == 6
    for rank in (1, 3):
        out = folded.export(rank, scaling=2.0)
        error = (2.0 * out.lora_b @ out.lora_a - dense).norm().item()
        assert error <= out.truncation_error * (1 + 1e-9)
        assert out.lora_b.shape == (10, rank)
        if cap is None:
            best = torch.linalg.svdvals(dense)[rank:].norm().item()
            assert error == pytest.approx(best, rel=1e-9)
            assert out.relative_error == pytest.approx(best / dense.norm().item(), rel=1e-9)
    assert FoldedUpdate.empty(10, 8).export(2, 1.0).relative_error == 0.0


@pytest.mark.parametrize("bound", [None, 0.0, -1.0, math.nan, math.inf])
def test_projection_without_clipping_needs_a_stated_bound(bound: float | None) -> None:
    with pytest.raises(PrivacyParameterError, match="gradient_bound"):
        check_unclipped(bound)
    assert check_unclipped(2.5) == 2.5


def test_a_projection_known_in_advance_voids_the_amplification() -> None:
    """The adversary statement: if A is known before W is fixed, the gradient can lie in A's row space."""
    r, d, draws = 4, 64, 400
    victim = normal(1, d, seed=9)
    victim /= victim.norm()
    late = projection_from_normals(normal(draws, r, d, seed=10))
    early = projection_from_normals(normal(draws, r, d, seed=11))
    aligned = torch.linalg.qr(early.mT).Q[..., :1].mT  # a gradient chosen to lie in the known row space

    def kept(gradient: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """mu sigma^2 = || g A^T (A A^T)^(-1/2) ||^2: the squared signal-to-noise ratio of the release."""
        projected = gradient @ a.mT
        return (projected @ torch.linalg.inv(a @ a.mT) @ projected.mT).flatten()

    assert kept(victim, late).mean().item() == pytest.approx(r / d, rel=0.15)  # Beta(r/2, (d-r)/2)
    assert kept(aligned, early).min().item() == pytest.approx(1.0, abs=1e-9)
