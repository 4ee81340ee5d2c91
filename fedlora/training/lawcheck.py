"""Is the noise Gaussian, of numbers that stand once each, and added to a sum as it is?

A variance says little about privacy. Uniform numbers, or Gaussian ones that are cut off, rule out whatever lies beyond
their end; numbers of 16 bits lie on a grid and show the sum between its points; numbers that come twice cancel; noise
that depends on the sum, or a sum that is rounded before it, is no Gaussian mechanism. All of them can have the claimed
variance. No test is asymptotic, and none reads a record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from fedlora.adapters.records import RecordAxis
from fedlora.config.schema import RecordPrivacy
from fedlora.mechanisms.base import LocalState
from fedlora.mechanisms.clip import zero_sum
from fedlora.mechanisms.noise import NoiseSource
from fedlora.mechanisms.stages import ClippedSum
from fedlora.training.checked import SelfCheck
from fedlora.training.cohort_passes import full_float32
from fedlora.training.drawing import noise_source
from fedlora.training.session import Workbench

Numbers = npt.NDArray[np.float64]

_CLIENTS: Final = ("self-check-0", "self-check-1")
_NUMBERS: Final = 2**14
"""Numbers of each of four draws: two of each of two clients' sources."""
_CHANCE: Final = 1e-12
"""Probability with which sound numbers are refused by each test."""
_ENDS: Final = (1.0, 2.0, 3.0, 3.5)
"""Sizes beyond which numbers are counted: 30 of four draws lie beyond the last."""
_ONCE: Final = 0.98
"""Least share of different sizes: 0.998 of so many float32 Gaussians differ, fewer than 0.3 of 16-bit ones."""
_LAGS: Final = 8
_LIKE: Final = 0.08
"""Correlation of two draws, or of a draw with itself some places on: reached once in 10^18 by chance."""
_LONG: Final = 30.0
"""Size of a made-up sum's values, in units of the bound: sums of many records are as long."""
TIMES: Final = 3.0
"""No power of two: what is rounded, or cut off, does not become three times as large."""
_SAME: Final = 2e-5


def check_law(bench: Workbench) -> SelfCheck:
    """Check that what clients' noise sources hand out are independent standard Gaussians of full precision."""
    name = "noise is Gaussian"
    if bench.config.repeatable:
        return SelfCheck(name, True, "repeatable by configuration: this run has no privacy")
    found = []
    for client in _CLIENTS:
        source = noise_source(bench.config, client, 1)
        found += [source.gaussians(_NUMBERS, bench.adapted.device, torch.float32) for _ in range(2)]
    return SelfCheck(name, *judge_law([one.double().cpu().numpy() for one in found]))


def judge_law(draws: Sequence[Numbers]) -> tuple[bool, str]:
    """Judge draws of equal length that should be independent standard Gaussians; say what they are not."""
    pooled = np.concatenate(draws)
    faults = [*_shape(pooled), *_ends(pooled), *_alike(draws)]
    once = len(np.unique(np.abs(pooled))) / pooled.size
    if once < _ONCE:
        faults.append(f"{once:.2f} of the numbers stand once")
    return not faults, "; ".join(faults) or f"{pooled.size} numbers, {once:.3f} of them once"


def _shape(pooled: Numbers) -> list[str]:
    """Hold the distribution function against the law's: Dvoretzky, Kiefer and Wolfowitz, with Massart's constant."""
    away = float(stats.kstest(pooled, "norm").statistic)
    allowed = math.sqrt(math.log(2.0 / _CHANCE) / (2.0 * pooled.size))
    return [] if away <= allowed else [f"distribution is {away:.3f} from a Gaussian's"]


def _ends(pooled: Numbers) -> list[str]:
    """Count large numbers, which have exact binomial tails."""
    found = []
    for end in _ENDS:
        seen, law = int((np.abs(pooled) > end).sum()), stats.binom(pooled.size, 2.0 * stats.norm.sf(end))
        if 2.0 * min(float(law.sf(seen - 1)), float(law.cdf(seen))) < _CHANCE:
            found.append(f"{seen} numbers beyond {end:g}, {law.mean():.4g} by the law")
    return found


def _alike(draws: Sequence[Numbers]) -> list[str]:
    """Correlate draws with each other, and each with itself a few places on."""
    pairs = [(one, other) for at, one in enumerate(draws) for other in draws[:at]]
    pairs += [(one[:-lag], one[lag:]) for one in draws for lag in range(1, _LAGS + 1)]
    worst = max(abs(float(np.mean(one * other))) for one, other in pairs)
    return [] if worst <= _LIKE else [f"numbers are correlated ({worst:.2f})"]


@dataclass
class FixedNoise:
    """The same numbers each time, `factor` times as large: to see what becomes of noise."""

    factor: float
    private: bool = True

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return (count,) numbers."""
        numbers = torch.randn(count, generator=torch.Generator().manual_seed(1))
        return (self.factor * numbers).to(device=device, dtype=dtype)


def check_added(bench: Workbench) -> SelfCheck:
    """Check that a release is the sum and the noise, and nothing else: whatever the sum, the same noise is added.

    The very noise stage runs on made-up sums with numbers that are put in: the release must be linear in both.
    """
    name = "noise is added as it is"
    if not isinstance(bench.config.privacy, RecordPrivacy):
        return SelfCheck(name, True, "no record-level privacy configured")
    mechanism = bench.mechanism
    state = mechanism.first_state(bench.adapted)

    def released(size: float, factor: float) -> torch.Tensor:
        sources: list[NoiseSource] = [FixedNoise(factor)]
        return mechanism.noise(state, _sum(bench, state, size), sources).blocks.flat

    with full_float32():
        noise, alone = released(0.0, 1.0), released(_LONG, 0.0)
        gap = {
            "noise of other size": _gap(released(0.0, TIMES), TIMES * noise),
            "a sum of other size": _gap(released(TIMES * _LONG, 0.0), TIMES * alone),
            "noise beside a sum": _gap(released(_LONG, 1.0), noise + alone),
        }
    faults = [what for what, change in gap.items() if not (change <= _SAME)]
    said = f"largest relative change {max(gap.values()):.2e}"
    return SelfCheck(name, not faults, "; ".join([said, *faults]))


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return how far two releases differ, relative to the largest value; NaN where one is not finite."""
    return float((one - other).abs().max() / one.abs().max())


def _sum(bench: Workbench, state: LocalState, size: float) -> ClippedSum:
    """Return a made-up sum with values of this size, in units of the bound."""
    mechanism = bench.mechanism
    axis = RecordAxis.of([0], bench.adapted.device)
    bound = mechanism.privacy.max_grad_norm
    empty = zero_sum(mechanism.coordinates.table, axis, mechanism.metric, bound, state.values.flat)
    numbers = torch.randn(empty.blocks.flat.shape, generator=torch.Generator().manual_seed(2))
    return ClippedSum(
        empty.blocks.like((size * bound * numbers).to(empty.blocks.flat)), bound, mechanism.metric
    )


__all__ = ["TIMES", "FixedNoise", "check_added", "check_law", "judge_law"]
