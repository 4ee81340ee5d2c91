"""`fedlora sweep`: a grid or random search over configurations, as Ray tasks; resumable."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlora.cli.common import ConfigArgument, JsonOption, OverlayOption, emit
from fedlora.errors import ConfigError, SimulationError
from fedlora.figures import at_least_digits
from fedlora.files import replace_text

if TYPE_CHECKING:
    from fedlora.config.schema import FedLoraConfig
    from fedlora.simulation.sweep import SweepPlan, TrialResult

HELP = """Run many configurations and compare them.

Trials over one data set spend from one ledger, so the budget must cover the whole sweep, unless the data is
marked public (data.marked_public: true). Running the same command again goes on where it stopped.

Examples:

  fedlora sweep run.yaml --grid privacy.target_epsilon=1,3,8 --grid mechanism.kind=lora_fa,factor --seeds 1,2,3

  fedlora sweep run.yaml --random training.optimizer.lr=1e-3:1e-1:log --samples 12 --early-stopping
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

GridOption = Annotated[
    list[str] | None, typer.Option("--grid", metavar="KEY=V1,V2", help="Values to combine.")
]
RandomOption = Annotated[
    list[str] | None, typer.Option("--random", metavar="KEY=LOW:HIGH[:log]", help="A range to draw from.")
]


@app.command(help=HELP)
def sweep(
    config: ConfigArgument,
    grid: GridOption = None,
    random: RandomOption = None,
    samples: Annotated[int, typer.Option(help="Random draws per grid point.")] = 1,
    seeds: Annotated[str, typer.Option(help="Experiment seeds, separated by commas.")] = "42",
    out: Annotated[Path, typer.Option(help="Folder of the sweep.")] = Path("sweeps/sweep"),
    metric: Annotated[str, typer.Option(help="Metric to compare.")] = "accuracy",
    smaller_is_better: Annotated[
        bool,
        typer.Option(
            "--smaller-is-better", help="Less is better; goes without saying for loss and perplexity."
        ),
    ] = False,
    early_stopping: Annotated[
        bool, typer.Option("--early-stopping", help="End trials below the median.")
    ] = False,
    parallel: Annotated[
        int | None, typer.Option(help="Trials at once; as many as the cores hold by default.")
    ] = None,
    gpus_per_trial: Annotated[float, typer.Option(min=0.0, help="Share of a GPU for each trial.")] = 0.0,
    cpus_per_trial: Annotated[
        float, typer.Option(min=0.01, help="Cores, or a share of one, for each trial.")
    ] = 1.0,
    overlay: OverlayOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a sweep."""
    from fedlora.config import load_config
    from fedlora.config.tracking import require_trackers
    from fedlora.data.metrics import LOWER_IS_BETTER
    from fedlora.simulation.sweep import SweepPlan, run_sweep

    plan = SweepPlan(
        config=config,
        grid=parse_grid(grid or ()),
        random=parse_ranges(random or ()),
        samples=samples,
        seeds=parse_seeds(seeds),
        metric=metric,
        larger_is_better=not (smaller_is_better or metric in LOWER_IS_BETTER),
        early_stopping=early_stopping,
        overlays=tuple(overlay or ()),
    )
    settings = load_config(config, (), overlay or ())
    require_trackers(settings.tracking)
    results = run_sweep(
        plan,
        out,
        parallel=parallel,
        gpus_per_trial=gpus_per_trial,
        cpus_per_trial=cpus_per_trial,
        progress=partial(_note, metric),
    )
    _tell(settings, plan, out, results, as_json)
    if all(one.status == "failed" for one in results):
        raise typer.Exit(SimulationError.exit_code)


def _note(metric: str, result: TrialResult, done: int, total: int) -> None:
    """Write a line for a trial that has ended."""
    value = result.metrics.get(metric)
    told = "-" if value is None else f"{metric} {value:.4f}"
    sys.stderr.write(
        f"[{done}/{total}] {result.status} {told} {' '.join(result.overrides)} seed {result.seed}\n"
    )


def _tell(
    settings: FedLoraConfig, plan: SweepPlan, out: Path, results: Sequence[TrialResult], as_json: bool
) -> None:
    """Write the sweep's files and print its table, with the ledger that its trials spent from."""
    from fedlora.simulation.clients_ledger import ledger_file

    means = _epsilon_means(settings)
    table = _write_results(out, plan, results, means)
    told = (
        "each trial has a ledger of its own: the data is marked public"
        if settings.data.marked_public
        else f"all trials spend from {ledger_file(settings).absolute()}, as runs do; it adds up: {_spent(settings)}"
    )
    emit(
        {
            "out": str(out),
            "ledger": told,
            "epsilon_means": means,
            "trials": [dataclasses.asdict(one) for one in results],
        },
        as_json=as_json,
        text=f"{table}\n{told}\ntable and plot: {out}",
    )


def _epsilon_means(settings: FedLoraConfig) -> str:
    from fedlora.report.conditions import conditions_line, conditions_of

    return (
        f"epsilon: of each trial alone; {conditions_line(conditions_of(settings))}; where a trial changes one of "
        "these, table.csv says what holds"
    )


def _write_results(out: Path, plan: SweepPlan, results: Sequence[TrialResult], means: str) -> str:
    """Write a sweep's tables and plot; return the table for people."""
    from fedlora.simulation.sweep_report import plot_svg, table_csv, table_text

    table = f"{table_text(results, plan.metric, plan.larger_is_better)}\n{means}"
    replace_text(out / "table.txt", table + "\n")
    replace_text(out / "table.csv", table_csv(results))
    replace_text(out / "plot.svg", plot_svg(results, plan.metric, means))
    return table


def _spent(settings: FedLoraConfig) -> str:
    """Say what the ledger holds: a trial that failed has no figure of its own and may have spent all the same."""
    from fedlora.simulation.clients_ledger import largest_spending

    largest = largest_spending(settings)
    return "nothing so far" if largest is None else f"epsilon {at_least_digits(largest)} so far"


def parse_grid(items: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read KEY=V1,V2 items; commas inside brackets or braces belong to the value.

    Raises:
        ConfigError: for an item without key or values, or a key that comes twice.

    Example:
        >>> parse_grid(["a.b=1,2", "c=[x,y],[x]"])
        {'a.b': ('1', '2'), 'c': ('[x,y]', '[x]')}
    """
    found: dict[str, tuple[str, ...]] = {}
    for item in items:
        key, sign, values = item.partition("=")
        parts = tuple(one.strip() for one in _split(values) if one.strip())
        if not key or not sign or not parts:
            raise ConfigError(f"--grid {item!r}: write KEY=V1,V2")
        if key in found:
            raise ConfigError(f"--grid {key}: given twice; write all its values at once, KEY=V1,V2")
        found[key] = parts
    return found


def _split(text: str) -> list[str]:
    """Cut at the commas that no bracket or brace holds."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def parse_ranges(items: Sequence[str]) -> dict[str, tuple[float, float, bool]]:
    """Read KEY=LOW:HIGH[:log] items.

    Raises:
        ConfigError: for a malformed range.
    """
    found: dict[str, tuple[float, float, bool]] = {}
    for item in items:
        key, _, text = item.partition("=")
        parts = text.split(":")
        try:
            low, high = float(parts[0]), float(parts[1])
        except (ValueError, IndexError):
            raise ConfigError(f"--random {item!r}: write KEY=LOW:HIGH or KEY=LOW:HIGH:log") from None
        if not key or len(parts) > 3 or (len(parts) == 3 and parts[2] != "log"):
            raise ConfigError(f"--random {item!r}: write KEY=LOW:HIGH or KEY=LOW:HIGH:log")
        if key in found:
            raise ConfigError(f"--random {key}: given twice; one range is drawn from")
        found[key] = (low, high, len(parts) == 3)
    return found


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds separated by commas.

    Raises:
        ConfigError: if one is not a whole number.
    """
    try:
        return tuple(int(one) for one in text.split(",") if one.strip())
    except ValueError:
        raise ConfigError(f"--seeds {text!r}: write whole numbers separated by commas") from None
