"""Draw who holds what in a simulated federation, as SVG without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

_COLOURS: Final = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#e15759",
    "#76b7b2",
    "#edc948",
    "#b07aa1",
    "#ff9da7",
    "#9c755f",
    "#bab0ac",
)
_WIDTH: Final = 720
_LEFT: Final = 160
_BAR: Final = 16
_STEP: Final = 20


def partition_svg(table: Mapping[str, Mapping[str, int]], most_clients: int = 60) -> str:
    """Return a stacked bar for each client, one colour per label. SENSITIVE: simulated data only.

    Args:
        table: client id to label counts, as `partition_table` gives them.
        most_clients: further clients are counted in a last line.

    Example:
        >>> partition_svg({"a": {"x": 1}}).startswith("<svg")
        True
    """
    shown = list(table.items())[:most_clients]
    labels = list(dict.fromkeys(label for counts in table.values() for label in counts))
    colour = {label: _COLOURS[number % len(_COLOURS)] for number, label in enumerate(labels)}
    largest = max((sum(counts.values()) for _, counts in shown), default=0)
    scale = (_WIDTH - _LEFT - 60) / max(1, largest)
    parts: list[str] = []
    for line, (client, counts) in enumerate(shown):
        parts += _bar(client, counts, line, scale, colour)
    rows = len(shown)
    if len(table) > rows:
        parts.append(_text(4, rows, f"and {len(table) - rows} more clients"))
        rows += 1
    for number, label in enumerate(labels[:20]):
        line = rows + 1 + number // 4
        left = 4 + (number % 4) * (_WIDTH // 4)
        parts.append(_box(left, line, 10, colour[label], label))
        parts.append(_text(left + 16, line, label))
    height = (rows + 2 + (min(len(labels), 20) + 3) // 4) * _STEP
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'
    )


def _bar(
    client: str, counts: Mapping[str, int], line: int, scale: float, colour: Mapping[str, str]
) -> list[str]:
    parts = [_text(4, line, client)]
    left = float(_LEFT)
    for label, count in counts.items():
        parts.append(_box(left, line, count * scale, colour[label], f"{label}: {count}"))
        left += count * scale
    parts.append(_text(left + 4, line, str(sum(counts.values()))))
    return parts


def _box(left: float, line: int, width: float, fill: str, title: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{line * _STEP + 2}" width="{width:.1f}" height="{_BAR}" fill="{fill}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(left: float, line: int, text: str) -> str:
    short = text if len(text) <= 24 else text[:23] + "…"
    return f'<text x="{left:.1f}" y="{line * _STEP + 14}">{escape(short)}</text>'
