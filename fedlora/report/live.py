"""A live terminal view of a run: what the epsilon means, how far the run is, the last rounds."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
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
        earlier: records of the rounds that a resumed run has behind it.
    """

    def __init__(
        self,
        console: Console,
        rounds: int,
        conditions: Mapping[str, Any] | None,
        earlier: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Draw nothing yet."""
        self._console, self._total, self._conditions = console, rounds, conditions
        self._records: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
        self._metrics: Mapping[str, float] = {}
        self._epsilon: float | None = None
        self._round = 0
        self._unused: dict[int, tuple[int, int]] = {}
        self._started = time.monotonic()
        self._streams: list[tuple[logging.StreamHandler[Any], Any]] = []
        for record in earlier:
            self._take(record)
        self._live = Live(self.view(), console=console, refresh_per_second=2, transient=False)

    def __enter__(self) -> LiveView:
        """Start drawing; what is logged from here goes above the view instead of into it."""
        real = (sys.stderr, sys.stdout)
        self._live.__enter__()
        for handler in _stream_handlers():
            if handler.stream in real:
                self._streams.append((handler, handler.stream))
                handler.setStream(sys.stderr if handler.stream is real[0] else sys.stdout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last view on the terminal."""
        for handler, stream in self._streams:
            handler.setStream(stream)
        self._streams = []
        self._live.update(self.view())
        self._live.__exit__(kind, error, trace)

    def note(self, record: Mapping[str, Any]) -> None:
        """Take one round (a line of `metrics.jsonl`)."""
        self._take(record)
        self._live.update(self.view())

    def _take(self, record: Mapping[str, Any]) -> None:
        """Take one round in; one that a resumed run trains anew replaces what was known of it and of later ones."""
        self._round = int(record.get("round") or 0)
        while self._records and int(self._records[-1].get("round") or 0) >= self._round:
            self._records.pop()
        self._unused = {number: one for number, one in self._unused.items() if number < self._round}
        self._records.append(record)
        self._metrics = record.get("metrics") or self._metrics
        epsilon = record.get("epsilon")
        self._epsilon = self._epsilon if epsilon is None else epsilon
        unused = len(record.get("refused") or {}), len(record.get("failed") or {})
        if any(unused):
            self._unused[self._round] = unused

    def view(self) -> RenderableType:
        """Return what is on the screen now."""
        head, means = self._head(), self._means()
        return Group(head, self._table(self._room(head, means)), means)

    def _room(self, *others: RenderableType) -> int:
        """Return how many rounds a terminal can show beside the rest: what epsilon means is never cut off."""
        if not self._console.is_terminal:
            return RECENT
        taken = sum(len(self._console.render_lines(one, pad=False)) for one in others)
        return max(1, min(RECENT, self._console.height - taken - 2))

    def _head(self) -> RenderableType:
        shown = [f"round {self._round}/{self._total}"]
        shown += [f"{name} {self._metrics[name]:.4f}" for name in _FIRST if name in self._metrics]
        if self._epsilon is not None:
            shown.append(f"epsilon {at_least(self._epsilon)}")
        if self._unused:
            refused, failed = (sum(one) for one in zip(*self._unused.values(), strict=True))
            shown.append(f"{refused} refusals, {failed} failures")
        if self._console.width < WIDE:
            return Text(", ".join(shown))
        grid = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, self._total), completed=self._round, width=24)
        grid.add_row(
            bar, Text("  ".join(shown)), Text(f"{time.monotonic() - self._started:.0f} s", style="dim")
        )
        return grid

    def _table(self, room: int) -> RenderableType:
        if not self._records:
            return Text("starting", style="dim")
        records = list(self._records)[-room:]
        names = [name for name in _FIRST if any(name in (one.get("metrics") or {}) for one in records)]
        table = Table(box=None, pad_edge=False, header_style="dim")
        heads = ("round", "clients", *names, "epsilon", "residual", "MB up", "seconds", "not used")
        kept = [place for place, head in enumerate(heads) if self._fits(head, names)]
        for place in kept:
            table.add_column(heads[place], justify="left" if heads[place] == "not used" else "right")
        for one in records:
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


def _stream_handlers() -> list[logging.StreamHandler[Any]]:
    """Return every handler of this process that writes to a stream; files are streams of their own."""
    loggers = [logging.getLogger(), *(one for one in logging.Logger.manager.loggerDict.values())]
    handlers = [handler for one in loggers if isinstance(one, logging.Logger) for handler in one.handlers]
    return list(dict.fromkeys(one for one in handlers if isinstance(one, logging.StreamHandler)))


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
