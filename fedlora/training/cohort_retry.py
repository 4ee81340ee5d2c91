"""A cohort that did not fit in memory is trained again in halves, on the very same draws."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from fedlora.errors import ModelError

if TYPE_CHECKING:
    from fedlora.mechanisms.noise import NoiseSource
    from fedlora.training.cohort import ClientJob, ClientUpdate


class RecordTooLargeError(ModelError):
    """One record alone did not fit beside the clients that train together."""


class TooLargeError(ModelError):
    """Some clients do not fit in memory, each of them alone.

    Attributes:
        done: updates of the clients that did fit, in order.
        clients: client to what stopped it.
    """

    def __init__(self, done: Sequence[ClientUpdate], clients: Mapping[str, Exception]) -> None:
        """Say it in the first one's words."""
        super().__init__(next((str(one) for one in clients.values()), "memory: no client fits"))
        self.done, self.clients = tuple(done), dict(clients)


@dataclass
class KeptJob:
    """SENSITIVE. A client's job that can be started again with the batches that were drawn before.

    Memory runs out for large draws. Drawing anew after it would favour small ones, and the sample would not be the
    Poisson sample that the accountant counts; so every draw is kept until the client is done. Noise of a failed
    attempt never left this function's caller: a private source draws other numbers, a repeatable one repeats its own.

    Attributes:
        job: the client's job as it was given.
        drawn: the draws so far.
        tried: whether the job was started before.
    """

    job: ClientJob
    drawn: list[Sequence[Any]] = field(default_factory=list)
    tried: bool = False
    _source: NoiseSource | None = None

    def start(self) -> ClientJob:
        """Return the job from its first step."""
        if not self.tried:
            self.tried = True
            self._source = None if self.job.noise.private else copy.deepcopy(self.job.noise)
            return replace(self.job, draw=self._draws().__next__)
        source = self.job.noise if self._source is None else copy.deepcopy(self._source)
        return replace(self.job, draw=self._draws().__next__, noise=source)

    def _draws(self) -> Iterator[Sequence[Any]]:
        place = 0
        while True:
            if place == len(self.drawn):
                self.drawn.append(self.job.draw())
            yield self.drawn[place]
            place += 1


def out_of_memory(problem: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a device or on the host."""
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError, RecordTooLargeError)):
        return True
    text = str(problem)
    return "can't allocate memory" in text or "out of memory" in text


def free_memory() -> None:
    """Give cached device memory back, once nothing of the failed attempt is referenced any more."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
