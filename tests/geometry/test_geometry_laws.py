"""Laws of frames, tangent vectors, retraction, products and transport."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlora.geometry as geo
from fedlora.errors import NotOnManifoldError, RankMismatchError

F64 = torch.float64
SHAPES = [(12, 9, 3), (9, 12, 3), (5, 11, 4), (7, 5, 5), (6, 6, 1)]  # (out, in, r); out < 2r included


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def point(out: int, inp: int, r: int, seed: int = 0) -> geo.Frames:
    return geo.frames_from_factors(normal(out, r, seed=seed), normal(r, inp, seed=seed + 1))


@pytest.mark.parametrize(("out", "inp", "r"), SHAPES)
@pytest.mark.parametrize("kind", ["full", "zero_b", "rank_one", "batched"])
def test_frames_from_factors_are_orthonormal_and_exact(out: int, inp: int, r: int, kind: str) -> None:
    lead = (2, 3) if kind == "batched" else ()
    b, a = normal(*lead, out, r), normal(*lead, r, inp, seed=1)
    if kind == "zero_b":
        b = torch.zeros_like(b)
    if kind == "rank_one":
        b = b[:, :1] @ torch.ones(1, r, dtype=F64)
    frames = geo.frames_from_factors(b, a, 2.0)
    assert geo.check_frames(frames) < 1e-12
    assert torch.allclose(frames.dense(), 2.0 * b @ a, atol=1e-12)
    for balanced in (False, True):
        b2, a2 = geo.frames_to_factors(frames, 2.0, balanced=balanced)
        assert torch.allclose(2.0 * b2 @ a2, 2.0 * b @ a, atol=1e-12)


def test_balanced_factors_have_equal_gram_matrices() -> None:
    b, a = geo.frames_to_factors(point(12, 9, 3), 0.5, balanced=True)
    assert torch.allclose(b.mT @ b, a @ a.mT, atol=1e-12)


def test_rank_above_the_matrix_and_mismatched_factors_are_refused() -> None:
    with pytest.raises(RankMismatchError, match="rank 6"):
        geo.frames_from_factors(normal(5, 6), normal(6, 9))
    with pytest.raises(RankMismatchError, match="columns"):
        geo.frames_from_factors(normal(5, 3), normal(2, 9))


@pytest.mark.parametrize("fault", ["scaled", "repeated", "nan"])
def test_frames_off_the_manifold_are_refused_with_their_residual(fault: str) -> None:
    frames = point(12, 9, 3)
    q = frames.q_in.clone()
    if fault == "scaled":
        q = q * 1.01
    elif fault == "repeated":
        q[:, 1] = q[:, 0]
    else:
        q[0, 0] = math.nan
    with pytest.raises(NotOnManifoldError) as caught:
        geo.check_frames(geo.Frames(frames.q_out, frames.core, q))
    assert not caught.value.residual < 1e-3


def test_rounded_frames_are_repaired_without_changing_z() -> None:
    frames = point(12, 9, 3)
    rounded = frames.to(torch.bfloat16).to(F64)
    with pytest.raises(NotOnManifoldError):
        geo.check_frames(rounded)
    repaired = geo.orthonormalize(rounded)
    assert geo.check_frames(repaired) < 1e-12
    assert torch.allclose(repaired.dense(), rounded.dense(), atol=1e-12)


@pytest.mark.parametrize(("out", "inp", "r"), SHAPES)
def test_projection_is_the_orthogonal_projector_and_its_norm_is_right(out: int, inp: int, r: int) -> None:
    frames, g, h = point(out, inp, r), normal(out, inp, seed=5), normal(out, inp, seed=6)
    t = geo.project_dense(frames, g)
    dense = geo.tangent_dense(frames, t)
    p_out, p_in = frames.q_out @ frames.q_out.mT, frames.q_in @ frames.q_in.mT
    assert torch.allclose(dense, g @ p_in + p_out @ g - p_out @ g @ p_in, atol=1e-12)
    assert torch.allclose(geo.tangent_dense(frames, geo.project_dense(frames, dense)), dense, atol=1e-12)
    assert geo.tangent_squared_norm(frames, t).item() == pytest.approx(dense.square().sum().item(), rel=1e-12)
    other = geo.project_dense(frames, h)
    assert geo.tangent_inner(frames, t, other).item() == pytest.approx((dense * h).sum().item(), abs=1e-10)
    assert geo.core_mismatch(frames, t).item() < 1e-12


def test_projection_of_a_product_and_of_a_change_equal_the_dense_ones() -> None:
    base, new = point(12, 9, 3), point(12, 9, 4, seed=9)
    left, right = normal(12, 5, seed=2), normal(5, 9, seed=3)
    a, b = geo.project_product(base, left, right), geo.project_dense(base, left @ right)
    assert torch.allclose(a.x_out, b.x_out)
    assert torch.allclose(a.x_in, b.x_in)
    t, dropped = geo.project_change(base, new)
    change = new.dense() - base.dense()
    projected = geo.tangent_dense(base, t)
    assert torch.allclose(projected, geo.tangent_dense(base, geo.project_dense(base, change)), atol=1e-12)
    assert dropped.item() == pytest.approx((change - projected).norm().item(), rel=1e-10)


@pytest.mark.parametrize(("out", "inp", "r"), SHAPES)
def test_lift_and_even_split_are_inverse(out: int, inp: int, r: int) -> None:
    frames = point(out, inp, r)
    t = geo.project_dense(frames, normal(out, inp, seed=4))
    back = geo.tangent_from_lift(frames, *geo.split_core(frames, t))
    assert torch.allclose(back.x_out, t.x_out, atol=1e-12)
    assert torch.allclose(back.x_in, t.x_in, atol=1e-12)
    u, v = normal(out, r, seed=7), normal(inp, r, seed=8)
    lifted = geo.tangent_from_lift(frames, u, v)
    assert geo.core_mismatch(frames, lifted).item() < 1e-12
    assert torch.allclose(
        geo.tangent_dense(frames, lifted), u @ frames.q_in.mT + frames.q_out @ v.mT, atol=1e-12
    )


def tangents(frames: geo.Frames, kind: str) -> geo.Tangent:
    out, inp = frames.q_out.shape[-2], frames.q_in.shape[-2]
    g = normal(out, inp, seed=11)
    if kind == "zero":
        g = torch.zeros_like(g)
    if kind == "rank_one":
        g = normal(out, 1, seed=12) @ normal(1, inp, seed=13)
    if kind == "inside":
        g = frames.q_out @ normal(frames.rank, frames.rank, seed=14) @ frames.q_in.mT
    return geo.project_dense(frames, g)


@pytest.mark.parametrize(("out", "inp", "r"), SHAPES)
@pytest.mark.parametrize("kind", ["generic", "zero", "rank_one", "inside"])
@pytest.mark.parametrize("core", ["full", "zero", "equal", "singular"])
def test_retraction_is_the_truncated_svd_on_the_manifold(
    out: int, inp: int, r: int, kind: str, core: str
) -> None:
    frames = point(out, inp, r)
    cores = {
        "full": frames.core,
        "zero": torch.zeros_like(frames.core),
        "equal": torch.eye(r, dtype=F64),
        "singular": torch.ones(r, r, dtype=F64),
    }
    frames = geo.Frames(frames.q_out, cores[core], frames.q_in)
    t = tangents(frames, kind)
    new = geo.retract(frames, t, -0.3)
    assert geo.check_frames(new) < 1e-12
    target = frames.dense() - 0.3 * geo.tangent_dense(frames, t)
    s = torch.linalg.svdvals(target)
    best = s[r:].square().sum().sqrt().item()
    assert (new.dense() - target).norm().item() == pytest.approx(best, abs=1e-10)


@pytest.mark.parametrize(("out", "inp", "r"), [s for s in SHAPES if min(s[0], s[1]) >= 2 * s[2]])
@pytest.mark.parametrize("kind", ["generic", "zero", "rank_one", "inside"])
@pytest.mark.parametrize("core", ["full", "zero", "equal", "singular"])
def test_gram_retraction_in_float32_stays_on_the_manifold_and_near_the_best(
    out: int, inp: int, r: int, kind: str, core: str
) -> None:
    frames = point(out, inp, r)
    cores = {"full": frames.core, "zero": torch.zeros(r, r, dtype=F64), "equal": torch.eye(r, dtype=F64),
             "singular": torch.ones(r, r, dtype=F64)}  # fmt: skip
    frames = geo.Frames(frames.q_out, cores[core], frames.q_in)
    t = tangents(frames, kind)
    single = frames.to(torch.float32)
    new = geo.retract_gram(single, geo.Tangent(t.x_out.float(), t.x_in.float()), -0.3)
    assert geo.check_frames(new) < 1e-5
    target = frames.dense() - 0.3 * geo.tangent_dense(frames, t)
    best = torch.linalg.svdvals(target)[r:].square().sum().sqrt().item()
    assert (new.dense().double() - target).norm().item() <= best + 3e-6 * (1 + target.norm().item())


def test_gram_retraction_batches_and_handles_out_below_two_r() -> None:
    batch = geo.frames_from_factors(normal(4, 5, 4), normal(4, 4, 11, seed=1)).to(torch.float32)
    t = geo.project_dense(batch, normal(4, 5, 11, seed=2).float())
    new = geo.retract_gram(batch, t, torch.linspace(-0.2, 0.0, 4))
    assert geo.check_frames(new) < 1e-5
    want = geo.retract(batch, t, torch.linspace(-0.2, 0.0, 4))
    assert torch.allclose(new.dense(), want.dense(), atol=2e-5)


def test_retraction_is_of_first_order() -> None:
    frames = point(12, 9, 3)
    t = tangents(frames, "generic")
    dense = geo.tangent_dense(frames, t)
    errors = []
    for step in (1e-2, 1e-3, 1e-4):
        for retract in (geo.retract, geo.retract_subspace):
            errors.append((retract(frames, t, step).dense() - frames.dense() - step * dense).norm().item())
    assert errors[2] < 2e-2 * errors[0]
    assert errors[4] < 2e-2 * errors[2]
    assert errors[5] < 2e-2 * errors[3]


def test_a_separate_qr_of_the_block_would_leave_the_manifold() -> None:
    """The joint QR is what keeps S = 0 with a rank-one gradient orthonormal."""
    frames = geo.random_frames(16, 12, 4, seed=3)
    g = normal(16, 1, dtype=torch.float32) @ normal(1, 12, seed=2, dtype=torch.float32)
    t = geo.project_dense(frames, g)
    separate = torch.linalg.qr(geo.complement(frames.q_out, t.x_out)).Q
    assert geo.orthonormality_residual(torch.cat([frames.q_out, separate], -1)).item() > 0.1
    new = geo.retract(frames, t, -1.0)
    assert geo.check_frames(new) < 1e-5


@pytest.mark.parametrize("retract", [geo.retract, geo.retract_subspace])
def test_retraction_batches_over_modules(retract: object) -> None:
    batch = geo.frames_from_factors(normal(5, 12, 3), normal(5, 3, 9, seed=1))
    t = geo.project_dense(batch, normal(5, 12, 9, seed=2))
    steps = torch.linspace(-0.2, 0.0, 5, dtype=F64)
    new = retract(batch, t, steps)  # type: ignore[operator]
    for i in range(5):
        one = geo.Frames(batch.q_out[i], batch.core[i], batch.q_in[i])
        single = retract(one, geo.Tangent(t.x_out[i], t.x_in[i]), float(steps[i]))  # type: ignore[operator]
        assert torch.allclose(new.dense()[i], single.dense(), atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(SHAPES), st.floats(0.01, 3.0))
def test_retraction_does_not_depend_on_the_rotation_of_the_frames(
    seed: int, shape: tuple[int, int, int], step: float
) -> None:
    out, inp, r = shape
    frames = point(out, inp, r, seed=seed % 997)
    rotations = [torch.linalg.qr(normal(r, r, seed=seed + k)).Q for k in (1, 2)]
    turned = geo.rotate_frames(frames, *rotations)
    assert torch.allclose(turned.dense(), frames.dense(), atol=1e-12)
    g = normal(out, inp, seed=seed + 3)
    a = geo.retract(frames, geo.project_dense(frames, g), -step).dense()
    b = geo.retract(turned, geo.project_dense(turned, g), -step).dense()
    assert torch.allclose(a, b, atol=1e-9)


@pytest.mark.parametrize("gauge", [0.25, 4.0, "general"])
def test_factors_in_every_gauge_give_the_same_point_and_tangent_space(gauge: object) -> None:
    b, a = normal(12, 3), normal(3, 9, seed=1)
    r = normal(3, 3, seed=2) if gauge == "general" else gauge
    b2, a2 = geo.gauge_factors(b, a, r)  # type: ignore[arg-type]
    one, two = geo.frames_from_factors(b, a), geo.frames_from_factors(b2, a2)
    g = normal(12, 9, seed=3)
    assert torch.allclose(one.dense(), two.dense(), atol=1e-12)
    dense = [geo.tangent_dense(f, geo.project_dense(f, g)) for f in (one, two)]
    assert torch.allclose(*dense, atol=1e-12)


def test_random_frames_repeat_and_differ_by_seed() -> None:
    a, b, c = (geo.random_frames(20, 8, 4, seed=s, batch=(2,)) for s in (1, 1, 2))
    assert torch.equal(a.q_out, b.q_out)
    assert not torch.allclose(a.q_in, c.q_in)
    assert a.core.abs().max().item() == 0.0
    assert geo.check_frames(a) < 1e-5


def test_transported_tangent_is_the_projection_of_the_dense_vector() -> None:
    old, new = point(12, 9, 3), point(12, 9, 3, seed=20)
    t = tangents(old, "generic")
    moved = geo.transport_tangent(old, new, t)
    want = geo.project_dense(new, geo.tangent_dense(old, t))
    assert torch.allclose(moved.x_out, want.x_out, atol=1e-12)
    assert torch.allclose(moved.x_in, want.x_in, atol=1e-12)


def test_second_moment_keeps_the_noise_part_and_stays_positive() -> None:
    old, new = point(12, 9, 3), point(12, 9, 3, seed=20)
    _, overlap = geo.frame_overlap(old, new)
    noise = 0.7
    pure = noise * torch.eye(3, dtype=F64)
    assert torch.allclose(geo.transport_second_moment(pure, overlap, noise), pure)
    assert torch.linalg.eigvalsh(overlap.mT @ pure @ overlap).min() < 0.5 * noise  # what the plain form does
    x = normal(3, 3, seed=4)
    moved = geo.transport_second_moment(x @ x.mT + pure, overlap, noise)
    assert torch.allclose(moved, overlap.mT @ x @ x.mT @ overlap + pure, atol=1e-12)
    assert torch.linalg.eigvalsh(geo.transport_second_moment(0.1 * pure, overlap, noise)).min() >= 0.699


def test_inverse_square_root() -> None:
    x = normal(2, 4, 4)
    m = x @ x.mT
    root = geo.inverse_sqrt(m, 0.3)
    want = torch.linalg.inv(m + 0.3 * torch.eye(4, dtype=F64))
    assert torch.allclose(root @ root, want, atol=1e-10)


def test_procrustes_finds_the_rotation_and_keeps_the_product() -> None:
    b, a = normal(12, 3), normal(3, 9, seed=1)
    q = torch.linalg.qr(normal(3, 3, seed=2)).Q
    aligned_b, aligned_a = geo.align_factors(b @ q, q.mT @ a, b)
    assert torch.allclose(aligned_b, b, atol=1e-12)
    assert torch.allclose(aligned_b @ aligned_a, b @ a, atol=1e-12)


def products(k: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float], list[float]]:
    ranks = [1 + i % 3 for i in range(k)]
    bs = [normal(12, r, seed=2 * i) for i, r in enumerate(ranks)]
    as_ = [normal(r, 9, seed=2 * i + 1) for i, r in enumerate(ranks)]
    return bs, as_, [1.0 / k] * k, [0.5 + i for i in range(k)]


def test_stacked_products_are_exact_and_truncate_to_the_dense_svd() -> None:
    bs, as_, w, s = products(5)
    dense = sum(wi * si * b @ a for b, a, wi, si in zip(bs, as_, w, s, strict=True))
    assert isinstance(dense, torch.Tensor)
    left, right = geo.stack_products(bs, as_, w, s, output_scaling=4.0)
    assert torch.allclose(4.0 * left @ right, dense, atol=1e-12)
    frames, dropped = geo.truncate_product(left * 4.0, right, 3)
    u, sv, vh = torch.linalg.svd(dense)
    assert torch.allclose(frames.dense(), u[:, :3] * sv[:3] @ vh[:3], atol=1e-10)
    assert dropped.item() == pytest.approx(sv[3:].norm().item(), rel=1e-10)
    assert geo.product_norm(left, right).item() == pytest.approx(dense.norm().item() / 4, rel=1e-12)
    distance = geo.product_distance(left * 4.0, right, frames.q_out @ frames.core, frames.q_in.mT)
    assert distance.item() == pytest.approx(dropped.item(), rel=1e-8)


def test_product_of_smaller_rank_is_completed_to_orthonormal_frames() -> None:
    frames, dropped = geo.truncate_product(normal(12, 2), normal(2, 9, seed=1), 5)
    assert geo.check_frames(frames) < 1e-12
    assert dropped.item() == 0.0
    assert torch.allclose(frames.dense(), normal(12, 2) @ normal(2, 9, seed=1), atol=1e-12)


@pytest.mark.parametrize("max_rank", [2, 4, 40])
def test_incremental_merge_stays_within_its_error_bound(max_rank: int) -> None:
    bs, as_, w, s = products(8)
    dense = sum(wi * si * b @ a for b, a, wi, si in zip(bs, as_, w, s, strict=True))
    assert isinstance(dense, torch.Tensor)
    sketch = geo.ProductSketch.empty(12, 9, max_rank)
    for b, a, wi, si in zip(bs, as_, w, s, strict=True):
        sketch = sketch.merge(wi * si * b, a)
    frames, bound = sketch.truncate(2)
    error = (frames.dense() - dense).norm().item()
    assert error <= bound * (1 + 1e-12)
    assert sketch.u.shape[1] <= max_rank
    if max_rank == 40:
        best = torch.linalg.svdvals(dense)[2:].norm().item()
        assert error == pytest.approx(best, rel=1e-10)
        assert sketch.error_bound < 1e-12


@pytest.mark.parametrize("scale", [1.0, 0.95, 1.05])
def test_tangent_noise_is_isotropic_with_the_stated_energy(scale: float) -> None:
    """Coordinates in an orthonormal basis of the tangent space are i.i.d. N(0, stddev^2); 5 % off is seen."""
    out, inp, r, draws = 8, 6, 2, 4000
    frames = point(out, inp, r)
    batch = geo.Frames(*(t.expand(draws, *t.shape) for t in (frames.q_out, frames.core, frames.q_in)))
    t = geo.tangent_noise(batch, 0.5 * scale, generator=torch.Generator().manual_seed(7))
    dimension = geo.tangent_dimension(out, inp, r)
    energy = geo.tangent_squared_norm(batch, t) / 0.25
    # chi^2 with draws * dimension degrees of freedom
    z = (energy.sum().item() - draws * dimension) / math.sqrt(2 * draws * dimension)
    assert (abs(z) < 4.5) == (scale == 1.0)
    assert geo.core_mismatch(batch, t).max().item() < 1e-12
    if scale == 1.0:
        dense = geo.tangent_dense(batch, t).reshape(draws, -1) / 0.5
        projector = np.stack(
            [
                geo.tangent_dense(frames, geo.project_dense(frames, e.reshape(out, inp))).reshape(-1).numpy()
                for e in torch.eye(out * inp, dtype=F64)
            ]
        )
        covariance = (dense.mT @ dense / draws).numpy()
        assert np.abs(covariance - projector).max() < 6 / math.sqrt(draws)
        for block in (t.x_out, t.x_in):
            assert block.var().item() == pytest.approx(0.25, rel=0.03)


def test_two_independent_cores_would_fail_the_energy_test() -> None:
    frames = point(8, 6, 2)
    draws = 4000
    batch = geo.Frames(*(t.expand(draws, *t.shape) for t in (frames.q_out, frames.core, frames.q_in)))
    a = geo.tangent_noise(batch, 1.0, generator=torch.Generator().manual_seed(1))
    b = geo.tangent_noise(batch, 1.0, generator=torch.Generator().manual_seed(2))
    assert geo.core_mismatch(batch, geo.Tangent(a.x_out, b.x_in)).mean().item() > 1.0
