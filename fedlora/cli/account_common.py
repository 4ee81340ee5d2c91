"""What the `fedlora account` commands share: groups, plots, progress, output."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedlora.accounting import (
    Event,
    GaussianEvent,
    NoisyProjectionEvent,
    PaveLayer,
    PoissonGaussianEvent,
    ProjectionGroup,
    plot,
    rdp,
)
from fedlora.accounting.reports import Adjacency, EpsilonReport
from fedlora.cli.account_options import finite_epsilon
from fedlora.cli.common import emit
from fedlora.errors import PrivacyParameterError
from fedlora.figures import at_least_digits


def sampled_event(noise_multiplier: float, sample_rate: float, steps: int) -> Event:
    """Return the run's event; no noise gives a release without protection."""
    event: Event = PoissonGaussianEvent(noise_multiplier, sample_rate)
    if sample_rate == 1.0:
        event = GaussianEvent(noise_multiplier)
    return event.times(steps)


def event_of_groups(
    values: Mapping[str, Any], groups: list[str] | None, clip: str | None
) -> NoisyProjectionEvent:
    """Return one step's event from the single layer's options or from `--group` texts.

    Raises:
      PrivacyParameterError: if both or neither are given, or one clip over projected and unprojected groups was not
        asked for.
    """
    rate = None if values["sample_rate"] == 1.0 else values["sample_rate"]
    single = (values["width"], values["rank"], values["noise_multiplier"])
    if not groups:
        if any(value is None for value in single):
            raise PrivacyParameterError("projection: give --width, --rank and --noise-multiplier, or --group")
        if clip is not None:
            raise PrivacyParameterError("--clip: has no effect on one layer; leave it out, or use --group")
        return NoisyProjectionEvent.single(*single, rate, values["out_width"])
    if single[0] is not None or single[1] is not None:
        raise PrivacyParameterError(
            "projection: got --group beside --width or --rank; describe all layers as groups"
        )
    if single[2] is not None and not needs_noise(groups):
        raise PrivacyParameterError(
            "--noise-multiplier: has no effect, every --group states its own noise; leave it out or empty a NOISE"
        )
    parsed = tuple(_group(text, single[2], values["out_width"]) for text in groups)
    mixed = len({group.width is None for group in parsed}) == 2
    if mixed and clip is None:
        raise PrivacyParameterError(
            "projection: one clip over projected and unprojected groups gives the plain Gaussian and loses the whole "
            "amplification; give --clip separate (each group its own clip), or --clip shared to have it anyway"
        )
    return NoisyProjectionEvent(parsed, rate, clip or "shared")


def needs_noise(groups: list[str] | None) -> bool:
    """Whether a noise multiplier has an effect: without groups, or if a group's NOISE is empty."""
    return not groups or any(text.rpartition(":")[2] == "" for text in groups)


def described(event: NoisyProjectionEvent, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a projection's parameters for the report: the options, every group and the clip."""
    shown: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return {**shown, "groups": event.to_json()["groups"], "clip": event.clip}


def _group(text: str, noise: float | None, out_width: int | None) -> ProjectionGroup:
    fields = text.split(":")
    if len(fields) != 5:
        raise PrivacyParameterError(f"--group: got {text!r}, allowed is NAME:WIDTH|none:RANK:WEIGHT:NOISE")
    name, width, rank, weight, own = fields
    try:
        plain = width.lower() in ("none", "")
        scale = float(weight or 1.0) * (float(own) if own else float("nan") if noise is None else noise)
        shape = None if plain else (int(width), int(rank))
    except ValueError:
        raise PrivacyParameterError(f"--group: got {text!r}, allowed are numbers after the name") from None
    if not scale > 0.0:
        raise PrivacyParameterError(f"--group {name}: weight times noise must be > 0; name both")
    if plain and rank:
        raise PrivacyParameterError(
            f"--group {name}: is not projected, its RANK has no effect; leave it empty"
        )
    if shape is None:
        return ProjectionGroup(name, None, None, 1.0 / scale)
    return ProjectionGroup(name, shape[0], shape[1], 1.0 / scale, out_width)


def layers_of(
    rank: int | None, dimension: int | None, gamma: float | None, texts: list[str] | None
) -> tuple[PaveLayer, ...]:
    """Return PAVE layers from options or `--layer` texts."""
    if texts:
        if (rank, dimension, gamma) != (None, None, None):
            raise PrivacyParameterError(
                "pave: --layer was given beside --rank, --dimension or --gamma; state every layer with --layer"
            )
        try:
            rows = [(int(a), int(b), float(c)) for a, b, c in (text.split(":") for text in texts)]
        except ValueError:
            raise PrivacyParameterError(f"--layer: got {texts!r}, allowed is RANK:DIMENSION:GAMMA") from None
        return tuple(PaveLayer(*row) for row in rows)
    if rank is None or dimension is None or gamma is None:
        raise PrivacyParameterError("pave: give --rank, --dimension and --gamma, or --layer")
    return (PaveLayer(rank, dimension, gamma),)


@contextmanager
def progress(first_seconds: float = 2.0) -> Iterator[None]:
    """Say on stderr that a long computation goes on, every few seconds."""
    done = threading.Event()
    start = time.monotonic()

    def tell() -> None:
        wait = first_seconds
        while not done.wait(wait):
            print(f"accounting: composing, {time.monotonic() - start:.0f} s ...", file=sys.stderr, flush=True)
            wait = 5.0

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()


def _sweep_values(text: str, values: Mapping[str, Any]) -> tuple[str, list[float]]:
    fields = text.split(":")
    if len(fields) != 4 or values.get(fields[0]) is None:
        names = ", ".join(name for name, value in values.items() if value is not None)
        raise PrivacyParameterError(
            f"--sweep: got {text!r}, allowed is NAME:START:STOP:COUNT with NAME one of {names}"
        )
    name, now = fields[0], values[fields[0]]
    try:
        start, stop, count = float(fields[1]), float(fields[2]), int(fields[3])
    except ValueError:
        raise PrivacyParameterError(f"--sweep: got {text!r}, allowed are numbers after the name") from None
    if start <= 0.0:
        start = now / 4.0
    if stop <= 0.0:
        stop = now * 4.0 if name not in ("rank", "steps") else now
    if not (math.isfinite(start) and start < stop < math.inf and 2 <= count <= 200):
        raise PrivacyParameterError(f"--sweep: got {text!r}, allowed is START < STOP and 2 to 200 points")
    points = np.geomspace(start, stop, count)
    if isinstance(now, int):
        points = np.unique(np.round(points))
    return name, [float(point) for point in points]


def run_plot(
    path: Path | None,
    sweep: str,
    values: Mapping[str, Any],
    curves: Callable[[dict[str, Any]], dict[str, float]],
    title: str,
    report: EpsilonReport,
) -> None:
    """Evaluate the curves over the swept parameter and write the chart; nothing without a path."""
    if path is None:
        return
    name, points = _sweep_values(sweep, values)
    whole = isinstance(values[name], int)
    rows = []
    with progress():
        for point in points:
            rows.append(curves({**values, name: int(point) if whole else point}))
    series = {label: [row[label] for row in rows] for label in rows[0]}
    fixed = ", ".join(f"{k} {v:g}" for k, v in values.items() if k != name and isinstance(v, (int, float)))
    rate = "Poisson at the rate shown" if name == "sample_rate" else _sampling(values)
    means = (
        f"delta {report.delta:g}; {report.adjacency}; per clipped unit (a record, or a client's update); against one "
        f"who sees all releases; bounds as named; sampling: {rate}"
    )
    means += "; conditions: as printed" if report.conditions else ""
    chart = plot.svg(f"{title}: {fixed}", name.replace("_", " "), points, series, log_x=True, note=means)
    _write(path, chart)


def _write(path: Path, chart: str) -> None:
    try:
        plot.write(path, chart)
    except OSError as error:
        raise PrivacyParameterError(f"--plot: {path} cannot be written ({error.strerror})") from error


def finish(
    report: EpsilonReport,
    values: Mapping[str, Any],
    *,
    as_json: bool,
    plot: Path | None,
    alternatives: Mapping[str, float] | None = None,
    event: Event | None = None,
    order: float | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Print a report with its parameters."""
    finite_epsilon(report.epsilon)
    result: dict[str, Any] = {**report.to_json(), "parameters": dict(values)}
    result["unit"] = result["unit"] or _UNIT
    result["adversary"] = _ADVERSARY.format(releases=result["num_events"])
    result["sampling_assumption"] = _sampling(values)
    result["alternatives"] = {**result["alternatives"], **(alternatives or {})}
    if order is not None and event is not None:
        if not order > 1.0 or not math.isfinite(order):
            raise PrivacyParameterError(f"--order: got {order}, allowed is a finite number > 1")
        moment = float(rdp.moment(event, np.array([order]), Adjacency.REPLACE_ONE)[0])
        result["renyi"] = {"order": order, "divergence": finite_epsilon(moment / (order - 1.0))}
    result.update(extra or {})
    if plot is not None:
        result["plot"] = str(plot)
    emit(result, as_json=as_json, text=_text(result))


_UNIT = "whatever was clipped before the noise: one record, or one client's whole update"
_ADVERSARY = (
    "sees all {releases} releases and knows everything but that unit; what it must not see is a condition"
)


def _sampling(values: Mapping[str, Any]) -> str:
    rate = values.get("sample_rate")
    if rate is None or rate >= 1.0:
        return "none: that unit may be in every release"
    return f"Poisson: that unit joins each release by a coin of its own, at rate {rate:g}"


def _text(result: Mapping[str, Any]) -> str:
    epsilon = result["epsilon"]
    shown = epsilon if isinstance(epsilon, str) else at_least_digits(epsilon, 6)
    lines = [
        f"epsilon {shown} at delta {result['delta']:g}",
        f"  bound:      {result['accountant']}",
        f"  neighbours: {result['adjacency']}",
        f"  unit:       {result['unit']}",
        f"  adversary:  {result['adversary']}",
        f"  sampling:   {result['sampling_assumption']}",
    ]
    for name, value in result["alternatives"].items():
        lines.append(f"  also:       {name}: {value if isinstance(value, str) else f'{value:.6g}'}")
    if "solved" in result:
        lines.insert(0, f"{result['solved']} {result[result['solved']]}")
    for name in ("renyi", "risk", "not_a_bound"):
        if name in result:
            lines.append(f"  {name}: {result[name]}")
    lines.extend(f"  condition:  {text}" for text in result["conditions"])
    if "plot" in result:
        lines.append(f"  plot:       {result['plot']}")
    return "\n".join(lines)


__all__ = [
    "described",
    "event_of_groups",
    "finish",
    "layers_of",
    "needs_noise",
    "progress",
    "run_plot",
    "sampled_event",
]
