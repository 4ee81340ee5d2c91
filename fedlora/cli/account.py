"""`fedlora account`: any mechanism's epsilon, noise, steps or rate without training.

No data, no model and no ledger are touched. Every figure is an upper bound; the keys `epsilon`, `delta`, `accountant`,
`adjacency` and `conditions` are always there with `--json`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedlora.accounting import (
    M1Event,
    PaveEvent,
    SketchEvent,
    VectorProjectionEvent,
    epsilon_of,
    m1,
    pave,
    sketch,
    vector,
)
from fedlora.accounting.reports import Adjacency
from fedlora.cli import account_options as opt
from fedlora.cli.account_calibrate import app as calibrate_app
from fedlora.cli.account_common import (
    described,
    event_of_groups,
    finish,
    layers_of,
    progress,
    run_plot,
    sampled_event,
)
from fedlora.cli.account_projection import kind_of_bound, projection_curves, projection_report
from fedlora.cli.account_table import table
from fedlora.cli.common import JsonOption
from fedlora.errors import PrivacyParameterError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Account for any mechanism without training.",
    epilog="Example: fedlora account gaussian --sample-rate 0.01 --noise-multiplier 1 --steps 1000 --delta 1e-5",
)
app.add_typer(calibrate_app, name="calibrate")
app.command("table", epilog="Example: fedlora account table --json")(table)


@app.command(
    epilog="Example: fedlora account gaussian --sample-rate 0.01 --noise-multiplier 1 --steps 1000 --delta 1e-5"
)
@opt.guarded
def gaussian(
    noise_multiplier: opt.NoiseOption,
    delta: opt.DeltaOption,
    sample_rate: opt.SampleRateOption = 1.0,
    steps: opt.StepsOption = 1,
    adjacency: opt.AdjacencyOption = "add-or-remove",
    accountant: opt.AccountantOption = "best",
    plot: opt.PlotOption = None,
    sweep: opt.SweepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Account for the (Poisson-sampled) Gaussian mechanism: DP-SGD, lora_fa, factor, prism, client-level noise."""
    chart = opt.writable(plot, sweep, "steps:1:0:20")
    relation = Adjacency.parse(adjacency)
    event = sampled_event(noise_multiplier, sample_rate, steps)
    with progress():
        report = epsilon_of(event, delta, adjacency=relation, accountant=accountant)
    values = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate, "steps": steps}

    def curves(v: dict[str, Any]) -> dict[str, float]:
        one = sampled_event(v["noise_multiplier"], v["sample_rate"], v["steps"])
        best = epsilon_of(one, delta, adjacency=relation, coarse=opt.CHART)
        renyi = epsilon_of(one, delta, adjacency=relation, accountant="rdp")
        return {"best bound": best.epsilon, "Renyi moments": renyi.epsilon}

    run_plot(plot, chart, values, curves, "Sampled Gaussian mechanism", report)
    finish(report, values, as_json=as_json, plot=plot)


@app.command(
    epilog="Example: fedlora account projection --width 768 --rank 8 --noise-multiplier 0.2 --sample-rate 0.01 "
    "--steps 1000 --delta 1e-5 --json"
)
@opt.guarded
@opt.takes({**opt.LAYER_SHAPE, **opt.GROUP_SHAPE})
def projection(
    shape: opt.Shape,
    delta: opt.DeltaOption,
    sample_rate: opt.SampleRateOption = 1.0,
    steps: opt.StepsOption = 1,
    out_width: opt.OutWidthOption = None,
    bound: opt.BoundOption = "moment",
    adjacency: opt.AdjacencyOption = "add-or-remove",
    accountant: opt.AccountantOption = "best",
    plot: opt.PlotOption = None,
    sweep: opt.SweepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Account for the noisy projection with a fresh projection each step; never above the plain Gaussian's figure."""
    chart = opt.writable(plot, sweep, "noise_multiplier:0.2:4:12")
    relation = Adjacency.parse(adjacency)
    group, clip = shape.pop("group"), shape.pop("clip")
    values = {**shape, "sample_rate": sample_rate, "steps": steps, "out_width": out_width}
    event = event_of_groups(values, group, clip)
    with progress():
        report = projection_report(event, steps, delta, relation, bound, accountant)

    def curves(v: dict[str, Any]) -> dict[str, float]:
        return projection_curves(event_of_groups(v, group, clip), v["steps"], delta, relation)

    run_plot(plot, chart, values, curves, "Noisy projection", report)
    extra = {"bound": kind_of_bound(report.accountant), "bound_asked": bound}
    finish(report, described(event, values), as_json=as_json, plot=plot, extra=extra)


@app.command(
    "vector",
    epilog="Example: fedlora account vector --width 400 --rank 32 --alignment 0.999 --delta 0.01 --json",
)
@opt.guarded
@opt.takes(opt.VECTOR_SHAPE)
def vector_command(
    shape: opt.Shape,
    alignment: Annotated[float, typer.Option(help="Smallest inner product of neighbouring unit queries.")],
    delta: opt.DeltaOption,
    preprocess_radius: Annotated[
        float | None,
        typer.Option(help="Add a random vector of this norm first and normalise again (Lemma 10)."),
    ] = None,
    preprocess_delta: Annotated[float | None, typer.Option(help="Share of delta for that step.")] = None,
    plot: opt.PlotOption = None,
    sweep: opt.SweepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Analyse the noise-free projection of one vector (conditional: never a guarantee in training)."""
    chart = opt.writable(plot, sweep, "rank:1:0:20")
    rho, left, extra = alignment, delta, {}
    if preprocess_radius is not None:
        share = vector_share(delta, preprocess_delta)
        rho = vector.aligned_by_noise(shape["width"], alignment, preprocess_radius, share)
        left = delta - share
        extra = {"alignment_after_noise": rho}
    elif preprocess_delta is not None:
        raise PrivacyParameterError(
            "--preprocess-delta: has no effect without --preprocess-radius; add it or leave the share out"
        )
    values = {**shape, "alignment": rho}
    report = epsilon_of(VectorProjectionEvent(**values), left)

    def curves(v: dict[str, Any]) -> dict[str, float]:
        at = (v["width"], v["rank"], v["alignment"], left)
        return {"exact profile": vector.exact_epsilon(*at), "Theorem 1": vector.theorem1(*at)}

    run_plot(plot, chart, values, curves, "Vector projection", report)
    finish(report, values, as_json=as_json, plot=plot, extra={**extra, "delta": delta})


def vector_share(delta: float, share: float | None) -> float:
    """Return the share of delta that the noise before the projection costs.

    Raises:
      PrivacyParameterError: if it is missing or not below delta.
    """
    if share is None or not 0.0 < share < delta:
        raise PrivacyParameterError(
            f"--preprocess-delta: got {share}, allowed is a number > 0 and < --delta ({delta}); both steps need a share"
        )
    return share


@app.command(
    "m1",
    epilog="Example: fedlora account m1 --width 400 --rank 200 --span 50 --alignment 0.999 --residual 0.3 "
    "--column-distance 0.05 --noise-std 2 --delta 1e-5 --json",
)
@opt.guarded
@opt.takes(opt.M1_SHAPE)
def m1_command(
    shape: opt.Shape,
    noise_std: Annotated[float, typer.Option(help="Standard deviation of the additive noise.")],
    delta: opt.DeltaOption,
    plot: opt.PlotOption = None,
    sweep: opt.SweepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Analyse M V + Xi with a secret Wishart M (conditional: its alignment cannot be verified in training)."""
    chart = opt.writable(plot, sweep, "noise_std:0.5:20:8")
    values = {**shape, "noise_std": noise_std}
    with progress():
        report = epsilon_of(M1Event(**values), delta)

    def curves(v: dict[str, Any]) -> dict[str, float]:
        event = M1Event(**v)
        return {
            "exact parts": m1.several_columns(event, delta),
            "as printed": m1.several_columns(event, delta, paper=True),
        }

    run_plot(plot, chart, values, curves, "M1", report)
    finish(report, values, as_json=as_json, plot=plot)


@app.command(
    "sketch", epilog="Example: fedlora account sketch --rank 16 --tau 64 --gamma 1000 --delta 1e-5 --json"
)
@opt.guarded
@opt.takes(opt.SKETCH_SHAPE)
def sketch_command(
    shape: opt.Shape,
    gamma: Annotated[float, typer.Option(help="The ratio Gamma > 1.")],
    delta: opt.DeltaOption,
    order: opt.OrderOption = None,
    plot: opt.PlotOption = None,
    sweep: opt.SweepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Analyse the secret Gaussian sketch (conditional: the sketching matrix must stay secret)."""
    chart = opt.writable(plot, sweep, "gamma:0:0:20")
    values = {**shape, "gamma": gamma}
    event = SketchEvent(**values)
    report = epsilon_of(event, delta)

    def curves(v: dict[str, Any]) -> dict[str, float]:
        one = SketchEvent(**v)
        return {
            "Renyi (Proposition 4.3)": epsilon_of(one, delta).epsilon,
            "tCDP (Proposition 4.4)": sketch.alternatives(one, delta).get(
                "corollary_7_3_proposition_4_4", float("inf")
            ),
        }

    run_plot(plot, chart, values, curves, "Gaussian sketch", report)
    finish(
        report,
        values,
        as_json=as_json,
        plot=plot,
        alternatives=sketch.alternatives(event, delta),
        event=event,
        order=order,
    )


@app.command(
    "pave", epilog="Example: fedlora account pave --rank 8 --dimension 8 --gamma 0.01 --delta 1e-5 --json"
)
@opt.guarded
def pave_command(
    delta: opt.DeltaOption,
    rank: Annotated[int | None, typer.Option(help="Rank r of the specification.")] = None,
    dimension: Annotated[int | None, typer.Option(help="Dimension k of the public subspace.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Covariance stability in [0, 1).")] = None,
    layer: Annotated[
        list[str] | None, typer.Option(help="RANK:DIMENSION:GAMMA of one layer; repeat for several.")
    ] = None,
    order: opt.OrderOption = None,
    plot: opt.PlotOption = None,
    sweep: opt.SweepOption = None,
    as_json: JsonOption = False,
) -> None:
    """Analyse a noise-free PAVE specification (conditional: the projection must stay secret)."""
    chart = opt.writable(plot, sweep, "gamma:0.001:0.2:20")
    if plot is not None and layer:
        raise PrivacyParameterError(
            "--plot: sweeps one layer; give --rank, --dimension and --gamma, not --layer"
        )
    event = PaveEvent(layers_of(rank, dimension, gamma, layer))
    values = {"rank": rank, "dimension": dimension, "gamma": gamma, "layers": len(event.layers)}
    report = epsilon_of(event, delta)
    theorem = pave.order_two(event, delta)

    def curves(v: dict[str, Any]) -> dict[str, float]:
        one = PaveEvent(layers_of(v["rank"], v["dimension"], v["gamma"], None))
        return {
            "all orders": epsilon_of(one, delta).epsilon,
            "order 2 (Theorem 3.5)": pave.order_two(one, delta),
        }

    run_plot(plot, chart, values, curves, "PAVE specification", report)
    finish(
        report,
        values,
        as_json=as_json,
        plot=plot,
        alternatives={"theorem_3_5_order_2": theorem},
        event=event,
        order=order,
        extra=_risks(report.epsilon, delta),
    )


def _risks(epsilon: float, delta: float) -> dict[str, Any]:
    """Theorems 4.2 and 4.3 and Corollary 7.23."""
    if not epsilon < 1e6:
        return {"risk": {"advantage": 1.0, "advantage_total_variation": 1.0, "gain_increase": 0.5}}
    tight = pave.risk_bound_tight(epsilon, delta)
    return {
        "risk": {
            "advantage": pave.risk_bound(epsilon, delta),
            "advantage_total_variation": tight,
            "gain_increase": pave.gain_increase(tight),
        }
    }


@app.command(
    "pave-noisy",
    epilog="Example: fedlora account pave-noisy --noise-multiplier 4 --layers 24 --sample-rate 0.01 "
    "--steps 1000 --delta 1e-5 --json",
)
@opt.guarded
def pave_noisy(
    noise_multiplier: Annotated[float, typer.Option(help="Noise / per-layer clipping norm.")],
    layers: Annotated[int, typer.Option(help="Layers, each clipped by itself.")],
    sample_rate: opt.SampleRateOption,
    steps: opt.StepsOption,
    delta: opt.DeltaOption,
    adjacency: opt.AdjacencyOption = "replace-one",
    as_json: JsonOption = False,
) -> None:
    """Account for DP-S-PAVE: layers share one batch, so they are one Gaussian with noise / sqrt(layers)."""
    event = pave.certified_event(noise_multiplier, layers, sample_rate, steps)
    with progress():
        report = epsilon_of(event, delta, adjacency=Adjacency.parse(adjacency))
    claimed = pave.claimed_epsilon(noise_multiplier, layers, sample_rate, steps, delta)
    values = {
        "noise_multiplier": noise_multiplier,
        "layers": layers,
        "sample_rate": sample_rate,
        "steps": steps,
    }
    finish(
        report, values, as_json=as_json, plot=None, extra={"not_a_bound": {"theorem_3_9_as_printed": claimed}}
    )


__all__ = ["app"]
