"""Connect to a Ray cluster, or start one of our own, with every wait bounded."""

from __future__ import annotations

import importlib
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedlora.addresses import host_and_port
from fedlora.config.schema import RayConfig
from fedlora.errors import ClusterUnreachableError, SimulationError
from fedlora.simulation.terminations import kept_handlers
from fedlora.simulation.watch import Guard

_SHORT: Final = "/tmp/ray"  # noqa: S108  (Ray's own default)
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  (Ray's object store)
_MAX_FOLDER: Final = 36
"""Ray's sockets lie some 70 bytes below its folder, and the name of a Unix socket has 107 bytes at most."""


@dataclass(frozen=True)
class Cluster:
    """A connection to Ray; `own` means that this process made it and must end it.

    Attributes:
        guard: watches over a Ray that this process started; None where it joined one.
    """

    own: bool
    namespace: str
    guard: Guard | None = None


def probe(address: str, timeout_seconds: float) -> None:
    """Check that a Ray head answers at host:port, within the bound.

    Raises:
        ClusterUnreachableError: in one line, with what to do.
    """
    parts = host_and_port(address)
    deadline = time.monotonic() + timeout_seconds
    hint = "start it with 'ray start --head', correct simulation.ray.address, or set it to null"
    if parts is None:
        raise ClusterUnreachableError(
            f"ray.address: got {address!r}; allowed host:port, auto or null; {hint}"
        )
    try:
        with socket.create_connection(parts, timeout=timeout_seconds):
            pass
    except (OSError, UnicodeError) as error:  # some names cannot even be asked for
        raise ClusterUnreachableError(
            f"ray.address: nothing listens at {address} ({type(error).__name__}); {hint}"
        ) from None
    _check_alive(address, max(1.0, deadline - time.monotonic()), hint)


def _check_alive(address: str, timeout_seconds: float, hint: str) -> None:
    grpc: Any = importlib.import_module("grpc")
    messages: Any = importlib.import_module("ray.core.generated.gcs_service_pb2")
    services: Any = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
    try:
        stub = services.NodeInfoGcsServiceStub(channel)
        stub.CheckAlive(messages.CheckAliveRequest(), timeout=timeout_seconds)
    except grpc.RpcError as error:
        code = error.code().name if hasattr(error, "code") else "no answer"
        if code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "INVALID_ARGUMENT", "FAILED_PRECONDITION"):
            return  # a Ray head answered; Ray's own client will bring its token
        raise ClusterUnreachableError(
            f"ray.address: {address} is not a live Ray head ({code}); {hint}"
        ) from None
    finally:
        channel.close()


def resolve_address(address: str) -> str:
    """Return host:port for "auto" (environment, then Ray's own file) or the address itself.

    Raises:
        ClusterUnreachableError: if "auto" finds nothing.
    """
    if address != "auto":
        return address.removeprefix("ray://") if address.startswith("ray://") else address
    named = os.environ.get("RAY_ADDRESS", "")
    if named and named not in ("auto", "local"):
        return named
    current = ray_folder() / "ray_current_cluster"
    try:
        found = current.read_bytes().decode("ascii", "replace").strip()
    except OSError:
        raise ClusterUnreachableError(
            "ray.address: auto found no cluster on this machine; start one with 'ray start --head' or use null"
        ) from None
    if host_and_port(found) is None:
        raise ClusterUnreachableError(
            f"ray.address: auto found no address in {current}; start a cluster with 'ray start --head' or use null"
        )
    return found


def ray_folder() -> Path:
    """Return the folder of Ray's sessions and of its address file, as Ray itself chooses it."""
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR")
    return Path(_SHORT) if root is None else Path(root) / "ray"


def connect(config: RayConfig, workers: int, gpus: float, run_id: str) -> Cluster:
    """Connect to (or start) Ray; an existing connection of this process is used and left alone.

    Args:
        config: the `simulation.ray` section.
        workers: CPU slots to start with, if a cluster is started.
        gpus: GPUs to start with.
        run_id: becomes the namespace, so that runs side by side do not meet.

    Raises:
        ClusterUnreachableError: if the address does not answer within the configured bound.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    namespace = f"fedlora-{run_id}"
    if ray.is_initialized():
        return Cluster(own=False, namespace=namespace)
    options: dict[str, Any] = {
        "namespace": namespace,
        "include_dashboard": False,
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "configure_logging": False,
    }
    guard = None
    if config.address is None:
        guard = _start(workers, gpus, options)
    else:
        _join(config, options)
    return Cluster(own=True, namespace=namespace, guard=guard)


def _start(workers: int, gpus: float, options: Mapping[str, Any]) -> Guard:
    """Start a cluster of our own; where that is interrupted, whatever of it runs already is killed at once.

    Ray itself leaves its agents behind then, which wait a minute and more for their head. The guard is there before
    the first of them, so that kill -9 of this process leaves none either, at whatever moment.
    """
    import ray

    guard = Guard()
    try:
        with kept_handlers(), _rays_handlers_left_out(), environment_set(guard.environment):
            # "local" never reads RAY_ADDRESS or a stale address file.
            ray.init(
                address="local",
                num_cpus=workers,
                num_gpus=math.ceil(gpus) if gpus > 0 else None,
                _temp_dir=_SHORT if _is_long(ray_folder()) else None,
                **options,
            )
    except BaseException as error:
        _leave_unfinished()
        guard.abort()
        if isinstance(error, OSError) or not isinstance(error, Exception):
            raise
        raise _not_started(error) from error
    return guard


def _leave_unfinished() -> None:
    """Leave a Ray whose start went through although it was interrupted, so that this process can start another."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def _not_started(error: Exception) -> SimulationError:
    """Say where Ray may lack room: its own text names neither a full disk nor shared memory that is not writable."""
    places = (_place(Path(_SHORT) if _is_long(ray_folder()) else ray_folder()), _place(_SHARED_MEMORY))
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SimulationError(
        f"Ray could not start on this machine ({text.rstrip('.')}); it needs room in {' and '.join(places)}"
    )


def _place(folder: Path) -> str:
    """Name a folder, with what is free on its disk and whether it can be written."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        free = shutil.disk_usage(there).free // 10**6
    except OSError:
        return str(folder)
    return f"{folder} ({free} MB free{'' if os.access(there, os.W_OK) else ', read-only'})"


def _is_long(folder: Path) -> bool:
    return len(os.fsencode(folder)) > _MAX_FOLDER


@contextmanager
def _rays_handlers_left_out() -> Iterator[None]:
    """Keep Ray from setting its handlers of SIGTERM, so that a start can be interrupted at once.

    `kept_handlers` stays the net below: this is a function inside Ray, which another version may have elsewhere.
    """
    utils = importlib.import_module("ray._private.utils")
    plain = getattr(utils, "set_sigterm_handler", None)
    if plain is None:
        yield
        return
    utils.set_sigterm_handler = lambda handler: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.set_sigterm_handler = plain  # type: ignore[attr-defined]


@contextmanager
def environment_set(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _join(config: RayConfig, options: dict[str, Any]) -> None:
    import ray

    address = resolve_address(str(config.address))
    probe(address, config.connect_timeout_seconds)
    options.pop("include_dashboard")
    target = config.address if str(config.address).startswith("ray://") else address
    try:
        with kept_handlers(), _rays_handlers_left_out():
            ray.init(address=target, **options)
    except KeyboardInterrupt:
        _leave_unfinished()
        raise
    except (ConnectionError, RuntimeError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ClusterUnreachableError(f"ray.address: cannot join {address}: {text}") from None


def disconnect(cluster: Cluster) -> None:
    """Leave the cluster; stops it only if this process started it."""
    if not cluster.own:
        return
    import ray

    try:
        if ray.is_initialized():
            ray.shutdown()
    except BaseException:
        if cluster.guard is not None:
            cluster.guard.abort()
        raise
    if cluster.guard is not None:
        cluster.guard.close()
