"""The report of runs that really ran: what the server writes, the diagnostics' values, trackers, the live view."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from simulation_helpers import configuration, container, metric_lines
from typer.testing import CliRunner

from fedlora.config import config_from_container, tracking
from fedlora.config.schema import TrackingConfig
from fedlora.errors import ConfigError
from fedlora.figures import at_least
from fedlora.report import tracker_kinds, trackers
from fedlora.report.conditions import conditions_line, conditions_of
from fedlora.report.diagnostics import RoundDiagnostics, gauge_drift
from fedlora.report.figures import epsilon_curves
from fedlora.report.live import LiveView
from fedlora.report.page import derived, render
from fedlora.report.run_data import read_run
from fedlora.simulation.prepare import complete, make_federation
from fedlora.simulation.run import simulate

PRISM = {
    "mechanism": {"kind": "prism", "adaptivity": "none"},
    "training": {"optimizer": {"kind": "sgd", "lr": 0.5}},
    "federation": {
        "aggregation": {"kind": "tangent"},
        "server_optimizer": {"kind": "adam", "lr": 0.01},
        "rounds": 3,
    },
    "privacy": {"noise_source": "os"},
}

MEANING = ("one record", "add_or_remove", "0.0001", "the server included", "accountant best", "Poisson")
"""What stands beside the epsilon of these runs."""


@pytest.fixture(scope="module")
def prism_run(tiny_world, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    config = configuration(tiny_world, runs, **PRISM, tracking={"tensorboard": False})
    return simulate(config, in_process=True)


def test_a_real_run_fills_every_part_of_its_report(prism_run):
    data = read_run(prism_run.folder)
    last = data.rounds[-1]
    assert set(last["diagnostics"]) == {"gauge_drift", "intrinsic_noise", "preconditioned_noise"}
    assert last["epsilon_by_client"] == {f"client-000{i}": last["epsilon"] for i in range(4)}
    known = [one["epsilon"] for one in data.rounds if one["epsilon"] is not None]
    assert epsilon_curves(data)[1] == {"4 clients like client-0000": known}
    assert sum(derived(data)["partition"].values()) == 160
    left = [row[-1] for row in derived(data)["clients"].values()]
    assert left == pytest.approx([50.0 - prism_run.epsilon] * 4)
    page = render(data)
    for part in ("Partition of the simulated clients", "epsilon per client", "gauge drift", "budget left"):
        assert part in page
    assert conditions_line(prism_run.statement).startswith(
        "per one record, not one person, add_or_remove, delta"
    )


def test_intrinsic_noise_is_that_of_the_tangent_space(prism_run):
    """sigma C / b sqrt(r (out + in - r)) over four layers of 16 x 16, over the root of four clients."""
    stated = math.sqrt(4 * 2 * (16 + 16 - 2)) * 1.0 / 8.0 / math.sqrt(4)
    for line in metric_lines(prism_run.folder)[1:]:
        assert line["diagnostics"]["intrinsic_noise"] == pytest.approx(stated, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "aggregation"), [("lora_fa", "mean_b"), ("factor", "product"), ("noisy_projection", "product")]
)
def test_intrinsic_noise_equals_what_the_mechanisms_noise_does_to_the_weights(
    tiny_world, tmp_path, kind, aggregation
):
    """Monte Carlo through the mechanism's own noise stage, against the stated root mean square."""
    import torch

    from fedlora.mechanisms.noise import OsNoise
    from fedlora.names import LORA_A, LORA_B, block_name

    mechanism = {"kind": kind}
    if kind == "noisy_projection":
        mechanism |= {
            "projection_source": "client",  # a projection of its own for every draw
            "head_max_grad_norm": 1.0,
            "head_noise_multiplier": 1.0,
        }
    config = configuration(
        tiny_world,
        tmp_path,
        mechanism=mechanism,
        federation={"aggregation": {"kind": aggregation}},
        training={"optimizer": {"kind": "sgd", "lr": 0.5}},
    )
    bench = complete(make_federation(config).config).bench
    own, payload = bench.mechanism, bench.initial_payload()
    draws = 300
    energy = []
    for _ in range(2):
        state = own.stages.prepare(own, own.stages.open(own, bench.adapted, payload, draws))
        update = own.noise(state, _nothing(own, state, draws), [OsNoise()] * draws)
        total = torch.zeros(draws, dtype=torch.float64)
        for module, spec in bench.layout.modules.items():
            noise_b = update.blocks[block_name(module, LORA_B)].double() / own.privacy.divisor
            if kind == "noisy_projection":
                moved = noise_b @ state.own.projections[module].double()
            else:
                factors = bench.adapted.write_factors().blocks
                a = torch.from_numpy(factors[block_name(module, LORA_A)]).double()
                b = torch.from_numpy(factors[block_name(module, LORA_B)]).double()
                moved = noise_b @ a
                if kind == "factor":
                    moved = (
                        moved + b @ update.blocks[block_name(module, LORA_A)].double() / own.privacy.divisor
                    )
                moved = moved * spec.scaling
            total += moved.square().sum((-2, -1))
        energy.append(total)
    measured = float(torch.cat(energy).mean())
    stated = RoundDiagnostics(bench).of(payload, payload, 1)["intrinsic_noise"] ** 2
    assert stated == pytest.approx(measured, rel=0.12)


def _nothing(own, state, clients):
    """The clipped sum of one record without a gradient, for every client."""
    from fedlora.audit.canaries import Chosen, GradientRows

    chosen = Chosen(np.arange(clients), np.zeros(clients, dtype=np.int64), np.ones(clients, dtype=np.float32))
    return own.clip(GradientRows(own, chosen, clients, state.values.flat).done(), state)


def test_a_rotation_is_all_drift_and_a_real_move_is_not(prism_run, tiny_world, tmp_path):
    config = configuration(
        tiny_world,
        tmp_path,
        mechanism={"kind": "factor"},
        federation={"aggregation": {"kind": "product"}},
    )
    bench = complete(make_federation(config).config).bench
    start = bench.initial_payload()
    rng = np.random.default_rng(0)
    filled = {
        name: rng.standard_normal(value.shape).astype(np.float32) for name, value in start.blocks.items()
    }
    before = replace(start, blocks=filled)
    turn, _ = np.linalg.qr(rng.standard_normal((2, 2)))

    def turned(name, value):
        if name.endswith("lora_A"):
            return (turn.T @ value).astype(np.float32)
        return (value @ turn).astype(np.float32) if name.endswith("lora_B") else value

    rotated = replace(before, blocks={name: turned(name, value) for name, value in filled.items()})
    assert gauge_drift(before, rotated) == pytest.approx(1.0, abs=1e-5)
    moved = {name: value * np.float32(1.3) for name, value in filled.items()}
    assert gauge_drift(before, replace(before, blocks=moved)) == pytest.approx(0.0, abs=1e-6)
    assert gauge_drift(before, before) == 0.0
    assert gauge_drift(before, replace(before, kind="frames")) is None


# -- the conditions -------------------------------------------------------------------------------------


def test_conditions_follow_the_configuration(tiny_world, tmp_path):
    said = conditions_of(configuration(tiny_world, tmp_path))
    assert said["unit"] == "one record, not one person"
    assert said["sample_rate"] == 0.2
    assert "rate 0.2" in said["sampling_assumption"]
    assert conditions_line(said).startswith("NO PRIVACY: seeded test noise; per one record")
    person = configuration(tiny_world, tmp_path, privacy={"group_by": "user", "noise_source": "os"})
    assert conditions_of(person)["unit"] == "each person's records"
    whole = configuration(tiny_world, tmp_path, training={"expected_batch_size": 40})
    assert conditions_of(whole)["sampling_assumption"].startswith("no amplification")
    shared = {"kind": "noisy_projection", "projection_source": "shared"}
    shared |= {"head_max_grad_norm": 1.0, "head_noise_multiplier": 1.0}
    assert "draws each projection honestly" in str(
        conditions_of(configuration(tiny_world, tmp_path, mechanism=shared))["adversary"]
    )


def test_the_stated_delta_is_the_one_at_which_ledgers_count(tiny_world, tmp_path):
    """A run's epsilon is the ledgers', at the budget's delta, even where the noise was chosen for a smaller one."""
    privacy = {"target_delta": 1e-6, "budget": {"epsilon": 50.0, "delta": 1e-4, "on_exhausted": "refuse"}}
    config = configuration(tiny_world, tmp_path, privacy=privacy, federation={"rounds": 1})
    done = simulate(config, in_process=True)
    assert done.statement["delta"] == 1e-4
    assert done.statement["target_delta"] == 1e-6
    stored = json.loads((done.folder / "ledger.json").read_text())["accounts"]
    assert {one["delta"] for one in stored} == {1e-4}
    assert max(one["epsilon"] for one in stored) == done.epsilon


def test_a_stated_bound_is_repeated_as_an_assumption(tiny_world, tmp_path):
    mechanism = {
        "kind": "noisy_projection",
        "projection_source": "client",
        "clipping": False,
        "gradient_bound": 2.5,
        "head_max_grad_norm": 1.0,
        "head_noise_multiplier": 1.0,
    }
    config = configuration(
        tiny_world,
        tmp_path,
        mechanism=mechanism,
        federation={"aggregation": {"kind": "product"}},
        training={"optimizer": {"kind": "sgd", "lr": 0.5}},
    )
    assert "at most 2.5: stated by the configuration, not enforced" in conditions_line(conditions_of(config))


def test_a_run_without_privacy_names_its_mechanism(tiny_world, tmp_path):
    free = {
        "privacy": None,
        "mechanism": {"kind": "none"},
        "federation": {"aggregation": {"kind": "product"}},
    }
    values = {**container(tiny_world, tmp_path, **free), "privacy": {"unit": "none"}}
    found = conditions_of(config_from_container(values))
    assert (found["mechanism"], conditions_line(found)) == ("none", "no privacy")


def test_no_privacy_has_no_conditions():
    assert conditions_line({"privacy": "none"}) == "no privacy"
    assert "not stated" in conditions_line({"unit": "one record"})


# -- the live view -----------------------------------------------------------------------------------------


def test_the_live_view_shows_rounds_and_what_epsilon_means(prism_run, tiny_world, tmp_path):
    conditions = conditions_of(configuration(tiny_world, tmp_path, privacy={"noise_source": "os"}))
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    with LiveView(console, 3, conditions) as view:
        for line in metric_lines(prism_run.folder):
            view.note(line)
        view.note({"round": 4, "refused": {"client-0001": "BudgetExceededError"}, "failed": {}})
    plain = Console(file=io.StringIO(), width=200)
    plain.print(view.view())
    text = plain.file.getvalue()
    for word in ("round 4/3", "4/4", "epsilon", "1 refusals", "client-0001", "start"):
        assert word in text, word
    for word in MEANING:
        assert word in text, word
    assert console.file.getvalue()


def test_the_live_view_keeps_the_last_rounds_only():
    console = Console(file=io.StringIO(), width=120)
    view = LiveView(console, 100, None)
    for number in range(1, 60):
        view._records.append({"round": number})
    assert len(view._records) == 8


def test_the_command_shows_conditions_and_writes_the_page(prism_run, capsys):
    from fedlora.cli.simulate import summary_text, write_report

    said = summary_text(prism_run)
    for word in MEANING:
        assert word in said
    assert write_report(prism_run.folder).read_text().startswith("<!doctype html>")


# -- trackers ------------------------------------------------------------------------------------------------


def test_a_private_run_that_spent_nothing_is_not_called_one_without_privacy(prism_run):
    from fedlora.cli.simulate import summary_text

    said = summary_text(replace(prism_run, epsilon=None))
    assert f"no epsilon is known; it would be {conditions_line(prism_run.statement)}" in said
    assert "no privacy" not in said
    free = replace(prism_run, epsilon=None, statement={"privacy": "none", "mechanism": "none"})
    assert "no privacy" in summary_text(free)


def test_a_missing_package_is_named_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"fedlora\[wandb\]"):
        trackers.require_trackers(TrackingConfig(wandb="demo"))
    trackers.require_trackers(TrackingConfig())


def test_a_tracker_that_is_not_installed_ends_the_run_before_it_spends(tiny_world, tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    config = configuration(tiny_world, tmp_path, tracking={"mlflow": "sqlite:///none.db"})
    with pytest.raises(ConfigError, match="mlflow"):
        simulate(config, in_process=True)
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_only_public_figures_are_sent(prism_run):
    sent = trackers.scalars(metric_lines(prism_run.folder)[-1])
    assert {"epsilon", "residual", "bytes_up", "accepted", "metrics/accuracy", "seconds/clients"} <= set(sent)
    assert "diagnostics/gauge_drift" in sent
    assert not any("client-" in name for name in sent)
    assert trackers.scalars({"round": 1, "epsilon": math.inf, "status": "ok"}) == {
        "refused": 0.0,
        "failed": 0.0,
    }


def test_a_tracker_that_fails_is_dropped_and_the_others_go_on(caplog):
    seen = []

    def broken(step, values):
        raise OSError("network")

    good = SimpleNamespace(name="good", log=lambda step, values: seen.append(step), close=seen.append)
    bad = SimpleNamespace(name="bad", log=broken, close=lambda status: None)

    def unopened(earlier):
        raise RuntimeError("no server")

    found = trackers.Trackers({"bad": lambda earlier: bad, "good": lambda earlier: good, "gone": unopened})
    found.open()
    assert found.names == ("bad", "good")
    found.note({"round": 1})
    found.note({"round": 2})
    assert found.names == ("good",)
    found.close("finished")
    found.close("failed")
    assert seen == [1, 2, "finished"]
    assert caplog.text.count("is left out from here") == 2


def _epsilons(folder):
    lines = metric_lines(folder)
    found = {line["round"]: line["epsilon"] for line in lines if line["epsilon"] is not None}
    assert len(found) >= 2
    return found


def test_tensorboard_keeps_the_runs_figures(tiny_world, tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = simulate(configuration(tiny_world, tmp_path, tracking={"tensorboard": True}), in_process=True)
    found = EventAccumulator(str(done.folder / "tensorboard"))
    found.Reload()
    stored = {one.step: one.value for one in found.Scalars("epsilon")}
    assert stored == pytest.approx(_epsilons(done.folder), rel=1e-6)
    assert "epsilon/text_summary" in found.Tags()["tensors"]


def test_mlflow_keeps_the_runs_figures_in_a_file(tiny_world, tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")
    pytest.importorskip("alembic")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    done = simulate(configuration(tiny_world, tmp_path, tracking={"mlflow": uri}), in_process=True)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tiny")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == done.run_id
    assert "add_or_remove" in run.data.tags["epsilon_means"]
    stored = {one.step: one.value for one in client.get_metric_history(run.info.run_id, "epsilon")}
    assert stored == _epsilons(done.folder)


@pytest.mark.long
def test_wandb_keeps_an_offline_run(tiny_world, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra wandb")
    for key, value in (("WANDB_MODE", "offline"), ("WANDB_SILENT", "true"), ("HOME", str(tmp_path))):
        monkeypatch.setenv(key, value)
    done = simulate(configuration(tiny_world, tmp_path, tracking={"wandb": "demo"}), in_process=True)
    (stored,) = (done.folder / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"epsilon" in stored.read_bytes()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("mlflow", "", "no tracking URI"),
        ("mlflow", "nonsense://host", "no tracking URI"),
        ("mlflow", "./mlruns", "no plain folders"),
        ("mlflow", "http://", "no tracking URI"),
        ("mlflow", "https://me:secret@host:5000", "holds a password"),
        ("mlflow", "postgresql+psycopg://me:secret@host/db", "holds a password"),
        ("wandb", "", "no project name"),
        ("wandb", "team/project", "no project name"),
    ],
)
def test_a_wrong_name_of_a_tracker_is_refused_before_anything_is_read(key, value, said):
    with pytest.raises(ConfigError, match=said) as caught:
        trackers.check_names(TrackingConfig(**{key: value}))
    assert "secret" not in str(caught.value)
    assert f"tracking.{key}" in str(caught.value)


def test_usual_names_of_trackers_are_taken():
    for uri in (
        "sqlite:///mlflow.db",
        "http://host:5000",
        "https://me@host/path",
        "postgresql://me@host:5432/db",
    ):
        trackers.check_names(TrackingConfig(mlflow=uri, wandb="news-2026 (pilot)"))


def test_check_refuses_a_wrong_tracker_and_says_what_its_epsilon_means(tiny_world, tmp_path):
    from fedlora.cli.check import app
    from fedlora.config import save_resolved

    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    save_resolved(configuration(tiny_world, tmp_path, privacy={"noise_source": "os"}), good)
    save_resolved(configuration(tiny_world, tmp_path, tracking={"wandb": "a/b"}), bad)
    said = CliRunner().invoke(app, [str(good)]).stdout
    for word in MEANING:
        assert word in said, said
    assert isinstance(CliRunner().invoke(app, [str(bad), "--static"]).exception, ConfigError)


def test_a_tracker_that_failed_is_a_warning_of_the_run(tiny_world, tmp_path, monkeypatch):
    def unopened(*arguments):
        raise OSError("no server")

    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(trackers, "MlFlow", unopened)
    changes = {"federation": {"rounds": 1}, "tracking": {"mlflow": "http://127.0.0.1:9"}}
    done = simulate(configuration(tiny_world, tmp_path, **changes), in_process=True)
    assert any("tracker mlflow failed (OSError)" in one for one in done.warnings)
    assert "tracker mlflow failed" in render(read_run(done.folder))


def test_a_server_that_is_gone_costs_mlflow_seconds_not_minutes(monkeypatch, tmp_path):
    import os

    wanted = tracker_kinds.PATIENCE | tracker_kinds.SILENCE
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "mlflow", SimpleNamespace(MlflowClient=lambda **k: 1 / 0))
    opening = tracker_kinds.Opening("run", "project", tmp_path, {}, {})
    with pytest.raises(ZeroDivisionError):
        tracker_kinds.MlFlow("http://127.0.0.1:9", opening)
    assert {name: os.environ[name] for name in wanted} == wanted
    for name in wanted:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("width", [200, 80, 40, 24])
def test_the_live_view_cuts_no_figure_on_a_narrow_terminal(prism_run, tiny_world, tmp_path, width):
    conditions = conditions_of(configuration(tiny_world, tmp_path, privacy={"noise_source": "os"}))
    console = Console(file=io.StringIO(), width=width)
    view = LiveView(console, 3, conditions)
    lines = metric_lines(prism_run.folder)
    for line in lines:
        view.note(line)
    console.print(view.view())
    said = console.file.getvalue()
    assert at_least(lines[-1]["epsilon"]) in said
    assert all(word in said for word in ("add_or_remove", "0.0001", "Poisson"))
    assert "…" not in said


def test_names_of_clients_are_no_markup_of_the_live_view():
    console = Console(file=io.StringIO(), width=120)
    view = LiveView(console, 3, None)
    view.note({"round": 1, "epsilon": math.inf, "refused": {"[/red]x": "E", "b\x1b[2J": "F"}, "failed": {}})
    console.print(view.view())
    assert "[/red]x" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()
