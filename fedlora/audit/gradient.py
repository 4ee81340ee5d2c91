"""Gradient-canary audit: the mechanism's own clip and noise, attacked by somebody who knows everything but coins.

Each canary enters its client's data by a fair coin, and each step by the Poisson coin. Where persons are protected it
is a person with as many records as one may have, all with the same gradient, and each record has a Poisson coin of its
own. The auditor reads every noised release, as a server does, and calls those canaries members whose likelihood ratio
is above a threshold that was fixed before. Canaries are orthogonal and flip their own coins, so each one is a trial of
its own as long as the noise of different coordinates is independent. `one_run_bound` in the figures is weaker and needs
no such assumption.

Source: Nasr et al., "Tight Auditing of Differentially Private Machine Learning", arXiv:2302.07956v1 (Dirac canaries);
    Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", arXiv:2305.08846v1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from fedlora.audit.canaries import CanaryBasis, Chosen, canary_basis, overshoot
from fedlora.audit.canary_audit import Attack, CanaryAudit
from fedlora.audit.planning import Plan, Strengths, score_step
from fedlora.config.schema import RecordPrivacy
from fedlora.errors import UnsupportedCombinationError
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.clip import add_sums
from fedlora.mechanisms.noise import NoiseSource, OsNoise
from fedlora.mechanisms.stages import ClippedSum, NoisyUpdate
from fedlora.training.sampling import OsCoins, PoissonSampler
from fedlora.training.session import Workbench

_CHUNK_NUMBERS: Final = 2**23
_DENSE_NUMBERS: Final = 9000
"""Numbers of per-record gradients that one attack may fill for each canary that was asked for, over all its steps."""


class GradientAudit(CanaryAudit):
    """Attacks one workbench's mechanism.

    Args:
        bench: loaded model and mechanism; nothing of it is changed.
        canaries: trials at most; fewer where a large adapter makes them dear.
        confidence: of the lower bound.
        noise: makes each client's noise source; the operating system's by default.
    """

    name = "gradient-canary"

    def __init__(
        self,
        bench: Workbench,
        *,
        canaries: int = 60_000,
        confidence: float = 0.95,
        noise: Callable[[], NoiseSource] = OsNoise,
    ) -> None:
        """Choose canaries; nothing runs yet.

        Raises:
            UnsupportedCombinationError: without record-level privacy.
        """
        privacy = bench.config.privacy
        if not isinstance(privacy, RecordPrivacy):
            raise UnsupportedCombinationError(
                f"audit: gradient canaries attack record-level noise; got privacy.unit {privacy.unit}; "
                "use --attack client for client-level noise, --attack loss without privacy"
            )
        super().__init__(bench, privacy, canaries=canaries, confidence=confidence, noise=noise)
        self._mechanism: Mechanism = bench.mechanism
        self._rate, self._reach = self._mechanism.privacy.sample_rate, overshoot(self._mechanism)
        self._copies = privacy.max_records_per_group if privacy.group_by is not None else 1
        self._basis: CanaryBasis = canary_basis(
            self._mechanism, self._open(1), limit=canaries, seed=bench.config.run.seed
        )

    def attack(self, plan: Plan, noise: Callable[[], NoiseSource] | None = None) -> Attack:
        """Run the mechanism's own clip and noise on canaries and score the releases; arguments as in the base."""
        clients = max(1, self._affordable(plan.steps) // self._basis.size)
        count = clients * self._basis.size
        coins = OsCoins()
        truth = (coins.words(count) >> np.uint64(63)).astype(bool)
        sampler = PoissonSampler(count * self._copies, self._rate, coins)
        state, score = self._open(clients), np.zeros(count)
        for _ in range(plan.steps):
            if self._mechanism.coordinates.kind == "projected":
                state = self._open(clients)  # every step has a projection of its own
            ready = self._mechanism.stages.prepare(self._mechanism, state)
            drawn = sampler.draw() // self._copies  # a person's records stand beside each other
            update = self._release(ready, drawn, truth, noise or self._noise)
            statistic, strength = self._basis.filtered(ready, update)
            score += score_step(
                statistic.numpy().reshape(-1),
                strength.numpy().reshape(-1),
                self._rate,
                self._paired,
                self._copies,
            )
        return Attack(score, truth)

    def quiet(self, entries: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.str_]]:
        """Return (draws, canaries) statistics of releases with nobody in them, and each canary's block.

        Args:
            entries: statistics that are asked for in the smallest block.
        """
        fewest = int(np.unique(self._basis.labels, return_counts=True)[1].min())
        most = max(1, _CHUNK_NUMBERS // self._mechanism.coordinates.table.size)
        state = self._open(min(most, -(-entries // fewest)))
        ready = self._mechanism.stages.prepare(self._mechanism, state)
        return self._basis.filtered(ready, self._silence(ready))[0].numpy(), self._basis.labels

    def adversary(self) -> tuple[str, str]:
        """Return what the attacker sees, and the sampling assumption."""
        whose = "the canary's coin" if self._copies == 1 else "the canary person's coin"
        each = "" if self._copies == 1 else f" for each of a person's {self._copies} records"
        sees = f"sees every noised release of the attacked steps, knows all records but {whose}"
        return sees, f"Poisson, rate {self._rate:g}{each}"

    def unit(self) -> str:
        """Return "person" where the run protects all records of one."""
        privacy = self._terms
        person = isinstance(privacy, RecordPrivacy) and privacy.group_by is not None
        return "person" if person else privacy.unit

    # -- one step ---------------------------------------------------------------------------------

    def _release(
        self,
        state: LocalState,
        drawn: npt.NDArray[np.int64],
        truth: npt.NDArray[np.bool_],
        noise: Callable[[], NoiseSource],
    ) -> NoisyUpdate:
        here = drawn if self._paired else drawn[truth[drawn]]
        sign = np.where(truth[here], 1.0, -1.0).astype(np.float32)
        return self._noised(state, Chosen(here // self._basis.size, here % self._basis.size, sign), noise)

    def _silence(self, state: LocalState) -> NoisyUpdate:
        """Return a release of noise alone: its only canary has length zero."""
        at = np.zeros(1, dtype=np.int64)
        return self._noised(state, Chosen(at, at, np.zeros(1, dtype=np.float32)), self._noise)

    def _noised(self, state: LocalState, chosen: Chosen, noise: Callable[[], NoiseSource]) -> NoisyUpdate:
        mechanism, clients = self._mechanism, state.values.flat.shape[0]
        total: ClippedSum | None = None
        step = max(1, _CHUNK_NUMBERS // self._numbers_per_canary())
        for first in range(0, max(1, len(chosen.client)), step):
            part = mechanism.clip(self._basis.gradients(state, chosen.part(first, first + step)), state)
            total = part if total is None else add_sums(total, part)
        if total is None:
            raise UnsupportedCombinationError("audit: no canary fits this adapter; audit a larger one")
        return mechanism.noise(state, total, [noise() for _ in range(clients)])

    def _open(self, clients: int) -> LocalState:
        mechanism, adapted = self._mechanism, self._bench.adapted
        return mechanism.stages.open(mechanism, adapted, mechanism.initial_payload(adapted), clients)

    # -- sizes and claims -------------------------------------------------------------------------

    def _afford(self, steps: int) -> int:
        """Return the canaries for which the dense gradients of one attack stay in bounds."""
        share = (1.0 if self._paired else 0.5) * self._rate * self._copies
        dense = share * steps * self._numbers_per_canary()
        return int(
            min(self._canaries, max(self._basis.size // 8, _DENSE_NUMBERS * self._canaries / dense, 200))
        )

    def _numbers_per_canary(self) -> int:
        """Return the numbers that one canary's gradient fills: stored blocks, and two factors of each matrix."""
        coordinates = self._mechanism.coordinates
        matrices = [
            shape for name, shape in coordinates.table.shapes.items() if name not in coordinates.stored.shapes
        ]
        return max(1, coordinates.stored.size + sum(sum(shape) for shape in matrices))

    def _affordable(self, steps: int) -> int:
        wanted = self._afford(steps)
        if wanted < self._basis.size:
            self._basis = canary_basis(
                self._mechanism, self._open(1), limit=wanted, seed=self._bench.config.run.seed
            )
        return wanted

    def _strengths(self) -> Strengths:
        """Return draws of the signal-to-noise ratio, measured on the canaries under fresh projections."""
        if self._mechanism.coordinates.kind != "projected":
            values = self._strengths_once()
            return lambda generator, count: generator.choice(values, count)
        many = np.concatenate([self._strengths_once() for _ in range(64)])
        return lambda generator, count: generator.choice(many, count)

    def _strengths_once(self) -> npt.NDArray[np.float64]:
        state = self._mechanism.stages.prepare(self._mechanism, self._open(1))
        found: npt.NDArray[np.float64] = np.unique(
            self._basis.filtered(state, self._silence(state))[1].numpy()
        )
        return found
