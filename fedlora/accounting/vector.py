"""The noise-free projection of one unit vector: Theorem 1 and the exact privacy profile.

"LoRA and Privacy: When Random Projections Help (and When They Don't)", Definition 1, Theorem 1, Lemmas 8 to 10. A
conditional analysis: the projection must stay secret and only one vector may be released.

Exact profile. By Lemma 8 the privacy loss is L = c ln A + (B / 2)(1 / A - 1), c = (d - r + 1) / 2, with
A = rho + sqrt(1 - rho^2) K2 / sqrt(K1) and B = K1 + K2^2 + K3. The ratio K2 / sqrt(K1) is a function of the direction
of a Gaussian vector in r + 1 dimensions and K1 + K2^2 its squared length, so A and B are independent,
B ~ chi^2_(d+r-1).
The integral over B has a closed form, and with K2 / sqrt(K1) = tan(theta), density proportional to cos^(r-1)(theta),
one bounded integral is left: delta(eps) = P(A <= 0) + E[(1 - exp(eps - L))_+; A > 0].
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
from scipy.special import betaln, chdtr, chdtrc, chdtri, stdtr, stdtrit

from fedlora.accounting import _checks
from fedlora.accounting.conditional import VectorProjectionEvent
from fedlora.accounting.hypergeometric import FloatArray
from fedlora.accounting.reports import Adjacency, EpsilonReport

_LARGEST = 1.0e6
_ROUNDING = 2.0**-49
"""Bound on the rounding error of a loss, relative to the width."""
_MISSED = 1.0e-12
"""A quadrature whose mass is off by more than this missed something; it is charged as if it showed everything."""


def support_mass(rank: int, alignment: float) -> float:
    """Return P(A <= 0) = E Phi(-rho sqrt(X) / sqrt(1 - rho^2)), X ~ chi^2_r: delta can never be smaller (Eq. 17).

    The expectation is the Student-t probability P(T_r <= -rho sqrt(r) / sqrt(1 - rho^2)).
    """
    if alignment >= 1.0:
        return 0.0
    return float(stdtr(rank, -alignment * math.sqrt(rank) / math.sqrt(1.0 - alignment * alignment)))


def theorem1(width: int, rank: int, alignment: float, delta: float) -> float:
    """Return Theorem 1's epsilon at a total delta, infinity outside its condition.

    delta = P(A <= 0) + 3 delta' fixes delta'; epsilon = c ln(rho + K) + (1 - rho + K) kappa / (2 (rho - K)).

    Args:
      width: d.
      rank: r <= d.
      alignment: rho.
      delta: total, in (0, 1).
    """
    event = VectorProjectionEvent(width, rank, alignment)
    rho, budget = event.alignment, _checks.delta(delta)
    if rho >= 1.0:
        return 0.0
    tail = (budget - support_mass(rank, rho)) / 3.0
    if not 0.0 < tail < 0.5:
        return math.inf
    k = math.sqrt((1.0 - rho * rho) / rank) * -float(stdtrit(rank, tail))
    if not rho > k:
        return math.inf
    kappa = float(chdtri(width + rank - 1, tail))
    return (width - rank + 1) / 2.0 * math.log(rho + k) + (1.0 - rho + k) * kappa / (2.0 * (rho - k))


@functools.lru_cache(maxsize=8)
def _nodes(panels: int) -> tuple[FloatArray, FloatArray]:
    """Composite Gauss-Legendre on [0, 1], panels graded towards both ends."""
    points, weights = np.polynomial.legendre.leggauss(12)
    edges = 0.5 - 0.5 * np.cos(np.linspace(0.0, math.pi, panels + 1))
    half = np.diff(edges)[:, None] / 2.0
    middle = (edges[:-1] + edges[1:])[:, None] / 2.0
    return (middle + half * points).ravel(), (half * weights).ravel()


def _conditional_excess(a: FloatArray, width: int, rank: int, epsilon: float) -> FloatArray:
    """E_B[(1 - exp(eps - L))_+] given A = a > 0, never rounded below 0."""
    nu, c = width + rank - 1, (width - rank + 1) / 2.0
    log_a = np.log(a)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        edge = 2.0 * (epsilon - c * log_a) / (1.0 / a - 1.0)
        edge = np.where(np.isfinite(edge), np.maximum(edge, 0.0), np.inf)
        low = a < 1.0
        first = np.where(low, chdtrc(nu, edge), np.where(epsilon < c * log_a, chdtr(nu, edge), 0.0))
        second = np.where(low, chdtrc(nu, edge / a), chdtr(nu, edge / a))
        scale = np.exp(np.minimum(epsilon + (rank - 1.0) * log_a + np.log(second), np.log(first)))
    return np.asarray(np.maximum(first - np.where(second > 0.0, scale, 0.0), 0.0))


def _log_beta(rank: int) -> float:
    """Log B(r/2, 1/2); by its asymptotic series where a difference of large logarithms would lose digits."""
    if rank < 200:
        return float(betaln(rank / 2.0, 0.5))
    y = 2.0 / rank
    ratio = (
        1.0 - y / 8.0 + y**2 / 128.0 + 5.0 * y**3 / 1024.0 - 21.0 * y**4 / 32768.0 - 399.0 * y**5 / 262144.0
    )
    return 0.5 * math.log(math.pi * y) - math.log(ratio)


def _integral(width: int, rank: int, alignment: float, epsilon: float, panels: int) -> tuple[float, float]:
    """E[(1 - exp(eps - L))_+; A > 0] by quadrature, and P(A > 0) by the same one, where theta is not negligible."""
    phi = math.acos(alignment)
    reach = min(math.pi / 2.0, 10.0 / math.sqrt(max(rank - 1.0, 1e-9)))  # beyond it a mass of exp(-50)
    low, high = max(phi - math.pi / 2.0, -reach), reach
    edges = (low, min(max(phi / 2.0, low), high), high)
    epsilon -= _ROUNDING * width
    x, w = _nodes(panels)
    norm = _log_beta(rank)
    total = mass = 0.0
    for start, stop in itertools.pairwise(edges):
        if not stop > start:
            continue
        theta = start + (stop - start) * x
        a = np.cos(phi - theta) / np.cos(theta)
        squared = np.minimum(np.sin(theta) ** 2, 1.0 - 2.0**-53)
        density = np.exp(0.5 * (rank - 1.0) * np.log1p(-squared) - norm)
        good = (a > 0.0) & np.isfinite(a)
        values = _conditional_excess(np.where(good, a, 1.0), width, rank, epsilon)
        total += (stop - start) * float(np.sum(w * density * np.where(good, values, 1.0)))
        mass += (stop - start) * float(np.sum(w * density))
    return total, mass


def profile(width: int, rank: int, alignment: float, epsilon: float) -> float:
    """Return delta(epsilon) for a pair of inputs with exactly this alignment, quadrature error added.

    Args:
      width: d.
      rank: r <= d.
      alignment: rho in (-1, 1].
      epsilon: >= 0.

    Returns:
      The exact delta, from above by the difference of two quadratures and by the mass that they miss.
    """
    event = VectorProjectionEvent(width, rank, alignment)
    budget = _checks.real("epsilon", epsilon, at_least=0.0)
    if event.alignment >= 1.0:
        return 0.0
    coarse, _ = _integral(width, rank, event.alignment, budget, 60)
    fine, mass = _integral(width, rank, event.alignment, budget, 120)
    outside = support_mass(rank, event.alignment)
    missed = abs(1.0 - outside - mass)  # probability that the quadrature does not account for
    error = abs(fine - coarse) + (missed if missed > _MISSED else 0.0) + 1e-15
    return min(1.0, outside + fine + error)


def worst_profile(width: int, rank: int, alignment: float, epsilon: float) -> float:
    """Return the profile's maximum over alignments from the bound up to 1 (it is met at the bound wherever checked)."""
    angle = math.acos(alignment)
    shares = (1.0, 0.97, 0.9, 0.75, 0.5, 0.25)
    return max(profile(width, rank, math.cos(share * angle), epsilon) for share in shares)


def exact_epsilon(width: int, rank: int, alignment: float, delta: float, tolerance: float = 1e-9) -> float:
    """Return the smallest epsilon of the exact profile, rounded up by `tolerance` (relative); infinity if none exists.

    The maximum over alignments in [rho, 1] is taken on a grid.
    """
    target = _checks.delta(delta)
    event = VectorProjectionEvent(width, rank, alignment)
    if event.alignment >= 1.0:
        return 0.0
    if support_mass(rank, event.alignment) >= target:
        return math.inf
    low, high = 0.0, 1.0
    if profile(width, rank, alignment, 0.0) > target:
        while profile(width, rank, alignment, high) > target:
            low, high = high, 2.0 * high
            if high > _LARGEST:
                return math.inf
    while high - low > tolerance * max(high, 1e-3):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if profile(width, rank, alignment, middle) > target else (low, middle)
    while worst_profile(width, rank, alignment, high) > target:
        high = high * 1.01 + 1e-6
        if high > _LARGEST:
            return math.inf
    return high


def aligned_by_noise(width: int, alignment: float, radius: float, delta: float) -> float:
    """Return the alignment after adding a random vector of norm `radius` and normalising again (Lemma 10).

    With tau = sqrt(2 / d ln(8 / delta)), both inner products with the random direction stay within tau with probability
    at least 1 - delta, and then the cosine is at least (rho + g^2 - 2 g tau) / (1 + g^2 + 2 g tau); this is never below
    the lemma's rho + s. The printed condition on the radius has its fraction inverted: the alignment grows for
    g > 2 tau (1 + rho) / (1 - rho). The noisy vector must be normalised before it is projected, and `delta` is charged.

    Raises:
      PrivacyParameterError: for values out of range.
    """
    event = VectorProjectionEvent(width, 1, alignment)
    g = _checks.real("radius", radius, above=0.0)
    tau = math.sqrt(2.0 / width * math.log(8.0 / _checks.delta(delta)))
    numerator = event.alignment + g * g - 2.0 * g * tau
    low, high = 1.0 + g * g - 2.0 * g * tau, 1.0 + g * g + 2.0 * g * tau
    if numerator >= 0.0:
        return numerator / high
    return max(-1.0, numerator / low) if low > 0.0 else -1.0


def alignment_gain(width: int, alignment: float, radius: float, delta: float) -> float:
    """Return Lemma 10's s, the guaranteed growth of the alignment as printed (may be negative)."""
    g, tau = radius, math.sqrt(2.0 / width * math.log(8.0 / delta))
    return ((1.0 - alignment) * g * g - 4.0 * g * tau) / (1.0 + g * g + 2.0 * g * tau)


def epsilon_report(event: VectorProjectionEvent, delta: float) -> EpsilonReport:
    """Return the exact epsilon with Theorem 1 beside it."""
    shape = (event.width, event.rank, event.alignment, delta)
    paper, exact = theorem1(*shape), exact_epsilon(*shape)
    value, name = (exact, "exact profile (Lemma 8)") if exact <= paper else (paper, "Theorem 1")
    return EpsilonReport(
        value,
        delta,
        name,
        Adjacency.REPLACE_ONE,
        event.conditions,
        alternatives={"theorem_1": paper, "exact_profile": exact},
    )
