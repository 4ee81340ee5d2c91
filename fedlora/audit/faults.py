"""Faults that audits plant on purpose, to measure whether they would notice them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fedlora.audit.verdict import Verdict, judge, measure_power
from fedlora.mechanisms.noise import NoiseSource, OsNoise


@dataclass
class ScaledNoise:
    """FAULT for measuring power: another source's noise, scaled."""

    scale: float
    source: NoiseSource
    private: bool = True

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return (count,) Gaussians of standard deviation `scale`."""
        return self.source.gaussians(count, device, dtype) * self.scale


def with_power(attack: Callable[[NoiseSource], Verdict], repeats: int) -> Verdict:
    """Run an attack, then measure its power on the same mechanism with half the noise.

    Args:
        attack: runs once with the noise source of every client.
        repeats: attacks with half the noise at most; 0 leaves the power open.
    """
    verdict = attack(OsNoise())
    claimed = verdict.claimed_epsilon
    if claimed is None:
        return verdict

    def caught() -> bool:
        return attack(ScaledNoise(0.5, OsNoise())).lower_bound > claimed

    power, done = measure_power(caught, repeats)
    return replace(
        verdict,
        power=power,
        verdict=judge(claimed, verdict.lower_bound, power),
        figures={**verdict.figures, "power_repeats": done},
    )
