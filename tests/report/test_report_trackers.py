"""Trackers: refused before anything is read, bounded in time, nothing secret, a resumed run without doubled steps."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulation_helpers import configuration, metric_lines

from fedlora.cli.serving_files import absolute_sources
from fedlora.config import tracking
from fedlora.config.schema import ClientPrivacy
from fedlora.errors import ConfigError
from fedlora.report import tracker_kinds, trackers
from fedlora.report.tracker_kinds import MlFlow, Opening, Wandb
from fedlora.simulation import run as simulation_run
from fedlora.simulation.run import simulate

ROUND = {
    "round": 3,
    "asked": 5,
    "accepted": 4,
    "epsilon": 1.5,
    "residual": 0.0,
    "bytes_up": 10,
    "bytes_down": 20,
}
ROUND |= {"metrics": {"accuracy": 0.5}, "seconds": {"clients": 1.0}, "diagnostics": {"gauge_drift": 0.1}}
ROUND |= {"refused": {"a": "BudgetExceededError"}, "failed": {}, "epsilon_by_client": {"a": 1.5}}


# -- before anything is read ----------------------------------------------------------------------------------


def _missing(monkeypatch):
    found = tracking.importlib.util.find_spec
    gone = ("tensorboard", "mlflow", "wandb")
    monkeypatch.setattr(
        tracking.importlib.util, "find_spec", lambda name, *more: None if name in gone else found(name, *more)
    )


@pytest.mark.parametrize("key", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_is_told_before_a_record_is_read(tiny_world, tmp_path, monkeypatch, key):
    """It was told only after model, records, ledger and workers were there."""
    _missing(monkeypatch)
    monkeypatch.setattr(simulation_run, "make_federation", lambda config: pytest.fail("records were read"))
    value = {"tensorboard": True, "mlflow": "sqlite:///x.db", "wandb": "demo"}[key]
    config = configuration(tiny_world, tmp_path / "runs", tracking={key: value})
    with pytest.raises(ConfigError, match=rf"fedlora\[{key}\]") as caught:
        simulate(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_a_missing_package_ends_a_server_before_it_listens(tiny_world, tmp_path, monkeypatch):
    from fedlora.cli import server
    from fedlora.config import save_resolved

    _missing(monkeypatch)
    path = tmp_path / "run.yaml"
    save_resolved(configuration(tiny_world, tmp_path, privacy={"noise_source": "os"}), path)
    places = (tmp_path / "certs", tmp_path / "allow.json", tmp_path / "state")
    with pytest.raises(ConfigError, match=r"fedlora\[wandb\]"):
        server._role(
            str(path), ["tracking.wandb=demo"], None, places, ("", None), 0, stay=False, choice=(False,) * 3
        )
    assert not (tmp_path / "state").exists()


def test_check_notes_a_package_that_is_not_here(tiny_world, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from fedlora.cli.check import app
    from fedlora.config import save_resolved

    _missing(monkeypatch)
    save_resolved(
        configuration(tiny_world, tmp_path, tracking={"mlflow": "http://host:5000"}), tmp_path / "run.yaml"
    )
    said = CliRunner().invoke(app, [str(tmp_path / "run.yaml"), "--static", "--json"])
    assert said.exit_code == 0, said.output
    assert any("fedlora[mlflow]" in note for note in json.loads(said.stdout)["notes"])


# -- where it goes --------------------------------------------------------------------------------------------


def test_a_servers_relative_tracking_file_is_where_the_command_was_given(tiny_world, tmp_path, monkeypatch):
    """The ServerApp runs in another folder."""
    monkeypatch.chdir(tmp_path)
    config = configuration(
        tiny_world, tmp_path, tracking={"mlflow": "sqlite:///mlflow.db"}, privacy={"noise_source": "os"}
    )
    container = config.model_copy(update={"data": config.data.model_copy(update={"partition": None})})
    assert absolute_sources(container).tracking.mlflow == f"sqlite:///{tmp_path}/mlflow.db"
    assert tracking.absolute_tracking("sqlite:////data/x.db") == "sqlite:////data/x.db"
    assert tracking.absolute_tracking("http://host:5000") == "http://host:5000"


# -- what is sent ---------------------------------------------------------------------------------------------


def test_fields_that_are_not_known_to_be_public_are_not_sent():
    sent = trackers.scalars({**ROUND, "clip_fraction": 0.3, "client_loss": {"a": 1.0}, "records": 77})
    assert set(sent) == {
        *("asked", "accepted", "epsilon", "residual", "bytes_up", "bytes_down", "refused", "failed"),
        *("metrics/accuracy", "seconds/clients", "diagnostics/gauge_drift"),
    }


CLIENT_LEVEL = {
    **{"unit": "client", "adjacency": "add_or_remove", "noise_multiplier": 1.0, "target_delta": 1e-4},
    **{"clipping_norm": 1.0, "noise_source": "os"},
    "budget": {"epsilon": 8.0, "delta": 1e-4, "on_exhausted": "refuse"},
}


@pytest.mark.parametrize(("asked", "secret"), [(0.5, True), (1.0, False), ("all", False), (3, False)])
def test_how_many_clients_were_drawn_is_not_sent_where_the_guarantee_rests_on_it(asked, secret):
    """Poisson sampling of clients is amplification only while nobody but the server sees the draw."""
    config = SimpleNamespace(
        privacy=ClientPrivacy.model_validate(CLIENT_LEVEL),
        federation=SimpleNamespace(clients_per_round=asked),
    )
    assert trackers.draws_are_secret(config) == secret
    sent = []
    kept = SimpleNamespace(name="kept", log=lambda step, values: sent.append(values), close=sent.append)
    found = trackers.Trackers({"kept": lambda earlier: kept}, secret_draws=secret)
    found.open()
    found.note(ROUND)
    assert (set(sent[0]) == {"epsilon", "metrics/accuracy"}) == secret


# -- time -----------------------------------------------------------------------------------------------------


def test_a_tracker_that_hangs_is_left_out(monkeypatch):
    monkeypatch.setattr(trackers, "PATIENCE_SECONDS", 0.2)
    held = threading.Event()
    slow = SimpleNamespace(name="slow", log=lambda step, values: held.wait(20), close=lambda status: None)
    found = trackers.Trackers({"slow": lambda earlier: slow})
    found.open()
    started = time.monotonic()
    found.note(ROUND)
    assert time.monotonic() - started < 5.0
    assert found.names == ()
    assert found.warnings == ("tracker slow failed (TimeoutError) and was left out from there",)
    found.close("finished")
    held.set()


# -- a resumed run --------------------------------------------------------------------------------------------


class _Store:
    """MLflow's client, in memory."""

    def __init__(self):
        self.runs = {}

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name)

    def create_run(self, experiment, run_name):
        name = f"{run_name}/{len(self.runs)}"
        self.runs[name] = {"status": "RUNNING", "points": [], "tags": {}, "batches": 0}
        return SimpleNamespace(info=SimpleNamespace(run_id=name))

    def log_param(self, run, name, value):
        pass

    def set_tag(self, run, name, value):
        self.runs[run]["tags"][name] = value

    def log_batch(self, run, metrics):
        self.runs[run]["batches"] += 1
        self.runs[run]["points"] += [(one.key, one.step, one.value) for one in metrics]

    def get_run(self, run):
        return SimpleNamespace(
            data=SimpleNamespace(metrics={key: 0 for key, _, _ in self.runs[run]["points"]})
        )

    def get_metric_history(self, run, key):
        points = self.runs[run]["points"]
        return [SimpleNamespace(step=step, value=value) for name, step, value in points if name == key]

    def update_run(self, run, status):
        self.runs[run]["status"] = status

    set_terminated = update_run


@pytest.fixture
def store(monkeypatch):
    found = _Store()
    metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)  # noqa: E731
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda tracking_uri: found))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=metric))
    for name in tracker_kinds.PATIENCE | tracker_kinds.SILENCE:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return found


def _opening(folder, earlier):
    return Opening("run-1", "project", folder, {"unit": "one record"}, earlier)


def _points(*rounds, scale=1.0):
    return {number: {"a": scale * number, "b": 2.0 * number} for number in rounds}


def _stored(run):
    return sorted(run["points"])


def _wanted(figures):
    return sorted((key, step, value) for step, row in figures.items() for key, value in row.items())


def test_a_resumed_run_goes_on_in_its_mlflow_run_and_sends_what_it_lacks(store, tmp_path):
    first = MlFlow("http://host", _opening(tmp_path, {}))
    for step, values in _points(0, 1).items():
        first.log(step, values)
    first.log(2, {"a": 2.0})  # half a round
    kept = _points(0, 1, 2, 3)
    again = MlFlow("http://host", _opening(tmp_path, kept))
    again.log(4, _points(4)[4])
    (run,) = store.runs.values()
    assert _stored(run) == _wanted(_points(0, 1, 2, 3, 4))
    assert run["status"] == "RUNNING"
    again.close("finished")
    assert run["status"] == "FINISHED"


def test_rounds_that_are_trained_anew_supersede_the_mlflow_run(store, tmp_path):
    """A damaged checkpoint: the last round runs again, with other noise."""
    first = MlFlow("http://host", _opening(tmp_path, {}))
    for step, values in _points(0, 1, 2).items():
        first.log(step, values)
    again = MlFlow("http://host", _opening(tmp_path, _points(0, 1)))
    again.log(2, {"a": 9.0, "b": 9.0})
    old, new = store.runs.values()
    assert old["status"] == "KILLED"
    assert old["tags"]["status"].startswith("superseded")
    assert _stored(new) == _wanted({**_points(0, 1), 2: {"a": 9.0, "b": 9.0}})
    third = MlFlow("http://host", _opening(tmp_path, {**_points(0, 1), 2: {"a": 9.0, "b": 9.0}}))
    assert len(store.runs) == 2
    third.close("finished")


def test_a_damaged_memory_of_trackers_begins_another_run(store, tmp_path):
    MlFlow("http://host", _opening(tmp_path, {}))
    for damage in ("", "{", '{"mlflow": 3}'):
        (tmp_path / tracker_kinds.MEMORY).write_text(damage)
        MlFlow("http://host", _opening(tmp_path, _points(0)))
    assert len(store.runs) == 4
    assert json.loads((tmp_path / tracker_kinds.MEMORY).read_text()) == {"mlflow": "run-1/3"}


class _Hosted:
    """A Weights & Biases run, in memory; its history outlives the process where it is online."""

    def __init__(self, history, given, resumed):
        self.history, self.id, self.resumed = history, given["id"], resumed
        self.starting_step = max((step for step, _ in history), default=-1) + 1 if resumed else 0
        self.summary, self.given, self.ended = {}, given, None

    def log(self, values, step):
        self.history.append((step, values))

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch):
    found = SimpleNamespace(histories={}, runs=[], online=True, Settings=lambda **values: values)

    def init(**given):
        resumed = found.online and given["resume"] == "allow" and given["id"] in found.histories
        history = found.histories.setdefault(given["id"], []) if resumed else []
        found.histories[given["id"]] = history
        found.runs.append(_Hosted(history, given, resumed))
        return found.runs[-1]

    found.init = init
    monkeypatch.setitem(sys.modules, "wandb", found)
    for name in tracker_kinds.SILENCE:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return found


def _steps(run):
    return [step for step, _ in run.history]


@pytest.mark.parametrize("online", [True, False])
def test_a_resumed_run_goes_on_under_its_wandb_name(wandb, tmp_path, online):
    wandb.online = online
    first = Wandb("project", _opening(tmp_path, {}))
    first.log(0, {"a": 0.0})
    first.log(1, {"a": 1.0})
    opening = replace(
        _opening(tmp_path, _points(0, 1, 2)), run_id="run-1.2"
    )  # a resumed simulation's own name
    again = Wandb("project", opening)
    again.log(3, {"a": 3.0})
    assert {(run.id, run.given["name"]) for run in wandb.runs} == {("run-1", "run-1")}
    assert _steps(wandb.runs[-1]) == [0, 1, 2, 3]


def test_rounds_that_are_trained_anew_supersede_the_wandb_run(wandb, tmp_path):
    first = Wandb("project", _opening(tmp_path, {}))
    for step in range(3):
        first.log(step, {"a": 1.0})
    Wandb("project", _opening(tmp_path, _points(0, 1)))
    old, new = wandb.runs[-2:]
    assert old.summary["status"].startswith("superseded")
    assert old.ended == 0
    assert new.id != old.id
    assert _steps(new) == [0, 1]
    Wandb("project", _opening(tmp_path, _points(0, 1)))
    assert wandb.runs[-1].id == new.id
    assert _steps(wandb.runs[-1]) == [0, 1]


@pytest.mark.parametrize("key", ["tensorboard", "mlflow"])
def test_a_stopped_and_resumed_run_has_each_step_once(tiny_world, tmp_path, key):
    pytest.importorskip(key, reason=f"needs the extra {key}")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    value = {"tensorboard": True, "mlflow": uri}[key]
    config = configuration(tiny_world, tmp_path, tracking={key: value}, federation={"rounds": 4})
    done = simulate(config, in_process=True, stop_after=2)
    done = simulate(resume=done.folder, in_process=True)
    found = _tensorboard(done.folder) if key == "tensorboard" else _mlflow(uri, config.run.name)
    wanted = [(line["round"], line["bytes_up"]) for line in metric_lines(done.folder)]
    assert [step for step, _ in found] == [step for step, _ in wanted] == [0, 1, 2, 3, 4]
    assert [value for _, value in found] == pytest.approx([value for _, value in wanted], rel=1e-6)


def _tensorboard(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(one.step, one.value) for one in found.Scalars("bytes_up")]


def _mlflow(uri, project):
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    return sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, "bytes_up"))
