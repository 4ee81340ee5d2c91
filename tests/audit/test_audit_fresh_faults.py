"""Faults of one client, one step, one group or one block, which attacks on whole releases average away."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from audit_helpers import CASES, make_bench, make_client_bench, write_model
from scipy import stats

from fedlora.aggregation.client_privacy import ClientMetric
from fedlora.audit.client_checks import run_client_checks
from fedlora.audit.faults import ScaledNoise
from fedlora.audit.gradient import GradientAudit
from fedlora.audit.noise_check import check_noise_scale, judge_scales
from fedlora.errors import SensitivityMismatchError
from fedlora.mechanisms import noisy_projection
from fedlora.mechanisms.noise import OsNoise
from fedlora.training import cohort, drawing, releasecheck, scalecheck, selfcheck
from fedlora.training.groups import public_records
from fedlora.training.sampling import PoissonSampler

SHARES = {"noise_at": "clients", "honest_clients": 4}
MECHANISMS = ["lora_fa", "prism", "factor", "dp_sgd", "lora_fa-per-layer"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("audit-fresh") / "model", hidden=32)


def _with_stage(bench, **stages):
    changed = dataclasses.replace(bench.mechanism.stages, **stages)
    return dataclasses.replace(bench, mechanism=dataclasses.replace(bench.mechanism, stages=changed))


def _noise_changed(bench, change):
    original = bench.mechanism.stages.noise

    def noise(mechanism, state, total, sources):
        update = original(mechanism, state, total, sources)
        clean = total.blocks.flat
        return dataclasses.replace(
            update, blocks=update.blocks.like(clean + change(update.blocks.flat - clean))
        )

    return _with_stage(bench, noise=noise)


def _refused(bench, check):
    with pytest.raises(SensitivityMismatchError, match=check):
        selfcheck.require_selfchecks(bench)


# -- noise of one client, one step, one release of several --------------------------------------------------------


def _by_client(noise):
    scale = torch.ones(len(noise), 1)
    scale[1:] = 0.5
    return noise * scale


@pytest.mark.parametrize("case", MECHANISMS)
def test_half_the_noise_of_all_clients_but_the_first_is_refused_and_audited(model, case):
    bench = _noise_changed(make_bench(model, case), _by_client)
    _refused(bench, "client 2 has 0.[45].* of the claimed noise")
    assert not all(one.passed for one in check_noise_scale(bench))


@pytest.mark.parametrize("case", MECHANISMS)
def test_half_the_noise_in_every_second_release_is_refused(model, case):
    calls = []

    def change(noise):
        calls.append(1)
        return noise * (1.0 if len(calls) % 2 else 0.5)

    _refused(_noise_changed(make_bench(model, case), change), "of the claimed noise")


@pytest.mark.parametrize("case", sorted(CASES))
def test_an_engine_that_halves_the_clients_noise_is_refused(model, case, monkeypatch):
    """The stage that audits attack is sound; what it is handed is not."""
    original = cohort.CohortEngine._noisy_sums
    monkeypatch.setattr(
        cohort.CohortEngine,
        "_noisy_sums",
        lambda self, mechanism, state, jobs, sources: original(
            self, mechanism, state, jobs, [ScaledNoise(0.5, one) for one in sources]
        ),
    )
    _refused(make_bench(model, case), "has 0.[45].* of the claimed noise")


@pytest.mark.parametrize("case", ["noisy_projection", "noisy_projection-shared"])
def test_half_the_noise_behind_a_projection_is_refused_at_the_start(model, case, monkeypatch):
    original = noisy_projection.projected_noise
    monkeypatch.setattr(
        noisy_projection,
        "projected_noise",
        lambda standard, projection, deviation: 0.5 * original(standard, projection, deviation),
    )
    _refused(make_bench(model, case), "of the claimed noise")


@pytest.mark.parametrize("period", [3, 5, 7])
@pytest.mark.parametrize("case", ["lora_fa", "prism"])
def test_noise_that_comes_again_after_some_releases_is_refused(model, case, period, monkeypatch):
    """As from a generator that is seeded anew every few steps."""
    kept, calls = {}, []

    class Again(OsNoise):
        def gaussians(self, count, device, dtype):
            calls.append(1)
            place = (count, len(calls) % (2 * period))
            if place not in kept:
                kept[place] = super().gaussians(count, device, dtype)
            return kept[place].clone()

    monkeypatch.setattr(releasecheck, "noise_source", lambda *names: Again())
    bench = make_bench(model, case)
    found = releasecheck.check_fresh_noise(bench)
    assert not found.passed
    assert "repeated in" in found.detail


def test_a_large_adapter_runs_fewer_rounds(model, monkeypatch):
    bench = make_bench(model)
    many = releasecheck.check_fresh_noise(bench).detail
    monkeypatch.setattr(releasecheck, "_KEPT", 1)
    few = releasecheck.check_fresh_noise(bench)
    assert few.passed
    assert (many.split()[0], few.detail.split()[0]) == ("16", "4")


# -- empty draws beside others ------------------------------------------------------------------------------------


@pytest.fixture
def sizes(monkeypatch):
    """Records that each client of the cohort has drawn in the present step."""
    found, original = [], cohort._draw

    def draw(jobs):
        drawn = original(jobs)
        found[:] = [len(one) for one in drawn]
        return drawn

    monkeypatch.setattr(cohort, "_draw", draw)
    return found


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("scale", [0.0, 0.5], ids=["none", "half"])
def test_an_empty_draw_with_less_noise_beside_others_is_refused(model, case, scale, monkeypatch, sizes):
    """A client whose draw is empty is noised alone, and is left out where another of its cohort has records."""
    original = ScaledNoise.gaussians

    def gaussians(self, count, device, dtype):
        alone = sizes[self.source] > 0 or not any(sizes)
        return OsNoise().gaussians(count, device, dtype) * (1.0 if alone else scale)

    assert original is not gaussians
    monkeypatch.setattr(ScaledNoise, "gaussians", gaussians)
    monkeypatch.setattr(
        releasecheck, "noise_source", lambda config, client, turn: ScaledNoise(1.0, int(client[-1]))
    )
    bench = make_bench(model, case)
    assert releasecheck.check_fresh_noise(bench).passed
    found = releasecheck.check_empty_beside(bench, public_records(bench.task, 6, 24))
    assert not found.passed
    assert "without own noise" in found.detail if scale == 0.0 else "of the claimed noise" in found.detail


@pytest.mark.parametrize("case", ["lora_fa", "prism", "noisy_projection"])
def test_a_step_that_is_shorter_after_an_empty_draw_beside_others_is_refused(model, case, monkeypatch, sizes):
    original = cohort.CohortEngine._noisy_sums

    def noisy(self, mechanism, state, jobs, sources):
        update = original(self, mechanism, state, jobs, sources)
        scales = [1.0 if size or not any(sizes) else 0.9 for size in sizes]
        flat = update.blocks.flat * torch.tensor(scales, dtype=update.blocks.flat.dtype)[:, None]
        return dataclasses.replace(update, blocks=update.blocks.like(flat))

    monkeypatch.setattr(cohort.CohortEngine, "_noisy_sums", noisy)
    _refused(make_bench(model, case), "updates depend on noised sums alone")


def test_another_clients_records_in_an_empty_draws_row_are_seen(model):
    bench = make_bench(model)
    clip = bench.mechanism.stages.clip

    def leaks(mechanism, gradients):
        total = clip(mechanism, gradients)
        total.blocks.flat[0] += 1e-3 * total.blocks.flat[-1]
        return total

    changed = _with_stage(bench, clip=leaks)
    found = releasecheck.check_empty_beside(changed, public_records(bench.task, 6, 24))
    assert not found.passed
    assert "0 with noise of another source" not in found.detail


# -- clips that leave a group or a block out ----------------------------------------------------------------------


def _unclipped(clip, blocks_of):
    """The same clip, with the bare sum in some blocks."""

    def loose(mechanism, gradients):
        total = clip(mechanism, gradients)
        free = dataclasses.replace(
            mechanism, privacy=dataclasses.replace(mechanism.privacy, max_grad_norm=1e9)
        )
        bare, flat = clip(free, gradients), total.blocks.flat.clone()
        for name in blocks_of(mechanism):
            first, end = total.blocks.table.span(name)
            flat[:, first:end] = bare.blocks.flat[:, first:end]
        return dataclasses.replace(total, blocks=total.blocks.like(flat))

    return loose


@pytest.mark.parametrize("group", ["adapters", "head"])
@pytest.mark.parametrize("case", ["lora_fa", "prism", "factor", "noisy_projection"])
def test_a_clip_that_leaves_one_group_out_is_refused(model, case, group):
    bench = make_bench(model, case)
    loose = _unclipped(bench.mechanism.stages.clip, lambda mechanism: mechanism.metric.blocks_of(group))
    _refused(_with_stage(bench, clip=loose), "clip is active")


@pytest.mark.parametrize("case", ["lora_fa", "prism", "dp_sgd"])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_clip_that_leaves_one_block_out_is_refused(model, case, place):
    """However short the block's gradients are beside the others: losses are scaled until it alone passes the bound."""
    bench = make_bench(model, case)
    name = list(bench.mechanism.coordinates.table.shapes)[place]
    _refused(
        _with_stage(bench, clip=_unclipped(bench.mechanism.stages.clip, lambda _: [name])), "clip is active"
    )


@pytest.mark.parametrize("group", ["adapters", "head"])
@pytest.mark.parametrize("case", ["lora_fa", "prism"])
def test_norms_that_leave_one_group_out_are_caught_by_the_audit(model, case, group):
    """Public records whose head is longer than all else hide it from the start; a canary lies in one group alone."""
    bench = make_bench(model, case)
    clip = bench.mechanism.stages.clip

    def blind(mechanism, gradients):
        norms = dict(gradients.squared_norms)
        norms[group] = torch.zeros_like(norms[group])
        return clip(mechanism, dataclasses.replace(gradients, squared_norms=norms))

    changed = _with_stage(bench, clip=blind)
    started = all(one.passed for one in selfcheck.run_selfchecks(changed))
    assert not started or GradientAudit(changed, canaries=20_000).run(repeats=0).verdict == "failed"


@pytest.mark.parametrize("case", ["lora_fa", "prism"])
def test_a_clip_of_pairs_of_records_is_refused(model, case):
    """As from a micro-batch of two whose sum is clipped once."""
    bench = make_bench(model, case)
    clip = bench.mechanism.stages.clip

    def paired(mechanism, gradients):
        norms = {}
        for group, value in gradients.squared_norms.items():
            both = value.clone()
            even = len(value) - len(value) % 2
            both[:even] = value[:even].view(-1, 2).mean(1).repeat_interleave(2)
            norms[group] = both
        return clip(mechanism, dataclasses.replace(gradients, squared_norms=norms))

    _refused(_with_stage(bench, clip=paired), "clip is active")


# -- losses -------------------------------------------------------------------------------------------------------


class _Scaled:
    """A task whose losses are scaled by something of the batch."""

    def __init__(self, task, scale):
        self._task, self._scale = task, scale

    def __getattr__(self, name):
        return getattr(self._task, name)

    def per_record_loss(self, model, batch):
        return self._task.per_record_loss(model, batch) * self._scale(batch["attention_mask"])


@pytest.mark.parametrize(
    "scale",
    [
        lambda mask: mask.sum(1) / mask.sum(1).float().mean(),
        lambda mask: mask.sum(1) / mask.shape[1],
        lambda mask: 1.0 / len(mask),
        lambda mask: (mask.sum(1) / mask.sum()) * len(mask),
    ],
    ids=["mean length", "padded length", "records", "all tokens"],
)
def test_losses_that_are_scaled_by_the_batch_are_refused(model, scale):
    """Records of one length have the mean length, so the public ones have two."""
    bench = make_bench(model)
    _refused(dataclasses.replace(bench, task=_Scaled(bench.task, scale)), "per-record loss is uncoupled")


# -- draws --------------------------------------------------------------------------------------------------------


def test_empty_draws_of_records_that_are_drawn_again_are_refused(model, monkeypatch):
    class Never(PoissonSampler):
        def draw(self):
            found = super().draw()
            while len(found) == 0:
                found = super().draw()
            return found

    bench = make_bench(model)
    rate = bench.config.training.sample_rate
    monkeypatch.setattr(
        drawing, "_sampler", lambda c, n, records, *rest: Never(len(records), rate, drawing.OsCoins())
    )
    _refused(bench, "draws of nobody 0 times")


# -- releases of whole clients ------------------------------------------------------------------------------------

CLIENT_CASES = {"mean_b": {}, "tangent": {"mechanism": "prism", "aggregation": "tangent"}, "shares": SHARES}


@pytest.mark.parametrize("case", sorted(CLIENT_CASES))
def test_a_norm_of_whole_updates_that_leaves_the_head_out_fails_a_check(model, case, monkeypatch):
    bench = make_client_bench(model, **CLIENT_CASES[case])
    original = ClientMetric.clip

    def blind(self, blocks, bound):
        update = self.update_of(blocks)
        kept = {name: block for name, block in update.items() if not name.startswith("classifier")}
        zeros = {name: 0.0 * block for name, block in update.items() if name not in kept}
        norm = ClientMetric.norm(self, {**kept, **zeros})
        clipped = original(self, blocks, 1e9)
        factor = min(1.0, bound / max(norm, 1e-30))
        return dataclasses.replace(
            clipped, blocks={name: factor * block for name, block in clipped.blocks.items()}
        )

    monkeypatch.setattr(ClientMetric, "clip", blind)
    assert [one.name for one in run_client_checks(bench) if not one.passed] == ["whole updates are clipped"]


@pytest.mark.parametrize("case", sorted(CLIENT_CASES))
def test_a_clip_of_every_block_alone_fails_a_check(model, case, monkeypatch):
    """Along one direction it is as good as the joint one."""
    bench = make_client_bench(model, **CLIENT_CASES[case])
    original = ClientMetric.clip

    def apart(self, blocks, bound):
        clipped = original(self, blocks, 1e9)
        parts = {
            name: block * min(1.0, bound / max(float(np.linalg.norm(block)), 1e-30))
            for name, block in clipped.blocks.items()
        }
        return dataclasses.replace(clipped, blocks=parts)

    monkeypatch.setattr(ClientMetric, "clip", apart)
    assert [one.name for one in run_client_checks(bench) if not one.passed] == ["whole updates are clipped"]


def test_one_client_of_four_with_half_its_share_of_noise_is_seen(model, monkeypatch):
    bench = make_client_bench(model, **SHARES)
    assert all(one.passed for one in check_noise_scale(bench))
    original, calls = ClientMetric.noise, []

    def noise(self, names, stddev, source):
        calls.append(1)
        return original(self, names, stddev * (1.0 if len(calls) % 4 else 0.5), source)

    monkeypatch.setattr(ClientMetric, "noise", noise)
    assert not all(one.passed for one in check_noise_scale(bench))


# -- the judges ---------------------------------------------------------------------------------------------------


def test_a_draw_with_too_little_noise_is_seen_among_many_that_have_all():
    draws, labels = np.random.default_rng(5).standard_normal((64, 500)), np.array(["a"] * 500)
    assert judge_scales(draws, labels).passed
    draws[7] *= 0.5
    found = judge_scales(draws, labels)
    assert not found.passed
    assert "release 8" in found.detail


@pytest.mark.parametrize(("scale", "passes"), [(1.0, True), (1.3, True), (0.5, False)])
def test_too_little_noise_is_told_from_enough(scale, passes):
    found = np.stack([stats.chi2.rvs(free, size=8, random_state=3) for free in (500, 30, 20)], axis=1)
    energies = scalecheck.Energies(scale**2 * found, np.array([500, 30, 20]), ("a", "b", "c"))
    quiet = scalecheck.too_quiet(energies, {"all": np.arange(8)})
    assert (not quiet) is passes
    assert passes or [one.split(" in ")[1] for one in quiet] == ["a", "small blocks"]


@pytest.mark.long
@pytest.mark.parametrize("case", sorted(CASES))
def test_no_false_alarm_of_the_release_checks_in_a_hundred_starts(model, case):
    bench = make_bench(model, case)
    records = public_records(bench.task, 6, 24)
    for _ in range(100):
        for found in (
            releasecheck.check_fresh_noise(bench),
            releasecheck.check_empty_beside(bench, records),
            selfcheck.check_clip(bench, records),
        ):
            assert found.passed, found
