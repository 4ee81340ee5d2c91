"""Attacks stay below the claim of private mechanisms, and notice planted faults."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from audit_helpers import CASES, make_bench, write_model
from typer.testing import CliRunner

from fedlora.audit import membership
from fedlora.audit.canaries import Chosen, canary_basis
from fedlora.audit.faults import ScaledNoise
from fedlora.audit.gradient import GradientAudit
from fedlora.audit.verdict import Verdict, judge, require_passed, write_verdict
from fedlora.config import save_resolved
from fedlora.errors import AuditFailedError, SensitivityMismatchError, UnsupportedCombinationError
from fedlora.mechanisms import noise as noise_stage
from fedlora.mechanisms.clip import clip_and_sum
from fedlora.mechanisms.noise import OsNoise, SeededNoise
from fedlora.report.run_data import read_run
from fedlora.training import drawing, selfcheck
from fedlora.training.cohort import CohortEngine

HALF = partial(ScaledNoise, 0.5, OsNoise())
CANARIES = 100_000
"""Half the noise lies six deviations of the bound and more above the claim; with 40 000 it was three to four."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("audit") / "model")


def _unclipped(bench: Any) -> Any:
    """A mechanism whose clip says C and does nothing."""

    def lying(mechanism, gradients):
        loose = clip_and_sum(gradients, mechanism.coordinates.table, mechanism.metric, 1e9)
        return dataclasses.replace(loose, bound=mechanism.privacy.max_grad_norm)

    stages = dataclasses.replace(bench.mechanism.stages, clip=lying)
    return dataclasses.replace(bench, mechanism=dataclasses.replace(bench.mechanism, stages=stages))


# -- the gradient-canary audit ------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["lora_fa", "lora_fa-replace-one", "factor", "prism", "dp_sgd"])
def test_a_sound_mechanism_passes_with_power(model, case):
    verdict = GradientAudit(make_bench(model, case), canaries=CANARIES).run(repeats=3)
    assert verdict.verdict == "passed", verdict
    assert 0.0 < verdict.lower_bound <= verdict.claimed_epsilon
    assert verdict.power == 1.0
    assert verdict.figures["one_run_bound"] <= verdict.claimed_epsilon


@pytest.mark.parametrize("case", ["lora_fa-per-layer", "noisy_projection", "noisy_projection-shared"])
def test_other_mechanisms_stay_below_their_claim(model, case):
    verdict = GradientAudit(make_bench(model, case), canaries=5_000).run(repeats=0)
    assert verdict.verdict == "weak attack"
    assert verdict.lower_bound <= verdict.claimed_epsilon


@pytest.mark.parametrize("case", ["lora_fa", "factor", "prism"])
def test_noise_at_half_scale_is_caught(model, case):
    verdict = GradientAudit(make_bench(model, case), canaries=CANARIES, noise=HALF).run(repeats=0)
    assert verdict.verdict == "failed"
    with pytest.raises(AuditFailedError, match="lower bound"):
        require_passed([verdict])


@pytest.mark.parametrize("case", ["lora_fa", "lora_fa-per-layer", "prism", "noisy_projection"])
def test_a_missing_clip_is_caught(model, case):
    bench = _unclipped(make_bench(model, case))
    assert GradientAudit(bench, canaries=CANARIES).run(repeats=0).verdict == "failed"


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_filter_has_the_stated_mean_and_variance(model, case):
    bench = make_bench(model, case)
    mechanism = bench.mechanism
    single = mechanism.stages.open(mechanism, bench.adapted, bench.initial_payload(), 1)
    basis = canary_basis(mechanism, single, limit=1000, seed=0)
    clients = 15_000 // basis.size
    state = mechanism.stages.open(mechanism, bench.adapted, bench.initial_payload(), clients)
    state = mechanism.stages.prepare(mechanism, state)
    order = np.arange(clients * basis.size)
    chosen = Chosen(order // basis.size, order % basis.size, np.ones(len(order), dtype=np.float32))
    clipped = mechanism.clip(basis.gradients(state, chosen), state)
    found, strength = basis.filtered(state, mechanism.noise(state, clipped, [OsNoise()] * clients))
    rest = (found - strength).numpy().ravel()
    error = 1.0 / np.sqrt(len(rest))
    assert abs(rest.mean()) < 5.5 * error  # the noise differs every time: 1 in 10 million by chance
    assert abs(rest.var() - 1.0) < 5.5 * np.sqrt(2.0) * error
    assert 5.5 * error < 0.05  # a mean or deviation that is 5 % off would be seen


def test_canaries_need_record_level_noise(model):
    free = membership.noise_free(make_bench(model))
    with pytest.raises(UnsupportedCombinationError, match="unit none"):
        GradientAudit(free)


def test_verdicts():
    assert judge(1.0, float("nan"), 1.0) == "failed"
    assert judge(None, 2.0, None) == "leaks as expected"
    assert judge(2.0, 1.0, 0.89) == "weak attack"
    assert judge(2.0, 1.0, 0.9) == "passed"


# -- membership inference -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_noise_free_release_leaks_and_the_noised_one_keeps_below_its_claim(model, seed):
    bench = make_bench(model, seed=seed)
    free = membership.noise_free(bench)
    leak = membership.release_attack(free, membership.make_shadows(free, trials=60, steps=1))
    assert leak.figures["auc"] > 0.99
    assert leak.verdict == "leaks as expected"
    shadows = membership.make_shadows(bench, trials=60)
    for verdict in (membership.release_attack(bench, shadows), membership.loss_attack(bench, shadows)):
        assert verdict.lower_bound <= verdict.claimed_epsilon
        assert verdict.figures["auc"] < 0.99


def test_the_loss_attack_sees_a_static_poison_without_noise(tmp_path):
    free = membership.noise_free(make_bench(write_model(tmp_path / "wide", 32)))
    verdict = membership.loss_attack(free, membership.make_shadows(free, trials=60, steps=100))
    assert verdict.figures["auc"] > 0.97


@pytest.mark.parametrize("case", ["prism", "noisy_projection-shared", "noisy_projection"])
def test_the_loss_attack_reads_every_uplink(model, case):
    bench = make_bench(model, case)
    before = {name: value.copy() for name, value in bench.adapted.write_factors().blocks.items()}
    verdict = membership.loss_attack(bench, membership.make_shadows(bench, trials=12, steps=2))
    assert verdict.lower_bound <= verdict.claimed_epsilon
    after = bench.adapted.write_factors().blocks
    assert all(np.array_equal(value, after[name]) for name, value in before.items())


def test_the_calibrated_attack_states_its_figures(model):
    figures = membership.calibrated_attack(make_bench(model)).figures
    assert {"auc", "tpr_at_1_percent_fpr", "tpr_at_10_percent_fpr", "perplexity_members"} <= set(figures)


def test_the_calibrated_attack_sees_members_without_noise_and_chance_with_it(tmp_path):
    """Eq. 16's score: AUC and perplexities part without privacy; noise takes most of that away.

    One private run says little: over 60 of them the log ratio of the perplexities was .19 on average, deviation .21
    (epsilon is not 0); without noise it was 1.85 or more in each of 8. So means are compared.
    """
    bench = make_bench(write_model(tmp_path / "wide", 32), rank=8)
    free = membership.noise_free(bench, lr=4.0)
    found = [membership.calibrated_attack(free, records=32, steps=100).figures for _ in range(4)]
    for one in found:  # with two labels half of the others are right by chance, so the AUC cannot reach 1
        assert one["perplexity_others"] > 1.5 * one["perplexity_members"]
        assert one["tpr_at_1_percent_fpr"] <= one["tpr_at_10_percent_fpr"]
    assert np.mean([one["auc"] for one in found]) > 0.5
    private = [membership.calibrated_attack(bench, records=24, steps=20) for _ in range(8)]
    assert _log_ratio([one.figures for one in private]) < 0.5 * _log_ratio(found)
    assert all(one.lower_bound <= one.claimed_epsilon for one in private)


def _log_ratio(found: list[Any]) -> float:
    return float(np.mean([np.log(one["perplexity_others"] / one["perplexity_members"]) for one in found]))


# -- self-checks: what attacks cannot see ---------------------------------------------------------------


def _fault(name: str, bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if name == "token-mean":
        original = type(bench.task).per_record_loss

        def coupled(self, model, batch):
            tokens = batch["attention_mask"].sum(1)
            return original(self, model, batch) * tokens / tokens.sum()

        monkeypatch.setattr(type(bench.task), "per_record_loss", coupled)
    elif name == "batch-mean":
        original = type(bench.task).per_record_loss

        def mean(self, model, batch):
            losses = original(self, model, batch)
            return losses.mean().expand(len(losses))

        monkeypatch.setattr(type(bench.task), "per_record_loss", mean)
    elif name == "seeded":
        monkeypatch.setattr(
            selfcheck, "noise_source", lambda config, client, turn: SeededNoise(1, client, turn)
        )
    elif name == "torch-seed":

        class Torch(OsNoise):
            def gaussians(self, count, device, dtype):
                return torch.randn(count, generator=torch.Generator().manual_seed(4), dtype=dtype)

        monkeypatch.setattr(selfcheck, "noise_source", lambda config, client, turn: Torch())
    elif name == "seeded-coins":
        monkeypatch.setattr(
            selfcheck, "coin_source", lambda config, client, turn: drawing.SeededCoins(1, client, turn)
        )
    elif name == "empty-skipped":
        original = CohortEngine._noisy_sums

        def skip(self, mechanism, state, jobs, sources):
            if all(len(job.draw()) == 0 for job in jobs):
                sources = [ScaledNoise(0.0, source) for source in sources]
            return original(self, mechanism, state, jobs, sources)

        monkeypatch.setattr(CohortEngine, "_noisy_sums", skip)
    return bench


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        ("token-mean", "uncoupled"),
        ("batch-mean", "uncoupled"),
        ("seeded", "unseeded"),
        ("torch-seed", "unseeded"),
        ("seeded-coins", "unseeded"),
        ("empty-skipped", "empty draws"),
    ],
)
def test_h16_start_up_checks_catch_what_attacks_cannot_see(model, monkeypatch, fault, check):
    bench = make_bench(model)
    selfcheck.require_selfchecks(bench)
    bench = _fault(fault, bench, monkeypatch)
    with pytest.raises(SensitivityMismatchError, match=check):
        selfcheck.require_selfchecks(bench)


@pytest.mark.parametrize("case", sorted(CASES))
def test_start_up_checks_pass_for_every_mechanism(model, case):
    assert all(one.passed for one in selfcheck.run_selfchecks(make_bench(model, case)))


@pytest.mark.parametrize(("rank", "hidden"), [(1, 64), (2, 64), (4, 48)])
def test_a_projection_that_stretches_is_no_fault_and_a_missing_clip_is(tmp_path, rank, hidden):
    bench = make_bench(
        write_model(tmp_path / "wide", hidden), "noisy_projection", rank=rank, max_grad_norm=1e-6
    )
    records = selfcheck.public_records(bench.task, 4, 12)
    for _ in range(3):
        found = selfcheck.check_clip(bench, records)
        assert found.passed, found
    assert not selfcheck.check_clip(_unclipped(bench), records).passed


def test_a_run_marked_without_privacy_may_be_repeatable(model):
    assert all(
        one.passed for one in selfcheck.run_selfchecks(make_bench(model, noise_source="seeded-test-only"))
    )


# -- the command ----------------------------------------------------------------------------------------


def _run_folder(model, tmp_path, case="lora_fa"):
    save_resolved(make_bench(model, case).config, tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text("")
    return tmp_path


def test_the_command_writes_verdicts_where_the_report_reads_them(model, tmp_path):
    from fedlora.cli.audit import app

    folder = _run_folder(model, tmp_path)
    result = CliRunner().invoke(app, [str(folder), "--repeats", "5", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["ok"]
    assert said["audits"][0]["verdict"] == "passed"
    (stored,) = read_run(folder).audits
    assert stored == said["audits"][0]
    assert stored["attack"] == "gradient-canary"
    assert {"unit", "adjacency", "adversary", "accountant", "sampling"} <= set(stored["conditions"])


def test_the_command_ends_with_its_own_code_when_the_claim_is_broken(model, tmp_path, monkeypatch):
    from fedlora.cli.audit import app

    original = noise_stage.draw_gaussians
    monkeypatch.setattr(noise_stage, "draw_gaussians", lambda *a: 0.5 * original(*a))
    result = CliRunner().invoke(app, [str(_run_folder(model, tmp_path)), "--repeats", "0", "--json"])
    assert result.exit_code == AuditFailedError.exit_code
    said = json.loads(result.stdout)
    assert not said["ok"]
    assert said["audits"][0]["verdict"] == "failed"


def test_a_verdict_is_replaced_whole(tmp_path):
    verdict = Verdict("loss", "weak attack", 1.0, 0.0, 0.95, None, 1e-5)
    write_verdict(tmp_path, verdict)
    path = write_verdict(tmp_path, dataclasses.replace(verdict, lower_bound=0.5))
    assert json.loads(path.read_text())["lower_bound"] == 0.5
    assert [file.name for file in tmp_path.iterdir()] == ["audit-loss.json"]


# -- long ---------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("case", sorted(CASES))
def test_no_false_alarm_in_twenty_runs(model, case):
    audit = GradientAudit(make_bench(model, case), canaries=20_000)
    plan = audit.plan()
    assert all(audit.bound(audit.attack(plan), plan) <= plan.claimed_epsilon for _ in range(20))


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_private_mechanism_stays_below_its_claim_over_three_seeds(model, case, seed):
    """Every attack that fits; and the control without noise leaks each time."""
    from fedlora.errors import UnsupportedCombinationError as Unsupported

    bench = make_bench(model, case, seed=seed)
    found = [GradientAudit(bench, canaries=20_000).run(repeats=0), membership.calibrated_attack(bench)]
    for attack, steps in ((membership.loss_attack, 3), (membership.release_attack, 1)):
        try:
            found.append(attack(bench, membership.make_shadows(bench, trials=60, steps=steps)))
        except Unsupported:
            assert attack is membership.release_attack
    for verdict in found:
        assert verdict.lower_bound <= verdict.claimed_epsilon, verdict
    if bench.layout.modules:
        free = membership.noise_free(bench)
        control = membership.release_attack(free, membership.make_shadows(free, trials=60, steps=1))
        assert control.figures["auc"] > 0.99


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", ["lora_fa", "prism", "factor"])
def test_power_at_half_the_noise(model, case, seed):
    verdict = GradientAudit(make_bench(model, case, seed=seed), canaries=60_000).run(repeats=20)
    assert verdict.verdict == "passed", verdict
