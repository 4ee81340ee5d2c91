"""The server's own randomness: noise under client-level privacy and coins of client sampling."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from fedlora.config.schema import FedLoraConfig
from fedlora.mechanisms.noise import NoiseSource, OsNoise, SeededNoise
from fedlora.training.sampling import CoinSource, OsCoins, SeededCoins


class ServerNoise:
    """Standard normal numbers for the server's release; one stream a round under the test source."""

    def __init__(self, config: FedLoraConfig) -> None:
        """Choose the source."""
        self._config = config
        self._source: NoiseSource = OsNoise()
        self.start_round(0)

    @property
    def private(self) -> bool:
        """True if nobody can repeat the draws."""
        return self._source.private

    def start_round(self, server_round: int) -> None:
        """Begin a round's stream."""
        if self._config.seeded_noise:
            self._source = SeededNoise(self._config.run.seed, "server", server_round)

    def normal(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Return i.i.d. N(0, 1) numbers of the given shape."""
        flat = self._source.gaussians(math.prod(shape), torch.device("cpu"), torch.float64)
        return flat.numpy().reshape(shape)


def sampling_coins(config: FedLoraConfig, server_round: int) -> CoinSource:
    """Return the coins of one round's client sampling; the seed only where nothing is amplified by them."""
    if config.repeatable:
        return SeededCoins(config.run.seed, "client-sampling", server_round)
    return OsCoins()
