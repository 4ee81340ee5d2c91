"""Opacus's numerical (PRV) accountant, on request: Gopi, Lee and Wutschitz, arXiv:2106.02848. Loads torch (3 s)."""

from __future__ import annotations

import math
import warnings

from fedlora.accounting import pld
from fedlora.accounting.reports import Adjacency
from fedlora.errors import UnsupportedEventError

EPS_ERROR = 0.01


def epsilon(parts: pld.Parts, delta: float, adjacency: Adjacency) -> float:
    """Return Opacus PRV's upper end, which lies within 2 * EPS_ERROR above the value.

    Args:
      parts: basic events with counts, Gaussian or sampled Gaussian.
      delta: in (0, 1).
      adjacency: add-or-remove only.

    Raises:
      UnsupportedEventError: for another relation, or an event that is not Gaussian.
    """
    if adjacency is not Adjacency.ADD_OR_REMOVE:
        raise UnsupportedEventError(
            "accountant prv: got replace_one, allowed is add_or_remove; use pld or best"
        )
    split = pld.gaussian_parts(parts) if pld.is_exact(parts) else None
    if split is None:
        raise UnsupportedEventError("accountant prv: got a non-Gaussian event; use best")
    full, sampled = split
    if math.isinf(full):
        return math.inf
    try:
        from opacus.accountants import PRVAccountant
    except ImportError as error:
        raise UnsupportedEventError("accountant prv: opacus is not installed; use pld or best") from error
    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, count) for sigma, rate, count in sampled]
    if full > 0.0:
        accountant.history.append((1.0 / math.sqrt(full), 1.0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta=delta, eps_error=EPS_ERROR))
