"""PRISM's direction in frames: gauge invariance, covariance under rotations, and the paper's form for comparison."""

from __future__ import annotations

import pytest
import torch

import fedlora.geometry as geo
from fedlora.errors import ConfigError
from fedlora.mechanisms.diagnostics_gauge import GaugeProblem, GaugeSettings, gauge_sensitivity
from fedlora.mechanisms.prism_direction import (
    PrismMoments,
    precondition,
    transport_moments,
    update_moments,
)
from fedlora.mechanisms.prism_paper import (
    PaperState,
    paper_lift,
    paper_noise,
    paper_squared_norm,
    paper_step,
)

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


@pytest.mark.parametrize("mechanism", ["prism", "prism-none"])
@pytest.mark.parametrize("zero_b", [False, True])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_prism_gives_the_same_z_from_every_gauge_over_20_steps(
    mechanism: str, zero_b: bool, dtype: torch.dtype, limit: float
) -> None:
    report = gauge_sensitivity(mechanism, GaugeSettings(dtype=dtype, zero_b=zero_b))  # type: ignore[arg-type]
    assert len(report.per_gauge) == 7
    assert report.max_relative_difference < limit


def test_the_papers_factors_and_factor_noise_depend_on_the_gauge() -> None:
    paper = gauge_sensitivity("prism-paper", GaugeSettings(steps=1))
    assert min(paper.first_step.values()) > 0.5
    assert max(paper.first_step.values()) > 2.0
    assert gauge_sensitivity("factor", GaugeSettings(steps=1)).max_relative_difference > 1.0


def test_the_gauge_diagnostic_refuses_unknown_mechanisms() -> None:
    with pytest.raises(ConfigError, match="prism-none"):
        gauge_sensitivity("adam")  # type: ignore[arg-type]


def test_the_gauge_problem_has_the_gradients_of_its_loss() -> None:
    problem = GaugeProblem.build(GaugeSettings(steps=1))
    z = [b @ a for b, a in problem.factors]
    grads = problem.record_gradients(z)
    for record in (0, 7):
        leaf = [t.clone().requires_grad_() for t in z]
        hidden = torch.tanh(problem.inputs[record] @ (problem.weights[0] + leaf[0]).mT)
        loss = (hidden @ (problem.weights[1] + leaf[1]).mT - problem.targets[record]).square().mean()
        for got, want in zip(grads, torch.autograd.grad(loss, leaf), strict=True):
            assert torch.allclose(got[record], want, atol=1e-14)


def run(frames: geo.Frames, tangents: list[torch.Tensor], variance: float) -> geo.Frames:
    moments = PrismMoments.zeros(frames)
    for ambient in tangents:
        moments = update_moments(moments, frames, geo.project_dense(frames, ambient), beta1=0.9, beta2=0.99)
        step = precondition(moments, frames, beta1=0.9, beta2=0.99, noise_variance=variance)
        new = geo.retract(frames, step, -0.05)
        moments = transport_moments(moments, frames, new, beta2=0.99, noise_variance=variance)
        frames = new
    return frames


@pytest.mark.parametrize("start", ["full", "zero", "rank_one"])
def test_direction_is_covariant_under_rotations_of_both_frames(start: str) -> None:
    frames = geo.frames_from_factors(normal(14, 3), normal(3, 9, seed=1))
    if start != "full":
        core = torch.zeros_like(frames.core)
        core[0, 0] = 1.0 if start == "rank_one" else 0.0
        frames = geo.Frames(frames.q_out, core, frames.q_in)
    rotations = [torch.linalg.qr(normal(3, 3, seed=s)).Q for s in (5, 6)]
    ambient = [normal(14, 9, seed=s) for s in range(20, 26)]
    one = run(frames, ambient, 1e-2)
    two = run(geo.rotate_frames(frames, *rotations), ambient, 1e-2)
    assert torch.allclose(one.dense(), two.dense(), atol=1e-10)
    assert geo.check_frames(one) < 1e-12


def test_pure_noise_moves_each_coordinate_by_about_the_learning_rate_and_no_more() -> None:
    """The floor at the noise's own variance bounds the gain by 1 / s (PRISM, Thm 3.5)."""
    frames = geo.frames_from_factors(normal(60, 4), normal(4, 40, seed=1))
    s = 0.3
    noise = geo.tangent_noise(frames, s, generator=torch.Generator().manual_seed(3))
    moments = update_moments(PrismMoments.zeros(frames), frames, noise, beta1=0.0, beta2=0.9)
    step = precondition(moments, frames, beta1=0.0, beta2=0.9, noise_variance=s * s)
    gain = geo.tangent_squared_norm(frames, step) / geo.tangent_squared_norm(frames, noise)
    assert 0.5 / s**2 < gain.item() <= 1.0 / s**2 + 1e-9


def test_second_moments_expectation_of_the_noise_is_exactly_its_variance() -> None:
    frames = geo.frames_from_factors(normal(30, 3), normal(3, 20, seed=1))
    many = geo.Frames(*(t.expand(3000, *t.shape) for t in (frames.q_out, frames.core, frames.q_in)))
    noise = geo.tangent_noise(many, 0.2, generator=torch.Generator().manual_seed(3))
    moments = update_moments(PrismMoments.zeros(many), many, noise, beta1=0.0, beta2=0.0)
    for second in (moments.v_out, moments.v_in):
        assert torch.allclose(second.mean(0), 0.04 * torch.eye(3, dtype=F64), atol=6e-4)


def test_without_noise_the_direction_still_exists() -> None:
    frames = geo.frames_from_factors(normal(10, 2), normal(2, 8, seed=1))
    tangent = geo.project_dense(frames, normal(10, 1) @ normal(1, 8, seed=4))
    moments = update_moments(PrismMoments.zeros(frames), frames, tangent, beta1=0.9, beta2=0.99)
    step = precondition(moments, frames, beta1=0.9, beta2=0.99, noise_variance=0.0)
    assert bool(torch.isfinite(step.x_out).all())
    assert geo.core_mismatch(frames, step).item() < 1e-4


def test_direction_batches_over_modules_with_own_noise_levels() -> None:
    batch = geo.frames_from_factors(normal(2, 12, 3), normal(2, 3, 9, seed=1))
    tangent = geo.project_dense(batch, normal(2, 12, 9, seed=2))
    variance = torch.tensor([0.1, 0.5], dtype=F64)
    moments = update_moments(PrismMoments.zeros(batch), batch, tangent, beta1=0.9, beta2=0.99)
    step = precondition(moments, batch, beta1=0.9, beta2=0.99, noise_variance=variance)
    for i in range(2):
        one = geo.Frames(batch.q_out[i], batch.core[i], batch.q_in[i])
        alone = geo.Tangent(tangent.x_out[i], tangent.x_in[i])
        kept = update_moments(PrismMoments.zeros(one), one, alone, beta1=0.9, beta2=0.99)
        want = precondition(kept, one, beta1=0.9, beta2=0.99, noise_variance=float(variance[i]))
        assert torch.allclose(step.x_out[i], want.x_out, atol=1e-12)
        assert torch.allclose(step.x_in[i], want.x_in, atol=1e-12)


def test_paper_lift_norm_and_noise_are_the_tangent_projection_in_factors() -> None:
    a, b, g = normal(14, 3), normal(9, 3, seed=1), normal(14, 9, seed=2)
    frames = geo.frames_from_factors(a, b.mT)
    lift = paper_lift(a, b, g @ b, g.mT @ a)
    dense = lift[0] @ b.mT + a @ lift[1].mT
    want = geo.tangent_dense(frames, geo.project_dense(frames, g))
    assert torch.allclose(dense, want, atol=1e-10)
    assert paper_squared_norm(a, b, *lift).item() == pytest.approx(want.square().sum().item(), rel=1e-10)
    draws = 3000
    many_a, many_b = a.expand(draws, 14, 3), b.expand(draws, 9, 3)
    xi = paper_noise(many_a, many_b, normal(draws, 14, 3, seed=5), normal(draws, 9, 3, seed=6))
    energy = (xi[0] @ many_b.mT + many_a @ xi[1].mT).square().sum((-2, -1)).mean().item()
    assert energy == pytest.approx(geo.tangent_dimension(14, 9, 3), rel=0.02)


def test_paper_step_without_adaptivity_limit_follows_the_tangent() -> None:
    """With a huge floor the paper's direction is proportional to the lift: it then descends along the tangent."""
    a, b = normal(14, 3), normal(9, 3, seed=1)
    lift = paper_lift(a, b, normal(14, 9, seed=2) @ b, normal(14, 9, seed=2).mT @ a)
    state = paper_step(PaperState.start(a, b), *lift, noise_variance=1e8, beta1=0.0, beta2=0.99, lr=1.0)
    move = state.a @ state.b.mT - a @ b.mT
    assert ((move * (lift[0] @ b.mT + a @ lift[1].mT)).sum() < 0).item()


def test_the_papers_floor_does_not_exist_at_lora_b_zero() -> None:
    state = PaperState.start(torch.zeros(14, 3, dtype=F64), normal(9, 3, seed=1))
    lift = paper_lift(state.a, state.b, normal(14, 9) @ state.b, normal(14, 9).mT @ state.a)
    new = paper_step(state, *lift, noise_variance=1.0, beta1=0.9, beta2=0.99, lr=0.1)
    assert torch.allclose(new.m_b, torch.zeros_like(new.m_b))  # lora_A's side gets no direction at all
