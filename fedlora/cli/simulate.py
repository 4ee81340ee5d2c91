"""`fedlora simulate`: run one configuration as a simulation on Ray, with live accuracy and epsilon."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedlora.cli.common import JsonOption, OverlayOption, OverridesArgument, emit
from fedlora.collector import held_collector
from fedlora.errors import BudgetExceededError, ConfigError, FedLoraError
from fedlora.figures import at_least
from fedlora.files import replace_text
from fedlora.simulation.settings import RoundRecord, RunResult

if TYPE_CHECKING:
    from fedlora.config.schema import FedLoraConfig

HELP = """Run a configuration as a simulation on Ray.

The same server, strategy and client code as in a deployment runs here, with the clients' data split as
`data.partition` says. Every client's privacy budget is charged in one ledger beside the run folders, so
that runs over the same data set add up.

Examples:

  fedlora simulate run.yaml

  fedlora simulate run.yaml privacy.target_epsilon=3 federation.rounds=40

  fedlora simulate --resume runs/demo-20261127-101530-ab12cd

  fedlora simulate run.yaml --json > result.json
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

ResumeOption = Annotated[
    Path | None, typer.Option("--resume", metavar="RUN", help="Go on with an interrupted run's folder.")
]
LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", help="The clients' ledger; ledger.sqlite in run.dir by default.")
]
InProcessOption = Annotated[
    bool, typer.Option("--in-process", help="Without Ray, all clients in this process (small runs).")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


@app.command(help=HELP)
def simulate(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="The run's YAML file.")] = None,
    overrides: OverridesArgument = None,
    overlay: OverlayOption = None,
    resume: ResumeOption = None,
    ledger: LedgerOption = None,
    in_process: InProcessOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run one simulation."""
    result = run_simulation(
        config, overrides, overlay, resume=resume, ledger=ledger, in_process=in_process, quiet=quiet
    )
    emit(as_object(result), as_json=as_json, text=summary_text(result))
    if result.status == "budget-exhausted":
        raise typer.Exit(BudgetExceededError.exit_code)


def run_simulation(
    config: str | None,
    overrides: list[str] | None,
    overlay: list[str] | None,
    *,
    resume: Path | None,
    ledger: Path | None,
    in_process: bool,
    quiet: bool,
) -> RunResult:
    """Load the configuration and run it with a progress display.

    Raises:
        ConfigError: if neither a file nor a run to resume is named, or both are.
    """
    if (config is None) == (resume is None):
        raise ConfigError("simulate: give either a CONFIG file or --resume RUN")
    if resume is not None and (overrides or overlay):
        raise ConfigError("simulate --resume: a run goes on with its own configuration; leave overrides out")
    with held_collector():
        from fedlora.config import load
        from fedlora.simulation.run import simulate as start

    loaded = None if config is None else load(config, overrides or (), overlay or ())
    if loaded is not None:
        for line in (*loaded.notes, *loaded.overridden()):
            logging.getLogger(__name__).info("%s", line)
    settings = None if loaded is None else loaded.config
    shown = settings if settings is not None else _config_of(resume)
    total = 1 if shown is None else shown.federation.rounds
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with progress_display(total, quiet=quiet, config=shown, resume=resume) as note:
        result = start(
            settings,
            resume=resume,
            ledger=ledger,
            progress=note,
            in_process=in_process,
            announce=None if quiet else _announce,
        )
    write_report(result.folder)
    return result


def _announce(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def write_report(folder: Path) -> Path:
    """Write a run's page beside its figures."""
    from fedlora.report.page import render
    from fedlora.report.run_data import read_run

    path = folder / "report.html"
    replace_text(path, render(read_run(folder)))
    return path


def _config_of(resume: Path | None) -> FedLoraConfig | None:
    from fedlora.config import load_config

    path = (resume or Path()) / "config.yaml"
    return load_config(path) if path.is_file() else None


def headline(record: RoundRecord) -> str:
    """Return one line about a round: status, accuracy (or the task's first metric) and epsilon."""
    parts = []
    metrics = record.metrics or {}
    name = next((one for one in ("accuracy", "exact_match", "perplexity", "loss") if one in metrics), None)
    if name is not None:
        parts.append(f"{name} {metrics[name]:.3f}")
    if record.epsilon is not None:
        parts.append(f"epsilon {at_least(record.epsilon, 3)}")
    if record.round > 0:
        parts.append(f"{record.accepted}/{record.asked} clients")
    if record.refused:
        parts.append(f"{len(record.refused)} refused")
    if record.failed:
        parts.append(f"{len(record.failed)} failed")
    return ", ".join(parts)


@contextmanager
def progress_display(
    rounds: int, *, quiet: bool, config: FedLoraConfig | None = None, resume: Path | None = None
) -> Iterator[Any]:
    """Show rounds on stderr: a live view on a terminal, a line per evaluated round elsewhere.

    Args:
        rounds: rounds of the whole run.
        quiet: show nothing.
        config: says what the epsilon means; its noise multiplier may still be open.
        resume: folder of the run that goes on; a live view begins with its rounds.
    """
    if quiet:
        yield None
        return
    from fedlora.report.conditions import conditions_line, conditions_of
    from fedlora.report.live import LiveView

    conditions = None if config is None else conditions_of(config)
    console = Console(stderr=True)
    if (
        not sys.stderr.isatty() or console.is_dumb_terminal
    ):  # colours can be forced into a log, a view can not
        if conditions is not None:
            sys.stderr.write(f"epsilon: {conditions_line(conditions)}\n")
        yield _print_round
        return
    with LiveView(console, rounds, conditions, _rounds_of(resume)) as view:

        def note(record: RoundRecord) -> None:
            view.note(vars(record))

        yield note


def _rounds_of(resume: Path | None) -> Sequence[Mapping[str, Any]]:
    """Return the rounds that a resumed run has behind it; none where its files cannot be read, which it says itself."""
    from fedlora.report.run_data import read_run

    if resume is None:
        return ()
    try:
        return read_run(resume).rounds
    except (FedLoraError, OSError):
        return ()


def _print_round(record: RoundRecord) -> None:
    if record.metrics or record.refused or record.failed or record.status == "skipped":
        sys.stderr.write(f"round {record.round}: {headline(record)}\n")
        sys.stderr.flush()


def as_object(result: RunResult) -> Mapping[str, Any]:
    """Return a result as JSON-ready values."""
    return {
        "run_id": result.run_id,
        "folder": str(result.folder),
        "status": result.status,
        "rounds": result.rounds,
        "metrics": None if result.metrics is None else dict(result.metrics),
        "epsilon": result.epsilon,
        "statement": dict(result.statement),
        "adapter": None if result.adapter is None else str(result.adapter),
        "report": str(result.folder / "report.html"),
        "seconds": dict(result.seconds),
        "memory": dict(result.memory),
        "warnings": list(result.warnings),
    }


def summary_text(result: RunResult) -> str:
    """Return the closing lines of a run for people."""
    lines = [f"{result.status}: {result.rounds} rounds in {result.seconds.get('wall', 0.0):.0f} s"]
    if result.metrics:
        lines.append("public evaluation: " + ", ".join(f"{k} {v:.4f}" for k, v in result.metrics.items()))
    lines.append(_epsilon_line(result))
    lines += [f"warning: {line}" for line in result.warnings]
    if result.adapter is not None:
        lines.append(f"adapter: {result.adapter} (PEFT format, reloaded and checked)")
    lines.append(f"run folder: {result.folder}, report: {result.folder / 'report.html'}")
    return "\n".join(lines)


def _epsilon_line(result: RunResult) -> str:
    """Return a run's epsilon with its meaning; a private run that spent nothing is not called unprivate."""
    from fedlora.report.conditions import conditions_line

    means = conditions_line(result.statement)
    if result.epsilon is not None:
        return f"epsilon {at_least(result.epsilon)}: {means}"
    return means if result.statement.get("privacy") == "none" else f"no epsilon is known; it would be {means}"
