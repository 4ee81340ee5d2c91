"""Experiment trackers: TensorBoard, MLflow, Weights & Biases, each behind one key of the YAML and one optional extra.

They are sent public figures of the rounds out of `metrics.jsonl`, and the meaning of the epsilon beside it. A tracker
that is asked for and not installed ends the run before it starts; one that fails later, or does not answer in time, is
dropped with a warning, because a tracker must not cost a run that has spent privacy.

| key | extra | value |
|---|---|---|
| `tracking.tensorboard` | `fedlora[tensorboard]` | true: event files in RUN/tensorboard |
| `tracking.mlflow` | `fedlora[mlflow]` | a tracking URI, for example sqlite:///mlflow.db or http://host:5000 |
| `tracking.wandb` | `fedlora[wandb]` | a project name; WANDB_MODE=offline keeps it on this machine |
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fedlora.config.schema import ClientPrivacy, FedLoraConfig
from fedlora.config.tracking import check_names, require_trackers
from fedlora.report.conditions import conditions_of
from fedlora.report.tracker_kinds import Figures, MlFlow, Opening, TensorBoard, Tracker, Wandb

_LOG = logging.getLogger(__name__)
OPENING_SECONDS: Final = 120.0
PATIENCE_SECONDS: Final = 60.0
"""Longest wait for a tracker to open its run, and to take a round or end; then it is left out."""
_SENT: Final = ("asked", "accepted", "epsilon", "residual", "bytes_up", "bytes_down")
_SENT_GROUPS: Final = ("metrics", "seconds", "diagnostics")
_SENT_OF_SECRET_DRAWS: Final = ("epsilon", "metrics")
"""Everything else of a round tells how many clients were drawn."""
Opener = Callable[[Figures], Tracker]


def scalars(record: Mapping[str, Any], *, secret_draws: bool = False) -> dict[str, float]:
    """Return a round record's numbers as flat names: "metrics/accuracy", "epsilon", "seconds/clients".

    Only fields that are known to be public are taken. Per-client entries stay in the run folder; what is not a finite
    number is left out.

    Args:
        record: one line of `metrics.jsonl`. PUBLIC.
        secret_draws: who takes part in a round is a secret that the guarantee rests on (`draws_are_secret`).
    """
    found: dict[str, float] = {}
    for name in (*_SENT, *_SENT_GROUPS):
        if secret_draws and name not in _SENT_OF_SECRET_DRAWS:
            continue
        value = record.get(name)
        children = value.items() if isinstance(value, Mapping) else ((None, value),)
        for child, one in children:
            if isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one):
                found[name if child is None else f"{name}/{child}"] = float(one)
    if not secret_draws:
        found["refused"] = float(len(record.get("refused") or {}))
        found["failed"] = float(len(record.get("failed") or {}))
    return found


def draws_are_secret(config: FedLoraConfig) -> bool:
    """Return whether the guarantee assumes that only the server sees who takes part: sampled clients, amplified."""
    privacy, asked = config.privacy, config.federation.clients_per_round
    return (
        isinstance(privacy, ClientPrivacy)
        and privacy.noise_at == "server"
        and isinstance(asked, float)
        and asked < 1.0
    )


class _Served:
    """One tracker on a thread of its own, so that one that hangs cannot hold up the run."""

    def __init__(self, name: str, opener: Opener, earlier: Figures) -> None:
        """Open it.

        Raises:
            Exception: whatever the tracker raises; TimeoutError if it does not answer.
        """
        self.name = name
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True).start()
        self._tracker: Tracker = self._ask(lambda: opener(earlier), OPENING_SECONDS)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one round."""
        self._ask(lambda: self._tracker.log(step, values), PATIENCE_SECONDS)

    def close(self, status: str) -> None:
        """End the tracker's run."""
        self._ask(lambda: self._tracker.close(status), PATIENCE_SECONDS)
        self._work.put(None)

    def _ask(self, do: Callable[[], Any], seconds: float) -> Any:
        self._work.put(do)
        try:
            result, error = self._done.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        if error is not None:
            raise error
        return result

    def _serve(self) -> None:
        while (do := self._work.get()) is not None:
            try:
                self._done.put((do(), None))
            except Exception as error:
                self._done.put((None, error))


class Trackers:
    """All trackers of one run; one that fails is dropped with a warning.

    Args:
        openers: name of each tracker and how it is opened, given the figures of the rounds that a resumed run keeps.
        secret_draws: who takes part in a round stays at the server.
    """

    def __init__(self, openers: Mapping[str, Opener], *, secret_draws: bool = False) -> None:
        """Open nothing yet."""
        self._openers, self._secret_draws = openers, secret_draws
        self._open: list[_Served] = []
        self._left_out: dict[str, str] = {}

    def open(self, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        """Open each.

        Args:
            earlier: lines of `metrics.jsonl` that a resumed run keeps.
        """
        figures = {
            int(record["round"]): scalars(record, secret_draws=self._secret_draws) for record in earlier
        }
        for name, opener in self._openers.items():
            try:
                self._open.append(_Served(name, opener, figures))
            except Exception as error:
                self._warn(name, error)

    @property
    def names(self) -> tuple[str, ...]:
        """Trackers that are still served."""
        return tuple(one.name for one in self._open)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each tracker that failed."""
        return tuple(
            f"tracker {name} failed ({why}) and was left out from there"
            for name, why in self._left_out.items()
        )

    def note(self, record: Mapping[str, Any]) -> None:
        """Send one line of `metrics.jsonl`."""
        step, values = int(record.get("round") or 0), scalars(record, secret_draws=self._secret_draws)
        self._each(lambda one: one.log(step, values))

    def close(self, status: str) -> None:
        """End every tracker's run; later calls do nothing."""
        self._each(lambda one: one.close(status))
        self._open = []

    def _each(self, do: Callable[[_Served], None]) -> None:
        kept = []
        for one in self._open:
            try:
                do(one)
                kept.append(one)
            except Exception as error:
                self._warn(one.name, error)
        self._open = kept

    def _warn(self, name: str, error: Exception) -> None:
        self._left_out[name] = type(error).__name__
        _LOG.warning(
            "tracker %s failed (%s) and is left out from here; metrics.jsonl has everything",
            name,
            type(error).__name__,
        )


def open_trackers(config: FedLoraConfig, run_id: str, folder: Path) -> Trackers:
    """Return the trackers that the configuration names; `Trackers.open` opens them.

    Args:
        config: resolved configuration.
        run_id: name of the run.
        folder: run folder; offline files of TensorBoard and Weights & Biases go below it.

    Raises:
        ConfigError: if a package is missing.
    """
    tracking, conditions = config.tracking, conditions_of(config)
    require_trackers(tracking)

    def opening(earlier: Figures) -> Opening:
        return Opening(run_id, config.run.name, folder, conditions, earlier)

    openers: dict[str, Opener] = {}
    if tracking.tensorboard:
        openers["tensorboard"] = lambda earlier: TensorBoard(opening(earlier))
    uri, project = tracking.mlflow, tracking.wandb
    if uri:
        openers["mlflow"] = lambda earlier: MlFlow(uri, opening(earlier))
    if project:
        openers["wandb"] = lambda earlier: Wandb(project, opening(earlier))
    return Trackers(openers, secret_draws=draws_are_secret(config))


__all__ = [
    "Tracker",
    "Trackers",
    "check_names",
    "draws_are_secret",
    "open_trackers",
    "require_trackers",
    "scalars",
]
