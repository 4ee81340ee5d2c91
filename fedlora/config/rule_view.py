"""What rules read: dotted keys of a plain container, whatever else is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedlora.config.problems import Problem
from fedlora.names import LABELLED_TASKS


class View:
    """Reads dotted keys of a plain container; a missing key, or one below a non-section, is the default."""

    def __init__(self, container: Mapping[str, Any]) -> None:
        """Keep the container."""
        self._container = container

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return the value at `key`, or `default` where it is absent or null."""
        value: Any = self._container
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return the number at `key`, or None where it is no number (that is another problem)."""
        value = self(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        try:
            return float(value)
        except OverflowError:  # a whole number beyond floats; its own range says no
            return math.inf if value > 0 else -math.inf

    def exceeds(self, larger: str, smaller: str) -> bool:
        """Return whether both are numbers and `larger` is above `smaller`."""
        left, right = self.number(larger), self.number(smaller)
        return left is not None and right is not None and left > right

    @property
    def unit(self) -> str:
        """Return the privacy unit, or "" where there is none."""
        return str(self("privacy.unit", ""))

    @property
    def mechanism(self) -> str:
        """Return the mechanism's kind."""
        return str(self("mechanism.kind", ""))

    @property
    def trains_head(self) -> bool:
        """Return whether modules outside the adapters are trained: those named, or a classifier's head."""
        if self("adapter.freeze_head") is True:
            return False
        return bool(self("adapter.modules_to_save", [])) or self("model.task") in LABELLED_TASKS

    @property
    def aggregation(self) -> str:
        """Return the aggregation's kind."""
        return str(self("federation.aggregation.kind", ""))


Rule = Callable[[View], Iterator[Problem]]
