"""Aggregation presets are overlays: each one, laid over the demo, is a valid configuration; two run end to end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedlora.aggregation import aggregation_problems, build_mode
from fedlora.config import load_config

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = sorted((ROOT / "strategies" / "presets" / "aggregation").glob("*.yaml"))
MODES = {"mean_b", "tangent", "product", "stack", "aligned", "factor_mean"}


def test_there_is_an_overlay_for_every_mode():
    assert {path.stem for path in OVERLAYS} >= MODES


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_every_overlay_is_valid_over_the_demo(path):
    config = load_config(ROOT / "examples" / "demo" / "demo.yaml", overlays=[path])
    assert aggregation_problems(config.federation, config.privacy) == []
    mode = build_mode(config.federation)
    if path.stem in MODES:
        assert mode.kind == path.stem


@pytest.fixture(scope="module")
def helpers(tmp_path_factory):
    sys.path.insert(0, str(ROOT / "tests" / "simulation"))
    try:
        import simulation_helpers
    finally:
        sys.path.pop(0)
    return simulation_helpers, simulation_helpers.make_world(tmp_path_factory.mktemp("secure-world"))


CLIENT = {
    "unit": "client",
    "noise_multiplier": 1.0,
    "target_delta": 1e-4,
    "adjacency": "add_or_remove",
    "clipping_norm": 0.5,
    "budget": {"epsilon": 500.0, "delta": 1e-4, "on_exhausted": "refuse"},
    "noise_source": "os",
}


def simulated(helpers, tmp_path, federation, privacy):
    from fedlora.config import config_from_container
    from fedlora.simulation.run import simulate

    tools, world = helpers
    raw = tools.container(world, tmp_path / "runs")
    raw["privacy"] = privacy
    raw["federation"] |= {"rounds": 2, **federation}
    result = simulate(config_from_container(raw), in_process=True)
    return result, tools.metric_lines(result.folder)


@pytest.mark.parametrize("secure", [False, True])
def test_secure_rounds_end_to_end(helpers, tmp_path, secure):
    result, lines = simulated(helpers, tmp_path, {"secure_aggregation": secure}, {"unit": "none"})
    assert result.status == "finished"
    assert [line["accepted"] for line in lines[1:]] == [4, 4]


@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_compressed_rounds_end_to_end(helpers, tmp_path, compression):
    result, lines = simulated(helpers, tmp_path, {"compression": compression}, {"unit": "none"})
    assert result.status == "finished"
    assert lines[-1]["accepted"] == 4


@pytest.mark.parametrize("noise_at", ["server", "clients"])
def test_client_level_privacy_end_to_end_and_the_ledger_equals_a_recomputation(helpers, tmp_path, noise_at):
    from fedlora.accounting import GaussianEvent, epsilon_of

    privacy = {**CLIENT, "noise_at": noise_at}
    federation = {"min_replies": 3}
    if noise_at == "clients":
        privacy["honest_clients"] = 3
        federation["secure_aggregation"] = True
    result, _ = simulated(helpers, tmp_path, federation, privacy)
    assert result.status == "finished"
    expected = epsilon_of(GaussianEvent(1.0).times(2), 1e-4).epsilon
    assert result.epsilon == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("weights", "secure"), [("equal", False), ("num_examples", False), ("equal", True)])
def test_h07_clients_without_records_are_skipped_by_name_end_to_end(helpers, tmp_path, weights, secure):
    from fedlora.config import config_from_container
    from fedlora.simulation.run import simulate

    tools, world = helpers
    raw = tools.container(world, tmp_path / "runs")
    raw["privacy"] = {"unit": "none"}
    raw["federation"] |= {
        "rounds": 2,
        "min_replies": 1,
        "aggregation": {"kind": "mean_b", "weights": weights},
        "secure_aggregation": secure,
    }
    raw["data"]["partition"] = {"kind": "quantity", "clients": 8, "alpha": 0.1}
    result = simulate(config_from_container(raw), in_process=True)
    assert result.status == "finished"
    for line in tools.metric_lines(result.folder)[-2:]:
        assert line["failed"], "the partition leaves some clients without records"
        assert line["accepted"] >= 2
        assert line["accepted"] + len(line["failed"]) == 8
        assert all("no examples" in reason for reason in line["failed"].values())


def test_h07_a_round_in_which_every_client_is_empty_is_skipped_and_named(helpers, tmp_path, monkeypatch):
    from fedlora.config import config_from_container
    from fedlora.errors import TooFewRepliesError
    from fedlora.simulation.run import simulate
    from fedlora.training import trainer as training
    from fedlora.training.answers import with_examples

    tools, world = helpers
    raw = tools.container(world, tmp_path / "runs")
    raw["privacy"] = {"unit": "none"}
    raw["federation"] |= {"rounds": 3, "min_replies": 1}
    calls = []

    def empty_in_round_two(reply, config, count):
        calls.append(reply.client)
        return with_examples(reply, config, 0 if 4 < len(calls) <= 8 else count)

    monkeypatch.setattr(training, "with_examples", empty_in_round_two)
    result = simulate(config_from_container(raw), in_process=True)
    lines = tools.metric_lines(result.folder)[-3:]
    assert [line["accepted"] for line in lines] == [4, 0, 4]
    assert [line["status"] for line in lines] == ["ok", "skipped", "ok"]
    assert len(lines[1]["failed"]) == 4
    assert lines[1]["adapter"] == lines[0]["adapter"] != lines[2]["adapter"]
    assert TooFewRepliesError.exit_code == 51
