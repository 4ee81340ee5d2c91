"""Which trainer answers a Flower message: a registered one, the site's own, or one of `flwr run`'s simulation.

No torch, ray or ledger in here: the relay imports this module in every process that Flower starts.

A deployment's relay never simulates. A trainer in this process is made only if all of this holds: no
trainer is registered and no socket is named by the environment; the run configuration says
`simulate = true` (the bundle that `fedlora server` ships has no such key); and the process is a worker of
Flower's simulation engine, which a site can see for itself: a Ray actor with a partition number.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from flwr.app import Context

from fedlora.errors import ConfigError, TrainerUnreachableError
from fedlora.names import ENV_TRAINER_SOCKET, ENV_TRAINER_TOKEN
from fedlora.training.local import find_port, is_registered
from fedlora.training.port import PacketPort

SIMULATE: Final = "simulate"
"""Key of the run configuration."""
PARTITION: Final = "partition-id"
PARTITIONS: Final = "num-partitions"


def asks_to_simulate(run_config: Mapping[str, Any]) -> bool:
    """Return whether a run configuration asks for a simulation on Flower's engine.

    Raises:
        ConfigError: if the key is anything but true or false.
    """
    value = run_config.get(SIMULATE, False)
    if not isinstance(value, bool):
        raise ConfigError(f"run configuration: {SIMULATE} is {value!r}; allowed true, false (without quotes)")
    return value


def in_ray_actor() -> bool:
    """Return whether this process is a Ray actor."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def partition_of(node_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (number of this partition, number of partitions), or None if the node has none."""
    number, total = node_config.get(PARTITION), node_config.get(PARTITIONS)
    if type(number) is not int or type(total) is not int or not (0 <= number < total):
        return None
    return number, total


def port_of(context: Context, app_file: str) -> PacketPort:
    """Return the trainer that answers for a node.

    Args:
        context: Flower's context of the message.
        app_file: file of the ClientApp that runs here.

    Raises:
        TrainerUnreachableError: if there is no trainer and this is no simulation on Flower's engine.
        ConfigError: if the run configuration cannot be simulated here.
    """
    sited = ENV_TRAINER_SOCKET in os.environ or ENV_TRAINER_TOKEN in os.environ
    if is_registered(context.node_id) or sited:
        return find_port(context.node_id)
    partition = partition_of(context.node_config)
    if partition is None or not in_ray_actor():
        return find_port(context.node_id)
    if not asks_to_simulate(context.run_config):
        raise TrainerUnreachableError(
            f"trainer: none in this process and {ENV_TRAINER_SOCKET} is not set; to simulate on Flower's engine, "
            f"give {SIMULATE}=true in --run-config"
        )
    from fedlora.simulation.flower_node import node_port

    app_dir = Path(app_file).resolve().parent.parent
    return node_port(context.run_config, context.run_id, partition, app_dir)
