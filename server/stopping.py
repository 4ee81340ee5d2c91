"""Early stopping on public records: no private statistic decides, so nothing is charged for it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fedlora.config.schema import EarlyStoppingConfig, FedLoraConfig
from fedlora.data.metrics import LOWER_IS_BETTER
from fedlora.errors import ConfigError


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

    def check(self, names: Collection[str] | None) -> None:
        """Refuse a metric that the task does not give, before any client is asked.

        Args:
            names: metrics of the task, those that do not exist at the start too; None without public records.

        Raises:
            ConfigError: naming the metrics that there are.
        """
        if self.config is not None and names is not None and self.config.metric not in names:
            raise ConfigError(
                f"data.public_eval.early_stopping.metric: {self.config.metric!r} is not among "
                f"{', '.join(sorted(names))}"
            )

    def over(self, metrics: Mapping[str, float]) -> bool:
        """Take in one evaluation; return True if the run should end.

        A figure that does not exist (it is left out, or no number) never improves.
        """
        if self.config is None:
            return False
        value = metrics.get(self.config.metric, math.nan)
        value = -value if self.config.metric in LOWER_IS_BETTER else value
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
