"""Checks of the trackers' keys that need nothing but the keys: they come before a model or a record is read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from fedlora.config.schema import TrackingConfig
from fedlora.errors import ConfigError

_SCHEMES: Final = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")
_NOT_IN_PROJECTS: Final = "/\\#?%:"
_FILE: Final = "sqlite:///"
_MODULES: Final = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


def require_trackers(tracking: TrackingConfig) -> None:
    """Refuse a tracker whose package is missing or whose name cannot be right, before anything is read or spent.

    Raises:
        ConfigError: naming the extra to install, or what is wrong with the value.
    """
    check_names(tracking)
    for key in missing_packages(tracking):
        raise ConfigError(
            f"tracking.{key}: the package {_MODULES[key]!r} is not installed; run pip install 'fedlora[{key}]' or "
            f"leave the key out"
        )


def missing_packages(tracking: TrackingConfig) -> list[str]:
    """Return the keys that are set and whose package is not installed here."""
    return [
        key
        for key, module in _MODULES.items()
        if getattr(tracking, key) not in (None, False) and importlib.util.find_spec(module) is None
    ]


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


def relative_file(uri: str | None) -> bool:
    """Return whether a tracking URI names a SQLite file by a path that counts from the current folder.

    Example:
        >>> relative_file("sqlite:///mlflow.db"), relative_file("sqlite:////data/mlflow.db"), relative_file(None)
        (True, False, False)
    """
    return uri is not None and uri.startswith(_FILE) and not uri.startswith(f"{_FILE}/")


def absolute_tracking(uri: str | None) -> str | None:
    """Return a tracking URI for a process that runs in another folder: a relative SQLite file becomes absolute."""
    if uri is None or not relative_file(uri):
        return uri
    return _FILE + str(Path(uri.removeprefix(_FILE)).absolute())


__all__ = ["absolute_tracking", "check_names", "missing_packages", "relative_file", "require_trackers"]
