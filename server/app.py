"""Flower's ServerApp: reads the run's settings, runs the rounds, writes the run folder.

In a simulation the settings are registered in this process (`fedlora.simulation.settings`); under
`flwr run` and in a deployment they come from the run configuration: `config` names the YAML file and
`overrides` holds dotted overrides.
"""

from __future__ import annotations

import logging
import time

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlora.simulation.settings import RunResult, ServerSettings, take_settings
from server.bounded import BoundedGrid
from server.finish import add_clients_ledger, finish, record_failure
from server.folder import log_to_folder
from server.from_context import folder_from_context, settings_from_context
from server.setup import build_server

_LOG = logging.getLogger(__name__)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federated training."""
    settings = take_settings(context.run_id)
    if settings is None:
        place = folder_from_context(context)
        if place is not None:
            log_to_folder(place)
        try:
            settings = settings_from_context(context)
        except Exception as error:
            if place is not None:
                record_failure(place, error)
            raise
        if settings.app_hash is None:  # real nodes, not a simulation on Flower's engine
            grid = BoundedGrid(grid)
    settings.result = run(grid, settings)
    if settings.expect is not None:
        settings.result = add_clients_ledger(settings.result, settings)


def run(grid: Grid, settings: ServerSettings) -> RunResult:
    """Run all rounds and write the run folder.

    Args:
        grid: Flower's grid.
        settings: the run's settings.

    Raises:
        FedLoraError: whatever ends the run early; the run folder then says "failed" and why.
        FileAccessError: the same where the run folder cannot even say that.
    """
    try:
        return _run(grid, settings)
    except Exception as error:
        worse = record_failure(settings.folder, error)
        if worse is not None:
            raise worse from error
        raise


def _run(grid: Grid, settings: ServerSettings) -> RunResult:
    started = time.perf_counter()
    server = build_server(settings, grid)
    try:
        server.folder.write_config(settings.config)
        server.folder.write_environment()
        if settings.resume:
            server.loop.resume()
        server.trackers.open(server.folder.rounds() if settings.resume else ())
        rounds_started = time.perf_counter()
        status = server.loop.run()
        server.seconds["rounds"] = time.perf_counter() - rounds_started
        return finish(server, status, time.perf_counter() - started)
    finally:
        server.close()
