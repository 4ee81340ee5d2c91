"""The server's own draw of clients, and a check of it before a run whose epsilon rests on it.

Under client-level privacy with `clients_per_round` as a share, every figure of the accountant assumes that each client
flips its own secret coin each round. The run's own sampler and strategy are asked for rounds of made-up clients, some
of them at a node that is away; nobody is sent anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from fedlora.aggregation.build import client_sampling
from fedlora.config.schema import ClientPrivacy, FedLoraConfig
from fedlora.training.checked import SelfCheck, require_passed
from fedlora.training.drawcheck import CHANCE, Table, faults_of, table_sizes
from fedlora.training.releasecheck import same_seeds
from server.noise import sampling_coins
from strategies.fedlora_strategy import FedLoraStrategy
from strategies.sampling import ClientSampler

_NAME: Final = "clients are Poisson draws"
_ROUNDS: Final = 256
_MOST: Final = 2_000
_ASKED: Final = 500.0
"""Made-up clients at most, and those that a round asks on average: the check takes a fifth of a second at most."""
_NODES: Final = 4
_AWAY: Final = 0
"""The node that is not there."""


def client_sampler(config: FedLoraConfig) -> ClientSampler:
    """Return the run's sampler of clients."""
    return ClientSampler(
        config.federation.clients_per_round, config.run.seed, lambda number: sampling_coins(config, number)
    )


def claimed_rate(config: FedLoraConfig) -> float | None:
    """Return the rate of client sampling that the accounting claims, or None if it claims none."""
    privacy = config.privacy
    if not isinstance(privacy, ClientPrivacy) or privacy.noise_at != "server":
        return None
    rate = client_sampling(config.federation, 1)[1]
    return rate if rate is not None and rate < 1.0 else None


def check_client_draws(
    config: FedLoraConfig, make: Callable[[FedLoraConfig], ClientSampler] = client_sampler
) -> SelfCheck:
    """Check that each client is asked by a coin of its own in each round, at the claimed rate.

    A fixed number, passes over shuffled clients, another rate, draws that are kept, made again where too few (or
    nobody) was drawn, or filled up where somebody is away, and seeded draws are seen.

    Args:
        config: resolved configuration.
        make: returns a fresh sampler as the run has it.
    """
    rate = claimed_rate(config)
    if rate is None:
        return SelfCheck(_NAME, True, "no amplification by sampling of clients is claimed")
    if config.seeded_noise:
        return SelfCheck(_NAME, True, "repeatable by configuration: this run has no privacy")
    least = config.federation.min_replies
    sizes = table_sizes(rate, min(_MOST, int(_ASKED / rate)), least)
    with same_seeds():
        times = {name: _asked(make(config), size, away=name == "many") for name, size in sizes.items()}
    with same_seeds():
        again = _asked(make(config), sizes["many"], away=True, rounds=_telling(rate, sizes["many"]))
    found = faults_of([Table(name, asked > 0, least) for name, asked in times.items()], rate, CHANCE / 2)
    told = again.size * np.log1p(-2.0 * rate * (1.0 - rate)) < np.log(
        CHANCE / 2
    )  # that two are alike by chance
    if (told and np.array_equal(again, times["many"][: len(again)])) or not make(config).coins(1).private:
        found.append("coins are seeded")
    if any((asked > 1).any() for asked in times.values()):
        found.append("a client is asked twice in a round")
    drawn, cells = sum(int(one.sum()) for one in times.values()), sum(one.size for one in times.values())
    whom = "/".join(map(str, sizes.values()))
    said = f"rate {drawn / cells:.4g} of {rate:.4g} over {_ROUNDS} rounds of {whom} clients"
    return SelfCheck(_NAME, not found, "; ".join([said, *found]))


def require_client_draws(config: FedLoraConfig) -> None:
    """Refuse to start a run whose draws of clients are not what its accounting claims.

    Raises:
        SensitivityMismatchError: naming what was found.
    """
    require_passed([check_client_draws(config)])


def _telling(rate: float, members: int) -> int:
    """Return in how many rounds two samplers hardly ever draw alike, 0 if not even in all of them."""
    rounds = math.ceil(math.log(CHANCE / 2) / (members * math.log1p(-2.0 * rate * (1.0 - rate))))
    return rounds if rounds <= _ROUNDS else 0


def _asked(
    sampler: ClientSampler, members: int, *, away: bool, rounds: int = _ROUNDS
) -> npt.NDArray[np.int64]:
    """Return (rounds, members): how often each client that is there is asked.

    Args:
        sampler: fresh.
        members: clients that are there.
        away: whether a quarter as many are away; draws of few clients are judged by how many are drawn in all.
        rounds: to ask for.
    """
    here = [f"check-{number:06d}" for number in range(members)]
    place = {name: number for number, name in enumerate(here)}
    share = -(-members // _NODES)
    roster = {1 + at: here[at * share : (at + 1) * share] for at in range(_NODES)}
    others = [f"away-{number:06d}" for number in range(share if away else 0)]
    nothing = cast("Any", None)
    strategy = FedLoraStrategy(nothing, nothing, sampler, nothing, {**roster, _AWAY: others})
    asked = np.zeros((rounds, members), dtype=np.int64)
    for number in range(rounds):
        _, groups = strategy.choose(number + 1, set(roster))
        whom = [place[name] for names in groups.values() for name in names]
        np.add.at(asked[number], whom, 1)
    return asked


__all__ = ["check_client_draws", "claimed_rate", "client_sampler", "require_client_draws"]
