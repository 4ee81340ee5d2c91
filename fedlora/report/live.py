"""A live terminal view of a run: what the epsilon means, how far the run is, the last rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedlora.figures import at_least, printable
from fedlora.report.conditions import conditions_line

RECENT: Final = 8
WIDE: Final = 80
NARROW: Final = 36
"""Columns of a terminal that hold the whole table, and those that hold round, clients, one metric and epsilon."""
_FIRST: Final = ("accuracy", "exact_match", "perplexity", "loss")


class LiveView:
    """Shows rounds as they end; a context manager around the run.

    Args:
        console: where to draw.
        rounds: rounds of the whole run.
        conditions: what the run's epsilon means (`conditions_of`), None before it is known.
    """

    def __init__(self, console: Console, rounds: int, conditions: Mapping[str, Any] | None) -> None:
        """Draw nothing yet."""
        self._console, self._total, self._conditions = console, rounds, conditions
        self._records: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
        self._metrics: Mapping[str, float] = {}
        self._epsilon: float | None = None
        self._refused = self._failed = self._round = 0
        self._started = time.monotonic()
        self._live = Live(self.view(), console=console, refresh_per_second=2, transient=False)

    def __enter__(self) -> LiveView:
        """Start drawing."""
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last view on the terminal."""
        self._live.update(self.view())
        self._live.__exit__(kind, error, trace)

    def note(self, record: Mapping[str, Any]) -> None:
        """Take one round (a line of `metrics.jsonl`)."""
        self._records.append(record)
        self._metrics = record.get("metrics") or self._metrics
        epsilon = record.get("epsilon")
        self._epsilon = self._epsilon if epsilon is None else epsilon
        self._refused += len(record.get("refused") or {})
        self._failed += len(record.get("failed") or {})
        self._round = int(record.get("round") or 0)
        self._live.update(self.view())

    def view(self) -> RenderableType:
        """Return what is on the screen now."""
        return Group(self._head(), self._table(), self._means())

    def _head(self) -> RenderableType:
        shown = [f"round {self._round}/{self._total}"]
        shown += [f"{name} {self._metrics[name]:.4f}" for name in _FIRST if name in self._metrics]
        if self._epsilon is not None:
            shown.append(f"epsilon {at_least(self._epsilon)}")
        if self._refused or self._failed:
            shown.append(f"{self._refused} refusals, {self._failed} failures")
        if self._console.width < WIDE:
            return Text(", ".join(shown))
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, self._total), completed=self._round, width=24)
        grid.add_row(
            bar, Text("  ".join(shown)), Text(f"{time.monotonic() - self._started:.0f} s", style="dim")
        )
        return grid

    def _table(self) -> RenderableType:
        if not self._records:
            return Text("starting", style="dim")
        names = [name for name in _FIRST if any(name in (one.get("metrics") or {}) for one in self._records)]
        table = Table(box=None, pad_edge=False, header_style="dim")
        heads = ("round", "clients", *names, "epsilon", "residual", "MB up", "seconds", "not used")
        kept = [place for place, head in enumerate(heads) if self._fits(head, names)]
        for place in kept:
            table.add_column(heads[place], justify="left" if heads[place] == "not used" else "right")
        for one in self._records:
            cells = _row(one, names)
            table.add_row(*(Text(printable(cells[place])) for place in kept))  # names are no markup
        return table

    def _fits(self, head: str, names: list[str]) -> bool:
        """Return whether a column is shown: a narrow terminal keeps few whole ones instead of many cut ones."""
        if self._console.width >= WIDE:
            return True
        return head in ("round", "epsilon") or (
            self._console.width >= NARROW and head in ("clients", *names[:1])
        )

    def _means(self) -> RenderableType:
        if self._conditions is None:
            return Text("")
        return Text(f"epsilon: {conditions_line(self._conditions)}", style="dim")


def _row(record: Mapping[str, Any], names: list[str]) -> list[str]:
    metrics, seconds = record.get("metrics") or {}, record.get("seconds") or {}
    start = record.get("round") == 0
    unused = {**(record.get("refused") or {}), **(record.get("failed") or {})}
    said = ", ".join(sorted(unused)[:3]) + (" ..." if len(unused) > 3 else "")
    return [
        "start" if start else str(record.get("round")),
        "" if start else f"{record.get('accepted')}/{record.get('asked')}",
        *(f"{metrics[name]:.4f}" if name in metrics else "" for name in names),
        _epsilon(record.get("epsilon")),
        _figure(record.get("residual"), ".2g"),
        "" if start else _figure((record.get("bytes_up") or 0) / 1e6, ".3g"),
        _figure(sum(float(value) for value in seconds.values()), ".2f"),
        said,
    ]


def _epsilon(value: Any) -> str:
    return at_least(value) if isinstance(value, int | float) else str(value or "")


def _figure(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""
