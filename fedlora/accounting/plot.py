"""A small SVG line chart: epsilon against a swept parameter, alternatives side by side."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8d5a97", "#b8860b", "#444444")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "4 4", "1 2")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 480, 80, 20, 46, 60


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps = (1.0,) if last - first > 3 else (1.0, 2.0, 5.0)
        return [
            s * 10.0**p
            for p in range(first, last + 1)
            for s in steps
            if low <= s * 10.0**p <= high * (1 + 1e-9)
        ]
    raw = (high - low) / 6.0 or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1.0, 2.0, 5.0, 10.0) if s * power >= raw)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _scale(low: float, high: float, log: bool, start: float, stop: float, value: float) -> float:
    if log:
        low, high, value = math.log(low), math.log(high), math.log(value)
    share = 0.5 if high == low else (value - low) / (high - low)
    return start + share * (stop - start)


def _extent(curves: Mapping[str, Sequence[float]], signed: bool) -> tuple[float, float, bool]:
    """Lowest and highest value of the vertical axis with some room, and whether it is logarithmic."""
    known = [v for curve in curves.values() for v in curve if math.isfinite(v) and (signed or v > 0.0)]
    low, high = min(known, default=1.0), max(known, default=1.0)
    if signed:
        room = 0.08 * (max(high, 0.0) - min(low, 0.0)) or 1.0
        return (low - room if low < 0.0 else 0.0), (high + room if high > 0.0 else 0.0), False
    return (low / 1.2, high * 1.2, True) if high / low > 20.0 else (0.0, high * 1.08, False)


def _grid(
    x_ticks: list[float],
    y_ticks: list[float],
    at: Callable[[float, float], tuple[float, float]],
    corner: tuple[float, float],
) -> list[str]:
    """Lines and numbers of both axes; `corner` is any point inside the chart."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for tick in x_ticks:
        px = at(tick, corner[1])[0]
        parts.append(f'<path d="M{px:.1f} {_TOP}V{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{px:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    for tick in y_ticks:
        py = at(corner[0], tick)[1]
        parts.append(f'<path d="M{_LEFT} {py:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{py + 4:.1f}" text-anchor="end">{tick:g}</text>')
    return parts


def _titles(x_label: str, y_label: str) -> list[str]:
    across, down = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2
    return [
        f'<text x="{across}" y="{_HEIGHT - 16}" text-anchor="middle">{html.escape(x_label)}</text>',
        f'<text x="18" y="{down}" transform="rotate(-90 18 {down})" text-anchor="middle">{html.escape(y_label)}</text>',
    ]


def svg(
    title: str,
    x_label: str,
    x: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    log_x: bool = False,
    y_label: str = "epsilon",
    signed: bool = False,
    note: str = "",
) -> str:
    """Return the chart as SVG text.

    Args:
      title: headline.
      x_label: name of the swept parameter.
      x: its values; > 0 if `log_x`.
      curves: epsilon for each value by name; infinite or non-positive values leave a gap. Epsilon is drawn on a log
        scale when it spans more than a factor of 20.
      log_x: logarithmic parameter axis.
      y_label: name of the vertical axis.
      signed: values of any sign on a linear scale; only those that are not finite leave a gap.
      note: what the values mean, in small letters under the headline.
    """
    low, high, log_y = _extent(curves, signed)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(xv: float, yv: float) -> tuple[float, float]:
        return _scale(min(x), max(x), log_x, _LEFT, right, xv), _scale(low, high, log_y, bottom, _TOP, yv)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img"><title>{html.escape(title)}</title>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15" font-weight="bold">{html.escape(title)}</text>',
        f'<text x="{_LEFT}" y="38" font-size="9">{html.escape(note)}</text>',
    ]
    parts.extend(_grid(_ticks(min(x), max(x), log_x), _ticks(low, high, log_y), at, (x[0], high)))
    parts.extend(_titles(x_label, y_label))
    for index, (name, values) in enumerate(curves.items()):
        parts.append(
            _curve(
                name,
                index,
                [
                    at(a, b) if math.isfinite(b) and (signed or b > 0.0) else None
                    for a, b in zip(x, values, strict=True)
                ],
            )
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(name: str, index: int, points: list[tuple[float, float] | None]) -> str:
    colour, dash = _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]
    path, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        path.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
        pen = "L"
    style = f'stroke="{colour}" stroke-dasharray="{dash}"'
    y = _TOP + 14 + 18 * index
    x = _WIDTH - _RIGHT - 290
    return (
        f'<path d="{"".join(path) or "M0 0"}" fill="none" stroke-width="2" {style}/>'
        f'<path d="M{x} {y - 4}h28" stroke-width="2" {style}/><text x="{x + 34}" y="{y}">{html.escape(name)}</text>'
    )


def write(path: Path, chart: str) -> None:
    """Write the chart; the folder must exist."""
    path.write_text(chart, encoding="utf-8")
