"""RayGrid: Flower's Grid on Ray actors; each actor is a node that hosts many logical clients.

Dead workers are replaced; their message is given to the new worker once (nothing of it was released,
its reservation is already spent) and fails by name after that. Every wait is bounded.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from flwr.app import Message

from fedlora.accounting import Event
from fedlora.errors import FedLoraError, SimulationError
from fedlora.simulation.crew import Crew
from fedlora.simulation.grid import MAX_ATTEMPTS, HostedGrid, Pending, agree_on_event, packet_header
from fedlora.simulation.host import Answered
from fedlora.simulation.machine_memory import kernel_kills
from fedlora.simulation.node_spec import NodeSpec, Readiness
from fedlora.simulation.spending import Spending

_LOG = logging.getLogger(__name__)
START_SECONDS = 600.0
"""Bound of a worker's start (imports and loading the base model)."""
MAX_STARTS = 3
"""A node's worker may die so often while it starts; then the run ends, or in a round its message fails by name."""
CLUSTER_STARTS = 6
"""The same in a cluster: it takes half a minute to notice that a machine is gone, and starts workers there so long."""
PAUSE_SECONDS = 1.0
"""Wait after the first such death in a cluster, twice as long after each further one."""


class RayGrid(HostedGrid):
    """Nodes as Ray actors.

    Args:
        specs: one per worker.
        spending: the driver's ledger.
        crew: the workers, already started; closed with the grid.
        default_timeout: bound of every wait that is not given one, in seconds.
        start_seconds: bound of a worker's start.
    """

    works_meanwhile = True

    def __init__(
        self,
        specs: Sequence[NodeSpec],
        spending: Spending,
        crew: Crew,
        default_timeout: float,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """Tell every worker what it is, without waiting for them."""
        super().__init__(specs, spending, default_timeout)
        self._crew, self._start_seconds = crew, start_seconds
        self._actors: dict[int, Any] = {}
        self._preparing: dict[int, Any] = {}
        self._kernel_kills = kernel_kills()
        for spec in specs:
            self._start(spec)

    @property
    def _in_cluster(self) -> bool:
        return self._crew.config.address is not None

    @property
    def _most_starts(self) -> int:
        return CLUSTER_STARTS if self._in_cluster else MAX_STARTS

    def _start(self, spec: NodeSpec) -> None:
        self._actors[spec.node_id] = actor = self._crew.take()
        self._preparing[spec.node_id] = actor.prepare.remote(spec)

    def _ensure_ready(self) -> None:
        if not self._preparing:
            return
        deadline, readiness = time.monotonic() + self._start_seconds, []
        deaths: dict[int, int] = {}
        while self._preparing:
            node_id = next(iter(self._preparing))
            ready = self._started(node_id, deadline)
            if ready is not None:
                del self._preparing[node_id]
                readiness.append(ready)
                continue
            deaths[node_id] = deaths.get(node_id, 0) + 1
            if deaths[node_id] >= self._most_starts:
                raise SimulationError(
                    f"node {node_id}: its worker died while starting, {deaths[node_id]} times in a row; memory may be "
                    "short: lower simulation.workers, or give the machine more"
                )
            self._start_again(node_id, deaths[node_id])
        event = Event.from_json(agree_on_event(readiness))
        if self._spending.event is not None and self._spending.event.key() != event.key():
            raise SimulationError(
                "a replaced worker derived another accounting event; stop and check its code"
            )
        self._spending.event = event

    def _started(self, node_id: int, deadline: float) -> Readiness | None:
        """Wait for one worker; None if it died."""
        import ray

        try:
            ready: Readiness = ray.get(
                self._preparing[node_id], timeout=max(0.0, deadline - time.monotonic())
            )
        except ray.exceptions.GetTimeoutError:
            raise SimulationError(
                f"workers: not ready within {self._start_seconds:.0f} s; the cluster may lack free CPUs or GPUs"
            ) from None
        except (
            ray.exceptions.RayActorError,
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.OutOfMemoryError,
        ):
            return None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, FedLoraError) else None
            if cause is not None:
                raise cause from None
            raise SimulationError(f"worker: could not start ({_first_line(error)})") from None
        except ray.exceptions.RayError as error:
            raise SimulationError(f"worker: could not start ({_first_line(error)})") from None
        return ready

    def _submit(self, pending: Pending) -> None:
        node_id = pending.message.metadata.dst_node_id
        actor = self._actors[node_id]
        pending.handle = actor.process.remote(
            pending.message, list(pending.grants), self._cohort_of(node_id), pending.coins_key
        )

    def _collect(self, keys: Sequence[str], wait_seconds: float) -> list[Message]:
        import ray

        by_reference = {self._pending[key].handle: key for key in keys}
        finished, _ = ray.wait(list(by_reference), num_returns=1, timeout=wait_seconds)
        if finished:
            finished, _ = ray.wait(list(by_reference), num_returns=len(by_reference), timeout=0)
        replies = []
        for reference in finished:
            reply = self._finish(by_reference[reference], reference)
            if reply is not None:
                replies.append(reply)
        return replies

    def _finish(self, key: str, reference: Any) -> Message | None:
        import ray

        pending = self._pending[key]
        node_id = pending.message.metadata.dst_node_id
        try:
            answered: Answered = ray.get(reference, timeout=self._default_timeout)
        except (
            ray.exceptions.RayActorError,
            ray.exceptions.OutOfMemoryError,
            ray.exceptions.WorkerCrashedError,
        ) as error:
            if self._for_memory(error):
                self._halve(pending, node_id)
            return self._after_death(key, pending, node_id)
        except ray.exceptions.RayError as error:
            del self._pending[key]
            return self._error_reply(pending.message, f"node {node_id}: {_first_line(error)}")
        del self._pending[key]
        return self._took(node_id, answered)

    def _for_memory(self, error: Exception) -> bool:
        """Return whether a worker was killed for its memory, or may have been where that cannot be known.

        Ray's monitor says so. The kernel says nothing: Ray names its killer as one guess among others for every sudden
        death, so this machine's own count of such kills decides; another machine's is not seen from here.
        """
        import ray

        if isinstance(error, ray.exceptions.OutOfMemoryError):
            return True
        if "memory" not in str(error).lower():
            return False
        before, self._kernel_kills = self._kernel_kills, kernel_kills()
        if self._in_cluster or before is None or self._kernel_kills is None:
            return True
        return self._kernel_kills > before

    def _halve(self, pending: Pending, node_id: int) -> None:
        """A worker that was killed for its memory goes on with half the clients at once."""
        clients = len(packet_header(pending.message).get("clients", ()))
        now = min(self._cohort_of(node_id) or clients, clients)
        self.halved[node_id] = max(1, now // 2)
        _LOG.warning(
            "node %s: its worker was killed for its memory; %d clients at once from now on",
            node_id,
            self.halved[node_id],
        )

    def _start_again(self, node_id: int, deaths: int) -> None:
        _LOG.warning("node %s: its worker died while starting; another one is started", node_id)
        if self._in_cluster:
            time.sleep(PAUSE_SECONDS * 2 ** (deaths - 1))
        self._replace(node_id)

    def _died_starting(self, node_id: int) -> bool:
        """Return whether a node's worker in a cluster died before it was ready: its machine may be the reason.

        On one machine it may as well be memory, and a message is not tried any longer than usual.
        """
        import ray

        if not self._in_cluster or node_id not in self._preparing:
            return False
        try:
            ray.get(self._preparing[node_id], timeout=0)
        except ray.exceptions.RayError:  # it has not come, or died
            return True
        return False

    def _after_death(self, key: str, pending: Pending, node_id: int) -> Message | None:
        if self._died_starting(node_id) and pending.starts + 1 < self._most_starts:
            pending.starts += 1
            self._start_again(node_id, pending.starts)
            self._submit(pending)
            return None
        self._replace(node_id)
        if pending.attempts < MAX_ATTEMPTS:
            _LOG.warning("node %s: its worker died; replaced, its message is sent once more", node_id)
            pending.attempts += 1
            self._submit(pending)
            return None
        del self._pending[key]
        return self._error_reply(
            pending.message, f"node {node_id}: its worker died {pending.attempts} times with this message"
        )

    def _replace(self, node_id: int) -> None:
        self._crew.dismiss(self._actors[node_id])
        self.replaced_workers += 1
        self._start(self._specs[node_id])

    def _abandon(self, pending: Pending) -> None:
        """A worker that is late is replaced: its memory and its late result are thrown away."""
        self._replace(pending.message.metadata.dst_node_id)

    def memory_per_worker(self) -> int | None:
        """Return the share of the smallest machine of a cluster that was there before; None for our own Ray."""
        if not self._in_cluster:
            return None
        ray: Any = importlib.import_module("ray")
        threads = max(spec.threads for spec in self._specs.values())
        shares = []
        for node in ray.nodes():
            have = node.get("Resources", {})
            places = min(len(self._specs), int(have.get("CPU", 0)) // threads)
            if node.get("Alive") and places > 0 and "memory" in have:
                shares.append(int(have["memory"]) // places)
        return min(shares) if shares else None

    def worker_pids(self) -> list[int]:
        """Return the workers' process ids (waits until they are ready)."""
        import ray

        return [ray.get(actor.prepare.remote(self._specs[node])).pid for node, actor in self._actors.items()]

    def close(self) -> None:
        """Kill the workers and leave the cluster; a cluster that was there before goes on."""
        self._actors = {}
        self._crew.close()


def _first_line(error: Exception) -> str:
    """Name the error's class only: messages of foreign errors may quote records."""
    cause = getattr(error, "cause", None)
    return type(cause or error).__name__
