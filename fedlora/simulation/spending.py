"""The driver's side of a simulation's ledger: one writer, a whole cohort per transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlora.accounting import Event
from fedlora.config.schema import FedLoraConfig, NoPrivacy
from fedlora.ledger.types import CommitRequest, Reservation
from fedlora.simulation.overlap import Sharing
from fedlora.training.charging import BudgetKeeper, Grant, charges, plan_round
from fedlora.training.port import ROUND


@dataclass
class Spending:
    """Reserve before a message leaves for its worker, commit before its reply reaches the strategy.

    Attributes:
        keeper: the ledger; None where nothing is charged.
        config: resolved configuration.
        event: accounting event of one step, as the workers derived it; set once they are ready.
        sharing: records or people that sit at several clients; their accounts say so.
    """

    keeper: BudgetKeeper | None
    config: FedLoraConfig
    event: Event | None = None
    sharing: Sharing | None = None

    def reserve(self, headers: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Grant]]:
        """Reserve for all clients of all messages in one durable transaction.

        Args:
            headers: message id to its packet header.

        Returns:
            Message id to the grants (or refusals) of its clients.
        """
        grants: dict[str, list[Grant]] = {message_id: [] for message_id in headers}
        privacy = self.config.privacy
        if self.keeper is None or self.event is None or isinstance(privacy, NoPrivacy):
            return grants
        plan, owners = [], []
        for message_id, header in headers.items():
            if header.get("op") != ROUND or not charges(self.config):
                continue
            requests = plan_round(
                self.config,
                header["clients"],
                run_id=header["run_id"],
                server_round=header["round"],
                event=self.event,
                steps=header["steps"],
                notes={} if self.sharing is None else self.sharing.conditions(),
                fingerprints=None if self.sharing is None else self.sharing.fingerprints,
            )
            plan.extend(requests)
            owners.extend([message_id] * len(requests))
        if not plan:
            return grants
        answers = self.keeper.reserve(plan)
        accounts = [
            answer.account
            for answer in answers
            if isinstance(answer, Reservation) and self._figure_due(answer.server_round)
        ]
        standings = self.keeper.standing(accounts, privacy.target_delta)
        for message_id, answer in zip(owners, answers, strict=True):
            grants[message_id].append(Grant(answer, standings.get(answer.account)))
        return grants

    def _figure_due(self, server_round: int) -> bool:
        """Return whether a round's exact epsilon is told: an exact figure costs more than a small round.

        The budget itself is checked in every round.
        """
        section = self.config.data.public_eval
        every = 5 if section is None else section.every_rounds
        return server_round == self.config.federation.rounds or server_round % every == 0

    def commit(self, commits: Sequence[CommitRequest]) -> None:
        """Record what ran, in one transaction."""
        if commits and self.keeper is not None:
            self.keeper.commit(commits)
