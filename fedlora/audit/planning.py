"""Choose steps and threshold of the canary audit, from simulations of the attack itself.

Only scalars are simulated here: the law that the matched filter's statistic has if the noise is as claimed, and
if it is halved. The audited code is not run, so the choice is independent of what it does later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fedlora.audit.statistics import epsilon_from_counts

Floats = npt.NDArray[np.float64]
Strengths = Callable[[np.random.Generator, int], Floats]
"""Generator and count to that many draws of one step's signal-to-noise ratio under the claimed noise."""

_FRACTIONS: Final = (0.001, 0.002, 0.004, 0.007, 0.01, 0.02, 0.04, 0.07, 0.1, 0.2, 0.35)
_STEPS: Final = (1, 2, 4, 8, 16, 64)
_REPEATS: Final = 3
_WORK: Final = 1_500_000
"""Simulated canary steps per repeat at most; fewer canaries are simulated than attacked beyond it."""


@dataclass(frozen=True)
class Plan:
    """PUBLIC. How the canary audit attacks.

    Attributes:
        steps: steps that are attacked.
        claimed_epsilon: the accountant's figure for them.
        threshold: score above which a canary is called a member.
    """

    steps: int
    claimed_epsilon: float
    threshold: float


def score_step(statistic: Floats, strength: Floats, sample_rate: float, paired: bool) -> Floats:
    """Log likelihood ratio of one step: canary in, against out (or against its negative if `paired`).

    Args:
        statistic: unit variance under the claimed noise.
        strength: its mean where the canary was drawn.
        sample_rate: q.
        paired: replace-one: "out" means that the opposite canary is there.
    """

    def mixture(sign: float) -> Floats:
        exponent = np.clip(sign * strength * statistic - 0.5 * strength**2, None, 600.0)
        inside: Floats = np.logaddexp(_log1m(sample_rate), math.log(sample_rate) + exponent)
        return inside

    return mixture(1.0) - mixture(-1.0) if paired else mixture(1.0)


def _log1m(rate: float) -> float:
    return math.log1p(-rate) if rate < 1.0 else -math.inf


def simulate(
    strengths: Strengths, members: Floats, steps: int, sample_rate: float, noise: float, paired: bool
) -> Floats:
    """Return scores of canaries (`members`: 1 in, 0 out, -1 opposite) if the true noise is `noise` times the claim."""
    generator = np.random.default_rng()
    count = len(members)
    score = np.zeros(count)
    for _ in range(steps):
        strength = strengths(generator, count)
        drawn = generator.random(count) < sample_rate
        statistic = strength * members * drawn + noise * generator.standard_normal(count)
        score += score_step(statistic, strength, sample_rate, paired)
    return score


def make_plan(
    strengths: Strengths,
    claim: Callable[[int], float],
    *,
    canaries: int,
    sample_rate: float,
    delta: float,
    confidence: float,
    paired: bool,
    most_steps: int,
    afford: Callable[[int], int],
) -> Plan:
    """Return the steps and the threshold that show half the noise best.

    Args:
        strengths: law of the signal-to-noise ratio.
        claim: steps to claimed epsilon.
        canaries: that will be attacked at most.
        sample_rate: q.
        delta: of claim and bound.
        confidence: of the bound.
        paired: replace-one adjacency.
        most_steps: steps of the run, the cap.
        afford: steps to canaries that one repeat may have.
    """
    best: tuple[float, Plan] | None = None
    for steps in sorted({min(s, most_steps) for s in _STEPS}):
        claimed = claim(steps)
        if not math.isfinite(claimed):
            continue
        count = max(200, min(canaries, afford(steps), _WORK // steps))
        margins: dict[float, list[float]] = {}
        cuts: dict[float, list[float]] = {}
        for _ in range(_REPEATS):
            truth = np.random.default_rng().random(count) < 0.5
            members = np.where(truth, 1.0, -1.0 if paired else 0.0)
            scores = simulate(strengths, members, steps, sample_rate, 0.5, paired)
            for fraction, cut in zip(_FRACTIONS, _quantiles(scores), strict=True):
                bound = bound_at(scores, truth, cut, delta=delta, confidence=confidence)
                margins.setdefault(fraction, []).append(bound / claimed if claimed > 0 else bound)
                cuts.setdefault(fraction, []).append(cut)
        for fraction, values in margins.items():
            worst, plan = min(values), Plan(steps, claimed, float(np.mean(cuts[fraction])))
            if best is None or worst > best[0]:
                best = (worst, plan)
    if best is None:
        return Plan(1, claim(1), 0.0)
    return best[1]


def _quantiles(scores: Floats) -> Sequence[float]:
    return [float(v) for v in np.quantile(scores, [1.0 - f for f in _FRACTIONS])]


def bound_at(
    scores: Floats, truth: npt.NDArray[np.bool_], threshold: float, *, delta: float, confidence: float
) -> float:
    """Return the lower bound on epsilon that one fixed threshold gives."""
    said = scores > threshold
    return epsilon_from_counts(
        int((said & truth).sum()),
        int(truth.sum()),
        int((said & ~truth).sum()),
        int((~truth).sum()),
        delta=delta,
        confidence=confidence,
    )
