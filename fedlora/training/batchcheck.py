"""Are a trainer's batches Poisson draws: a coin of its own for each record of each client in each step?"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.training.checked import SelfCheck
from fedlora.training.drawcheck import Table, faults_of, table_sizes
from fedlora.training.drawing import make_job
from fedlora.training.requests import RoundRequest

_CLIENTS: Final = 2
_ROUNDS: Final = 4
_DRAWS: Final = 32  # of each client in each of these rounds
_MOST_RECORDS: Final = 10_000
_CHANCE: Final = 1e-9
"""Probability that sound draws are refused at one start."""


class _Places:
    """Records that are their own positions."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: npt.NDArray[np.int64]) -> list[Any]:
        return list(indices.tolist())


def check_draws(config: FedLoraConfig) -> SelfCheck:
    """Check that batches are Poisson draws at the public rate: a coin of its own for each record in each step.

    Draws of two clients in several rounds are judged by `fedlora.training.drawcheck`, one after the other and side by
    side (coins that clients share tell each one what the other drew), for clients with many records and with so few
    that many draws are empty.
    """
    name = "batches are Poisson draws"
    rate = config.training.sample_rate
    if not isinstance(config.privacy, RecordPrivacy) or not (rate < 1.0):
        return SelfCheck(name, True, "no amplification by sampling is claimed")
    found: list[str] = []
    drawn = coins = 0
    for size, count in table_sizes(rate, _MOST_RECORDS).items():
        table, twice = _draws(config, count)
        drawn, coins = drawn + int(table.sum()), coins + table.size
        orders = {size: (0, 1, 2, 3), f"{size}, clients side by side": (0, 2, 1, 3)}
        tables = [Table(what, table.transpose(by).reshape(-1, count)) for what, by in orders.items()]
        found += faults_of(tables, rate, _CHANCE / 2) + ["a record is drawn twice at once"] * twice
    said = dict.fromkeys([f"rate {drawn / coins:.4g} of {rate:.4g}", *found])
    return SelfCheck(name, not found, "; ".join(said))


def _draws(config: FedLoraConfig, count: int) -> tuple[npt.NDArray[np.bool_], bool]:
    """Return what two clients' jobs of several rounds draw from so many records each, and whether one comes twice.

    Returns: (rounds, clients, draws, records), True where a record was drawn.
    """
    table = np.zeros((_ROUNDS, _CLIENTS, _DRAWS, count), dtype=bool)
    twice = False
    for turn, at in np.ndindex(_ROUNDS, _CLIENTS):
        client = f"self-check-{at}"
        request = RoundRequest(client, turn + 1, {}, "", None, [client], _DRAWS)  # type: ignore[arg-type]
        job = make_job(config, client, _Places(count), request, _DRAWS)
        for row in table[turn, at]:
            one = list(job.draw())
            twice = twice or len(set(one)) < len(one)
            row[one] = True
    return table, twice


__all__ = ["check_draws"]
