"""The three trackers: how each opens or goes on with its run, takes a round's figures and ends.

A resumed run goes on in the tracker's run that it began: what `trackers.json` of the run folder remembers. Rounds that
the tracker lacks are sent again from `metrics.jsonl`; where it holds rounds that will be trained anew, which none of
them lets one take back, its run is marked superseded and another one is begun.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from fedlora.errors import DataError
from fedlora.files import read_object, write_durably
from fedlora.report.conditions import conditions_line

Figures = Mapping[int, Mapping[str, float]]
"""Round to its figures by flat name."""
PATIENCE: Final = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's own defaults would keep a run waiting for minutes at a server that is gone."""
SILENCE: Final = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "DO_NOT_TRACK": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}
"""What keeps the trackers' packages from reporting to their makers, and off a command's standard output."""
MEMORY: Final = "trackers.json"
SUPERSEDED: Final = "superseded: the run went on from an earlier round"
_INIT_SECONDS: Final = 30.0


class Tracker(Protocol):
    """Receives public figures of one run."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the figures of one round."""
        ...

    def close(self, status: str) -> None:
        """End the run."""
        ...


@dataclass(frozen=True)
class Opening:
    """PUBLIC. What a tracker is opened with.

    Attributes:
        run_id: unique name of the run.
        project: the configuration's `run.name`.
        folder: run folder; offline files of TensorBoard and Weights & Biases go below it.
        conditions: what the run's epsilon means.
        earlier: figures of the rounds that a resumed run keeps; empty for a new one.
    """

    run_id: str
    project: str
    folder: Path
    conditions: Mapping[str, Any]
    earlier: Figures

    def remembered(self, kind: str) -> str | None:
        """Return the tracker's own name of this run, if it began one."""
        try:
            found = read_object(self.folder / MEMORY).get(kind)
        except (DataError, OSError):
            return None
        return found if isinstance(found, str) else None

    def remember(self, kind: str, name: str) -> None:
        """Keep the tracker's own name of this run in the run folder."""
        try:
            known = dict(read_object(self.folder / MEMORY))
        except DataError:
            known = {}
        write_durably(self.folder / MEMORY, json.dumps({**known, kind: name}).encode() + b"\n")


class TensorBoard:
    """Event files below the run folder; what an earlier process wrote is purged and written again."""

    name = "tensorboard"

    def __init__(self, opening: Opening) -> None:
        """Open the files and write the earlier rounds."""
        module: Any = importlib.import_module("torch.utils.tensorboard")
        folder = opening.folder / "tensorboard"
        began = any(folder.glob("events.out.*"))
        self._writer = module.SummaryWriter(str(folder), purge_step=0 if began else None)
        self._writer.add_text("epsilon", conditions_line(opening.conditions))
        for step, values in opening.earlier.items():
            self._write(step, values)
        self._writer.flush()

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write one round."""
        self._write(step, values)
        self._writer.flush()

    def close(self, status: str) -> None:
        """Write the status and end."""
        self._writer.add_text("status", status)
        self._writer.close()


class MlFlow:
    """A run in an MLflow store; each round is one batch, so that a crash leaves it whole or not there."""

    name = "mlflow"

    def __init__(self, uri: str, opening: Opening) -> None:
        """Find or begin the run."""
        for name, value in (PATIENCE | SILENCE).items():
            os.environ.setdefault(name, value)
        import mlflow

        self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
        known = opening.remembered(self.name)
        if known is not None and self._goes_on(known, opening.earlier):
            self._run = known
            return
        self._run = self._begin(opening)
        for step, values in opening.earlier.items():
            self.log(step, values)

    def _begin(self, opening: Opening) -> str:
        found = self._client.get_experiment_by_name(opening.project)
        experiment = self._client.create_experiment(opening.project) if found is None else found.experiment_id
        run: str = self._client.create_run(experiment, run_name=opening.run_id).info.run_id
        for name, value in opening.conditions.items():
            self._client.log_param(run, name, value)
        self._client.set_tag(run, "epsilon_means", conditions_line(opening.conditions))
        opening.remember(self.name, run)
        return run

    def _goes_on(self, run: str, earlier: Figures) -> bool:
        """Go on with a run whose rounds are all kept, sending those that it lacks; end one that holds others."""
        sent: dict[int, dict[str, float]] = {}
        for key in self._client.get_run(run).data.metrics:
            for one in self._client.get_metric_history(run, key):
                sent.setdefault(int(one.step), {})[key] = one.value
        if any(
            earlier.get(step, {}).get(key) != value
            for step, row in sent.items()
            for key, value in row.items()
        ):
            self._client.set_tag(run, "status", SUPERSEDED)
            self._client.set_terminated(run, "KILLED")
            return False
        self._client.update_run(run, status="RUNNING")
        self._run = run
        for step, values in earlier.items():
            row = sent.get(step, {})
            self.log(step, {name: value for name, value in values.items() if name not in row})
        return True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one round."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        if values:
            self._client.log_batch(
                self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()]
            )

    def close(self, status: str) -> None:
        """End the run."""
        self._client.set_tag(self._run, "status", status)
        self._client.set_terminated(self._run, "FAILED" if status == "failed" else "FINISHED")


class Wandb:
    """A Weights & Biases run under the run's own name.

    Offline a process cannot go on in the files of another one: it writes a complete run of the same name, which
    replaces the earlier when both are synced in their order.
    """

    name = "wandb"

    def __init__(self, project: str, opening: Opening) -> None:
        """Begin or go on with the run."""
        for name, value in SILENCE.items():
            os.environ.setdefault(name, value)
        known = opening.remembered(self.name)
        self._run: Any = self._begin(
            project, known or _wandb_id(opening.run_id), opening, resume=known is not None
        )
        first = int(self._run.starting_step) if self._run.resumed else 0
        if first > max(opening.earlier, default=-1) + 1:
            self.close(SUPERSEDED)
            again = f"{_wandb_id(opening.run_id)}-{int(time.time())}"
            self._run, first = self._begin(project, again, opening, resume=False), 0
        opening.remember(self.name, str(self._run.id))
        for step, values in opening.earlier.items():
            if step >= first:
                self.log(step, values)

    @staticmethod
    def _begin(project: str, name: str, opening: Opening, *, resume: bool) -> Any:
        import wandb

        settings = wandb.Settings(
            console="off",
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
            save_code=False,
            disable_git=True,
            init_timeout=_INIT_SECONDS,
        )
        return wandb.init(
            project=project,
            id=name,
            name=name if resume else opening.run_id,
            resume="allow" if resume else None,
            dir=str(opening.folder),
            config={**opening.conditions, "epsilon_means": conditions_line(opening.conditions)},
            settings=settings,
            reinit="create_new",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one round."""
        self._run.log(dict(values), step=step)

    def close(self, status: str) -> None:
        """End the run."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


def _wandb_id(run_id: str) -> str:
    """Return a run's name as Weights & Biases takes it: none of its forbidden letters."""
    return "".join(letter if letter not in "/\\#?%:" else "-" for letter in run_id)[:120]
