"""Measured properties of LoRA's implicit and explicit noise: N(W, r), Lemma 6.1, Kaiming bias, gauges, sigma.

Nothing here is a privacy guarantee: a noise-free LoRA update with a known lora_A has epsilon = infinity.

References: LoRA Provides Differential Privacy by Design via Random Sketching (Eqs. 11, 17, Lemma 6.1,
App. B); PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA, arXiv:2606.00944v1 (Prop. 2.2,
Thm 3.1, Prop. A.29, Figs. 3, 4, 12, 13, 15).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedlora.errors import ConfigError
from fedlora.geometry import (
    Frames,
    frames_from_factors,
    gauge_factors,
    split_core,
    tangent_dimension,
    tangent_noise,
    tangent_squared_norm,
)
from fedlora.mechanisms.prism_direction import PrismMoments, precondition, update_moments

Tensor = torch.Tensor
Init = Literal["gaussian", "kaiming", "he"]


def _generator(seed: int) -> torch.Generator:
    """Return a generator whose stream differs from one that a caller seeded with the same number."""
    return torch.Generator().manual_seed(seed + 7_340_033)


def injected_noise_measure(gradient: Tensor, lora_a: Tensor, lr: float = 1.0) -> float:
    """Return N(W, r) = ||W_full - (W + B A)||_F after one gradient step (Sketching paper, Eq. 17).

    With frozen A and B = 0 before, B A = -lr G A^T A, so it is lr ||G (A^T A - I)||_F.

    Args:
        gradient: G, (out, in); the result inherits its secrecy (SENSITIVE for a private batch).
        lora_a: (r, in), without scaling.
        lr: step size.
    """
    return float(lr * torch.linalg.matrix_norm(gradient @ lora_a.mT @ lora_a - gradient))


def injected_noise_by_layer(
    gradients: Mapping[str, Tensor], rank: int, *, init: Init = "gaussian", draws: int = 5, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Return per layer the mean N(W, r) over `draws` of lora_A, the gradient's norm and their ratio.

    For Gaussian A with variance 1/r, E N^2 = ||G||^2 (in + 1) / r: layers with larger gradients get more.

    Args:
        gradients: layer name to G (out, in).
        rank: r.
        init: law of lora_A (see `a_variance`).
        draws: number of matrices averaged over.
        seed: public seed.
    """
    generator = _generator(seed)
    result = {}
    for name, gradient in gradients.items():
        g = gradient.detach().double().cpu()
        values = [injected_noise_measure(g, draw_a(rank, g.shape[1], init, generator)) for _ in range(draws)]
        norm = float(torch.linalg.matrix_norm(g))
        mean = sum(values) / draws
        result[name] = {
            "noise": mean,
            "gradient_norm": norm,
            "ratio": mean / norm if norm > 0 else 0.0,
            "expected_ratio": math.sqrt(expected_squared_ratio(rank, g.shape[1], init)),
        }
    return result


def a_variance(rank: int, in_features: int, init: Init) -> float:
    """Return the variance of one entry of lora_A: Gaussian 1/r, PEFT's Kaiming 1/(3 in), He's uniform 2/in."""
    table = {"gaussian": 1.0 / rank, "kaiming": 1.0 / (3.0 * in_features), "he": 2.0 / in_features}
    if init not in table:
        raise ConfigError(f"no law of lora_A named {init!r}; choose one of {', '.join(table)}")
    return table[init]


def draw_a(rank: int, in_features: int, init: Init, generator: torch.Generator) -> Tensor:
    """Return one lora_A (rank, in) in float64 with the stated law (uniform for the Kaiming types)."""
    deviation = math.sqrt(a_variance(rank, in_features, init))
    if init == "gaussian":
        return deviation * torch.randn(rank, in_features, generator=generator, dtype=torch.float64)
    uniform = torch.rand(rank, in_features, generator=generator, dtype=torch.float64)
    return (2.0 * uniform - 1.0) * (deviation * math.sqrt(3.0))


def expected_squared_ratio(rank: int, in_features: int, init: Init) -> float:
    """Return E ||q (A^T A - I)||^2 / ||q||^2 exactly (averaged over directions q for uniform entries).

    Bias (r v - 1)^2, plus r v^2 (in + 1 + kappa ||q||_4^4 / ||q||^4) with excess kurtosis kappa = 0 or -1.2;
    the last term is at most 1.2 and is dropped (q spread over many coordinates).
    """
    v = a_variance(rank, in_features, init)
    return (rank * v - 1.0) ** 2 + rank * v * v * (in_features + 1.0)


def kaiming_bias(rank: int, in_features: int, init: Init = "kaiming") -> float:
    """Return r v - 1, the factor of the gradient that the 'noise' subtracts (Sketching paper, App. B).

    0 is unbiased; near -1 the implicit noise cancels almost the whole gradient.
    """
    return rank * a_variance(rank, in_features, init) - 1.0


@dataclass(frozen=True)
class SketchMoments:
    """Empirical against stated moments of q (A^T A - I).

    Attributes:
        mean_error: ||mean - (r v - 1) q|| in standard errors per coordinate (root mean square; about 1).
        variance_ratio: mean over coordinates of empirical / stated variance (about 1).
        covariance_error: largest |empirical - exact covariance| / (r v^2 ||q||^2).
        bias: r v - 1.
        draws: number of matrices.
    """

    mean_error: float
    variance_ratio: float
    covariance_error: float
    bias: float
    draws: int


def sketch_moments(
    q: Tensor, rank: int, *, init: Init = "gaussian", draws: int = 4000, seed: int = 0
) -> SketchMoments:
    """Compare q (A^T A - I) with Lemma 6.1 (Gaussian) or Lemma B.1 (uniform): mean and variance.

    The lemmas' diagonal covariance r v^2 (||q||^2 I + D) leaves out the off-diagonal part r v^2 q_i q_j,
    which is there at every width; `covariance_error` uses the full r v^2 (||q||^2 I + q q^T + kappa diag(q^2)).

    Args:
        q: (in,), any fixed vector.
        rank: r.
        init: law of lora_A.
        draws: number of matrices.
        seed: public seed.
    """
    q = q.detach().double().cpu()
    m, v = q.shape[0], a_variance(rank, q.shape[0], init)
    generator = _generator(seed)
    samples = torch.empty(draws, m, dtype=torch.float64)
    for i in range(draws):
        a = draw_a(rank, m, init, generator)
        samples[i] = (a @ q) @ a - q
    mean, bias = samples.mean(0), rank * v - 1.0
    kappa = 0.0 if init == "gaussian" else -1.2
    diagonal = rank * v * v * (q.square().sum() + (1.0 + kappa) * q.square())
    exact = rank * v * v * torch.outer(q, q)
    exact.diagonal().copy_(diagonal)
    centred = samples - bias * q
    covariance = centred.mT @ centred / draws
    scale = rank * v * v * float(q.square().sum())
    return SketchMoments(
        mean_error=float(((mean - bias * q) / (diagonal / draws).sqrt()).square().mean().sqrt()),
        variance_ratio=float((centred.square().mean(0) / diagonal).mean()),
        covariance_error=float((covariance - exact).abs().max()) / scale,
        bias=bias,
        draws=draws,
    )


@dataclass(frozen=True)
class GaugeNoisePoint:
    """Energy of the noise that reaches Z in one gauge, per unit of stddev^2 (first order and measured)."""

    c: float
    factor_first_order: float
    factor_measured: float
    prism_exact: float
    prism_measured: float


def intrinsic_noise_by_gauge(
    lora_b: Tensor, lora_a: Tensor, gauges: Sequence[float], *, stddev: float, draws: int = 64, seed: int = 0
) -> list[GaugeNoisePoint]:
    """Return E ||noise in Z||^2 / stddev^2 over the scalar gauges (c lora_A, lora_B / c), Z fixed.

    Factor noise: out ||c A||^2 + in ||B / c||^2 to first order plus out in r stddev^2 from the product of
    noises (PRISM, Eqs. 8, 9); it is unbounded over c. Tangent noise: r (out + in - r) in every gauge (Eq. 20).
    """
    generator = _generator(seed)
    b0, a0 = lora_b.detach().double().cpu(), lora_a.detach().double().cpu()
    out, r, inp = b0.shape[0], b0.shape[1], a0.shape[1]
    points = []
    for c in gauges:
        b, a = gauge_factors(b0, a0, c)
        frames = frames_from_factors(b, a)
        many = Frames(*(t.expand(draws, *t.shape) for t in (frames.q_out, frames.core, frames.q_in)))
        tangent = tangent_noise(many, 1.0, generator=generator)
        xi_b = stddev * torch.randn(draws, out, r, generator=generator, dtype=torch.float64)
        xi_a = stddev * torch.randn(draws, r, inp, generator=generator, dtype=torch.float64)
        energy = ((b + xi_b) @ (a + xi_a) - b @ a).square().sum((-2, -1)).mean()
        points.append(
            GaugeNoisePoint(
                c=c,
                factor_first_order=float(out * a.square().sum() + inp * b.square().sum()),
                factor_measured=float(energy) / stddev**2,
                prism_exact=float(tangent_dimension(out, inp, r)),
                prism_measured=float(tangent_squared_norm(many, tangent).mean()),
            )
        )
    return points


@dataclass(frozen=True)
class PreconditionedNoisePoint:
    """Mean norms of noise before and after preconditioning at one noise level."""

    sigma: float
    raw: float
    adam: float
    prism: float


def preconditioned_noise_by_sigma(
    sigmas: Sequence[float],
    *,
    out_features: int = 48,
    in_features: int = 40,
    rank: int = 4,
    signal: float = 1.0,
    steps: int = 60,
    beta2: float = 0.99,
    seed: int = 0,
) -> list[PreconditionedNoisePoint]:
    """Return ||P^(-1/2) noise|| against sigma for Adam on factors and PRISM's floors (PRISM, Figs. 4, 15).

    A constant signal of norm `signal` sits in the tangent space under noise of standard deviation sigma per
    coordinate. Adam's second moments follow the noise, so what is left after dividing hardly depends on sigma;
    PRISM's debiased moments plus a floor at the noise's own variance never amplify it beyond one unit per entry.
    """
    generator = _generator(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    frames = frames_from_factors(normal(out_features, rank), normal(rank, in_features))
    direction = tangent_noise(frames, 1.0, generator=generator)
    direction = direction.scaled(signal / float(tangent_squared_norm(frames, direction).sqrt()))
    points = []
    for sigma in sigmas:
        moments, second = PrismMoments.zeros(frames), torch.zeros(out_features, rank, dtype=torch.float64)
        raw, adam, prism = 0.0, 0.0, 0.0
        for step in range(1, steps + 1):
            noise = tangent_noise(frames, sigma, generator=generator)
            noised = direction.plus(noise)
            moments = update_moments(moments, frames, noised, beta1=0.0, beta2=beta2)
            second = torch.lerp(noised.x_out.square(), second, beta2)
            lift_out, lift_in = split_core(frames, noise)
            shown = replace(moments, m_out=lift_out, m_in=lift_in)
            applied = precondition(shown, frames, beta1=0.0, beta2=beta2, noise_variance=sigma**2)
            raw += float(tangent_squared_norm(frames, noise).sqrt()) / steps
            prism += float(tangent_squared_norm(frames, applied).sqrt()) / steps
            adam += float((noise.x_out / ((second / (1 - beta2**step)).sqrt() + 1e-8)).norm()) / steps
        points.append(PreconditionedNoisePoint(sigma, raw, adam, prism))
    return points
