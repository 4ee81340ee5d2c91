"""One client's batches and noise for one round, ready for the cohort engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedlora.adapters.adapted import AdaptedModel
from fedlora.config.schema import FedLoraConfig, NoPrivacy
from fedlora.errors import PolicyRefusedError
from fedlora.mechanisms.noise import NoiseSource, OsNoise, SeededNoise
from fedlora.training.cohort import ClientJob
from fedlora.training.requests import RoundRequest
from fedlora.training.sampling import CoinSource, OsCoins, PoissonSampler, SeededCoins, ShuffleSampler
from fedlora.training.shelf import Records

Coins = Callable[[str, int], CoinSource]
"""Client and round to its coins."""


def make_job(
    config: FedLoraConfig,
    client: str,
    records: Records,
    request: RoundRequest,
    steps: int,
    coins: Coins | None = None,
) -> ClientJob:
    """Draw and encode all of one client's batches, so that a bad record fails this client alone.

    Args:
        config: resolved configuration.
        client: logical client id.
        records: SENSITIVE. The client's records.
        request: the round request (its number separates the streams of seeded sources).
        steps: number of draws.
        coins: cryptographic coins in the place of the operating system's (a simulation's, which can be drawn again).

    Returns:
        SENSITIVE. A job whose `draw` hands out the prepared batches, one per step, possibly empty.

    Raises:
        PolicyRefusedError: if shuffled batches are asked for under privacy.
        DataError: if a drawn record cannot be encoded.
    """
    sampler = _sampler(config, client, records, request.server_round, coins)
    batches = iter([records.batch(sampler.draw()) for _ in range(steps)])

    def draw() -> list[Any]:
        return next(batches)

    return ClientJob(client=client, draw=draw, noise=noise_source(config, client, request.server_round))


@contextmanager
def dropout_masks(
    config: FedLoraConfig, adapted: AdaptedModel, clients: Sequence[str], server_round: int
) -> Iterator[None]:
    """Make one training's dropout masks repeatable where its noise or data order is; torch's own state is put back.

    Masks hang on which clients train together. No bound hangs on them: each record's gradient is clipped.
    """
    if not (adapted.dropout and config.repeatable):
        yield
        return
    name = hashlib.sha256(f"masks|{config.run.seed}|{server_round}|{'|'.join(clients)}".encode()).digest()
    with torch.random.fork_rng([adapted.device] if adapted.device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(name[:8], "little"))
        yield


def noise_source(config: FedLoraConfig, client: str, server_round: int) -> NoiseSource:
    """Return a client's noise source: the operating system's, or a repeatable one in runs marked "no privacy"."""
    if config.seeded_noise:
        return SeededNoise(config.run.seed, client, server_round)
    return OsNoise()


def _sampler(
    config: FedLoraConfig, client: str, records: Records, server_round: int, coins: Coins | None
) -> PoissonSampler | ShuffleSampler:
    training = config.training
    if training.sampling == "shuffle":
        if not isinstance(config.privacy, NoPrivacy):
            raise PolicyRefusedError(
                "training.sampling: shuffle is refused under privacy (no amplification by sampling); use poisson"
            )
        name = hashlib.sha256(f"order|{config.run.seed}|{client}|{server_round}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(int.from_bytes(name[:16], "little")))
        return ShuffleSampler(len(records), training.expected_batch_size, generator)
    source = coin_source(config, client, server_round, coins)
    return PoissonSampler(len(records), training.sample_rate, source)


def coin_source(
    config: FedLoraConfig, client: str, server_round: int, coins: Coins | None = None
) -> CoinSource:
    """Return a client's coins; the experiment seed may order the data without privacy only."""
    if config.repeatable:
        return SeededCoins(config.run.seed, client, server_round)
    return OsCoins() if coins is None else coins(client, server_round)
