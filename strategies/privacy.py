"""Server-side parts of client-level privacy: its noise and its ledger entry."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from fedlora.accounting import Event
from fedlora.config.schema import ClientPrivacy, FedLoraConfig
from fedlora.errors import LedgerError, UnsupportedEventError
from fedlora.ledger import Account, Ledger, Reservation, ReserveRequest
from fedlora.mechanisms.noise import NoiseSource, OsNoise, SeededNoise
from fedlora.training.charging import budget_terms
from fedlora.training.sampling import CoinSource, OsCoins, SeededCoins

SERVER_ACCOUNT = "federation"
"""Account of the client unit in the server's ledger: every client is one unit of it."""


class RoundNormals:
    """Standard normals of the server, from one noise source a round.

    Args:
        for_round: round number to its source.
    """

    def __init__(self, for_round: Callable[[int], NoiseSource]) -> None:
        """Start before round 1."""
        self._for_round = for_round
        self._source = for_round(0)
        self.private: bool = self._source.private

    def at_round(self, server_round: int) -> None:
        """Use this round's source from now on."""
        self._source = self._for_round(server_round)
        self.private = self.private and self._source.private

    def normal(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Return i.i.d. N(0, 1) numbers."""
        drawn = self._source.gaussians(math.prod(shape), torch.device("cpu"), torch.float64)
        return drawn.numpy().reshape(shape)


def server_noise(config: FedLoraConfig) -> RoundNormals | None:
    """Return the server's noise under client-level privacy, None otherwise."""
    privacy = config.privacy
    if not isinstance(privacy, ClientPrivacy):
        return None
    if privacy.noise_source == "os":
        return RoundNormals(lambda _: OsNoise())
    return RoundNormals(lambda server_round: SeededNoise(config.run.seed, "server", server_round))


def client_coins(config: FedLoraConfig) -> Callable[[int], CoinSource]:
    """Return the coins of Poisson client sampling: the operating system's unless the run is marked as a test."""
    privacy = config.privacy
    if isinstance(privacy, ClientPrivacy) and privacy.noise_source == "os":
        return lambda _: OsCoins()
    return lambda server_round: SeededCoins(config.run.seed, "server", server_round)


class ClientUnitLedger:
    """Charges each round's client-level event to the server's ledger before the noise is drawn.

    The account is (`SERVER_ACCOUNT`, data.name) with unit "client": the same bound holds for every client.

    Args:
        ledger: the server's own, durable.
        config: resolved configuration with privacy.unit client.
        run_id: unique name of the run.
    """

    def __init__(self, ledger: Ledger, config: FedLoraConfig, run_id: str) -> None:
        """Check that there is something to charge."""
        if not isinstance(config.privacy, ClientPrivacy):
            raise UnsupportedEventError("privacy.unit is not client: the server has nothing to charge")
        self._ledger, self._config, self._run_id = ledger, config, run_id
        self.account = Account(SERVER_ACCOUNT, config.data.name)
        self._round = 0
        self._reserved: Reservation | None = None

    def at_round(self, server_round: int) -> None:
        """Charge for this round from now on."""
        self._round, self._reserved = server_round, None

    def __call__(self, event: Event) -> None:
        """Reserve one release durably.

        Raises:
            BudgetExceededError: if it would pass the budget; then nothing may be released.
            LedgerError: if the round was charged before, or nothing could be written.
        """
        request = ReserveRequest(
            account=self.account,
            budget=budget_terms(self._config),
            run_id=self._run_id,
            server_round=self._round,
            event=event,
            steps=1,
            assumptions=self._assumptions(),
        )
        self._reserved = self._ledger.reserve_one(request)
        self._ledger.mark_started([self._reserved])

    def commit(self, event: Event, digest: str = "") -> None:
        """Record that the release happened.

        Raises:
            LedgerError: if nothing was reserved for this round.
        """
        if self._reserved is None:
            raise LedgerError(f"round {self._round}: nothing was reserved, so nothing can be committed")
        self._ledger.commit([(self._reserved, 1, event, digest)])
        self._reserved = None

    def _assumptions(self) -> tuple[str, ...]:
        privacy = self._config.privacy
        if not isinstance(privacy, ClientPrivacy):
            return ()
        texts = []
        if privacy.noise_at == "clients":
            texts.append(f"shares of noise: at least {privacy.honest_clients} answering clients are honest")
        else:
            texts.append("the server is trusted with single updates (noise at the server)")
        if privacy.noise_source != "os":
            texts.append("noise source seeded for tests: NO PRIVACY")
        return tuple(texts)
