"""Experiment trackers: TensorBoard, MLflow, Weights & Biases, each behind one key of the YAML and one optional extra.

They are sent what `metrics.jsonl` holds anyway: public figures of the rounds, and the meaning of the epsilon beside
it. A tracker that is asked for and not installed ends the run before it starts; one that fails later is
dropped with a warning, because a tracker must not cost a run that has spent privacy.

| key | extra | value |
|---|---|---|
| `tracking.tensorboard` | `fedlora[tensorboard]` | true: event files in RUN/tensorboard |
| `tracking.mlflow` | `fedlora[mlflow]` | a tracking URI, for example sqlite:///mlflow.db or http://host:5000 |
| `tracking.wandb` | `fedlora[wandb]` | a project name; WANDB_MODE=offline keeps it on this machine |
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from fedlora.config.schema import FedLoraConfig, TrackingConfig
from fedlora.errors import ConfigError
from fedlora.report.conditions import conditions_line, conditions_of

_LOG = logging.getLogger(__name__)
_PATIENCE: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's own defaults would keep a run waiting for minutes at a server that is gone."""
_SCHEMES: Final = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
_NOT_IN_PROJECTS: Final = "/\\#?%:"
_INIT_SECONDS: Final = 30.0
_MODULES: Final = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


class Tracker(Protocol):
    """Receives public figures of one run."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of one round."""
        ...

    def close(self, status: str) -> None:
        """End the run."""
        ...


def require_trackers(tracking: TrackingConfig) -> None:
    """Refuse a tracker whose package is missing or whose name cannot be right, before anything is read or spent.

    Raises:
        ConfigError: naming the extra to install, or what is wrong with the value.
    """
    check_names(tracking)
    for key, module in _MODULES.items():
        if getattr(tracking, key) not in (None, False) and importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"tracking.{key}: the package {module!r} is not installed; run pip install 'fedlora[{key}]' or "
                f"leave the key out"
            )


def check_names(tracking: TrackingConfig) -> None:
    """Refuse what can be no tracker's address or project, and a password that the run folder would repeat.

    Raises:
        ConfigError: naming the key and what is allowed.
    """
    _check_mlflow(tracking.mlflow)
    _check_wandb(tracking.wandb)


def _check_mlflow(uri: str | None) -> None:
    if uri is None:
        return
    scheme, _, rest = uri.partition("://")
    if scheme.partition("+")[0].lower() not in _SCHEMES or not rest:
        raise ConfigError(
            f"tracking.mlflow: {uri!r} is no tracking URI; allowed are {', '.join(_SCHEMES)} before ://, for example "
            "sqlite:///mlflow.db (MLflow keeps no plain folders any more)"
        )
    if ":" in rest.partition("/")[0].rpartition("@")[0]:
        raise ConfigError(
            "tracking.mlflow: the URI holds a password, and the run folder and its report repeat it; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or ~/.pgpass for PostgreSQL, and leave it out"
        )


def _check_wandb(project: str | None) -> None:
    if project is None:
        return
    if not project.strip() or len(project) > 128 or any(letter in _NOT_IN_PROJECTS for letter in project):
        raise ConfigError(
            f"tracking.wandb: {project!r} is no project name; it has 1 to 128 characters and none of {_NOT_IN_PROJECTS}"
        )


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a round record's numbers as flat names: "metrics/accuracy", "epsilon", "seconds/clients".

    Per-client entries stay in the run folder; what is not a finite number is left out.

    Args:
        record: one line of `metrics.jsonl`. PUBLIC.
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if name in ("round", "refused", "failed", "epsilon_by_client"):
            continue
        children = value.items() if isinstance(value, Mapping) else ((None, value),)
        for child, one in children:
            if isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one):
                found[name if child is None else f"{name}/{child}"] = float(one)
    found["refused"] = float(len(record.get("refused") or {}))
    found["failed"] = float(len(record.get("failed") or {}))
    return found


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        module: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("epsilon", conditions_line(conditions))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


class _MlFlow:
    name = "mlflow"

    def __init__(self, uri: str, run_id: str, project: str, conditions: Mapping[str, Any]) -> None:
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        import mlflow

        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        self._run: str = self._client.create_run(experiment, run_name=run_id).info.run_id
        for name, value in conditions.items():
            self._client.log_param(self._run, name, value)
        self._client.set_tag(self._run, "epsilon_means", conditions_line(conditions))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run, name, value, step=step)

    def close(self, status: str) -> None:
        self._client.set_tag(self._run, "status", status)
        self._client.set_terminated(self._run, "FAILED" if status == "failed" else "FINISHED")


class _Wandb:
    name = "wandb"

    def __init__(self, project: str, run_id: str, folder: Path, conditions: Mapping[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(
            console="off",
            x_disable_stats=True,
            x_disable_meta=True,
            save_code=False,
            init_timeout=_INIT_SECONDS,
        )
        self._run: Any = wandb.init(
            project=project,
            name=run_id,
            dir=str(folder),
            config={**conditions, "epsilon_means": conditions_line(conditions)},
            settings=settings,
            reinit="create_new",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


class Trackers:
    """All trackers of one run; one that fails is dropped with a warning."""

    def __init__(self, openers: Mapping[str, Callable[[], Tracker]]) -> None:
        """Open each."""
        self._open: list[Tracker] = []
        self._left_out: dict[str, str] = {}
        for name, opener in openers.items():
            try:
                self._open.append(opener())
            except Exception as error:
                self._warn(name, error)

    @property
    def names(self) -> tuple[str, ...]:
        """Trackers that are still served."""
        return tuple(one.name for one in self._open)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each tracker that failed."""
        return tuple(
            f"tracker {name} failed ({why}) and was left out from there"
            for name, why in self._left_out.items()
        )

    def note(self, record: Mapping[str, Any]) -> None:
        """Send one line of `metrics.jsonl`."""
        step, values = int(record.get("round") or 0), scalars(record)
        self._each(lambda one: one.log(step, values))

    def close(self, status: str) -> None:
        """End every tracker's run; later calls do nothing."""
        self._each(lambda one: one.close(status))
        self._open = []

    def _each(self, do: Callable[[Tracker], None]) -> None:
        kept = []
        for one in self._open:
            try:
                do(one)
                kept.append(one)
            except Exception as error:
                self._warn(one.name, error)
        self._open = kept

    def _warn(self, name: str, error: Exception) -> None:
        self._left_out[name] = type(error).__name__
        _LOG.warning(
            "tracker %s failed (%s) and is left out from here; metrics.jsonl has everything",
            name,
            type(error).__name__,
        )


def open_trackers(config: FedLoraConfig, run_id: str, folder: Path) -> Trackers:
    """Open the trackers that the configuration names.

    Args:
        config: resolved configuration.
        run_id: name of the run.
        folder: run folder; offline files of TensorBoard and Weights & Biases go below it.

    Raises:
        ConfigError: if a package is missing.
    """
    tracking, conditions = config.tracking, conditions_of(config)
    require_trackers(tracking)
    openers: dict[str, Callable[[], Tracker]] = {}
    if tracking.tensorboard:
        openers["tensorboard"] = lambda: _TensorBoard(folder, conditions)
    uri, project = tracking.mlflow, tracking.wandb
    if uri:
        openers["mlflow"] = lambda: _MlFlow(uri, run_id, config.run.name, conditions)
    if project:
        os.environ.setdefault("WANDB_SILENT", "true")
        openers["wandb"] = lambda: _Wandb(project, run_id, folder, conditions)
    return Trackers(openers)


__all__ = ["Tracker", "Trackers", "check_names", "open_trackers", "require_trackers", "scalars"]
