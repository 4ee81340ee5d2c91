"""Statistics of membership attacks: ROC figures and lower bounds on epsilon with confidence.

Nothing here sees records: attacks hand in scores and truth of canaries that the auditor made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedlora.errors import PrivacyParameterError

Scores = npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RocFigures:
    """How well a score tells members from non-members.

    Attributes:
        auc: probability that a member scores above a non-member (ties count half).
        tpr_at_1: true positive rate at 1 % false positives.
        tpr_at_10: true positive rate at 10 % false positives.
        num_members: members scored.
        num_non_members: non-members scored.
    """

    auc: float
    tpr_at_1: float
    tpr_at_10: float
    num_members: int
    num_non_members: int


def roc_figures(scores: npt.ArrayLike, is_member: npt.ArrayLike) -> RocFigures:
    """AUC and true positive rates at 1 % and 10 % false positives.

    Args:
        scores: (n,), larger means "member".
        is_member: (n,) booleans.

    Raises:
        PrivacyParameterError: if a class is empty or a score is not finite.
    """
    values, truth = _check_scores(scores, is_member)
    members, others = values[truth], values[~truth]
    ranks = stats.rankdata(values)
    auc = (ranks[truth].sum() - members.size * (members.size + 1) / 2) / (members.size * others.size)
    return RocFigures(
        auc=float(auc),
        tpr_at_1=_tpr_at(members, others, 0.01),
        tpr_at_10=_tpr_at(members, others, 0.10),
        num_members=int(members.size),
        num_non_members=int(others.size),
    )


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """One-sided exact bounds (lower, upper) for a binomial rate, each at `confidence`.

    Example:
        >>> lower, upper = clopper_pearson(0, 100, 0.95)
        >>> lower, round(upper, 4)
        (0.0, 0.0295)
    """
    _check_confidence(confidence)
    if not 0 <= successes <= trials or trials < 1:
        raise PrivacyParameterError(
            f"need 0 <= successes <= trials, trials >= 1; got {successes} of {trials}"
        )
    tail = 1 - confidence
    lower = 0.0 if successes == 0 else float(stats.beta.ppf(tail, successes, trials - successes + 1))
    upper = 1.0 if successes == trials else float(stats.beta.ppf(1 - tail, successes + 1, trials - successes))
    return lower, upper


def epsilon_from_counts(
    true_positives: int,
    num_members: int,
    false_positives: int,
    num_non_members: int,
    *,
    delta: float,
    confidence: float = 0.95,
) -> float:
    """Lower bound on epsilon from independent trials of one attack with a fixed threshold.

    Any (epsilon, delta) mechanism has TPR <= e^epsilon FPR + delta and
    1 - FPR <= e^epsilon (1 - TPR) + delta. Each rate is replaced by its Clopper-Pearson bound; both hold
    together at `confidence` (half the error to each).

    Returns:
        A number >= 0; 0 means that the attack shows nothing.

    Source: Jagielski, Ullman and Oprea, "Auditing Differentially Private Machine Learning: How Private is
        Private SGD?", arXiv:2006.07709v1, Section 3; Kairouz, Oh and Viswanath, "The Composition Theorem for
        Differential Privacy", arXiv:1311.0776v4, Theorem 2.1.
    """
    _check_delta(delta)
    each = 1 - (1 - confidence) / 2
    tpr, _ = clopper_pearson(true_positives, num_members, each)
    _, fpr = clopper_pearson(false_positives, num_non_members, each)
    bounds = [0.0]
    if tpr > delta and fpr > 0:
        bounds.append(math.log((tpr - delta) / fpr))
    if 1 - fpr > delta and tpr < 1:
        bounds.append(math.log((1 - fpr - delta) / (1 - tpr)))
    return max(bounds)


def epsilon_one_run(
    num_canaries: int, num_guesses: int, num_correct: int, *, delta: float, confidence: float = 0.95
) -> float:
    """Lower bound on epsilon from one run with many independently included canaries.

    Each of m canaries is included by a fair coin; the auditor guesses r of the coins and abstains on
    the rest. For an (epsilon, delta) mechanism (add or remove one record) the number of right guesses W obeys
    P[W >= v] <= beta + 2 m delta alpha with beta = P[Bin(r, p) >= v], p = e^eps / (1 + e^eps) and
    alpha = max_i P[v - i <= Bin(r, p) < v] / i. The largest epsilon that is rejected at `confidence` is returned.

    Raises:
        PrivacyParameterError: if counts contradict each other.

    Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", arXiv:2305.08846v1,
        Theorem 5.2 and Proposition 5.7.
    """
    _check_delta(delta)
    _check_confidence(confidence)
    if not 0 <= num_correct <= num_guesses <= num_canaries or num_canaries < 1:
        raise PrivacyParameterError(
            f"need correct <= guesses <= canaries; got {num_correct}, {num_guesses}, {num_canaries}"
        )
    allowed = 1 - confidence
    if num_guesses == 0 or one_run_p_value(num_canaries, num_guesses, num_correct, 0.0, delta) > allowed:
        return 0.0
    low, high = 0.0, 1.0
    while one_run_p_value(num_canaries, num_guesses, num_correct, high, delta) <= allowed and high < 256:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        if one_run_p_value(num_canaries, num_guesses, num_correct, middle, delta) <= allowed:
            low = middle
        else:
            high = middle
    return low


def one_run_p_value(
    num_canaries: int, num_guesses: int, num_correct: int, epsilon: float, delta: float
) -> float:
    """Probability bound of seeing at least `num_correct` right guesses under (epsilon, delta).

    Source: as `epsilon_one_run`.
    """
    rate = 1 / (1 + math.exp(-epsilon))
    beta = float(stats.binom.sf(num_correct - 1, num_guesses, rate))
    alpha = 0.0
    if delta > 0 and num_correct > 0:
        steps = np.arange(1, num_correct + 1)
        window = np.cumsum(stats.binom.pmf(num_correct - steps, num_guesses, rate))
        alpha = float(np.max(window / steps))
    return min(1.0, beta + 2 * num_canaries * delta * alpha)


def best_one_run_bound(
    scores: npt.ArrayLike, is_member: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> tuple[float, int]:
    """Lower bound from one run, guessing "in" for the highest and "out" for the lowest scores.

    A fixed set of guess counts (1/1, 1/2, ... of the canaries) is tried and the error is shared among
    them, so the best one still holds at `confidence`.

    Returns:
        (epsilon lower bound, number of guesses that gave it).
    """
    values, truth = _check_scores(scores, is_member)
    order = np.argsort(values, kind="stable")
    sizes = sorted({max(1, values.size // (2 * part)) for part in (1, 2, 3, 5, 10, 20, 50)})
    share = 1 - (1 - confidence) / len(sizes)
    best = (0.0, 0)
    for size in sizes:
        correct = int(truth[order[-size:]].sum() + (~truth[order[:size]]).sum())
        guesses = 2 * size
        if guesses > values.size:
            continue
        bound = epsilon_one_run(values.size, guesses, correct, delta=delta, confidence=share)
        best = max(best, (bound, guesses))
    return best


def _tpr_at(members: Scores, others: Scores, rate: float) -> float:
    """True positive rate at the smallest threshold whose false positive rate is at most `rate`."""
    allowed = math.floor(rate * others.size)
    ranked = np.sort(others)[::-1]
    if allowed >= others.size:
        return 1.0
    return float(np.mean(members > ranked[allowed]))


def _check_scores(scores: npt.ArrayLike, is_member: npt.ArrayLike) -> tuple[Scores, Truth]:
    values = np.asarray(scores, dtype=np.float64)
    truth = np.asarray(is_member, dtype=bool)
    if values.ndim != 1 or values.shape != truth.shape:
        raise PrivacyParameterError(f"scores {values.shape} and truth {truth.shape} must be equal vectors")
    if not np.all(np.isfinite(values)):
        raise PrivacyParameterError("attack scores must be finite")
    if truth.all() or not truth.any():
        raise PrivacyParameterError("an attack needs members and non-members")
    return values, truth


def _check_confidence(confidence: float) -> None:
    if not 0.5 < confidence < 1:
        raise PrivacyParameterError(f"confidence must lie in (0.5, 1); got {confidence!r}")


def _check_delta(delta: float) -> None:
    if not 0 <= delta < 1:
        raise PrivacyParameterError(f"delta must lie in [0, 1); got {delta!r}")
