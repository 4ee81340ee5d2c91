"""What a sweep found: a table (text and CSV) and a plot of the metric against epsilon, as SVG."""

from __future__ import annotations

import csv
import html
import io
import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from fedlora.figures import at_least
from fedlora.simulation.sweep import BELOW_MEDIAN, TrialResult

_COLOURS = ("#1b6ca8", "#c0392b", "#1e8449", "#8e44ad", "#b9770e", "#2c3e50")
_MEANING = ("delta", "unit", "adjacency", "adversary", "accountant", "sampling_assumption")
"""What an epsilon means, by its names in a run's statement."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 640.0, 400.0, 64.0, 48.0, 20.0, 160.0


@dataclass(frozen=True)
class Point:
    """One configuration over its seeds.

    Attributes:
        overrides: what was varied.
        mechanism: mechanism kind.
        epsilon: what one run of it costs (its own events); None without privacy.
        mean, spread: of the metric over seeds; spread is the sample standard deviation, 0 for one seed.
        runs: number of seeds that finished.
    """

    overrides: tuple[str, ...]
    mechanism: str
    epsilon: float | None
    mean: float
    spread: float
    runs: int


def points(results: Sequence[TrialResult], metric: str) -> list[Point]:
    """Group finished trials by configuration, in order of appearance.

    A trial that the sweep ended early stopped at a round of its own: its metric is none of the others' seeds.
    """
    groups: dict[tuple[str, ...], list[TrialResult]] = {}
    for one in results:
        if metric in one.metrics and one.status in ("finished", "stopped-early"):
            groups.setdefault(one.overrides, []).append(one)
    found = []
    for overrides, ones in groups.items():
        values = [one.metrics[metric] for one in ones]
        spends = [one.epsilon for one in ones if one.epsilon is not None]
        found.append(
            Point(
                overrides,
                ones[0].mechanism,
                max(spends) if spends else None,
                statistics.fmean(values),
                statistics.stdev(values) if len(values) > 1 else 0.0,
                len(values),
            )
        )
    return found


def table_text(results: Sequence[TrialResult], metric: str, larger_is_better: bool = True) -> str:
    """Return the table for people, best configuration first, failures last."""
    ordered = sorted(points(results, metric), key=lambda one: -one.mean if larger_is_better else one.mean)
    rows = [("mechanism", "changed", "epsilon", metric, "spread", "runs")]
    for one in ordered:
        epsilon = "-" if one.epsilon is None else at_least(one.epsilon, 3)
        changed = " ".join(one.overrides) or "-"
        rows.append((one.mechanism, changed, epsilon, f"{one.mean:.4f}", f"{one.spread:.4f}", str(one.runs)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for trial in results:
        if trial.status in ("failed", "budget-exhausted"):
            changed = " ".join(trial.overrides)
            lines.append(f"{trial.status}: {changed} seed {trial.seed} {trial.error}".rstrip())
        elif trial.status == BELOW_MEDIAN:
            reached = trial.metrics.get(metric, math.nan)
            changed = " ".join(trial.overrides)
            lines.append(
                f"{BELOW_MEDIAN}: {changed} seed {trial.seed} {metric} {reached:.4f} after round {trial.rounds}"
            )
        elif metric not in trial.metrics:
            lines.append(f"no {metric} in the end: {' '.join(trial.overrides)} seed {trial.seed}")
    return "\n".join(lines)


def table_csv(results: Sequence[TrialResult]) -> str:
    """Return one line per trial with all its metrics and what its epsilon means."""
    names = sorted({name for one in results for name in one.metrics})
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(
        ["trial", "seed", "status", "mechanism", "overrides", "epsilon", *_MEANING, "rounds", *names, "error"]
    )
    for one in results:
        row = [
            one.name,
            one.seed,
            one.status,
            one.mechanism,
            " ".join(one.overrides),
            one.epsilon,
            *(one.statement.get(name, "") for name in _MEANING),
            one.rounds,
        ]
        writer.writerow([*row, *(one.metrics.get(name, "") for name in names), one.error])
    return stream.getvalue()


@dataclass(frozen=True)
class _Axes:
    """Ranges of the plot and where a value lies on it."""

    low: float
    high: float
    far: float

    @classmethod
    def around(cls, shown: Sequence[Point]) -> _Axes:
        """Leave a margin around all points and their spread."""
        low = min(one.mean - one.spread for one in shown)
        high = max(one.mean + one.spread for one in shown)
        pad = 0.05 * (high - low) or 0.05
        far = max((one.epsilon or 0.0) for one in shown) * 1.05
        return cls(low - pad, high + pad, far if far > 0 else 1.0)

    def x(self, epsilon: float) -> float:
        """Return the horizontal place of an epsilon."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * epsilon / self.far

    def y(self, value: float) -> float:
        """Return the vertical place of a metric's value."""
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * (value - self.low) / (self.high - self.low)


def plot_svg(results: Sequence[TrialResult], metric: str, means: str = "") -> str:
    """Draw the metric against epsilon, one line per mechanism, with the seeds' spread as bars.

    Args:
        results: PUBLIC. Trials.
        metric: that is drawn.
        means: what the epsilons mean, written below the axis.
    """
    shown = [one for one in points(results, metric) if one.epsilon is None or math.isfinite(one.epsilon)]
    if not shown:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="320" height="40"><text y="24">no results</text></svg>'
    axes = _Axes.around(shown)
    parts = [_frame(metric, axes)]
    for number, mechanism in enumerate(dict.fromkeys(one.mechanism for one in shown)):
        colour = _COLOURS[number % len(_COLOURS)]
        own = [one for one in shown if one.mechanism == mechanism]
        parts += _curve([one for one in own if one.epsilon is not None], axes, colour)
        parts += _levels([one for one in own if one.epsilon is None], axes, colour)
        y = _TOP + 18 * number + 10
        note = "" if any(one.epsilon is not None for one in own) else " (no privacy)"
        parts.append(f'<circle cx="{_WIDTH - _RIGHT + 16}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 26}" y="{y}">{html.escape(mechanism + note)}</text>')
    said = textwrap.wrap(means, 120)
    height = _HEIGHT + 13.0 * len(said)
    parts += [
        f'<text x="8" y="{_HEIGHT + 13.0 * at + 4:.0f}" font-size="10">{html.escape(line)}</text>'
        for at, line in enumerate(said)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:.0f}" height="{height:.0f}" '
        f'font-family="sans-serif" font-size="12"><rect width="{_WIDTH:.0f}" height="{height:.0f}" fill="white"/>'
        + "".join(parts)
        + "</svg>"
    )


def _curve(own: Sequence[Point], axes: _Axes, colour: str) -> list[str]:
    parts = []
    ordered = sorted(own, key=lambda one: one.epsilon or 0.0)
    path = " ".join(f"{axes.x(one.epsilon or 0.0):.1f},{axes.y(one.mean):.1f}" for one in ordered)
    if len(ordered) > 1:
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for one in ordered:
        x = axes.x(one.epsilon or 0.0)
        top, end = axes.y(one.mean + one.spread), axes.y(one.mean - one.spread)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{end:.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{axes.y(one.mean):.1f}" r="3.5" fill="{colour}"/>')
    return parts


def _levels(own: Sequence[Point], axes: _Axes, colour: str) -> list[str]:
    return [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{axes.y(one.mean):.1f}" y2="{axes.y(one.mean):.1f}" '
        f'stroke="{colour}" stroke-dasharray="5 4"/>'
        for one in own
    ]


def _frame(metric: str, axes: _Axes) -> str:
    parts = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM}" stroke="black"/>',
        f'<line x1="{_LEFT}" x2="{_LEFT}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" stroke="black"/>',
    ]
    for step in range(5):
        value = axes.low + (axes.high - axes.low) * step / 4
        parts.append(
            f'<text x="{_LEFT - 6}" y="{axes.y(value) + 4:.1f}" text-anchor="end">{value:.3f}</text>'
        )
        epsilon = axes.far * step / 4
        parts.append(
            f'<text x="{axes.x(epsilon):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{epsilon:.2g}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">epsilon</text>')
    parts.append(f'<text x="12" y="14">{html.escape(metric)}</text>')
    return "".join(parts)
