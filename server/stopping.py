"""Early stopping on public records: no private statistic decides, so nothing is charged for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedlora.config.schema import EarlyStoppingConfig, FedLoraConfig
from fedlora.errors import ConfigError

_LOWER_IS_BETTER = frozenset({"loss", "perplexity"})


@dataclass
class EarlyStopping:
    """Ends a run once a public metric has not improved for some evaluations.

    Attributes:
        config: metric, patience and least gain; None never stops.
        best: best value so far, higher is better (losses count negatively).
        waited: evaluations since then.
    """

    config: EarlyStoppingConfig | None
    best: float | None = None
    waited: int = 0

    @classmethod
    def of(cls, config: FedLoraConfig) -> EarlyStopping:
        """Return the rule that `data.public_eval.early_stopping` states."""
        public = config.data.public_eval
        return cls(None if public is None else public.early_stopping)

    def check(self, metrics: Mapping[str, float] | None) -> None:
        """Refuse a metric that the task does not give, before any client is asked.

        Raises:
            ConfigError: naming the metrics that there are.
        """
        if self.config is not None and metrics is not None and self.config.metric not in metrics:
            raise ConfigError(
                f"data.public_eval.early_stopping.metric: {self.config.metric!r} is not among "
                f"{', '.join(sorted(metrics))}"
            )

    def over(self, metrics: Mapping[str, float]) -> bool:
        """Take in one evaluation; return True if the run should end. A value that is no number never improves."""
        if self.config is None:
            return False
        value = metrics[self.config.metric]
        value = -value if self.config.metric in _LOWER_IS_BETTER else value
        if math.isfinite(value) and (self.best is None or value > self.best + self.config.min_gain):
            self.best, self.waited = value, 0
            return False
        self.waited += 1
        return self.waited >= self.config.patience

    def memory(self) -> dict[str, float | int | None]:
        """Return JSON-ready values for a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def restore(self, memory: Mapping[str, float | int | None]) -> None:
        """Take back what `memory` returned."""
        best, waited = memory.get("best"), memory.get("waited")
        self.best = None if best is None else float(best)
        self.waited = 0 if waited is None else int(waited)
