"""Gauge sensitivity: the same Z written as (c lora_A, lora_B / c) or (R lora_A, lora_B R^-1) must train alike.

A small, fully deterministic problem (two adapted layers, several tokens a record, dense per-record
gradients by autograd) is trained from many gauges with the very same noise, drawn in ambient coordinates
and then projected. What differs at the end is the mechanism's dependence on the representation.

Reference: PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA, arXiv:2606.00944v1, Sec. 4
(Issue I), Figs. 2, 8, 9 and App. C.1; the runs here share noise, so that exact invariance shows as rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fedlora.errors import ConfigError
from fedlora.geometry import (
    Frames,
    Tangent,
    frames_from_factors,
    gauge_factors,
    project_dense,
    retract,
    tangent_squared_norm,
)
from fedlora.mechanisms.prism_direction import PrismMoments, precondition, transport_moments, update_moments
from fedlora.mechanisms.prism_paper import PaperState, paper_lift, paper_squared_norm, paper_step

Tensor = torch.Tensor
Gauged = Literal["prism", "prism-none", "prism-paper", "factor", "factor-adam", "lora_fa"]
SCALARS = (0.25, 0.5, 2.0, 4.0)


@dataclass(frozen=True)
class GaugeSettings:
    """Numbers of the diagnostic's runs; all public, all in the problem's own units.

    `lr` is for adaptive directions (entries of order one), `plain_lr` for plain descent.
    """

    steps: int = 20
    rank: int = 3
    noise_multiplier: float = 0.5
    max_grad_norm: float = 0.5
    lr: float = 0.02
    plain_lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    general_gauges: int = 3
    zero_b: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0


@dataclass(frozen=True)
class GaugeReport:
    """What the diagnostic found; all PUBLIC (synthetic data).

    Attributes:
        mechanism: which one was run.
        max_relative_difference: largest ||dZ_gauge - dZ|| / ||dZ|| after all steps, dZ = Z_end - Z_start.
        first_step: the same after one step, per gauge.
        per_gauge: after all steps, per gauge.
        steps: number of steps.
    """

    mechanism: str
    max_relative_difference: float
    first_step: dict[str, float]
    per_gauge: dict[str, float]
    steps: int


@dataclass(frozen=True)
class GaugeProblem:
    """Two frozen layers with adapters, records of several tokens, a smooth loss.

    Attributes:
        weights: W0 of each layer, (out, in).
        factors: (lora_b, lora_a) of each layer in the reference gauge.
        inputs: (records, tokens, in).
        targets: (records, tokens, out of the last layer).
        ambient: per step and layer, (out, in) standard normals shared by all runs.
    """

    weights: Sequence[Tensor]
    factors: Sequence[tuple[Tensor, Tensor]]
    inputs: Tensor
    targets: Tensor
    ambient: Sequence[Sequence[Tensor]] = field(repr=False)

    @staticmethod
    def build(settings: GaugeSettings) -> GaugeProblem:
        """Return the problem for these settings (the same for every mechanism)."""
        g = torch.Generator().manual_seed(settings.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64).to(settings.dtype)

        sizes = ((20, 16), (12, 20))
        weights = [normal(*s) / s[1] ** 0.5 for s in sizes]
        factors = []
        for out, inp in sizes:
            b, a = normal(out, settings.rank) * 0.3, normal(settings.rank, inp) / settings.rank**0.5
            factors.append((torch.zeros_like(b) if settings.zero_b else b, a))
        inputs, targets = normal(12, 5, 16), normal(12, 5, 12)
        ambient = [[normal(*s) for s in sizes] for _ in range(settings.steps)]
        return GaugeProblem(weights, factors, inputs, targets, ambient)

    def record_gradients(self, z: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return dense per-record gradients with respect to each Z, (records, out, in) each."""

        def loss(zs: tuple[Tensor, ...], x: Tensor, y: Tensor) -> Tensor:
            hidden = torch.tanh(x @ (self.weights[0] + zs[0]).mT)
            return (hidden @ (self.weights[1] + zs[1]).mT - y).square().mean()

        gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        result: tuple[Tensor, ...] = gradient(tuple(z), self.inputs, self.targets)
        return result


def gauge_sensitivity(mechanism: Gauged, settings: GaugeSettings | None = None) -> GaugeReport:
    """Train from c in {0.25, 0.5, 2, 4} and from random general R; report how far the runs part.

    Args:
        mechanism: "prism" (frames), "prism-none" (no adaptivity), "prism-paper" (the paper's factors),
            "factor", "factor-adam" or "lora_fa".
        settings: numbers of the runs.

    Raises:
        ConfigError: if the mechanism is not one of these.
    """
    settings = settings or GaugeSettings()
    if mechanism not in _RUNS:
        raise ConfigError(f"no gauge diagnostic for {mechanism!r}; choose one of {', '.join(_RUNS)}")
    problem = GaugeProblem.build(settings)
    run = _RUNS[mechanism]
    start = [b @ a for b, a in problem.factors]
    reference = run(problem, problem.factors, settings)
    first, last = {}, {}
    for name, gauge in _gauges(settings).items():
        turned = [gauge_factors(b, a, gauge) for b, a in problem.factors]
        path = run(problem, turned, settings)
        first[name] = _difference(path[0], reference[0], start)
        last[name] = _difference(path[-1], reference[-1], start)
    worst = max(last.values())
    return GaugeReport(mechanism, worst if worst == worst else float("inf"), first, last, settings.steps)


def _gauges(settings: GaugeSettings) -> dict[str, float | Tensor]:
    gauges: dict[str, float | Tensor] = {f"c={c:g}": c for c in SCALARS}
    g = torch.Generator().manual_seed(settings.seed + 1)
    for i in range(settings.general_gauges):
        r = torch.randn(settings.rank, settings.rank, generator=g, dtype=torch.float64)
        gauges[f"R{i + 1}"] = (r + torch.eye(settings.rank, dtype=torch.float64)).to(settings.dtype)
    return gauges


def _difference(z: Sequence[Tensor], reference: Sequence[Tensor], start: Sequence[Tensor]) -> float:
    gap = sum(float((a - b).square().sum()) for a, b in zip(z, reference, strict=True))
    move = sum(float((b - s).square().sum()) for b, s in zip(reference, start, strict=True))
    return float((gap / move) ** 0.5) if move > 0 else float("inf")


Factors = Sequence[tuple[Tensor, Tensor]]
Path = list[list[Tensor]]


def _clip(squared: Tensor, bound: float) -> Tensor:
    return (bound / squared.sqrt().clamp_min(1e-30)).clamp_max(1.0)


def _prism_run(adaptive: bool) -> Callable[[GaugeProblem, Factors, GaugeSettings], Path]:
    def run(problem: GaugeProblem, factors: Factors, s: GaugeSettings) -> Path:
        points = [frames_from_factors(b, a) for b, a in factors]
        moments = [PrismMoments.zeros(p) for p in points]
        tau, batch = s.noise_multiplier * s.max_grad_norm, problem.inputs.shape[0]
        variance = (tau / batch) ** 2
        path = []
        for ambient in problem.ambient:
            tangents = _clipped_tangents(problem, points, s.max_grad_norm)
            for i, (point, total) in enumerate(zip(points, tangents, strict=True)):
                noised = total.plus(project_dense(point, ambient[i]).scaled(tau)).scaled(1.0 / batch)
                direction = noised
                if adaptive:
                    kept = update_moments(moments[i], point, noised, beta1=s.beta1, beta2=s.beta2)
                    direction = precondition(
                        kept, point, beta1=s.beta1, beta2=s.beta2, noise_variance=variance
                    )
                points[i] = retract(point, direction, -(s.lr if adaptive else s.plain_lr))
                if adaptive:
                    moments[i] = transport_moments(
                        kept, point, points[i], beta2=s.beta2, noise_variance=variance
                    )
            path.append([p.dense() for p in points])
        return path

    return run


def _clipped_tangents(problem: GaugeProblem, points: Sequence[Frames], bound: float) -> list[Tangent]:
    gradients = problem.record_gradients([p.dense() for p in points])
    tangents = [project_dense(p, g) for p, g in zip(points, gradients, strict=True)]
    squared = torch.stack([tangent_squared_norm(p, t) for p, t in zip(points, tangents, strict=True)]).sum(0)
    alpha = _clip(squared, bound)[:, None, None]
    return [Tangent((t.x_out * alpha).sum(0), (t.x_in * alpha).sum(0)) for t in tangents]


def _paper_run(problem: GaugeProblem, factors: Factors, s: GaugeSettings) -> Path:
    states = [PaperState.start(b, a.mT) for b, a in factors]
    tau, batch = s.noise_multiplier * s.max_grad_norm, problem.inputs.shape[0]
    path = []
    for ambient in problem.ambient:
        gradients = problem.record_gradients([t.a @ t.b.mT for t in states])
        lifts = [paper_lift(t.a, t.b, g @ t.b, g.mT @ t.a) for t, g in zip(states, gradients, strict=True)]
        squared = torch.stack(
            [paper_squared_norm(t.a, t.b, *pair) for t, pair in zip(states, lifts, strict=True)]
        ).sum(0)
        alpha = _clip(squared, s.max_grad_norm)[:, None, None]
        for i, (state, pair) in enumerate(zip(states, lifts, strict=True)):
            noise = paper_lift(state.a, state.b, ambient[i] @ state.b, ambient[i].mT @ state.a)
            noised = [((x * alpha).sum(0) + tau * n) / batch for x, n in zip(pair, noise, strict=True)]
            states[i] = paper_step(
                state,
                noised[0],
                noised[1],
                noise_variance=(tau / batch) ** 2,
                beta1=s.beta1,
                beta2=s.beta2,
                lr=s.lr,
            )
        path.append([t.a @ t.b.mT for t in states])
    return path


def _factor_run(train_a: bool, adam: bool) -> Callable[[GaugeProblem, Factors, GaugeSettings], Path]:
    def run(problem: GaugeProblem, factors: Factors, s: GaugeSettings) -> Path:
        state = [[b, a] for b, a in factors]
        averages = [[(torch.zeros_like(x), torch.zeros_like(x)) for x in pair] for pair in state]
        tau, batch = s.noise_multiplier * s.max_grad_norm, problem.inputs.shape[0]
        path = []
        for step, ambient in enumerate(problem.ambient, 1):
            gradients = problem.record_gradients([b @ a for b, a in state])
            pairs = [
                (g @ a.mT, b.mT @ g if train_a else torch.zeros_like(a).expand(len(g), *a.shape))
                for (b, a), g in zip(state, gradients, strict=True)
            ]
            squared = torch.stack([x.square().sum((-2, -1)) for pair in pairs for x in pair]).sum(0)
            alpha = _clip(squared, s.max_grad_norm)[:, None, None]
            for i, pair in enumerate(pairs):
                # the same standard normals in every gauge, taken from the ambient draw
                normals = (ambient[i][:, : s.rank], ambient[i][: s.rank] if train_a else 0.0)
                for j, (x, n) in enumerate(zip(pair, normals, strict=True)):
                    d = ((x * alpha).sum(0) + tau * n) / batch
                    if adam:
                        m, v = averages[i][j]
                        m, v = torch.lerp(d, m, s.beta1), torch.lerp(d.square(), v, s.beta2)
                        averages[i][j] = (m, v)
                        d = (m / (1 - s.beta1**step)) / ((v / (1 - s.beta2**step)).sqrt() + 1e-8)
                    state[i][j] = state[i][j] - (s.lr if adam else s.plain_lr) * d
            path.append([b @ a for b, a in state])
        return path

    return run


_RUNS: dict[str, Callable[[GaugeProblem, Factors, GaugeSettings], Path]] = {
    "prism": _prism_run(True),
    "prism-none": _prism_run(False),
    "prism-paper": _paper_run,
    "factor": _factor_run(True, False),
    "factor-adam": _factor_run(True, True),
    "lora_fa": _factor_run(False, False),
}
