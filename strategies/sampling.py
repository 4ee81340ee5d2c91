"""Which logical clients take part in a round: all, a fixed number, or each by its own coin (Poisson)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedlora.errors import AggregationError
from fedlora.training.sampling import CoinSource, PoissonSampler

CoinsFor = Callable[[int], CoinSource]
"""Round number to a source of coins (the operating system's, or seeded in tests)."""


@dataclass(frozen=True)
class ClientSampler:
    """Draws a round's clients, under Poisson sampling once: a second draw would depend on why the first was not used.

    Attributes:
        asked: "all", a number (drawn without replacement from the public seed; no amplification is
            claimed), or a share below or at 1 as float (Poisson: independent coins).
        seed: public experiment seed, for fixed numbers only.
        coins: source of Poisson coins per round; never the experiment's seed under real privacy.
    """

    asked: Literal["all"] | int | float
    seed: int
    coins: CoinsFor
    _drawn: list[int] = field(default_factory=list, init=False, repr=False, compare=False)

    def draw(self, server_round: int, clients: Sequence[str]) -> tuple[str, ...]:
        """Return this round's clients in id order; under Poisson sampling possibly none.

        The draw of a fixed number depends on seed and round alone, so a resumed run repeats it.

        Raises:
            AggregationError: if the roster names a client twice, or the coins of this or a later round have been drawn.
        """
        known = sorted(clients)
        if len(set(known)) != len(known):
            raise AggregationError("the roster names a client at two nodes; client ids must be unique")
        if self.asked == "all":
            return tuple(known)
        if isinstance(self.asked, float):
            self._once(server_round)
            chosen = PoissonSampler(len(known), self.asked, self.coins(server_round)).draw()
            return tuple(known[int(index)] for index in chosen)
        if self.asked >= len(known):
            return tuple(known)
        text = f"fedlora-client-sampling|{self.seed}|{server_round}".encode()
        key = int.from_bytes(hashlib.sha256(text).digest()[:16], "little")
        generator = np.random.Generator(np.random.Philox(key))
        picks = generator.choice(len(known), size=self.asked, replace=False)
        return tuple(known[int(index)] for index in sorted(picks))

    def _once(self, server_round: int) -> None:
        if self._drawn and not server_round > self._drawn[-1]:
            raise AggregationError(
                f"client sampling: got round {server_round} after round {self._drawn[-1]}; a round's coins are drawn "
                "once, or the sample that is used is no Poisson sample: go on with the next round"
            )
        self._drawn[:] = [server_round]
