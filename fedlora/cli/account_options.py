"""The options that the `fedlora account` commands share, each declared once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import numpy as np
import typer

from fedlora.errors import FedLoraError, PrivacyParameterError

P = ParamSpec("P")
R = TypeVar("R")

DeltaOption = Annotated[float, typer.Option("--delta", help="Failure probability in (0, 1).")]
TargetOption = Annotated[float, typer.Option("--target-epsilon", help="The epsilon that must not be passed.")]
SolveOption = Annotated[str, typer.Option("--solve-for", help="noise_multiplier, steps or sample_rate.")]
AdjacencyOption = Annotated[str, typer.Option(help="add-or-remove or replace-one.")]
AccountantOption = Annotated[str, typer.Option(help="best, moment, pld, rdp or prv.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", help="Write epsilon over a swept parameter as SVG.")
]
SweepOption = Annotated[
    str | None,
    typer.Option("--sweep", help="NAME:START:STOP:COUNT for --plot; 0 takes a range around the given value."),
]
GroupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--group", help="NAME:WIDTH|none:RANK:WEIGHT:NOISE of one group of weights; repeat for several."
    ),
]
ClipOption = Annotated[
    str | None, typer.Option(help="shared or separate; must be given if some groups are not projected.")
]
BoundOption = Annotated[
    str, typer.Option(help="moment (fast), profile (every bound, the tightest) or theorem5 (as published).")
]
SampleRateOption = Annotated[float, typer.Option(help="Poisson rate in (0, 1].")]
StepsOption = Annotated[int, typer.Option(help="Number of noised steps.")]
NoiseOption = Annotated[float, typer.Option(help="Noise standard deviation / clipping norm.")]
GivenRateOption = Annotated[float | None, typer.Option(help="Poisson rate in (0, 1]; 1 if left out.")]
GivenStepsOption = Annotated[
    int | None, typer.Option(help="The most noised steps that will be taken; 1 if left out.")
]
GivenNoiseOption = Annotated[
    float | None, typer.Option(help="Noise / clipping norm; left out where it is solved for.")
]
LayerWidthOption = Annotated[int | None, typer.Option(help="In-width of the projected layer.")]
LayerRankOption = Annotated[int | None, typer.Option(help="Rank of the fresh projection.")]
OutWidthOption = Annotated[int | None, typer.Option(help="Out-width; only the published bound uses it.")]
WidthOption = Annotated[int, typer.Option(help="Dimension d.")]
RankOption = Annotated[int, typer.Option(help="Rank r.")]
SpanOption = Annotated[int, typer.Option(help="Dimension of the unchanged columns' span.")]
AlignmentOption = Annotated[float, typer.Option(help="Alignment outside the span.")]
ResidualOption = Annotated[float, typer.Option(help="Norm outside the span, in [0, 1].")]
ColumnOption = Annotated[float, typer.Option(help="Bound on ||v - v'||.")]
ChangedOption = Annotated[int, typer.Option(help="Number of changed columns.")]
TauOption = Annotated[int, typer.Option(help="Rank bound tau, at most the out-width.")]
LayersOption = Annotated[int, typer.Option(help="Independent layers L.")]
DimensionOption = Annotated[int, typer.Option(help="Dimension k of the public subspace.")]
OrderOption = Annotated[
    float | None, typer.Option(help="Also print the Renyi divergence bound at this order.")
]

CHART = 20.0
"""Factor on the discretisation for charts: a curve is drawn in a fraction of the time, at most about 1 % higher."""


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn arithmetic that leaves double precision into an invalid-parameter error: no input ends in a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with np.errstate(all="ignore"):
                return command(*args, **kwargs)
        except FedLoraError:
            raise
        except (ArithmeticError, ValueError, TypeError, IndexError, MemoryError) as error:
            raise PrivacyParameterError(
                f"options: a value is too large or too small for double precision ({type(error).__name__}); "
                "use values between about 1e-100 and 1e100"
            ) from error

    return run


Shape = dict[str, Any]
"""Values of a family's options by name."""
_NEEDED = inspect.Parameter.empty
LAYER_SHAPE = {
    "width": (LayerWidthOption, None),
    "rank": (LayerRankOption, None),
    "noise_multiplier": (GivenNoiseOption, None),
}
GROUP_SHAPE = {"group": (GroupOption, None), "clip": (ClipOption, None)}
VECTOR_SHAPE = {"width": (WidthOption, _NEEDED), "rank": (RankOption, _NEEDED)}
M1_SHAPE = {
    **VECTOR_SHAPE,
    "span": (SpanOption, _NEEDED),
    "alignment": (AlignmentOption, _NEEDED),
    "residual": (ResidualOption, _NEEDED),
    "column_distance": (ColumnOption, _NEEDED),
    "changed_columns": (ChangedOption, 1),
}
SKETCH_SHAPE = {"rank": (RankOption, _NEEDED), "tau": (TauOption, _NEEDED), "layers": (LayersOption, 1)}


def takes(options: Mapping[str, tuple[Any, Any]]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Give a command the options of a family, so that `account` and `account calibrate` declare them once.

    Args:
      options: names with (option type, default). The command gets their values as a dict, its first argument.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        @functools.wraps(command)
        def run(**given: Any) -> R:
            shape = {name: given.pop(name) for name in options}
            return command(shape, **given)

        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for name, (kind, default) in options.items()
        ]
        named = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        run.__signature__ = inspect.Signature([*shared, *named])  # type: ignore[attr-defined]
        return run

    return decorate


def writable(path: Path | None, sweep: str | None, default: str) -> str:
    """Return the sweep to draw, after refusing a sweep without a chart and a chart that cannot be written.

    Raises:
      PrivacyParameterError: for --sweep without --plot.
      typer.BadParameter: if the chart's folder does not exist, or its path is a folder.
    """
    if path is None:
        if sweep is not None:
            raise PrivacyParameterError("--sweep: has no effect without --plot; add it or leave --sweep out")
        return default
    if path.is_dir() or not path.parent.is_dir():
        raise typer.BadParameter(f"--plot: {path} cannot be written; name a file in an existing folder")
    return default if sweep is None else sweep


def unsolved(what: str, given: dict[str, float | int | None]) -> None:
    """Refuse a value for the parameter that is solved for.

    Raises:
      PrivacyParameterError: naming the option.
    """
    if given.get(what) is not None:
        option = "--" + what.replace("_", "-")
        raise PrivacyParameterError(f"{option}: is solved for; leave it out, or solve for something else")


def finite_epsilon(value: float) -> float:
    """Return an epsilon that is a number >= 0 or infinity.

    Raises:
      PrivacyParameterError: for NaN and negative values.
    """
    if math.isnan(value) or value < 0.0:
        raise PrivacyParameterError(
            f"epsilon: got {value}, allowed is >= 0 or infinity; the parameters leave double precision"
        )
    return value
