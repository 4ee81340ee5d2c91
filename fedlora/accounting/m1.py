"""M1: M V + Xi with a secret Wishart M, one-column and several-column bounds.

"LoRA and Privacy: When Random Projections Help (and When They Don't)", Theorems 3 and 4, Lemmas 2, 14 and 15. A
conditional analysis. Two places of the paper are replaced by sharper valid ones: Eq. 3's classical Gaussian formula,
which is proved for epsilon < 1 only, by the exact Gaussian profile; Lemma 2 by the exact profile of the
residual vector.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from scipy.special import chdtri, stdtrit

from fedlora.accounting import gaussian, vector
from fedlora.accounting.conditional import M1Event
from fedlora.accounting.reports import Adjacency, EpsilonReport

_SHARES = (0.05, 0.3, 0.6, 0.9)


def spectral_bound(event: M1Event, failure: float) -> float:
    """Return Gamma of Lemma 14: ||M_par u|| <= Gamma with probability >= 1 - failure (sigma_M^2 = 1 / r)."""
    p = min(event.span, event.rank)
    if p == 0:
        return 0.0
    g = math.sqrt(2.0 * math.log(2.0 / failure))
    return (math.sqrt(event.width) + math.sqrt(p) + g) * (math.sqrt(p) + g) / event.rank


def _residual_shape(event: M1Event) -> tuple[int, int] | None:
    """(m, q) of the residual Wishart, or None where the residual reveals nothing."""
    m, q = event.width - event.span, event.rank - min(event.span, event.rank)
    nothing = event.residual == 0.0 or q == 0 or event.alignment >= 1.0 or m < 2
    return None if nothing else (m, q)


def parallel_classical(event: M1Event, delta_gauss: float, failure: float) -> float:
    """Return Eq. 3 as printed: Gamma Delta / sigma_G sqrt(2 ln(1.25 / delta)); a theorem for values below 1 only."""
    scale = spectral_bound(event, failure) * event.column_distance
    if scale == 0.0:
        return 0.0
    return (
        math.inf
        if event.noise_std == 0.0
        else scale / event.noise_std * math.sqrt(2.0 * math.log(1.25 / delta_gauss))
    )


def parallel_exact(event: M1Event, delta_gauss: float, failure: float) -> float:
    """Return the exact Gaussian epsilon of the correlated term (Lemma 15 with the exact profile)."""
    scale = spectral_bound(event, failure) * event.column_distance
    if scale == 0.0:
        return 0.0
    return (
        math.inf
        if event.noise_std == 0.0
        else gaussian.epsilon_of_gaussian(delta_gauss, scale / event.noise_std)
    )


def residual_lemma2(event: M1Event, delta_residual: float) -> float:
    """Return Lemma 2's epsilon at a total residual delta (appendix form, 1 / (rho - K) - 1; the main text prints +)."""
    shape = _residual_shape(event)
    if shape is None:
        return 0.0
    m, q = shape
    rho = event.alignment
    tail = (delta_residual - vector.support_mass(q, rho)) / 3.0
    if not 0.0 < tail < 0.5:
        return math.inf
    k = math.sqrt((1.0 - rho * rho) / q) * -float(stdtrit(q, tail))
    if not rho > k:
        return math.inf
    kappa = float(chdtri(m + q - 1, tail))
    return (m - q + 1) / 2.0 * math.log(rho + k) + kappa / 2.0 * (1.0 / (rho - k) - 1.0)


def residual_exact(event: M1Event, delta_residual: float) -> float:
    """Return the exact epsilon of the residual vector."""
    shape = _residual_shape(event)
    return (
        0.0
        if shape is None
        else vector.exact_epsilon(shape[0], shape[1], event.alignment, delta_residual, 1e-4)
    )


def one_column(event: M1Event, delta: float, *, paper: bool = False) -> float:
    """Return Theorem 4's epsilon at a total delta, the split of delta optimised on a grid.

    Args:
      event: the analysis.
      delta: in (0, 1).
      paper: use the printed Eq. 3 and Lemma 2 instead of the sharper ones.
    """
    correlated, residual = (
        (parallel_classical, residual_lemma2) if paper else (parallel_exact, residual_exact)
    )
    shape = _residual_shape(event)
    floor = 0.0 if shape is None else vector.support_mass(shape[1], event.alignment)
    left = delta - floor
    if not left > 0.0:
        return math.inf
    if spectral_bound(event, 0.5) == 0.0:
        return residual(event, delta)
    if shape is None:
        return min(correlated(event, delta * s, delta * (1.0 - s)) for s in _SHARES)
    residuals = {s: residual(event, floor + left * s) for s in _SHARES}
    return min(
        residuals[s] + correlated(event, left * (1.0 - s) * t, left * (1.0 - s) * (1.0 - t))
        for s, t in itertools.product(_SHARES, _SHARES)
    )


def several_columns(event: M1Event, delta: float, *, paper: bool = False) -> float:
    """Return Theorem 3's epsilon: k eps_1 with k exp((k - 1) eps_1) delta_1 <= delta."""
    k = event.changed_columns
    if k == 1:
        return one_column(event, delta, paper=paper)
    best = math.inf
    for exponent in np.linspace(0.0, 1.0, 9):
        single = delta / k * 10.0 ** (-8.0 * float(exponent))
        epsilon = one_column(event, single, paper=paper)
        if (k - 1) * epsilon + math.log(k) + math.log(single) <= math.log(delta):
            best = min(best, k * epsilon)
    return best


def epsilon_report(event: M1Event, delta: float) -> EpsilonReport:
    """Return the sharper valid bound with the printed one beside it (valid only if its Gaussian part is below 1)."""
    ours, printed = several_columns(event, delta), several_columns(event, delta, paper=True)
    notes = {"theorems_3_and_4_as_printed": printed}
    return EpsilonReport(
        ours,
        delta,
        "Theorems 3 and 4 with exact parts",
        Adjacency.REPLACE_ONE,
        event.conditions,
        alternatives=notes,
    )
