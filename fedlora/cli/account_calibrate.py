"""`fedlora account calibrate FAMILY`: noise, steps, rate or another parameter for a target epsilon, private side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedlora.accounting import (
    Event,
    M1Event,
    PaveEvent,
    PaveLayer,
    SketchEvent,
    VectorProjectionEvent,
    calibrate_noise_multiplier,
    epsilon_of,
    max_sample_rate,
    max_steps_within,
    solve_parameter,
)
from fedlora.accounting import vector as profile
from fedlora.accounting.reports import Adjacency
from fedlora.cli.account_common import (
    AccountantOption,
    AdjacencyOption,
    ClipOption,
    DeltaOption,
    GroupOption,
    event_of_groups,
    finish,
    progress,
    sampled_event,
)
from fedlora.cli.common import JsonOption
from fedlora.errors import AccountingError, PrivacyParameterError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Solve for noise, steps, rate or another parameter; the target is met at the result.",
    epilog="Example: fedlora account calibrate gaussian --target-epsilon 3 --delta 1e-5 --sample-rate 0.1 --steps 210",
)
TargetOption = Annotated[float, typer.Option("--target-epsilon", help="The epsilon that must not be passed.")]
SolveOption = Annotated[str, typer.Option("--solve-for", help="noise_multiplier, steps or sample_rate.")]


def _check(report_epsilon: float, target: float, name: str, value: float) -> None:
    if not report_epsilon <= target:
        raise AccountingError(
            f"calibration: {name} {value} gives epsilon {report_epsilon} beyond the target {target}; report this"
        )


def _solve(
    what: str,
    make: Any,
    values: dict[str, Any],
    target: float,
    delta: float,
    adjacency: Adjacency,
    accountant: str,
) -> None:
    """Fill in the asked-for entry of `values`; `make(values)` builds one step's or the whole run's event."""
    if what == "noise_multiplier":
        values[what] = calibrate_noise_multiplier(
            lambda s: make({**values, what: s}),
            target,
            delta,
            adjacency=adjacency,
            accountant_name=accountant,
        )
        return
    if values["noise_multiplier"] is None and values.get("fixed_noise") is None:
        raise PrivacyParameterError(f"calibrate: --noise-multiplier is needed to solve for {what}")
    if what == "steps":
        values[what] = max_steps_within(make({**values, what: 1}), target, delta, adjacency=adjacency)
    elif what == "sample_rate":
        values[what] = max_sample_rate(
            lambda q: make({**values, what: q}), target, delta, adjacency=adjacency
        )
    else:
        raise PrivacyParameterError(
            f"--solve-for: got {what!r}, allowed is noise_multiplier | steps | sample_rate"
        )
    if not values[what] > 0:
        raise AccountingError(
            f"calibration: no {what} meets epsilon {target:g} at delta {delta:g}; add noise"
        )


def _report(
    what: str,
    make: Any,
    values: dict[str, Any],
    target: float,
    delta: float,
    adjacency: Adjacency,
    accountant: str,
    as_json: bool,
) -> None:
    with progress():
        _solve(what, make, values, target, delta, adjacency, accountant)
        report = epsilon_of(make(values), delta, adjacency=adjacency, accountant=accountant)
    _check(report.epsilon, target, what, values[what])
    shown = {name: value for name, value in values.items() if value is not None and name != "fixed_noise"}
    finish(
        report,
        shown,
        as_json=as_json,
        plot=None,
        extra={"target_epsilon": target, "solved": what, what: values[what]},
    )


@app.command(
    epilog="Example: fedlora account calibrate gaussian --target-epsilon 3 --delta 1e-5 --sample-rate 0.1 --steps 210"
)
def gaussian(
    target_epsilon: TargetOption,
    delta: DeltaOption,
    sample_rate: Annotated[float, typer.Option(help="Poisson rate in (0, 1].")] = 1.0,
    steps: Annotated[int, typer.Option(help="The most noised steps that will be taken.")] = 1,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Given noise, to solve for another value.")
    ] = None,
    solve_for: SolveOption = "noise_multiplier",
    adjacency: AdjacencyOption = "add-or-remove",
    accountant: AccountantOption = "best",
    as_json: JsonOption = False,
) -> None:
    """Solve for the sampled Gaussian mechanism."""
    values: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
    }

    def make(v: dict[str, Any]) -> Event:
        return sampled_event(v["noise_multiplier"], v["sample_rate"], v["steps"])

    _report(
        solve_for.replace("-", "_"),
        make,
        values,
        target_epsilon,
        delta,
        Adjacency.parse(adjacency),
        accountant,
        as_json,
    )


@app.command(
    epilog="Example: fedlora account calibrate projection --target-epsilon 1 --delta 1e-5 --width 768 --rank 8 "
    "--sample-rate 0.01 --steps 1000 --json"
)
def projection(
    target_epsilon: TargetOption,
    delta: DeltaOption,
    width: Annotated[int | None, typer.Option(help="In-width of the projected layers.")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the fresh projection.")] = None,
    sample_rate: Annotated[float, typer.Option(help="Poisson rate in (0, 1].")] = 1.0,
    steps: Annotated[int, typer.Option(help="The most noised steps that will be taken.")] = 1,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Given noise, to solve for another value.")
    ] = None,
    group: GroupOption = None,
    clip: ClipOption = None,
    solve_for: SolveOption = "noise_multiplier",
    adjacency: AdjacencyOption = "add-or-remove",
    accountant: AccountantOption = "moment",
    as_json: JsonOption = False,
) -> None:
    """Solve for the noisy projection; groups with an empty NOISE take the noise that is solved for."""
    values: dict[str, Any] = {
        "width": width,
        "rank": rank,
        "noise_multiplier": noise_multiplier,
        "sample_rate": sample_rate,
        "steps": steps,
        "out_width": None,
    }

    def make(v: dict[str, Any]) -> Event:
        return event_of_groups(v, group, clip).times(v["steps"])

    _report(
        solve_for.replace("-", "_"),
        make,
        values,
        target_epsilon,
        delta,
        Adjacency.parse(adjacency),
        accountant,
        as_json,
    )


def _conditional(
    name: str,
    make: Any,
    values: dict[str, Any],
    safe: float,
    unsafe: float,
    target: float,
    delta: float,
    as_json: bool,
    private: Any = None,
) -> None:
    test = private or (lambda x: epsilon_of(make(x), delta).epsilon <= target)
    with progress():
        values[name] = solve_parameter(test, safe, unsafe)
        report = epsilon_of(make(values[name]), delta)
    _check(report.epsilon, target, name, values[name])
    finish(
        report,
        values,
        as_json=as_json,
        plot=None,
        extra={"target_epsilon": target, "solved": name, name: values[name]},
    )


@app.command(
    epilog="Example: fedlora account calibrate vector --target-epsilon 1 --delta 0.01 --width 400 --rank 32"
)
def vector(
    target_epsilon: TargetOption,
    delta: DeltaOption,
    width: Annotated[int, typer.Option(help="Dimension d.")],
    rank: Annotated[int, typer.Option(help="Rank r.")],
    as_json: JsonOption = False,
) -> None:
    """Find the smallest alignment (as 1 - rho) at which the vector projection meets the target."""
    values: dict[str, Any] = {"width": width, "rank": rank}
    inside = target_epsilon * (1.0 - 1e-7)
    _conditional(
        "misalignment",
        lambda x: VectorProjectionEvent(width, rank, 1.0 - x),
        values,
        1e-12,
        1.0,
        target_epsilon,
        delta,
        as_json,
        lambda x: profile.worst_profile(width, rank, 1.0 - x, inside) <= delta,
    )


@app.command(
    epilog="Example: fedlora account calibrate m1 --target-epsilon 3 --delta 1e-5 --width 400 --rank 200 --span 50 "
    "--alignment 0.9999 --residual 0.3 --column-distance 0.05"
)
def m1(
    target_epsilon: TargetOption,
    delta: DeltaOption,
    width: Annotated[int, typer.Option(help="Dimension d.")],
    rank: Annotated[int, typer.Option(help="Rank r.")],
    span: Annotated[int, typer.Option(help="Dimension of the unchanged columns' span.")],
    alignment: Annotated[float, typer.Option(help="Alignment outside the span.")],
    residual: Annotated[float, typer.Option(help="Norm outside the span, in [0, 1].")],
    column_distance: Annotated[float, typer.Option(help="Bound on ||v - v'||.")],
    as_json: JsonOption = False,
) -> None:
    """Find the smallest additive noise at which M1 meets the target."""
    values: dict[str, Any] = {
        "width": width,
        "rank": rank,
        "span": span,
        "alignment": alignment,
        "residual": residual,
        "column_distance": column_distance,
    }
    shape = dict(values)
    _conditional(
        "noise_std",
        lambda s: M1Event(noise_std=s, **shape),
        values,
        1e6,
        1e-6,
        target_epsilon,
        delta,
        as_json,
    )


@app.command(
    epilog="Example: fedlora account calibrate sketch --target-epsilon 3 --delta 1e-5 --rank 16 --tau 64"
)
def sketch(
    target_epsilon: TargetOption,
    delta: DeltaOption,
    rank: Annotated[int, typer.Option(help="Columns r of the sketch.")],
    tau: Annotated[int, typer.Option(help="Rank bound tau.")],
    layers: Annotated[int, typer.Option(help="Independent layers L.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest ratio Gamma at which the sketch meets the target."""
    values: dict[str, Any] = {"rank": rank, "tau": tau, "layers": layers}
    _conditional(
        "gamma",
        lambda g: SketchEvent(rank, tau, g, layers),
        values,
        1e9,
        1.0 + 1e-9,
        target_epsilon,
        delta,
        as_json,
    )


@app.command(
    epilog="Example: fedlora account calibrate pave --target-epsilon 0.5 --delta 1e-5 --rank 8 --dimension 8"
)
def pave(
    target_epsilon: TargetOption,
    delta: DeltaOption,
    rank: Annotated[int, typer.Option(help="Rank r.")],
    dimension: Annotated[int, typer.Option(help="Dimension k.")],
    as_json: JsonOption = False,
) -> None:
    """Find the largest covariance change gamma at which the specification meets the target."""
    values: dict[str, Any] = {"rank": rank, "dimension": dimension}
    _conditional(
        "gamma",
        lambda g: PaveEvent((PaveLayer(rank, dimension, g),)),
        values,
        1e-9,
        1.0 - 1e-9,
        target_epsilon,
        delta,
        as_json,
    )
