"""Evaluation of the global adapter on public records, at the server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from fedlora.data import EncodedRows, public_eval_rows
from fedlora.training.session import Workbench
from fedlora.wire.payload import AdapterPayload

_REHEARSED: Final = 2


class PublicEvaluator:
    """Evaluates on `data.public_eval`, every so many rounds; records are read and encoded once.

    Args:
        bench: the server's own model, task and adapter.
    """

    def __init__(self, bench: Workbench, batch_size: int = 32) -> None:
        """Open the public records (lazily)."""
        self._bench, self._batch_size = bench, batch_size
        self.names: tuple[str, ...] | None = None
        """Metrics of the task, whether they exist for an adapter or not; None before the first evaluation."""
        self._section = bench.config.data.public_eval
        rows = public_eval_rows(bench.config.data) if self._section is not None else None
        if rows is not None and self._section is not None and self._section.max_records is not None:
            rows = rows[: self._section.max_records]
        self._encoded: Any = None if rows is None else EncodedRows(bench.task, rows)

    @property
    def available(self) -> bool:
        """Whether there are public records."""
        return self._encoded is not None

    def due(self, server_round: int, last: int) -> bool:
        """Return whether a round is evaluated: the last one, and every N rounds."""
        if self._encoded is None or self._section is None:
            return False
        return server_round == last or server_round % self._section.every_rounds == 0

    def rehearse(self, payload: AdapterPayload) -> None:
        """Encode every public record and evaluate a few: what is wrong with them shows before clients are asked.

        Raises:
            DataError: naming file and row of a record that does not fit the task.
        """
        if self._encoded is None:
            return
        for first in range(0, len(self._encoded), self._batch_size):
            self._encoded.take(range(first, min(first + self._batch_size, len(self._encoded))))
        self._bench.adapted.load(payload)
        few = self._encoded[:_REHEARSED]
        self._bench.task.evaluate(self._bench.adapted.model, few, self._batch_size)

    def evaluate(self, payload: AdapterPayload) -> Mapping[str, float] | None:
        """Return the task's metrics of an adapter; figures that do not exist are left out."""
        if self._encoded is None:
            return None
        self._bench.adapted.load(payload)
        found = self._bench.task.evaluate(self._bench.adapted.model, self._encoded, self._batch_size)
        self.names = tuple(found)
        return {name: float(value) for name, value in found.items() if math.isfinite(value)}
