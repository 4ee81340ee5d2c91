"""What canary audits share: attack once, measure the power at half the noise, judge the bound against the claim."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fedlora.accounting import epsilon_of
from fedlora.audit.faults import ScaledNoise
from fedlora.audit.planning import Plan, Question, Strengths, best_bound, make_plan
from fedlora.audit.statistics import best_one_run_bound, roc_figures
from fedlora.audit.verdict import Verdict, judge, measure_power
from fedlora.config.resolve import total_steps
from fedlora.config.schema import ClientPrivacy, RecordPrivacy
from fedlora.mechanisms.noise import NoiseSource
from fedlora.training.session import Workbench


@dataclass(frozen=True)
class Attack:
    """SENSITIVE only in name: the auditor's own canaries.

    Attributes:
        scores: (n,) summed log likelihood ratios.
        truth: (n,) whether each canary was in the data.
    """

    scores: npt.NDArray[np.float64]
    truth: npt.NDArray[np.bool_]


class CanaryAudit(ABC):
    """Attacks one workbench's own clip and noise with orthogonal canaries.

    Args:
        bench: loaded model and mechanism; nothing of it is changed.
        privacy: its privacy section.
        canaries: trials at most.
        confidence: of the lower bound.
        noise: makes each noise source.
    """

    name: ClassVar[str]
    _rate: float
    """Probability with which a canary that is in enters a step; set by the subclass."""
    _reach: float
    """Signal of a canary that is not clipped, in units of the bound; set by the subclass."""
    _copies: int = 1
    """Records of one canary: all that one person may have, each drawn by a coin of its own."""

    def __init__(
        self,
        bench: Workbench,
        privacy: RecordPrivacy | ClientPrivacy,
        *,
        canaries: int,
        confidence: float,
        noise: Callable[[], NoiseSource],
    ) -> None:
        """Keep what is attacked; nothing runs yet."""
        self._bench, self._terms, self._confidence = bench, privacy, confidence
        self._canaries, self._noise = canaries, noise
        self._paired = privacy.adjacency == "replace_one"

    @abstractmethod
    def _strengths(self) -> Strengths:
        """Return draws of a canary's signal-to-noise ratio."""

    @abstractmethod
    def _afford(self, steps: int) -> int:
        """Return the canaries with which an attack of so many steps ends in bounded time."""

    def plan(self) -> Plan:
        """Choose steps and thresholds from simulated attacks on faulty mechanisms."""
        return make_plan(
            Question(
                strengths=self._strengths(),
                claim=self.claim,
                afford=self._afford,
                sample_rate=self._rate,
                delta=self._terms.target_delta,
                confidence=self._confidence,
                paired=self._paired,
                most_steps=total_steps(self._bench.config),
                overshoot=self._reach,
                copies=self._copies,
            )
        )

    @abstractmethod
    def attack(self, plan: Plan, noise: Callable[[], NoiseSource] | None = None) -> Attack:
        """Run the audited code on canaries and score its releases.

        Args:
            plan: steps and thresholds.
            noise: makes each noise source, in the place of the audit's own.
        """

    def halved(self, plan: Plan) -> Attack:
        """Attack the same code with half the noise."""
        return self.attack(plan, partial(ScaledNoise, 0.5, self._noise()))

    @abstractmethod
    def adversary(self) -> tuple[str, str]:
        """Return (what the attacker sees and knows, sampling assumption)."""

    def unit(self) -> str:
        """Return whose presence the attack tests."""
        return self._terms.unit

    def run(self, *, repeats: int = 10) -> Verdict:
        """Attack once, then measure the power on as many runs with half the noise.

        Args:
            repeats: runs with half the noise at most (fewer once the required power is out of reach); 0 leaves the
                power open.
        """
        plan = self.plan()
        attack = self.attack(plan)
        bound = self.bound(attack, plan)
        power, done = measure_power(
            lambda: self.bound(self.halved(plan), plan) > plan.claimed_epsilon, repeats
        )
        return Verdict(
            self.name,
            judge(plan.claimed_epsilon, bound, power),
            plan.claimed_epsilon,
            bound,
            self._confidence,
            power,
            self._terms.target_delta,
            self._conditions(plan),
            {**self._figures(attack, plan), "power_repeats": done},
        )

    def bound(self, attack: Attack, plan: Plan) -> float:
        """Return the lower bound on epsilon at the plan's thresholds."""
        return best_bound(
            attack.scores,
            attack.truth,
            plan.thresholds,
            delta=self._terms.target_delta,
            confidence=self._confidence,
        )

    def claim(self, steps: int) -> float:
        """Return the accountant's epsilon for so many steps."""
        return epsilon_of(
            self._bench.event.times(steps),
            self._terms.target_delta,
            adjacency=self._terms.adjacency,
            accountant=self._terms.accountant,
        ).epsilon

    def _figures(self, attack: Attack, plan: Plan) -> dict[str, object]:
        roc = roc_figures(attack.scores, attack.truth)
        one_run, guesses = best_one_run_bound(
            attack.scores, attack.truth, delta=self._terms.target_delta, confidence=self._confidence
        )
        return {
            "auc": roc.auc,
            "tpr_at_1_percent_fpr": roc.tpr_at_1,
            "tpr_at_10_percent_fpr": roc.tpr_at_10,
            "canaries": len(attack.truth),
            "steps": plan.steps,
            "thresholds": list(plan.thresholds),
            "one_run_bound": one_run,
            "one_run_guesses": guesses,
        }

    def _conditions(self, plan: Plan) -> dict[str, object]:
        privacy = self._terms
        report = epsilon_of(
            self._bench.event.times(plan.steps),
            privacy.target_delta,
            adjacency=privacy.adjacency,
            accountant=privacy.accountant,
        )
        derived = self._bench.config.derived
        sees, sampling = self.adversary()
        return {
            "unit": self.unit(),
            "adjacency": privacy.adjacency,
            "accountant": report.accountant,
            "sampling": sampling,
            "adversary": sees,
            "attacked_steps": plan.steps,
            "epsilon_of_the_whole_run": None if derived is None else derived.epsilon,
            "event_conditions": list(report.conditions),
        }
