"""Settings of a simulation on Flower's engine; server and nodes read the same ones from the run configuration."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlora.config import load_config
from fedlora.config.schema import FedLoraConfig
from fedlora.config.tracking import relative_file, require_trackers
from fedlora.errors import ConfigError
from fedlora.names import STATES_FOLDER


@dataclass(frozen=True)
class FlowerPlan:
    """PUBLIC. What `flwr run` was asked to simulate.

    Attributes:
        config: the checked configuration with an absolute `run.dir`; not resolved yet.
        run_id: unique name of the run.
        folder: run folder.
        state_dir: where clients' optimiser state is kept.
    """

    config: FedLoraConfig
    run_id: str
    folder: Path
    state_dir: Path


def config_file(run_config: Mapping[str, Any], app_dir: Path) -> Path:
    """Return the YAML file that a run configuration (or FEDLORA_CONFIG) names.

    A relative path is looked for in the current directory, then beside the app.

    Raises:
        ConfigError: if no file is named or it is not there.
    """
    named = str(run_config.get("config", "") or os.environ.get("FEDLORA_CONFIG", ""))
    if not named:
        raise ConfigError(
            "run configuration: no 'config'; flwr run . --run-config 'config=\"/path/to/run.yaml\"'"
        )
    path = Path(named).expanduser()
    candidates = [path] if path.is_absolute() else [Path.cwd() / path, app_dir / path]
    found = next((one for one in candidates if one.is_file()), None)
    if found is None:
        raise ConfigError(f"run configuration: config {named} is not there; give an absolute path")
    return found


def overrides_of(run_config: Mapping[str, Any]) -> list[str]:
    """Return the dotted overrides of a run configuration.

    Raises:
        ConfigError: if quotes are not closed.
    """
    try:
        return shlex.split(str(run_config.get("overrides", "")))
    except ValueError as error:
        raise ConfigError(
            f"run configuration: overrides cannot be read ({error}); close the quotes"
        ) from None


def read_plan(run_config: Mapping[str, Any], flower_run: int, app_dir: Path) -> FlowerPlan:
    """Read and check what a simulation on Flower's engine needs.

    Args:
        run_config: Flower's run configuration.
        flower_run: Flower's number of the run; part of the run's name.
        app_dir: directory of the app.

    Raises:
        ConfigError: for anything that cannot be simulated this way, with what to do.
    """
    config = load_config(config_file(run_config, app_dir), overrides_of(run_config))
    runs = Path(str(run_config.get("run-dir", "")) or config.run.dir).expanduser()
    if not runs.is_absolute():
        raise ConfigError(
            f"run-dir: got {str(runs)!r}, relative; Flower's processes run in another folder, and the clients' "
            "ledger must always be the same file; give an absolute run-dir in --run-config"
        )
    if bool(run_config.get("resume", False)):
        raise ConfigError(
            "resume: not under flwr run with simulate=true; go on with fedlora simulate --resume RUN"
        )
    if config.federation.secure_aggregation:
        raise ConfigError(
            "federation.secure_aggregation: needs nodes that stay in one process, which Flower's engine does not "
            "promise; use fedlora simulate, or set it to false"
        )
    require_trackers(config.tracking)
    if relative_file(config.tracking.mlflow):
        raise ConfigError(
            f"tracking.mlflow: got {config.tracking.mlflow!r}, relative; Flower's processes run in another folder; "
            "give sqlite:/// with an absolute path"
        )
    _check_clients_known(config)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(runs)})})
    run_id = str(run_config.get("run-id", "")) or f"{config.run.name}-flwr-{flower_run}"
    return FlowerPlan(config, run_id, runs / run_id, runs / run_id / STATES_FOLDER)


def _check_clients_known(config: FedLoraConfig) -> None:
    if config.data.partition is None:
        raise ConfigError("data.partition: missing; a simulation needs to know how clients share the data")
    if config.deployment.expected_clients is not None:
        raise ConfigError(
            "deployment.expected_clients: a simulation has the clients of data.partition; leave it null, or start a "
            "deployment with fedlora server"
        )
