"""`fedlora account calibrate FAMILY`: noise, steps, rate or another parameter for a target epsilon, private side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from fedlora.cli import account_options as opt
from fedlora.cli.account_common import (
    described,
    event_of_groups,
    finish,
    needs_noise,
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
_SOLVED = ("noise_multiplier", "steps", "sample_rate")


def _check(report_epsilon: float, target: float, name: str, value: float) -> None:
    if not report_epsilon <= target:
        raise AccountingError(
            f"calibration: {name} {value} gives epsilon {report_epsilon} beyond the target {target}; report this"
        )


@dataclass(frozen=True)
class _Job:
    """What to solve for, under which target; `make(values)` builds the whole run's event."""

    what: str
    make: Callable[[dict[str, Any]], Event]
    target: float
    delta: float
    adjacency: Adjacency
    accountant: str

    def solve(self, values: dict[str, Any]) -> float:
        """Return the asked-for value, at which the target was met."""
        terms: dict[str, Any] = {"adjacency": self.adjacency, "accountant_name": self.accountant}
        if self.what == "steps":
            one = self.make({**values, "steps": 1})
            return max_steps_within(one, self.target, self.delta, **terms)
        search = calibrate_noise_multiplier if self.what == "noise_multiplier" else max_sample_rate
        return search(lambda x: self.make({**values, self.what: x}), self.target, self.delta, **terms)


def _given(solve_for: str, values: dict[str, Any], needed: bool) -> tuple[str, dict[str, Any]]:
    """Check which values are given and fill in the others' defaults; `needed` says whether noise has an effect."""
    what = solve_for.replace("-", "_")
    if what not in _SOLVED:
        raise PrivacyParameterError(
            f"--solve-for: got {solve_for!r}, allowed is noise_multiplier | steps | sample_rate"
        )
    opt.unsolved(what, values)
    if what != "noise_multiplier" and needed and values["noise_multiplier"] is None:
        raise PrivacyParameterError(f"calibrate: --noise-multiplier is needed to solve for {what}")
    if what == "noise_multiplier" and not needed:
        raise PrivacyParameterError(
            "calibrate: every --group states its own noise, nothing is left to solve for; empty a NOISE"
        )
    defaults = {"sample_rate": 1.0, "steps": 1}
    return what, {
        name: defaults.get(name) if value is None and name != what else value
        for name, value in values.items()
    }


def _report(
    job: _Job, values: dict[str, Any], as_json: bool, shown: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    what, target = job.what, job.target
    with progress():
        values = {**values, what: job.solve(values)}
        if not values[what] > 0:
            raise AccountingError(
                f"calibration: no {what} meets epsilon {target:g} at delta {job.delta:g}; add noise"
            )
        report = epsilon_of(job.make(values), job.delta, adjacency=job.adjacency, accountant=job.accountant)
    _check(report.epsilon, target, what, values[what])
    extra = {"target_epsilon": target, "solved": what, what: values[what]}
    finish(report, shown(values), as_json=as_json, plot=None, extra=extra)


@app.command(
    epilog="Example: fedlora account calibrate gaussian --target-epsilon 3 --delta 1e-5 --sample-rate 0.1 --steps 210"
)
@opt.guarded
def gaussian(
    target_epsilon: opt.TargetOption,
    delta: opt.DeltaOption,
    sample_rate: opt.GivenRateOption = None,
    steps: opt.GivenStepsOption = None,
    noise_multiplier: opt.GivenNoiseOption = None,
    solve_for: opt.SolveOption = "noise_multiplier",
    adjacency: opt.AdjacencyOption = "add-or-remove",
    accountant: opt.AccountantOption = "best",
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

    what, filled = _given(solve_for, values, True)
    job = _Job(what, make, target_epsilon, delta, Adjacency.parse(adjacency), accountant)
    _report(job, filled, as_json, dict)


@app.command(
    epilog="Example: fedlora account calibrate projection --target-epsilon 1 --delta 1e-5 --width 768 --rank 8 "
    "--sample-rate 0.01 --steps 1000 --json"
)
@opt.guarded
@opt.takes({**opt.LAYER_SHAPE, **opt.GROUP_SHAPE})
def projection(
    shape: opt.Shape,
    target_epsilon: opt.TargetOption,
    delta: opt.DeltaOption,
    sample_rate: opt.GivenRateOption = None,
    steps: opt.GivenStepsOption = None,
    solve_for: opt.SolveOption = "noise_multiplier",
    adjacency: opt.AdjacencyOption = "add-or-remove",
    accountant: opt.AccountantOption = "moment",
    as_json: JsonOption = False,
) -> None:
    """Solve for the noisy projection; groups with an empty NOISE take the noise that is solved for."""
    group, clip = shape.pop("group"), shape.pop("clip")
    values = {**shape, "sample_rate": sample_rate, "steps": steps, "out_width": None}

    def make(v: dict[str, Any]) -> Event:
        return event_of_groups(v, group, clip).times(v["steps"])

    what, filled = _given(solve_for, values, needs_noise(group))
    job = _Job(what, make, target_epsilon, delta, Adjacency.parse(adjacency), accountant)
    _report(job, filled, as_json, lambda v: described(event_of_groups(v, group, clip), v))


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
@opt.guarded
@opt.takes(opt.VECTOR_SHAPE)
def vector(
    shape: opt.Shape,
    target_epsilon: opt.TargetOption,
    delta: opt.DeltaOption,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest alignment (as 1 - rho) at which the vector projection meets the target."""
    width, rank = shape["width"], shape["rank"]
    inside = target_epsilon * (1.0 - 1e-7)
    _conditional(
        "misalignment",
        lambda x: VectorProjectionEvent(width, rank, 1.0 - x),
        shape,
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
@opt.guarded
@opt.takes(opt.M1_SHAPE)
def m1(
    shape: opt.Shape,
    target_epsilon: opt.TargetOption,
    delta: opt.DeltaOption,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest additive noise at which M1 meets the target."""
    _conditional(
        "noise_std",
        lambda s: M1Event(**{**shape, "noise_std": s}),
        shape,
        1e6,
        1e-6,
        target_epsilon,
        delta,
        as_json,
    )


@app.command(
    epilog="Example: fedlora account calibrate sketch --target-epsilon 3 --delta 1e-5 --rank 16 --tau 64"
)
@opt.guarded
@opt.takes(opt.SKETCH_SHAPE)
def sketch(
    shape: opt.Shape,
    target_epsilon: opt.TargetOption,
    delta: opt.DeltaOption,
    as_json: JsonOption = False,
) -> None:
    """Find the smallest ratio Gamma at which the sketch meets the target."""
    _conditional(
        "gamma",
        lambda g: SketchEvent(**{**shape, "gamma": g}),
        shape,
        1e9,
        1.0 + 1e-9,
        target_epsilon,
        delta,
        as_json,
    )


@app.command(
    epilog="Example: fedlora account calibrate pave --target-epsilon 0.5 --delta 1e-5 --rank 8 --dimension 8"
)
@opt.guarded
def pave(
    target_epsilon: opt.TargetOption,
    delta: opt.DeltaOption,
    rank: opt.RankOption,
    dimension: opt.DimensionOption,
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
