"""The outcome of an attack, as it stands in a run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from fedlora.errors import AuditFailedError
from fedlora.figures import finite
from fedlora.files import replace_text

Word = Literal["passed", "weak attack", "failed", "leaks as expected"]

REQUIRED_POWER: Final = 0.9
"""Share of audits of the same mechanism at half the noise that must fail for a pass to mean anything."""


@dataclass(frozen=True)
class Verdict:
    """PUBLIC. What one attack found.

    Attributes:
        attack: its name.
        verdict: "failed" if the lower bound lies above the claim, "weak attack" if nothing was found but the attack
            would not have noticed half the noise either, "leaks as expected" for runs that claim no privacy.
        claimed_epsilon: what the accountant claims for the attacked steps; None without privacy.
        lower_bound: epsilon that the attack proves, at `confidence`.
        confidence: of the lower bound.
        power: share of repeats in which half the noise was caught; None where it was not measured.
        delta: of claim and bound.
        conditions: unit, adjacency, adversary, accountant, sampling: what the figures mean.
        figures: further figures of the attack.
        samples_as_the_run: whether records enter the attacked steps as they enter the run's. Where a canary stands in
            every step, only the claim for such steps is tested, and not the run's own, amplified one.
    """

    attack: str
    verdict: Word
    claimed_epsilon: float | None
    lower_bound: float
    confidence: float
    power: float | None
    delta: float | None
    conditions: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    samples_as_the_run: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values; an infinite epsilon is the text "inf"."""
        found = {
            "attack": self.attack,
            "verdict": self.verdict,
            "claimed_epsilon": self.claimed_epsilon,
            "lower_bound": self.lower_bound,
            "confidence": self.confidence,
            "power": self.power,
            "required_power": REQUIRED_POWER,
            "delta": self.delta,
            "samples_as_the_run": self.samples_as_the_run,
            "conditions": dict(self.conditions),
            "figures": dict(self.figures),
        }
        return {name: finite(value) for name, value in found.items()}


def judge(claimed_epsilon: float | None, lower_bound: float, power: float | None) -> Word:
    """Return the verdict of a bound against a claim.

    Example:
        >>> judge(1.0, 1.2, 1.0), judge(1.0, 0.4, 0.95), judge(1.0, 0.4, 0.5), judge(1.0, 0.4, None)
        ('failed', 'passed', 'weak attack', 'weak attack')
    """
    if claimed_epsilon is None:
        return "leaks as expected" if lower_bound > 0.0 else "weak attack"
    if not (lower_bound <= claimed_epsilon):
        return "failed"
    return "passed" if power is not None and power >= REQUIRED_POWER else "weak attack"


def measure_power(caught: Callable[[], bool], repeats: int) -> tuple[float | None, int]:
    """Repeat an audit of the same mechanism at half the noise until its power is decided.

    Args:
        caught: runs one such audit; True if its lower bound lies above the claim.
        repeats: audits at most; 0 leaves the power open.

    Returns:
        (share caught, audits done): fewer than `repeats` once `REQUIRED_POWER` is out of reach.
    """
    found, done = 0, 0
    while done < repeats:
        found, done = found + caught(), done + 1
        if done - found > (1.0 - REQUIRED_POWER) * repeats + 1e-9:
            break
    return (found / done if done > 0 else None), done


def write_verdict(folder: Path, verdict: Verdict) -> Path:
    """Write `audit-<attack>.json` into a run's folder, where the report finds it."""
    path = folder / f"audit-{verdict.attack.replace(' ', '-')}.json"
    replace_text(path, json.dumps(verdict.to_json(), indent=2, allow_nan=False) + "\n")
    return path


def require_passed(verdicts: list[Verdict]) -> None:
    """Refuse to go on after a failed audit.

    Raises:
        AuditFailedError: naming the attacks whose lower bound lies above the claim.
    """
    failed = [one for one in verdicts if one.verdict == "failed"]
    if failed:
        said = "; ".join(
            f"{one.attack}: lower bound {one.lower_bound:.4g} at confidence {one.confidence:g}, "
            f"claimed {one.claimed_epsilon:.4g}, delta {one.delta:g}"
            for one in failed
        )
        raise AuditFailedError(
            f"audit failed: {said}; the mechanism that ran is not as private as it claims; stop using this run's "
            "figures and look for missing clipping or noise"
        )
