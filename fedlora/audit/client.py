"""Client-canary audit: the server's own check, clip, sum, noise and divisor against one who knows all but the coins.

Each canary client is in the federation by a fair coin, and in a round by the run's own client sampling. Its whole
update is four times longer than the clipping norm, along a direction of its own, so that canaries do not disturb each
other. The auditor reads each round's released mean before the server's optimiser (which is post-processing) and calls
those clients members whose likelihood ratio is above a threshold that was fixed before.

With shares of noise the released sum is what secure aggregation opens: exactly `honest_clients` clients answer, the
least that may, each clips and adds its share by the client's own code, and a canary that is "out" sends no change.
Under an adaptive clip the noised bits are charged, but not attacked: in one run they show no client alone.

Source: as fedlora.audit.gradient, with whole clients in place of records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from fedlora.aggregation import Aggregator, ClientPlan, build_aggregator, clip_and_share
from fedlora.aggregation.build import client_sampling
from fedlora.aggregation.linear import MeanB, Means, TangentMean
from fedlora.aggregation.secagg_blocks import update_vector, vector_blocks
from fedlora.aggregation.server_optimizer import ServerOptimizer
from fedlora.aggregation.types import Charge, Outcome
from fedlora.audit.canaries import OVERSHOOT
from fedlora.audit.canary_audit import Attack, CanaryAudit
from fedlora.audit.client_canaries import CanaryClients
from fedlora.audit.planning import Plan, Strengths, score_step
from fedlora.config.schema import ClientPrivacy
from fedlora.errors import AggregationError, UnsupportedCombinationError
from fedlora.mechanisms.noise import NoiseSource, OsNoise
from fedlora.training.sampling import OsCoins, PoissonSampler
from fedlora.training.session import Workbench
from fedlora.wire.payload import AdapterPayload

_NUMBERS: Final = 9_000
"""Update entries that one attack may clip and sum for each canary that was asked for, over all its rounds."""
_CLIENTS: Final = 100
"""Public size of the audited federation; the auditor multiplies the divisor out again."""
_STORED: Final = 2**16
_QUIET_ROUNDS: Final = 32
"""Releases without any change that are read at most."""
_OVERHEAD: Final = 4_000
"""What checking and clipping an update costs beside its entries, in entries."""
_SHARES: Final = 4
"""How much dearer a canary is where clients add shares of noise: 5500 canaries on the demo's adapter, which tell."""


class Normals:
    """A noise source as the aggregation asks for it.

    Attributes:
        private: True if nobody can repeat the draws.
    """

    def __init__(self, source: NoiseSource) -> None:
        """Wrap a source."""
        self._source, self.private = source, source.private

    def normal(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Return i.i.d. N(0, 1) numbers of the given shape."""
        count = int(np.prod(shape, dtype=np.int64))
        return self._source.gaussians(count, torch.device("cpu"), torch.float64).numpy().reshape(shape)


class _Stored:
    """A noise source that draws many numbers at once and hands each out once: thousands of clients draw a few each."""

    def __init__(self, source: NoiseSource) -> None:
        self._source, self.private = source, source.private
        self._store = torch.empty(0)

    def shared(self) -> NoiseSource:
        return self

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if count > len(self._store) or self._store.dtype != dtype:
            self._store = self._source.gaussians(max(count, _STORED), device, dtype)
        found, self._store = self._store[:count], self._store[count:]
        return found


class _HeardMeanB(MeanB):
    """Keeps the released mean update and leaves the adapter where it is: every attacked round starts there."""

    heard: Means

    def apply(self, updates: Means) -> Outcome:
        """Remember what is released."""
        self.heard = dict(updates)
        return Outcome(self.current, residual=0.0)


class _HeardTangent(TangentMean):
    """The same for tangent updates."""

    heard: Means

    def apply(self, updates: Means) -> Outcome:
        """Remember what is released."""
        self.heard = dict(updates)
        return Outcome(self.current, residual=0.0)


@dataclass(frozen=True)
class Server:
    """One audited aggregator, whose releases can be read."""

    aggregator: Aggregator
    mode: _HeardMeanB | _HeardTangent

    @property
    def plan(self) -> ClientPlan:
        """This round's public constants.

        Raises:
            UnsupportedCombinationError: without client-level privacy.
        """
        if self.aggregator.plan is None:
            raise UnsupportedCombinationError("audit: this run has no client-level privacy")
        return self.aggregator.plan


def open_server(bench: Workbench, noise: NoiseSource, *, charge: Charge | None = None) -> Server:
    """Build the run's own aggregator around a noise source.

    Args:
        bench: with client-level privacy.
        noise: of the server.
        charge: told each round's event; nothing is written.
    """
    agg = bench.config.federation.aggregation.model_copy(update={"max_update_norm": None})
    federation = bench.config.federation.model_copy(update={"aggregation": agg})
    config = bench.config.model_copy(update={"federation": federation})
    aggregator = build_aggregator(
        config,
        bench.layout,
        bench.adapted.recipe.sha256,
        num_clients=_CLIENTS,
        noise=Normals(noise),
        charge=charge or (lambda event: None),
        uplink=bench.mechanism.uplink,
    )
    optimizer = ServerOptimizer(federation.server_optimizer)
    tangent = aggregator.mode.uplink == "tangent"
    mode = _HeardTangent(optimizer) if tangent else _HeardMeanB(optimizer)
    aggregator.mode = mode
    return Server(aggregator, mode)


def open_shares(
    server: Server,
    start: AdapterPayload,
    updates: Iterable[AdapterPayload],
    noise: Callable[[], NoiseSource],
) -> None:
    """Clip whole updates and add a share of the noise to each by the client's code; open their sum at the server.

    Args:
        server: in a round that has begun.
        start: the global adapter that clients start from.
        updates: one of each client, at least one.
        noise: makes each client's noise source.
    """
    total: npt.NDArray[np.float64] = np.zeros(1)
    shapes: dict[str, tuple[int, ...]] = {}
    names = []
    for number, update in enumerate(updates):
        sent = clip_and_share(update, start, server.plan, Normals(noise()))
        total = total + update_vector(sent, start)
        shapes = {name: block.shape for name, block in sorted(update.blocks.items())}
        names.append(f"client-{number:06d}")
    server.aggregator.authorize_sum(names)
    server.aggregator.finish_sum(names, vector_blocks(total, shapes))


class ClientAudit(CanaryAudit):
    """Attacks one workbench's client-level release.

    Args:
        bench: loaded model and configuration; nothing of it is changed.
        canaries: trials at most; fewer where a large adapter makes them dear.
        confidence: of the lower bound.
        noise: makes the noise source of the server (or of every client, with shares).
    """

    name = "client-canary"

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
            UnsupportedCombinationError: without client-level privacy.
        """
        privacy = bench.config.privacy
        if not isinstance(privacy, ClientPrivacy):
            raise UnsupportedCombinationError(
                f"audit: canary clients attack client-level noise; got privacy.unit {privacy.unit}; use "
                "--attack gradient (record) or loss (none)"
            )
        super().__init__(bench, privacy, canaries=canaries, confidence=confidence, noise=noise)
        self._start = bench.initial_payload()
        self._sigma = open_server(bench, OsNoise()).plan.noise_multiplier
        self._honest = privacy.honest_clients if privacy.noise_at == "clients" else None
        rate = client_sampling(bench.config.federation, _CLIENTS)[1]
        self._rate, self._reach = 1.0 if rate is None or self._honest is not None else rate, OVERSHOOT
        limit = canaries if self._honest is None else min(canaries, self._honest)
        self._basis = CanaryClients(self._start, bench.layout, limit=limit, seed=bench.config.run.seed)

    def _strengths(self) -> Strengths:
        return lambda generator, count: np.full(count, 1.0 / self._sigma)

    def attack(self, plan: Plan, noise: Callable[[], NoiseSource] | None = None) -> Attack:
        """Run the server's (or the clients') own code on canary clients and score the releases."""
        make = noise or self._noise
        if self._honest is not None:
            make = _Stored(make()).shared
        size = min(self._basis.size, self._afford(plan.steps))
        servers = [open_server(self._bench, make()) for _ in range(max(1, self._afford(plan.steps) // size))]
        count, coins = len(servers) * size, OsCoins()
        truth = (coins.words(count) >> np.uint64(63)).astype(bool)
        sampler, score = PoissonSampler(count, self._rate, coins), np.zeros(count)
        strength = np.full(count, 1.0 / self._sigma)
        for _ in range(plan.steps):
            drawn = sampler.draw()
            signs = np.zeros(count)
            signs[drawn] = np.where(truth[drawn], 1.0, -1.0 if self._paired else 0.0)
            read = [
                self._round(server, signs[at * size : (at + 1) * size], make)
                for at, server in enumerate(servers)
            ]
            score += score_step(np.concatenate(read), strength, self._rate, self._paired)
        return Attack(score, truth)

    def quiet(self, entries: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.str_]]:
        """Return (rounds, canaries) coordinates of releases without any change, and each canary's block.

        Args:
            entries: coordinates that are asked for in the smallest block, within a few rounds.
        """
        basis, everybody = self._basis, np.zeros(self._basis.size)
        if self._honest is not None:  # as many answer as canaries fit into a round; all directions are read
            basis = CanaryClients(
                self._start, self._bench.layout, limit=self._canaries, seed=self._bench.config.run.seed
            )
        fewest = int(np.unique(basis.labels, return_counts=True)[1].min())
        rounds, server = min(_QUIET_ROUNDS, -(-entries // fewest)), open_server(self._bench, self._noise())
        units = [self._coordinates(server, everybody, self._noise, basis) for _ in range(rounds)]
        return np.stack(units), basis.labels

    def adversary(self) -> tuple[str, str]:
        """Return what the attacker sees, and the sampling assumption."""
        known = "knows every client's update but the canary's coin"
        if self._honest is not None:
            sees = f"the server: sees every opened sum of the attacked rounds, {known}"
            return f"{sees}; {self._honest} honest clients add noise", "none: the server draws the clients"
        sees = f"sees every noised mean of the attacked rounds, {known}; not the server"
        if self._rate < 1.0:
            return sees, f"Poisson over clients, rate {self._rate:g}"
        return sees, "none: the canary may be in every round"

    # -- one round --------------------------------------------------------------------------------

    def _round(
        self, server: Server, signs: npt.NDArray[np.float64], make: Callable[[], NoiseSource]
    ) -> npt.NDArray[np.float64]:
        """Return the drawn canaries' coordinates of one release, in units of the claimed noise."""
        return self._coordinates(server, signs, make, self._basis)[: len(signs)]

    def _coordinates(
        self,
        server: Server,
        signs: npt.NDArray[np.float64],
        make: Callable[[], NoiseSource],
        basis: CanaryClients,
    ) -> npt.NDArray[np.float64]:
        plan = server.plan
        server.aggregator.begin(self._start)
        length = OVERSHOOT * plan.clipping_norm
        if self._honest is None:
            self._send(server, signs, length)
        else:
            self._share(server, signs, length, make)
        unit = plan.noise_multiplier * plan.clipping_norm / plan.expected_clients
        return basis.read(server.mode.heard) / unit

    def _send(self, server: Server, signs: npt.NDArray[np.float64], length: float) -> None:
        for number in np.flatnonzero(signs).tolist():
            name = f"canary-{number:06d}"
            if not server.aggregator.add(name, self._basis.update(number, float(signs[number]) * length)):
                raise AggregationError(
                    f"audit: the server refused a canary: {server.aggregator.rejected[name]}"
                )
        server.aggregator.finish()

    def _share(
        self,
        server: Server,
        signs: npt.NDArray[np.float64],
        length: float,
        make: Callable[[], NoiseSource],
    ) -> None:
        padded = np.pad(signs, (0, (self._honest or 0) - len(signs))).tolist()
        updates = (
            self._basis.nobody if sign == 0.0 else self._basis.update(number, sign * length)
            for number, sign in enumerate(padded)
        )
        open_shares(server, self._start, updates, make)

    def _afford(self, steps: int) -> int:
        """Return the canaries whose updates one attack clips and sums in bounded time."""
        share = 1.0 if self._paired or self._honest is not None else 0.5
        each = share * self._rate * steps * (self._basis.numbers + _OVERHEAD)
        most = self._canaries
        if self._honest is not None:  # every client draws noise of its own
            each, most = each * _SHARES, most // _SHARES
        return int(min(most, max(200, _NUMBERS * self._canaries / each)))
