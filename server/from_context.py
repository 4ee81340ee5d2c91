"""Settings from Flower's run configuration (`flwr run`, deployments)."""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import Context

from fedlora.config import load_config
from fedlora.config.tracking import require_trackers
from fedlora.simulation.appdir import code_hash
from fedlora.simulation.clients_ledger import open_clients_ledger
from fedlora.simulation.counts import write_partition
from fedlora.simulation.flower import asks_to_simulate
from fedlora.simulation.flower_plan import config_file, overrides_of, read_plan
from fedlora.simulation.prepare import complete, make_federation
from fedlora.simulation.settings import ServerSettings

_APP_DIR = Path(__file__).resolve().parent.parent


def settings_from_context(context: Context) -> ServerSettings:
    """Read `config` (a YAML file) and `overrides` from the run configuration.

    `run-id`, `run-dir` and `resume` come from `fedlora server`, which starts a run anew after a crash under
    the same name: a round that clients have answered already is then never trained twice.

    With `simulate = true` the run is a simulation on Flower's engine; only nodes of that engine take part.

    Raises:
        ConfigError: if no file is named or it is not there.
    """
    if asks_to_simulate(context.run_config):
        return _simulated(context)
    path = config_file(context.run_config, _APP_DIR)
    config = load_config(path, overrides_of(context.run_config), deployment=True)
    require_trackers(config.tracking)
    prepared = complete(config)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    given = str(context.run_config.get("run-id", ""))
    run_id = given or f"{config.run.name}-{stamp}-{context.run_id % 10**6:06d}"
    folder = Path(str(context.run_config.get("run-dir", "")) or config.run.dir) / run_id
    resume = bool(context.run_config.get("resume", False))
    return ServerSettings(prepared.config, run_id, folder, resume=resume, bench=prepared.bench)


def folder_from_context(context: Context) -> Path | None:
    """Return the run folder that `fedlora server` asked for, before any configuration is read; else None."""
    parts = [str(context.run_config.get(key, "")) for key in ("run-dir", "run-id")]
    return Path(parts[0]) / parts[1] if all(parts) else None


def _simulated(context: Context) -> ServerSettings:
    plan = read_plan(context.run_config, context.run_id, _APP_DIR)
    federation = make_federation(plan.config)
    prepared = complete(federation.config)
    write_partition(plan.folder, federation)
    book = open_clients_ledger(prepared.config, None)  # made once, before the nodes open it side by side
    if book is not None:
        book.close()
    return ServerSettings(
        prepared.config,
        plan.run_id,
        plan.folder,
        bench=prepared.bench,
        expect=tuple(sorted(federation.parts)),
        app_hash=code_hash(_APP_DIR),
    )
