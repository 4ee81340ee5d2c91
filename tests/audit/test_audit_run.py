"""`fedlora audit RUN` on runs that really ran: what is claimed is read from the folder and held against attacks."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
from audit_helpers import CLIENT_PRIVACY
from simulation_helpers import configuration, container, make_world
from typer.testing import CliRunner

from fedlora.accounting import epsilon_of
from fedlora.aggregation.client_privacy import client_event
from fedlora.audit.faults import with_power
from fedlora.audit.run_claim import RunClaim, hold_to_claim, read_claim
from fedlora.audit.verdict import REQUIRED_POWER, Verdict, measure_power
from fedlora.cli.audit import app
from fedlora.config import config_from_container, load_config
from fedlora.errors import AuditFailedError, DataError, WeakAuditError
from fedlora.mechanisms import noise as noise_stage
from fedlora.report.page import render
from fedlora.report.run_data import read_run
from fedlora.simulation.run import simulate

QUICK = ("--repeats", "5", "--canaries", "40000", "--json")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A private run of three rounds, with noise from the operating system."""
    root = make_world(tmp_path_factory.mktemp("world"))
    privacy = {"noise_source": "os", "group_weights": {"head": 0.5, "adapters": 1.0}}
    config = configuration(root, root / "runs", privacy=privacy, federation={"rounds": 3})
    return simulate(config, in_process=True).folder


@pytest.fixture
def run_folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / finished.name)


def _summary(folder, **changes):
    path = folder / "summary.json"
    found = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(found))
    return found


def _audit(folder, *options):
    result = CliRunner().invoke(app, [str(folder), *(options or QUICK)])
    return result, json.loads(result.stdout)


def test_a_finished_run_passes_and_the_report_shows_it(run_folder):
    result, said = _audit(run_folder)
    assert result.exit_code == 0, result.output
    (verdict,) = said["audits"]
    summary = json.loads((run_folder / "summary.json").read_text())
    conditions = verdict["conditions"]
    assert conditions["epsilon_that_the_run_states"] == summary["epsilon"]
    assert conditions["epsilon_from_the_runs_events"] == pytest.approx(summary["epsilon"], rel=1e-9)
    assert conditions["run_status"] == "finished"
    assert 0 < verdict["lower_bound"] <= verdict["claimed_epsilon"] <= summary["epsilon"] * (1 + 1e-9)
    assert verdict["confidence"] == 0.95
    assert verdict["power"] == 1.0
    assert verdict["verdict"] == "passed"
    assert verdict["delta"] == 1e-4
    assert {"the run's claim"} <= {one["name"] for one in said["selfchecks"]}
    page = render(read_run(run_folder))
    assert "gradient-canary" in page
    assert "passed" in page


def test_a_run_that_states_less_than_attacks_prove_fails_loudly(run_folder):
    """A summary with a forged epsilon: the bound lies above what the run states."""
    _summary(run_folder, epsilon=0.05)
    result, said = _audit(run_folder)
    assert result.exit_code == AuditFailedError.exit_code == 30
    (verdict,) = said["audits"]
    assert verdict["verdict"] == "failed"
    assert verdict["claimed_epsilon"] == 0.05
    assert verdict["lower_bound"] > 0.05
    assert "AUDIT FAILED (gradient-canary)" in render(read_run(run_folder))


def test_a_run_that_states_less_than_its_events_fails_even_if_no_attack_sees_it(run_folder):
    stated = json.loads((run_folder / "summary.json").read_text())["epsilon"]
    _summary(run_folder, epsilon=stated * 0.95)
    result, said = _audit(run_folder, "--repeats", "0", "--canaries", "2000", "--json")
    assert result.exit_code == 30
    (check,) = [one for one in said["selfchecks"] if one["name"] == "the run's claim"]
    assert not check["passed"]
    assert "its events imply" in check["detail"]


def _rewritten(folder, name, change):
    path = folder / name
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_a_run_whose_events_were_made_cheaper_fails_by_its_rounds(run_folder):
    """Events and epsilon forged together: the rounds, with the configuration's own mechanism, cost more."""

    def cheaper(table):
        for entry in table.values():
            entry["events"] = [
                {"event": {**entry["events"][0]["event"], "noise_multiplier": 3.0}, "steps": 3}
            ]
        return table

    _rewritten(run_folder, "ledger-mirror.json", cheaper)
    claim = read_claim(run_folder, load_config(run_folder / "config.yaml"))
    _summary(run_folder, epsilon=claim.from_events)
    result, said = _audit(run_folder, "--repeats", "0", "--canaries", "2000", "--json")
    assert result.exit_code == 30
    (check,) = [one for one in said["selfchecks"] if one["name"] == "the run's claim"]
    assert not check["passed"]
    assert "its rounds" in check["detail"]


def test_a_run_whose_events_are_gone_fails(run_folder):
    (run_folder / "ledger-mirror.json").unlink()
    result, said = _audit(run_folder, "--repeats", "0", "--canaries", "2000", "--json")
    assert result.exit_code == 30
    (check,) = [one for one in said["selfchecks"] if one["name"] == "the run's claim"]
    assert "holds no events" in check["detail"]


def test_the_epsilon_of_a_client_level_run_is_recomputed_from_its_folder(tmp_path):
    world = make_world(tmp_path)
    values = container(
        world, tmp_path / "runs", federation={"rounds": 2, "clients_per_round": 0.5, "min_replies": 1}
    )
    values["privacy"] = CLIENT_PRIVACY
    done = simulate(config_from_container(values), in_process=True)
    config = load_config(done.folder / "config.yaml")
    event = client_event(config.privacy, config.federation)
    claim = read_claim(done.folder, config, event)
    by_hand = epsilon_of(event.times(2), 1e-3, adjacency="add_or_remove").epsilon
    assert claim.from_events == claim.from_rounds == pytest.approx(by_hand)
    assert done.epsilon == pytest.approx(by_hand)
    assert claim.check().passed
    assert done.statement["epsilon_from_this_runs_events"] == pytest.approx(by_hand)
    assert "server's ledger" in done.statement["epsilon_is"]
    page = render(read_run(done.folder))
    assert "<h2>Federation</h2>" in page
    assert "epsilon of the federation" in page
    _summary(done.folder, epsilon=0.9 * by_hand)
    assert not read_claim(done.folder, config, event).check().passed
    again = simulate(config_from_container(values), in_process=True)  # the same clients pay twice
    claim = read_claim(again.folder, config, event)
    assert claim.epsilon > claim.from_events == pytest.approx(by_hand)
    assert claim.check().passed


def test_a_run_without_its_epsilon_fails(run_folder):
    _summary(run_folder, epsilon=None)
    result, _ = _audit(run_folder, "--repeats", "0", "--canaries", "2000", "--json")
    assert result.exit_code == 30


def test_noise_at_half_scale_in_a_runs_mechanism_fails(run_folder, monkeypatch):
    original = noise_stage.draw_gaussians
    monkeypatch.setattr(noise_stage, "draw_gaussians", lambda *a: 0.5 * original(*a))
    result, said = _audit(run_folder, "--repeats", "0", "--canaries", "40000", "--json")
    assert result.exit_code == 30
    assert said["audits"][0]["verdict"] == "failed"


def test_a_configuration_that_claims_less_than_it_spends_is_refused(run_folder):
    path = run_folder / "config.yaml"
    text = path.read_text()
    derived = load_config(path).derived.epsilon
    assert str(derived) in text
    path.write_text(text.replace(str(derived), str(derived / 2)))
    result = CliRunner().invoke(app, [str(run_folder), *QUICK])
    assert result.exit_code not in (0, 30, 31)


def test_weak_attacks_have_an_exit_code_of_their_own_on_request(run_folder):
    options = ("--attack", "loss", "--trials", "12", "--repeats", "5", "--json")
    result, said = _audit(run_folder, *options)
    assert result.exit_code == 0
    (verdict,) = said["audits"]
    assert verdict["verdict"] == "weak attack"
    assert verdict["power"] is not None
    assert verdict["figures"]["power_repeats"] >= 1
    strict, _ = _audit(run_folder, *options, "--strict")
    assert strict.exit_code == WeakAuditError.exit_code == 31
    passed, _ = _audit(run_folder, *QUICK, "--strict")
    assert passed.exit_code == 0


def test_an_unfinished_run_is_judged_by_its_configuration(run_folder):
    for name in ("summary.json", "ledger-mirror.json"):
        (run_folder / name).unlink()
    result, said = _audit(run_folder)
    assert result.exit_code == 0
    assert said["audits"][0]["conditions"]["run_status"] == "unfinished"


def test_damaged_files_are_named(run_folder):
    config = load_config(run_folder / "config.yaml")
    (run_folder / "ledger-mirror.json").write_text('{"client-0000": {"events": [{"event": {}, "steps": 1}]}}')
    with pytest.raises(DataError, match="client-0000"):
        read_claim(run_folder, config)
    (run_folder / "summary.json").write_text("{")
    with pytest.raises(DataError, match=r"summary\.json"):
        read_claim(run_folder, config)


def test_a_run_of_seeded_noise_never_passes(tmp_path):
    """Attacks draw noise of their own, so that they see nothing of the seed."""
    root = make_world(tmp_path)
    values = container(root, root / "runs", data={"labels": ["cold", "warm"]})
    assert values["privacy"]["noise_source"] == "seeded-test-only"
    (tmp_path / "run.yaml").write_text(json.dumps(values))
    result = CliRunner().invoke(app, [str(tmp_path / "run.yaml"), *QUICK, "--strict"])
    (verdict,) = json.loads(result.stdout)["audits"]
    assert verdict["power"] == 1.0
    assert verdict["verdict"] == "weak attack"
    assert verdict["conditions"]["privacy"].startswith("NO PRIVACY: seeded test noise")
    assert result.exit_code == WeakAuditError.exit_code


def test_a_run_that_states_an_infinite_epsilon_is_audited_and_written(run_folder):
    _summary(run_folder, epsilon="inf")
    result, said = _audit(run_folder, "--repeats", "0", "--canaries", "2000", "--json")
    assert result.exit_code == 0, result.output
    (verdict,) = said["audits"]
    assert verdict["conditions"]["epsilon_that_the_run_states"] == "inf"
    assert read_run(run_folder).audits == [verdict]
    assert "inf" in render(read_run(run_folder))


def test_overrides_of_a_run_are_refused(run_folder):
    result = CliRunner().invoke(app, [str(run_folder), "privacy.noise_multiplier=9"])
    assert result.exit_code != 0


def test_all_attacks_say_which_ones_do_not_fit(run_folder):
    text = (run_folder / "config.yaml").read_text()
    assert "lora_fa" in text
    options = ("--attack", "all", "--trials", "12", "--repeats", "0", "--canaries", "2000", "--json")
    result, said = _audit(run_folder, *options)
    assert result.exit_code == 0
    names = [one["attack"] for one in said["audits"]]
    assert names == ["gradient-canary", "loss", "release", "calibrated", "noise-free"]
    assert said["left_out"] == {}
    assert [one["confidence"] for one in said["audits"]] == pytest.approx([0.9875] * 4 + [0.95])
    for verdict in said["audits"]:  # a bound on epsilon too, where nothing is claimed
        meaning = verdict["conditions"]
        assert {"unit", "adjacency", "adversary", "accountant", "sampling"} <= set(meaning), verdict["attack"]
        assert (meaning["unit"], meaning["adjacency"]) == ("record", "add_or_remove")
        assert verdict["delta"] is not None


def test_the_command_says_delta_zero_and_how_often_power_was_measured(run_folder):
    options = ("--attack", "noise-free", "--trials", "12")
    assert "  delta: 0\n" in CliRunner().invoke(app, [str(run_folder), *options]).output
    said = CliRunner().invoke(app, [str(run_folder), "--repeats", "5", "--canaries", "20000"]).output
    assert "power at half the noise 1.00 (5 repeats)" in said


def test_a_power_that_one_lucky_repeat_decides_is_refused(run_folder):
    refused = CliRunner().invoke(app, [str(run_folder), "--repeats", "1"])
    assert refused.exit_code == 2
    assert "0 (the power stays open" in " ".join(refused.output.split())


# -- the rules behind it ------------------------------------------------------------------------------------


def _verdict(bound, claimed, power=1.0):
    return Verdict("loss", "passed", claimed, bound, 0.95, power, 1e-5)


@pytest.mark.parametrize(
    ("stated", "bound", "word", "claimed"),
    [
        (3.0, 1.0, "passed", 2.0),
        (1.5, 1.0, "passed", 1.5),
        (0.5, 1.0, "failed", 0.5),
        (None, 1.0, "passed", 2.0),
    ],
)
def test_a_verdict_is_held_against_the_smaller_claim(stated, bound, word, claimed):
    held = hold_to_claim(_verdict(bound, 2.0), RunClaim(stated, 1e-5, 1e-5, stated, "finished"))
    assert (held.verdict, held.claimed_epsilon) == (word, claimed)


def test_a_bound_for_a_smaller_delta_says_nothing_about_a_claim_at_a_larger_one():
    claim = RunClaim(0.5, 1e-3, 1e-3, 0.5, "finished")
    assert hold_to_claim(_verdict(1.0, 2.0), claim).verdict == "passed"


def test_an_attack_with_its_canary_in_every_step_says_nothing_about_a_sampled_runs_epsilon():
    """Its bound may lie above the run's amplified epsilon although both hold: no alarm."""
    verdict = dataclasses.replace(_verdict(1.0, 2.0), samples_as_the_run=False)
    held = hold_to_claim(verdict, RunClaim(0.5, 1e-5, 1e-5, 0.5, "finished"))
    assert (held.verdict, held.claimed_epsilon) == ("passed", 2.0)


def test_shadow_attacks_say_that_they_do_not_sample_as_the_run(run_folder):
    options = ("--attack", "release", "--trials", "12", "--repeats", "0", "--json")
    (verdict,) = _audit(run_folder, *options)[1]["audits"]
    assert verdict["samples_as_the_run"] is False
    assert verdict["conditions"]["sampling"] == "none: the canary is in every step"


def test_a_claim_at_another_delta_than_the_ledgers_fails():
    assert RunClaim(3.0, 1e-5, 1e-5, 3.0, "finished").check().passed
    assert not RunClaim(3.0, 1e-6, 1e-5, 3.0, "finished").check().passed
    assert not RunClaim(2.9, 1e-5, 1e-5, 3.0, "finished").check().passed
    assert not RunClaim(None, 1e-5, 1e-5, 3.0, "finished").check().passed
    assert RunClaim(None, None, 1e-5, 3.0, "unfinished").check().passed


def test_power_is_measured_until_it_is_decided():
    calls = []
    assert measure_power(lambda: bool(calls.append(1)) or True, 10) == (1.0, 10)
    assert measure_power(lambda: False, 0) == (None, 0)
    outcomes = iter([True, False, True, False, True])
    assert measure_power(lambda: next(outcomes), 10) == (0.5, 4)  # a second miss of ten decides
    outcomes = iter([False] + [True] * 9)
    assert measure_power(lambda: next(outcomes), 10) == (REQUIRED_POWER, 10)


def test_attacks_on_nothing_private_measure_no_power():
    found = with_power(lambda noise: Verdict("loss", "leaks as expected", None, 1.0, 0.95, None, None), 5)
    assert found.power is None


def test_the_runs_epsilons_say_their_own_unit_beside_an_attack_on_records():
    claim = RunClaim(3.0, 1e-5, 1e-5, 3.0, "finished", unit="person")
    held = hold_to_claim(_verdict(1.0, 2.0), claim)
    assert held.conditions["unit_and_delta_of_the_runs_epsilons"] == "person, 1e-05"
