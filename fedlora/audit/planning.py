"""Choose steps and threshold of the canary audit, from simulations of the attack itself.

Only scalars are simulated here: the law that the matched filter's statistic has if the noise is as claimed, and
if it is halved. The audited code is not run, so the choice is independent of what it does later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy import stats

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
        thresholds: scores above which a canary is called a member: one that shows half the noise best, one that
            shows a missing clip best. The error of the bound is shared among them.
    """

    steps: int
    claimed_epsilon: float
    thresholds: tuple[float, ...]


def score_step(
    statistic: Floats, strength: Floats, sample_rate: float, paired: bool, copies: int = 1
) -> Floats:
    """Log likelihood ratio of one step: canary in, against out (or against its negative if `paired`).

    Args:
        statistic: unit variance under the claimed noise.
        strength: its mean where the canary was drawn.
        sample_rate: q.
        paired: replace-one: "out" means that the opposite canary is there.
        copies: records of one canary, each drawn with q by a coin of its own.
    """
    weights = stats.binom.logpmf(np.arange(copies + 1), copies, sample_rate)

    def mixture(sign: float) -> Floats:
        found: Floats = np.full(statistic.shape, weights[0])
        for drawn in range(1, copies + 1):
            signal = drawn * strength
            exponent = np.clip(sign * signal * statistic - 0.5 * signal**2, None, 600.0)
            found = np.logaddexp(found, weights[drawn] + exponent)
        return found

    return mixture(1.0) - mixture(-1.0) if paired else mixture(1.0)


def simulate(
    strengths: Strengths,
    members: Floats,
    steps: int,
    sample_rate: float,
    paired: bool,
    *,
    copies: int = 1,
    noise: float = 1.0,
    signal: float = 1.0,
) -> Floats:
    """Return scores of canaries (`members`: 1 in, 0 out, -1 opposite) under a fault.

    The true noise is `noise` times the claim, a canary's contribution `signal` times the bound.
    """
    generator = np.random.default_rng()
    count = len(members)
    score = np.zeros(count)
    for _ in range(steps):
        strength = strengths(generator, count)
        drawn = generator.binomial(copies, sample_rate, count)
        statistic = signal * strength * members * drawn + noise * generator.standard_normal(count)
        score += score_step(statistic, strength, sample_rate, paired, copies)
    return score


@dataclass(frozen=True)
class Question:
    """What a plan is made for.

    Attributes:
        strengths: law of the signal-to-noise ratio.
        claim: steps to claimed epsilon.
        afford: steps to the canaries that one attack may have.
        sample_rate: q.
        delta: of claim and bound.
        confidence: of the bound.
        paired: replace-one adjacency.
        most_steps: steps of the run, the cap.
        overshoot: signal of a canary that is not clipped.
        copies: records of one canary.
    """

    strengths: Strengths
    claim: Callable[[int], float]
    afford: Callable[[int], int]
    sample_rate: float
    delta: float
    confidence: float
    paired: bool
    most_steps: int
    overshoot: float
    copies: int = 1


def make_plan(question: Question) -> Plan:
    """Return the steps that show half the noise best, and thresholds for half the noise and a missing clip."""
    best: tuple[float, Plan] | None = None
    for steps in sorted({min(s, question.most_steps) for s in _STEPS}):
        claimed = question.claim(steps)
        if not math.isfinite(claimed):
            continue
        margin, cut = _best_cut(question, steps, claimed, noise=0.5)
        if best is None or margin > best[0]:
            best = (margin, Plan(steps, claimed, (cut,)))
    if best is None:
        return Plan(1, question.claim(1), (0.0,))
    plan = best[1]
    if not (question.overshoot > 1.0):
        return plan
    _, loose = _best_cut(question, plan.steps, plan.claimed_epsilon, signal=question.overshoot)
    return replace(plan, thresholds=(*plan.thresholds, loose))


def _best_cut(question: Question, steps: int, claimed: float, **fault: Any) -> tuple[float, float]:
    """Return (worst bound over claim in some simulations, threshold) of the best share of guesses."""
    count = max(200, min(question.afford(steps), _WORK // steps))
    margins: list[list[float]] = []
    cuts: list[list[float]] = []
    for _ in range(_REPEATS):
        truth = np.random.default_rng().random(count) < 0.5
        members = np.where(truth, 1.0, -1.0 if question.paired else 0.0)
        scores = simulate(
            question.strengths,
            members,
            steps,
            question.sample_rate,
            question.paired,
            copies=question.copies,
            **fault,
        )
        found = _quantiles(scores)
        share = _shared(question.confidence, 2)
        bounds = [bound_at(scores, truth, cut, delta=question.delta, confidence=share) for cut in found]
        margins.append([bound / claimed if claimed > 0 else bound for bound in bounds])
        cuts.append(found)
    worst = np.min(margins, axis=0)
    place = int(np.argmax(worst))
    return float(worst[place]), float(np.mean(cuts, axis=0)[place])


def _shared(confidence: float, parts: int) -> float:
    return 1.0 - (1.0 - confidence) / parts


def _quantiles(scores: Floats) -> list[float]:
    return [float(v) for v in np.quantile(scores, [1.0 - f for f in _FRACTIONS])]


def best_bound(
    scores: Floats,
    truth: npt.NDArray[np.bool_],
    thresholds: Sequence[float],
    *,
    delta: float,
    confidence: float,
) -> float:
    """Return the largest bound over fixed thresholds that share the error."""
    share = _shared(confidence, len(thresholds))
    return max(bound_at(scores, truth, cut, delta=delta, confidence=share) for cut in thresholds)


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
