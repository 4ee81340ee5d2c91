"""Run one simulation: resolve, start the grid, run the very ServerApp of a deployment, clean up."""

from __future__ import annotations

import logging
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, RecordDict

from fedlora.config import config_container, load_config
from fedlora.config.resolve import config_hash
from fedlora.config.schema import FedLoraConfig
from fedlora.config.tracking import require_trackers
from fedlora.data import check_records
from fedlora.errors import CheckpointError, SimulationError
from fedlora.files import FolderLock, replace_text
from fedlora.ledger import Ledger
from fedlora.names import STATES_FOLDER
from fedlora.simulation.appdir import code_hash, find_app_dir, load_module
from fedlora.simulation.cards import restate_card
from fedlora.simulation.clients_ledger import (
    LEDGER_NOTE,
    clients_secret,
    ledger_of_run,
    note_ledger,
    open_clients_ledger,
)
from fedlora.simulation.counts import write_partition
from fedlora.simulation.grid import HostedGrid, InProcessGrid
from fedlora.simulation.identity import SERVER_NODE
from fedlora.simulation.memory import (
    MemoryPlan,
    clients_of_a_worker,
    earlier_cohort,
    free_memory_here,
    plan_memory,
    write_plan,
)
from fedlora.simulation.node_spec import NodeSpec
from fedlora.simulation.overlap import Sharing, find_sharing
from fedlora.simulation.prepare import Federation, complete, make_federation, share_out
from fedlora.simulation.settings import Progress, RunResult, ServerSettings, register_settings
from fedlora.simulation.spending import Spending
from fedlora.simulation.terminations import terminations
from fedlora.training.charging import BudgetKeeper, LedgerKeeper

if TYPE_CHECKING:
    from fedlora.simulation.crew import Crew

_LOG = logging.getLogger(__name__)
_FIRST_NODE = 1001
_CHECK_SECONDS = 2.0
"""Time for encoding records before the first round, about what the workers still need to load the base model."""


def simulate(
    config: FedLoraConfig | None = None,
    *,
    resume: Path | None = None,
    ledger: Path | None = None,
    progress: Progress | None = None,
    in_process: bool = False,
    stop_after: int | None = None,
    run_id: str | None = None,
    announce: Callable[[str], None] | None = None,
) -> RunResult:
    """Run one simulation on this machine or on a Ray cluster.

    Args:
        config: checked configuration with a partition; not needed with `resume`.
        resume: folder of an interrupted run to go on with.
        ledger: the clients' ledger file; `ledger.sqlite` beside the run folders where None, so that runs
            over the same data set add up. A resumed run goes on with its own.
        progress: called after every round.
        in_process: run all nodes in this process, without Ray (tests, tiny runs).
        stop_after: end after this round as if interrupted (tests of resume).
        run_id: name of the run; made from the configuration's name, time and chance where None.
        announce: told the memory plan in one line, before the first round.

    Returns:
        How the run ended.

    Raises:
        ClusterUnreachableError: if the Ray cluster does not answer within its bound.
        FolderInUseError: if another process works on the run folder; nothing was begun or charged then.
        FedLoraError: whatever else ends the run.
    """
    started = time.perf_counter()
    with terminations(), ExitStack() as held:
        if resume is not None:
            held.enter_context(_locked(resume))
            ledger = ledger_of_run(resume, ledger)
        federation = _federation(config, resume)
        crew = None if in_process else _crew(federation, held)
        settings = _settings(federation, resume, progress, stop_after, run_id)
        if resume is None:
            held.enter_context(_fresh_folder(settings, ledger))
        settings.ledger = ledger
        book = open_clients_ledger(settings.config, ledger, create=resume is None)
        try:
            spending = Spending(None if book is None else LedgerKeeper(book), settings.config)
            result = _run(settings, federation, spending, crew, announce, started)
            return _with_ledger(result, book, settings)
        finally:
            if book is not None:
                book.close()


def _run(
    settings: ServerSettings,
    federation: Federation,
    spending: Spending,
    crew: Crew | None,
    announce: Callable[[str], None] | None,
    started: float,
) -> RunResult:
    """Tell the workers what they are, prepare the rest while they load, and run the server."""
    run_number = zlib.crc32(settings.run_id.encode()) + 1
    specs = _specs(settings, federation, run_number, in_process=crew is None)
    settings.clients = {spec.node_id: tuple(sorted(spec.parts)) for spec in specs}
    grid = _grid(settings, specs, spending, crew)
    try:
        plan = _prepare(grid, settings, federation, spending, specs, announce)
        _log_plan(settings, specs, time.perf_counter() - started)
        _run_server(grid, settings, run_number)
    finally:
        grid.close()
    memory = write_plan(settings.folder, plan, grid.halved) if plan is not None else {}
    inside = {f"workers_{name}": value for name, value in grid.worker_seconds.items()}
    return _closed(settings, spending, memory, {**inside, "wall": time.perf_counter() - started})


def _locked(folder: Path) -> FolderLock:
    """Take a run folder for as long as the run lasts: two drivers on one folder would both train and both charge."""
    if not folder.is_dir():
        raise CheckpointError(f"resume: {folder} is not there; give the folder of an earlier run")
    return FolderLock(folder, "run folder")


@contextmanager
def _fresh_folder(settings: ServerSettings, ledger: Path | None) -> Iterator[None]:
    """Make and take a new run's folder; one in which nothing was written by its end is removed again."""
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as lock:
        note_ledger(folder, settings.config, ledger)
        try:
            yield
        finally:
            own = {lock.path, folder / LEDGER_NOTE}
            if set(folder.iterdir()) == own:
                for path in own:
                    path.unlink()
                folder.rmdir()


def _closed(
    settings: ServerSettings, spending: Spending, memory: Mapping[str, Any], seconds: Mapping[str, float]
) -> RunResult:
    """Return the server's result with what the driver knows."""
    result = settings.result
    if result is None:
        raise SimulationError("the server app ended without a result; see its log")
    told = () if spending.sharing is None else spending.sharing.warnings
    return replace(
        result,
        memory=memory,
        seconds={**result.seconds, **seconds},
        warnings=(*result.warnings, *told),
    )


# -- preparation ------------------------------------------------------------------------------------


def _federation(config: FedLoraConfig | None, resume: Path | None) -> Federation:
    """Read the rows and share them out, before anything is started."""
    if resume is not None:
        path = resume / "config.yaml"
        if not path.is_file():
            raise CheckpointError(f"resume: {path} is not there; give the folder of an earlier run")
        config = load_config(path)
    if config is None:
        raise SimulationError("simulate: neither a configuration nor a run to resume was given")
    require_trackers(config.tracking)
    return make_federation(config)


def _crew(federation: Federation, held: ExitStack) -> Crew:
    """Start the workers; they import while the driver prepares."""
    from fedlora.simulation.crew import Crew

    config = federation.config
    name = f"{config.run.name}-{os.urandom(6).hex()}"
    crew = Crew(
        config.simulation.ray,
        num_workers(config, len(federation.parts)),
        config.simulation.threads_per_worker,
        name,
    )
    held.callback(crew.close)
    return crew


def _settings(
    federation: Federation,
    resume: Path | None,
    progress: Progress | None,
    stop_after: int | None,
    run_id: str | None,
) -> ServerSettings:
    """Resolve the configuration, for a new run or the next attempt of an interrupted one."""
    prepared = complete(federation.config)
    if resume is not None:
        name, folder = f"{resume.name}.{_next_attempt(resume)}", resume
    else:
        run = federation.config.run
        name = run_id or f"{run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(3).hex()}"
        folder = Path(run.dir) / name
    return ServerSettings(
        prepared.config,
        name,
        folder,
        resume=resume is not None,
        progress=progress,
        stop_after=stop_after,
        bench=prepared.bench,
    )


def _next_attempt(folder: Path) -> int:
    """Count attempts: each has its own run id, so that what an interrupted round spent stays spent."""
    path = folder / "attempts"
    text = path.read_text().strip() if path.exists() else "1"
    attempt = (int(text) if text.isdigit() else 1) + 1
    replace_text(path, str(attempt))
    return attempt


def _with_ledger(result: RunResult, book: Ledger | None, settings: ServerSettings) -> RunResult:
    """Write every account as JSON beside the run's metrics; the ledger's largest epsilon is the run's."""
    if book is None:
        return result
    folder: Any = load_module(find_app_dir(), "server.folder")
    clients = {client for known in (settings.clients or {}).values() for client in known}
    epsilon = folder.write_ledger(settings.folder, book, settings.config, clients)
    final = replace(result, epsilon=epsilon if epsilon is not None else result.epsilon)
    folder.RunFolder(settings.folder).write_json("summary.json", final)
    restate_card(settings.config, final)
    return final


def num_workers(config: FedLoraConfig, clients: int) -> int:
    """Return the number of workers: as configured, else one per core (and thread share), at most one a client."""
    section = config.simulation
    if section.workers != "auto":
        return min(int(section.workers), clients)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if section.ray.gpus_per_worker > 0:
        import torch

        gpus = torch.cuda.device_count()
        return max(1, min(math.floor(gpus / section.ray.gpus_per_worker), cores, clients))
    return max(1, min(cores // section.threads_per_worker, clients))


def _specs(
    settings: ServerSettings, federation: Federation, run_number: int, in_process: bool
) -> list[NodeSpec]:
    config = settings.config
    app_dir = find_app_dir()
    count = 1 if in_process else num_workers(config, len(federation.parts))
    container: Mapping[str, Any] = config_container(config)
    digest, seen = config_hash(config), code_hash(app_dir)
    return [
        NodeSpec(
            node_id=_FIRST_NODE + number,
            run_number=run_number,
            app_dir=str(app_dir),
            code_hash=seen,
            container=container,
            config_hash=digest,
            parts=parts,
            state_dir=str((settings.folder / STATES_FOLDER).absolute()),
            threads=config.simulation.threads_per_worker,
        )
        for number, parts in enumerate(share_out(federation.parts, count))
    ]


def _grid(
    settings: ServerSettings, specs: list[NodeSpec], spending: Spending, crew: Crew | None
) -> HostedGrid:
    timeout = settings.config.federation.round_timeout_seconds
    if crew is None:
        return InProcessGrid(specs, spending, timeout)
    from fedlora.simulation.raygrid import RayGrid

    return RayGrid(specs, spending, crew, timeout)


def _prepare(
    grid: HostedGrid,
    settings: ServerSettings,
    federation: Federation,
    spending: Spending,
    specs: list[NodeSpec],
    announce: Callable[[str], None] | None,
) -> MemoryPlan | None:
    """Do what needs the loaded model and the rows but no worker: check records, look for overlaps, plan."""
    if not settings.resume:
        check_records(settings.bench.task, federation.rows, federation.parts, seconds=_CHECK_SECONDS)
    write_partition(settings.folder, federation)
    spending.sharing = _sharing(settings, federation, spending.keeper)
    return _plan_memory(grid, settings, specs, announce)


def _sharing(settings: ServerSettings, federation: Federation, keeper: BudgetKeeper | None) -> Sharing | None:
    config, rows, parts = federation.config, federation.rows, federation.parts
    if not isinstance(keeper, LedgerKeeper):
        return find_sharing(config, rows, parts)
    secret = clients_secret(config, settings.ledger)
    return find_sharing(config, rows, parts, secret=secret, earlier=keeper.ledger.fingerprints())


def _plan_memory(
    grid: HostedGrid,
    settings: ServerSettings,
    specs: list[NodeSpec],
    announce: Callable[[str], None] | None,
) -> MemoryPlan | None:
    """Decide how many clients train together, say so, and write it down; None where it cannot be predicted."""
    config, shares = settings.config, [len(spec.parts) for spec in specs]
    earlier = earlier_cohort(settings.folder) if settings.resume else None
    try:
        free = grid.memory_per_worker()
        if free is None:
            free = free_memory_here(
                len(specs), settings.bench.adapted.device.type, config.simulation.ray.gpus_per_worker
            )
        plan = plan_memory(settings.bench, clients_of_a_worker(config, shares), len(specs), free, earlier)
    except Exception as error:  # a plan is a convenience: cohorts are halved where memory runs out
        _LOG.warning("memory: not predicted (%s)", type(error).__name__)
        return None
    grid.cohort = plan.cohort
    write_plan(settings.folder, plan, {})
    _LOG.info("%s", plan.line())
    if announce is not None:
        announce(plan.line())
    return plan


def _log_plan(settings: ServerSettings, specs: list[NodeSpec], seconds: float) -> None:
    clients = sum(len(spec.parts) for spec in specs)
    _LOG.info(
        "run %s: %d clients on %d workers with %d threads each; prepared in %.1f s",
        settings.run_id,
        clients,
        len(specs),
        specs[0].threads,
        seconds,
    )


def _run_server(grid: HostedGrid, settings: ServerSettings, run_number: int) -> None:
    app = load_module(find_app_dir(), "server.app").app
    register_settings(run_number, settings)
    context = Context(
        run_id=run_number, node_id=SERVER_NODE, node_config={}, state=RecordDict(), run_config={}
    )
    app(grid, context)
