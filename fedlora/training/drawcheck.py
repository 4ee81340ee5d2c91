"""Are draws what the accountant assumes: a coin of its own for every member in every draw, at the public rate?

Batches of records and rounds of clients are judged alike, from a table of who was drawn when. No test is asymptotic:
counts have exact binomial tails, spreads Chernoff's bound, which holds for every number of draws. All tests of a start
share one probability of a false alarm (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.special import logsumexp

from fedlora.errors import PrivacyParameterError

Draws = npt.NDArray[np.bool_]

CHANCE: Final = 1e-6
"""Probability that a sound sampler is refused at one start, over all tests."""
_TESTS: Final = 9
"""Tests of one table."""
_DRAWN: Final = 16.0
"""Members that a draw of the large table has (or leaves) on average."""
_FEWEST: Final = 64
_TILTS: Final = np.concatenate([sign * np.logspace(-3.0, 3.0, 40) for sign in (-1.0, 1.0)])
"""Exponents, in units of a spread's own scale, of which the best bounds a tail; each of them bounds it."""


@dataclass(frozen=True)
class Table:
    """Who was drawn when; PUBLIC, since the members are made up.

    Attributes:
        name: of the table, for the message.
        draws: (draws, members), True where a member was drawn.
        least: a size below which draws may have been thrown away.
    """

    name: str
    draws: Draws
    least: int = 1


def table_sizes(rate: float, most: int, least: int = 1) -> dict[str, int]:
    """Return name to number of members: many; one drawn on average; `least` drawn on average (if `most` holds them).

    Draws that are made again where nobody (or too few) was drawn are not seen in a large table: there are none.
    """
    large = int(np.clip(math.ceil(_DRAWN / min(rate, 1.0 - rate)), _FEWEST, most))
    sizes = {"many": large, "few": int(np.clip(round(1.0 / rate), 1, most))}
    wanted = math.ceil(least / rate)
    return {**sizes, "least": wanted} if least > 1 and wanted <= most else sizes


def faults_of(tables: Iterable[Table], rate: float, chance: float = CHANCE) -> list[str]:
    """Return what no table of independent coins shows, but with probability `chance` for all tables together.

    Args:
        tables: of independent draws.
        rate: in (0, 1), the claim.
        chance: of a false alarm.

    Raises:
        PrivacyParameterError: if the rate is not in (0, 1).
    """
    if not 0.0 < rate < 1.0:
        raise PrivacyParameterError(f"sample rate: got {rate}; a check of draws needs one in (0, 1)")
    kept = list(tables)
    limit = chance / (_TESTS * max(1, len(kept)))
    return [f"{one.name}: {said}" for one in kept for said in _faults(one, rate, limit)]


def _faults(table: Table, rate: float, limit: float) -> list[str]:
    drawn = table.draws
    times, members = drawn.shape
    sizes = drawn.sum(1)
    found = [
        _count("drawn", int(sizes.sum()), drawn.size, rate, limit),
        _spread("sizes of draws", sizes, members, rate, limit),
        _spread("members' shares of draws", drawn.sum(0), times, rate, limit),
        _count("draws of nobody", int((sizes == 0).sum()), times, (1.0 - rate) ** members, limit),
    ]
    if table.least > 1:
        below = float(stats.binom.cdf(table.least - 1, members, rate))
        what = f"draws of fewer than {table.least}"
        found.append(_count(what, int((sizes < table.least).sum()), times, below, limit))
    for first in (0, 1):  # pairs that share nothing, so that their coins are independent
        for what, one in (("drawn twice running", drawn[first:]), ("neighbours together", drawn.T[first:])):
            pairs = one[: len(one) - len(one) % 2]
            both = pairs[0::2] & pairs[1::2]
            found.append(_count(what, int(both.sum()), both.size, rate**2, limit))
    return list(dict.fromkeys(said for said in found if said))


def _count(what: str, seen: int, trials: int, chance: float, limit: float) -> str:
    """Judge a count of independent coins by its exact binomial tails."""
    law = stats.binom(trials, chance)
    if 2.0 * min(float(law.sf(seen - 1)), float(law.cdf(seen))) >= limit:
        return ""
    return f"{what} {seen} times, {trials * chance:.4g} by the law"


def _spread(what: str, counts: npt.NDArray[np.int64], coins: int, rate: float, limit: float) -> str:
    """Judge by how much counts of `coins` coins each differ, whatever their mean.

    The statistic is the second Krawtchouk polynomial, which is uncorrelated with the count. Chernoff:
    P(S >= s) <= E[exp(t k)]^n exp(-t s) for every t > 0, and the same below for t < 0.
    """
    scale = math.sqrt(2.0 * coins * (coins - 1)) * rate * (1.0 - rate)
    if not scale > 0.0:
        return ""
    away = np.arange(coins + 1) - coins * rate
    values = (away**2 - (1.0 - 2.0 * rate) * away - coins * rate * (1.0 - rate)) / scale
    law = stats.binom.logpmf(np.arange(coins + 1), coins, rate)
    known = np.isfinite(law)
    growth = logsumexp(law[known] + _TILTS[:, None] * values[known], axis=1)
    bound = float((len(counts) * growth - _TILTS * values[counts].sum()).min())
    if 2.0 * math.exp(min(0.0, bound)) >= limit:
        return ""
    found = float(np.square(away[counts]).mean()) / (coins * rate * (1.0 - rate))
    return f"variance of {what} {found:.2f} of the law's"


__all__ = ["CHANCE", "Draws", "Table", "faults_of", "table_sizes"]
