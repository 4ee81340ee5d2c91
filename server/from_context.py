"""Settings from Flower's run configuration (`flwr run`, deployments)."""

from __future__ import annotations

import os
import shlex
import time
from pathlib import Path

from flwr.app import Context

from fedlora.config import load_config
from fedlora.errors import ConfigError
from fedlora.simulation.prepare import complete
from fedlora.simulation.settings import ServerSettings


def settings_from_context(context: Context) -> ServerSettings:
    """Read `config` (a YAML file) and `overrides` from the run configuration.

    `run-id`, `run-dir` and `resume` come from `fedlora server`, which starts a run anew after a crash under
    the same name: a round that clients have answered already is then never trained twice.

    A relative path is looked for in the current directory, then beside the app.

    Raises:
        ConfigError: if no file is named or it is not there.
    """
    named = str(context.run_config.get("config", "") or os.environ.get("FEDLORA_CONFIG", ""))
    if not named:
        raise ConfigError(
            "run configuration: no 'config'; flwr run . --run-config 'config=\"/path/to/run.yaml\"'"
        )
    path = next((one for one in _candidates(named) if one.is_file()), None)
    if path is None:
        raise ConfigError(f"run configuration: config {named} is not there; give an absolute path")
    overrides = shlex.split(str(context.run_config.get("overrides", "")))
    config = load_config(path, overrides, deployment=True)
    prepared = complete(config)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    given = str(context.run_config.get("run-id", ""))
    run_id = given or f"{config.run.name}-{stamp}-{context.run_id % 10**6:06d}"
    folder = Path(str(context.run_config.get("run-dir", "")) or config.run.dir) / run_id
    resume = bool(context.run_config.get("resume", False))
    return ServerSettings(prepared.config, run_id, folder, resume=resume, bench=prepared.bench)


def _candidates(named: str) -> list[Path]:
    path = Path(named).expanduser()
    if path.is_absolute():
        return [path]
    return [Path.cwd() / path, Path(__file__).resolve().parent.parent / path]
