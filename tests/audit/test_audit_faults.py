"""Faults that attacks on all directions together miss: one quiet block, a clip that public records never reach."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from audit_helpers import CASES, make_bench, make_client_bench, write_model

from fedlora.aggregation.client_privacy import ClientMetric
from fedlora.audit.gradient import GradientAudit
from fedlora.audit.noise_check import check_noise_scale, judge_scales
from fedlora.audit.planning import score_step
from fedlora.config import config_container, config_from_container
from fedlora.config.resolve import derive_noise
from fedlora.errors import SensitivityMismatchError
from fedlora.mechanisms.clip import clip_and_sum
from fedlora.training import selfcheck
from fedlora.training.session import bind, load_parts, step_event


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("audit-faults") / "model")


def _with_stage(bench, **stages):
    changed = dataclasses.replace(bench.mechanism.stages, **stages)
    return dataclasses.replace(bench, mechanism=dataclasses.replace(bench.mechanism, stages=changed))


# -- one block with too little noise --------------------------------------------------------------------------


def _quiet(bench, block, scale):
    """The same mechanism with scaled noise in one block."""
    original = bench.mechanism.stages.noise

    def noise(mechanism, state, total, sources):
        update = original(mechanism, state, total, sources)
        clean = total.blocks[block]
        update.blocks[block].copy_(clean + scale * (update.blocks[block] - clean))
        return update

    return _with_stage(bench, noise=noise)


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_noise_of_every_block_is_as_claimed(model, case):
    (check,) = check_noise_scale(make_bench(model, case))
    assert check.passed, check.detail


@pytest.mark.parametrize("case", ["lora_fa", "prism", "factor", "noisy_projection", "dp_sgd"])
@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
def test_half_the_noise_in_one_block_alone_is_caught(model, case, place):
    bench = make_bench(model, case)
    block = list(bench.mechanism.coordinates.table.shapes)[place]
    (check,) = check_noise_scale(_quiet(bench, block, 0.5))
    assert not check.passed
    assert "too little in" in check.detail


@pytest.mark.parametrize(
    "case", [{}, {"mechanism": "prism", "aggregation": "tangent"}], ids=["mean_b", "tangent"]
)
def test_half_the_noise_in_one_block_of_a_client_level_release_is_caught(model, case, monkeypatch):
    bench = make_client_bench(model, **case)
    assert all(one.passed for one in check_noise_scale(bench))
    original = ClientMetric.noise

    def noise(self, names, stddev, source):
        found = dict(original(self, names, stddev, source))
        largest = max(found, key=lambda name: found[name].size)
        return {**found, largest: 0.5 * found[largest]}

    monkeypatch.setattr(ClientMetric, "noise", noise)
    assert not all(one.passed for one in check_noise_scale(bench))


def test_blocks_are_judged_alone_and_few_draws_together():
    draws = np.random.default_rng(5).standard_normal((500, 6))
    labels = np.array(["a", "a", "b", "b", "c", "d"])
    assert judge_scales(draws, labels).passed
    assert "4 parts" in judge_scales(draws, labels).detail
    assert "1 parts" in judge_scales(draws[:50], labels).detail
    draws[:, 2:4] *= 0.5
    found = judge_scales(draws, labels)
    assert not found.passed
    assert found.detail.endswith("too little in b")


# -- a clip that public records do not reach -------------------------------------------------------------------


@pytest.mark.parametrize("bound", [1e9, 2.0], ids=["missing", "doubled"])
@pytest.mark.parametrize("case", ["lora_fa", "lora_fa-per-layer", "factor", "prism", "dp_sgd"])
def test_a_faulty_clip_is_refused_at_start_up_though_public_gradients_are_short(model, case, bound):
    bench = make_bench(model, case)
    (sound,) = [one for one in selfcheck.run_selfchecks(bench) if one.name == "clip is active"]
    assert "losses scaled by" in sound.detail  # they are shorter than the bound

    def lying(mechanism, gradients):
        own = mechanism.privacy.max_grad_norm
        loose = clip_and_sum(gradients, mechanism.coordinates.table, mechanism.metric, bound * own)
        return dataclasses.replace(loose, bound=own)

    with pytest.raises(SensitivityMismatchError, match="clip is active"):
        selfcheck.require_selfchecks(_with_stage(bench, clip=lying))


@pytest.mark.parametrize("case", ["lora_fa", "prism"])
def test_dropout_is_no_fault_of_the_clip_and_hides_none(model, case):
    """Sums with and without a record had other masks: every private run with LoRA dropout was refused."""
    bench = make_bench(model, case, dropout=0.3)
    rates = [module.p for module in bench.adapted.model.modules() if isinstance(module, torch.nn.Dropout)]
    assert all(one.passed for one in selfcheck.require_selfchecks(bench))
    assert 0.3 in rates
    assert rates == [m.p for m in bench.adapted.model.modules() if isinstance(m, torch.nn.Dropout)]

    def none(mechanism, gradients):
        own = mechanism.privacy.max_grad_norm
        loose = clip_and_sum(gradients, mechanism.coordinates.table, mechanism.metric, 1e9 * own)
        return dataclasses.replace(loose, bound=own)

    with pytest.raises(SensitivityMismatchError, match="clip is active"):
        selfcheck.require_selfchecks(_with_stage(bench, clip=none))


# -- persons ------------------------------------------------------------------------------------------------------


def _person_bench(model, records, *, rate=0.2, **privacy):
    bench = make_bench(model, group_by="user", max_records_per_group=records, **privacy)
    container = config_container(bench.config)
    container.pop("derived", None)
    container["training"]["expected_batch_size"] = int(rate * 30)
    config = config_from_container(container)
    parts = load_parts(config)
    return bind(derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout)), parts)


def test_a_person_is_attacked_with_all_records_that_it_may_have(model):
    """A canary of one record can prove no more than one record's epsilon, however little noise a person gets."""
    bench = _person_bench(model, 2, rate=1.0, noise_multiplier=2.0)
    audit = GradientAudit(bench)
    plan = audit.plan()
    verdict = audit.run(repeats=2)
    assert verdict.conditions["unit"] == "person"
    assert "person's 2 records" in verdict.conditions["sampling"]
    assert verdict.verdict == "passed", verdict
    assert verdict.lower_bound <= verdict.claimed_epsilon
    assert audit.bound(audit.halved(plan), plan) > plan.claimed_epsilon


def test_persons_under_sampling_stay_below_their_claim(model):
    audit = GradientAudit(_person_bench(model, 3, noise_multiplier=3.0), canaries=20_000)
    plan = audit.plan()
    assert 0.0 < audit.bound(audit.attack(plan), plan) <= plan.claimed_epsilon


@pytest.mark.parametrize("copies", [1, 3])
def test_scores_are_likelihood_ratios(copies):
    """Under "out" the mean ratio is 1; under "in" the mean of its inverse is 1."""
    generator = np.random.default_rng(3)
    count, rate, strength = 400_000, 0.3, np.full(400_000, 0.5)
    out = generator.standard_normal(count)
    drawn = generator.binomial(copies, rate, count)
    inside = generator.standard_normal(count) + strength * drawn
    assert np.exp(score_step(out, strength, rate, False, copies)).mean() == pytest.approx(1.0, abs=0.01)
    assert np.exp(-score_step(inside, strength, rate, False, copies)).mean() == pytest.approx(1.0, abs=0.01)


@pytest.mark.long
def test_no_false_alarm_in_twenty_audits_of_persons(model):
    audit = GradientAudit(_person_bench(model, 2, noise_multiplier=2.0), canaries=20_000)
    plan = audit.plan()
    assert all(audit.bound(audit.attack(plan), plan) <= plan.claimed_epsilon for _ in range(20))


@pytest.mark.long
@pytest.mark.parametrize("case", sorted(CASES))
def test_no_false_alarm_of_the_noise_check_in_a_hundred_runs(model, case):
    bench = make_bench(model, case)
    assert all(one.passed for _ in range(100) for one in check_noise_scale(bench))
