"""Train many clients at once: one forward and backward over the shared frozen base for all of them.

Adapters are stacked along a client axis; clip, noise, optimiser state and events stay per client, and the result
equals training them one after the other. A cohort of one is an ordinary client and takes the plain matrix path.
Batches are Poisson draws of any size; an empty draw runs no forward, but its noise is drawn, the step is
taken and counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fedlora.accounting import Event
from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.records import to_host
from fedlora.config.schema import FedLoraConfig
from fedlora.errors import ModelError, PrivacyError
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.noise import NoiseSource
from fedlora.mechanisms.stages import NoisyUpdate
from fedlora.training.cohort_parallel import DataParallel
from fedlora.training.cohort_passes import PassRunner, full_float32
from fedlora.training.cohort_retry import (
    KeptJob,
    RecordTooLargeError,
    TooLargeError,
    free_memory,
    out_of_memory,
)
from fedlora.wire.payload import AdapterPayload

_LOG = logging.getLogger(__name__)


class CohortTask(Protocol):
    """What the engine needs of a task."""

    def collate(self, records: list[Any]) -> dict[str, torch.Tensor]:
        """Pad encoded records to one batch."""
        ...

    def per_record_loss(self, model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return (records,) losses, each over its own tokens only."""
        ...


@dataclass(frozen=True)
class ClientJob:
    """One client's part of a round.

    Attributes:
        client: logical client id.
        draw: SENSITIVE. Returns the next Poisson draw (encoded records), possibly empty.
        noise: the client's own noise source.
        slots: optimiser state that an earlier round left (see `ClientUpdate.slots`); None starts anew.
    """

    client: str
    draw: Callable[[], Sequence[Any]]
    noise: NoiseSource
    slots: Mapping[str, torch.Tensor] | None = None


@dataclass(frozen=True)
class ClientUpdate:
    """PUBLIC (under record-level privacy). What one client's local training gave.

    Attributes:
        client: logical client id.
        payload: the mechanism's uplink.
        event: what ONE step released, from the objects that ran.
        steps: optimiser steps taken, counted by the engine.
        slots: optimiser state on the host, for a client that keeps it between rounds.
    """

    client: str
    payload: AdapterPayload
    event: Event
    steps: int
    slots: Mapping[str, torch.Tensor] = field(default_factory=dict)


class CohortEngine:
    """Trains jobs over one adapted model; kept between rounds (taps are attached once).

    Args:
        adapted: the model with its taps.
        mechanism: the bound stages.
        task: collates records and computes per-record losses.
        config: the resolved configuration.
        parallel: this process's place in a group that trains together on several devices.

    Raises:
        ModelError: if nothing would be trained.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        mechanism: Mechanism,
        task: CohortTask,
        config: FedLoraConfig,
        parallel: DataParallel | None = None,
    ) -> None:
        """Check that there is something to train and prepare the passes."""
        if adapted.num_trained() == 0:
            raise ModelError("adapter: 0 trained values; name target_modules or modules_to_save")
        self.adapted, self.mechanism, self.config = adapted, mechanism, config
        self._passes = PassRunner(adapted, task, config.training.micro_batch_size)
        self._parallel = parallel
        cohort = config.simulation.cohort
        self._cohort = None if cohort == "auto" else int(cohort)
        self._noise_seconds = 0.0

    @property
    def passes(self) -> PassRunner:
        """The forward and backward passes, with their present size limits."""
        return self._passes

    @property
    def cohort(self) -> int | None:
        """Clients trained together at most; None for no limit. Halved where they do not fit, and kept."""
        return self._cohort

    @property
    def seconds(self) -> dict[str, float]:
        """Time in forward and backward passes and in drawing noise so far (on a GPU: in launching them)."""
        return {"passes": self._passes.seconds, "noise": self._noise_seconds}

    def limit_cohort(self, clients: int) -> None:
        """Train at most so many clients together; a smaller limit that was found before stays."""
        self._cohort = clients if self._cohort is None else min(self._cohort, clients)

    def train(
        self, payload: AdapterPayload, jobs: Sequence[ClientJob], steps: int, first_step: int = 0
    ) -> list[ClientUpdate]:
        """Take local steps for every job from one payload.

        Where memory runs out the cohort is halved: its clients start again from the payload with the draws that
        they had, and nothing of the failed attempt is kept.

        Args:
            payload: what came down; not changed.
            jobs: one for each client.
            steps: optimiser steps per client, >= 1.
            first_step: global number of the first step, for the learning-rate schedule.

        Returns:
            One update for each job, in order.

        Raises:
            LayoutMismatchError: if the payload does not fit.
            PrivacyError: if a step's event differs from the mechanism's own.
            TooLargeError: if clients do not fit in memory alone; it holds the others' updates.
        """
        updates: list[ClientUpdate] = []
        too_large: dict[str, Exception] = {}
        waiting = [KeptJob(job) for job in jobs]
        with full_float32():
            while waiting:
                now = waiting[: self._cohort]
                found = self._attempt(payload, now, steps, first_step)
                if not isinstance(found, Exception):
                    updates += found
                elif len(now) > 1:
                    self._halve(len(now))
                    continue
                else:
                    too_large[now[0].job.client] = found
                waiting = waiting[len(now) :]
        if too_large:
            raise TooLargeError(updates, too_large)
        return updates

    def _attempt(
        self, payload: AdapterPayload, kept: Sequence[KeptJob], steps: int, first_step: int
    ) -> list[ClientUpdate] | Exception:
        """Train some clients together; return the error if memory ran out (without the frames that hold it)."""
        limit = self._passes.max_tokens
        try:
            return self._train_cohort(payload, [one.start() for one in kept], steps, first_step)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError, RecordTooLargeError) as error:
            if self._parallel is not None or not out_of_memory(error):
                raise
            if len(kept) > 1:
                self._passes.max_tokens = limit
            return error.with_traceback(None)

    def _halve(self, clients: int) -> None:
        self._cohort = clients // 2
        free_memory()
        _LOG.warning("out of memory with %d clients at once: %d from now on", clients, self._cohort)

    def _train_cohort(
        self, payload: AdapterPayload, jobs: Sequence[ClientJob], steps: int, first_step: int
    ) -> list[ClientUpdate]:
        mechanism = self.mechanism.for_modules(payload.modules)
        expected = mechanism.step_event()
        state = _with_slots(mechanism.stages.open(mechanism, self.adapted, payload, len(jobs)), jobs)
        state = replace(state, first_step=first_step)
        sources = [job.noise for job in jobs]
        taken = 0
        for step in range(steps):
            state = mechanism.stages.prepare(mechanism, state)
            update = self._noisy_sums(mechanism, state, jobs, sources)
            if update.event != expected:
                raise PrivacyError(
                    "step event: what ran differs from what was announced; nothing is released"
                )
            state = mechanism.stages.update(
                mechanism, state, update, mechanism.schedule.at(first_step + step)
            )
            taken += 1
        payloads = mechanism.stages.close(mechanism, state)
        return [
            ClientUpdate(job.client, own, expected, taken, slots)
            for job, own, slots in zip(jobs, payloads, _split_slots(state, len(jobs)), strict=True)
        ]

    def _noisy_sums(
        self,
        mechanism: Mechanism,
        state: LocalState,
        jobs: Sequence[ClientJob],
        sources: Sequence[NoiseSource],
    ) -> NoisyUpdate:
        """Draw, run the passes, clip, sum and add noise: all that is SENSITIVE of one step."""
        if self._parallel is None:
            clipped = self._passes.clipped_sums(mechanism, state, _draw(jobs))
            started = time.perf_counter()
            noised = mechanism.noise(state, clipped, sources)
            self._noise_seconds += time.perf_counter() - started
            return noised
        parallel = self._parallel
        part = self._passes.clipped_sums(mechanism, state, parallel.share(lambda: _draw(jobs)))
        total = parallel.add(part)
        return parallel.noise(mechanism, lambda: mechanism.noise(state, total, sources), total.blocks)


def _draw(jobs: Sequence[ClientJob]) -> list[Sequence[Any]]:
    return [job.draw() for job in jobs]


def _with_slots(state: LocalState, jobs: Sequence[ClientJob]) -> LocalState:
    """Put each client's kept optimiser state into its row; clients without one start from the empty state.

    Rows are put together on the host and moved at once: one transfer for each slot.
    """
    if all(job.slots is None for job in jobs):
        return state
    slots = {}
    for name, empty in state.slots.items():
        rows = list(to_host(empty))
        for number, job in enumerate(jobs):
            if job.slots is not None and name in job.slots:
                rows[number] = job.slots[name].to(empty.dtype)
        slots[name] = torch.stack(rows).to(empty.device)
    return replace(state, slots=slots)


def _split_slots(state: LocalState, num_clients: int) -> list[dict[str, torch.Tensor]]:
    """Return each client's optimiser state on the host (one transfer per slot)."""
    on_host = {name: to_host(value) for name, value in state.slots.items()}
    return [{name: value[number] for name, value in on_host.items()} for number in range(num_clients)]
