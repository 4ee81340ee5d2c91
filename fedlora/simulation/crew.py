"""The Ray workers of one run, started before it is known what they will do: importing takes them longest.

While they import, the driver loads the base model, derives the noise, and looks at the records.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from typing import Any, Final

from fedlora.config.schema import RayConfig
from fedlora.simulation.actor import NodeHostActor
from fedlora.simulation.cluster import Cluster, connect, disconnect, environment_set

_LOG = logging.getLogger(__name__)
_THREAD_NAMES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_PASSED_ON: Final = ("HF_HUB_OFFLINE", "HF_HOME", "PYTHONPATH")


class Crew:
    """Connects to Ray (or starts it) and hires workers.

    Args:
        config: the `simulation.ray` section.
        workers: how many start now.
        threads: CPU threads of each.
        run_id: name of the run (Ray namespace).

    Raises:
        ClusterUnreachableError: if the cluster does not answer.
    """

    def __init__(self, config: RayConfig, workers: int, threads: int, run_id: str) -> None:
        """Connect, and start all workers at once without waiting for them."""
        self.config, self.threads = config, threads
        self._environment = worker_environment(threads)
        self._hired: list[Any] = []
        with environment_set(self._environment):  # our own Ray's processes inherit it
            self._cluster: Cluster | None = connect(
                config, threads * workers, config.gpus_per_worker * workers, run_id
            )
        self._inherited = self._cluster.own and config.address is None
        try:
            self._idle = [self._hire() for _ in range(workers)]
        except BaseException:
            self.close()
            raise

    def take(self) -> Any:
        """Return a worker's handle: one that has been importing, else a new one."""
        return self._idle.pop(0) if self._idle else self._hire()

    def _hire(self) -> Any:
        ray: Any = importlib.import_module("ray")
        own = {} if self._inherited else {"runtime_env": {"env_vars": self._environment}}
        actor = (
            ray.remote(NodeHostActor)
            .options(
                num_cpus=self.threads,
                num_gpus=self.config.gpus_per_worker,
                max_restarts=0,
                max_task_retries=0,
                **own,
            )
            .remote()
        )
        actor.load.remote()
        self._hired.append(actor)
        return actor

    def dismiss(self, actor: Any) -> None:
        """Kill one worker."""
        ray: Any = importlib.import_module("ray")
        ray.kill(actor, no_restart=True)
        self._hired = [one for one in self._hired if one is not actor]

    def close(self) -> None:
        """Kill the workers and leave the cluster; a cluster that was there before goes on. Safe to call twice."""
        cluster, self._cluster = self._cluster, None
        if cluster is None:
            return
        started = time.monotonic()
        ray: Any = importlib.import_module("ray")
        try:
            if ray.is_initialized():
                for actor in self._hired:
                    ray.kill(actor, no_restart=True)
            self._hired, self._idle = [], []
        finally:
            disconnect(cluster)
        _LOG.debug("workers dismissed in %.1f s", time.monotonic() - started)


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a worker."""
    found = dict.fromkeys(_THREAD_NAMES, str(threads))
    found |= {"TOKENIZERS_PARALLELISM": "false", "FLWR_TELEMETRY_ENABLED": "0"}
    return found | {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
