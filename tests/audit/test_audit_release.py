"""Faults around the noise that no attack on one client's releases can see: start-up self-checks find each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from audit_helpers import CASES, make_bench, make_client_bench, write_model
from chance import mixed_energy_bounds

from fedlora.aggregation.client_privacy import ClientMetric
from fedlora.audit.client_checks import check_empty_rounds
from fedlora.audit.gradient import GradientAudit
from fedlora.audit.noise_check import check_noise_scale
from fedlora.config import config_container, config_from_container
from fedlora.config.resolve import derive_noise
from fedlora.errors import SensitivityMismatchError
from fedlora.mechanisms.noise import OsNoise
from fedlora.mechanisms.stages import ClippedSum
from fedlora.names import split_block_name
from fedlora.training import cohort, drawing, releasecheck, selfcheck
from fedlora.training.groups import public_records
from fedlora.training.sampling import PoissonSampler, ShuffleSampler
from fedlora.training.session import bind, load_parts, step_event


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("audit-release") / "model", hidden=32)


def _with_stage(bench, **stages):
    changed = dataclasses.replace(bench.mechanism.stages, **stages)
    return dataclasses.replace(bench, mechanism=dataclasses.replace(bench.mechanism, stages=changed))


def _with_training(bench, **training):
    container = config_container(bench.config)
    container.pop("derived", None)
    container["training"] |= training
    config = config_from_container(container)
    parts = load_parts(config)
    return bind(derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout)), parts)


def _refused(bench, check):
    with pytest.raises(SensitivityMismatchError, match=check):
        selfcheck.require_selfchecks(bench)


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_sound_mechanisms_start(model, case, optimizer):
    bench = make_bench(model, case)
    if optimizer == "adam" and not case.startswith("noisy_projection"):
        bench = _with_training(bench, steps_per_round=2, optimizer={"kind": "adam", "lr": 0.01})
    names = [one.name for one in selfcheck.require_selfchecks(bench)]
    assert {
        "noise is fresh everywhere",
        "updates depend on noised sums alone",
        "batches are Poisson draws",
    } <= set(names)


# -- noise that is not fresh -----------------------------------------------------------------------------------


def _noise_changed(bench, change):
    """The same mechanism with `change(noise)` in the place of its noise, (clients, coordinates)."""
    original = bench.mechanism.stages.noise

    def noise(mechanism, state, total, sources):
        update = original(mechanism, state, total, sources)
        clean = total.blocks.flat
        changed = change(mechanism, update.blocks.flat - clean)
        return dataclasses.replace(update, blocks=update.blocks.like(clean + changed))

    return _with_stage(bench, noise=noise)


MECHANISMS = ["lora_fa", "prism", "factor", "dp_sgd"]


@pytest.mark.parametrize("case", MECHANISMS)
def test_noise_that_is_drawn_once_and_reused_over_steps_is_refused(model, case):
    kept = {}
    bench = _noise_changed(make_bench(model, case), lambda _, noise: kept.setdefault(noise.shape, noise))
    _refused(bench, "noise is fresh everywhere")


def test_a_source_that_repeats_itself_within_a_round_is_refused(model, monkeypatch):
    class Repeating(OsNoise):
        def gaussians(self, count, device, dtype):
            self.kept = getattr(self, "kept", {})
            if count not in self.kept:
                self.kept[count] = super().gaussians(count, device, dtype)
            return self.kept[count].clone()

    monkeypatch.setattr(releasecheck, "noise_source", lambda *names: Repeating())
    bench = _with_training(make_bench(model), steps_per_round=3)
    assert not releasecheck.check_fresh_noise(bench).passed


@pytest.mark.parametrize("case", MECHANISMS)
def test_a_cohort_that_shares_one_clients_noise_is_refused(model, case):
    bench = _noise_changed(make_bench(model, case), lambda _, noise: noise[:1].expand_as(noise))
    _refused(bench, "noise is fresh everywhere")


def test_a_cohort_that_shares_noise_under_a_built_mechanism_is_refused(model, monkeypatch):
    from fedlora.mechanisms import noisy_projection

    original = noisy_projection.draw_gaussians

    def shared(sources, *shape):
        drawn = original(sources, *shape)
        return drawn[:1].expand_as(drawn).clone()

    monkeypatch.setattr(noisy_projection, "draw_gaussians", shared)
    _refused(make_bench(model, "noisy_projection-shared"), "noise is fresh everywhere")


def test_noise_that_is_partly_anothers_is_refused(model):
    bench = _noise_changed(make_bench(model, rank=16), lambda _, noise: 0.6 * noise + 0.8 * noise[:1])
    _refused(bench, "noise is fresh everywhere")


def test_the_same_noise_in_every_layer_is_refused(model):
    bench = make_bench(model, rank=16)
    table = bench.mechanism.coordinates.table
    modules = [name for name, shape in table.shapes.items() if split_block_name(name)[0] and len(shape) == 2]
    first, second = (table.span(name) for name in modules[:2])
    assert first[1] - first[0] == second[1] - second[0] >= releasecheck._LARGE

    def change(_, noise):
        noise[:, slice(*second)] = noise[:, slice(*first)]
        return noise

    _refused(_noise_changed(bench, change), "noise is fresh everywhere")


@pytest.mark.parametrize("case", [*MECHANISMS, "lora_fa-per-layer"])
@pytest.mark.parametrize("place", [0, 7, -1])
def test_a_single_coordinate_without_noise_is_refused(model, case, place):
    def change(_, noise):
        noise[:, place] = 0.0
        return noise

    _refused(_noise_changed(make_bench(model, case), change), "1 coordinates without own noise")


@pytest.mark.parametrize("case", ["lora_fa", "prism", "factor"])
def test_a_head_that_is_left_out_of_the_noise_is_refused(model, case):
    def change(mechanism, noise):
        for name in mechanism.coordinates.extras:
            first, end = mechanism.coordinates.table.span(name)
            noise[:, first:end] = 0.0
        return noise

    _refused(_noise_changed(make_bench(model, case), change), "noise is fresh everywhere")


def _from_torch():
    generator = torch.Generator().manual_seed(7)
    return lambda _, noise: torch.randn(noise.shape, generator=generator)


def _from_numpy():
    generator = np.random.default_rng(7)
    return lambda _, noise: torch.from_numpy(generator.standard_normal(noise.shape)).float()


def _from_global_torch():
    def change(_, noise):
        torch.manual_seed(42)
        return torch.randn(noise.shape)

    return change


def _from_global_numpy():
    return lambda _, noise: torch.from_numpy(np.random.standard_normal(noise.shape)).float()  # noqa: NPY002


@pytest.mark.parametrize("made", [_from_torch, _from_numpy, _from_global_torch, _from_global_numpy])
def test_noise_that_does_not_come_from_the_clients_source_is_refused(model, made):
    """A generator that goes on from call to call looks fresh, and whoever knows its seed takes its noise off."""
    _refused(_noise_changed(make_bench(model), made()), "noise is fresh everywhere")


# -- clips and divisors ----------------------------------------------------------------------------------------


def _batch_clip(mechanism, gradients, *, mean):
    """Sum (or average) first, clip then."""
    bound = mechanism.privacy.max_grad_norm
    loud = {group: torch.zeros_like(value) for group, value in gradients.squared_norms.items()}
    from fedlora.mechanisms.clip import clip_and_sum

    total = clip_and_sum(
        dataclasses.replace(gradients, squared_norms=loud),
        mechanism.coordinates.table,
        mechanism.metric,
        bound,
    )
    flat = total.blocks.flat / (max(1, len(gradients.client_of_record)) if mean else 1)
    norm = flat.norm(dim=1, keepdim=True)
    return ClippedSum(total.blocks.like(flat * (bound / norm.clamp_min(bound))), bound, mechanism.metric)


@pytest.mark.parametrize("case", ["lora_fa", "factor", "prism", "dp_sgd"])
@pytest.mark.parametrize("mean", [False, True], ids=["batch's sum", "batch's mean"])
def test_a_clip_of_the_batch_instead_of_each_record_is_refused(model, case, mean):
    bench = make_bench(model, case)
    _refused(_with_stage(bench, clip=lambda m, g: _batch_clip(m, g, mean=mean)), "clip is active.*moves miss")


@pytest.mark.parametrize("case", ["lora_fa", "prism"])
def test_a_sum_that_is_divided_by_the_drawn_records_before_the_noise_is_refused(model, case):
    bench = make_bench(model, case)
    clip = bench.mechanism.stages.clip

    def divided(mechanism, gradients):
        total = clip(mechanism, gradients)
        flat = total.blocks.flat / max(1, len(gradients.client_of_record))
        return dataclasses.replace(total, blocks=total.blocks.like(flat))

    _refused(_with_stage(bench, clip=divided), "clip is active.*moves miss")


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_divisor_that_counts_the_drawn_records_is_refused(model, case, monkeypatch):
    counts = []
    original_draw, original = cohort._draw, cohort.CohortEngine._noisy_sums

    def draw(jobs):
        drawn = original_draw(jobs)
        counts[:] = [max(1, len(one)) for one in drawn]
        return drawn

    def noisy(self, mechanism, state, jobs, sources):
        update = original(self, mechanism, state, jobs, sources)
        scale = 6.0 / torch.tensor(counts, dtype=update.blocks.flat.dtype)[:, None]
        return dataclasses.replace(update, blocks=update.blocks.like(update.blocks.flat * scale))

    monkeypatch.setattr(cohort, "_draw", draw)
    monkeypatch.setattr(cohort.CohortEngine, "_noisy_sums", noisy)
    _refused(make_bench(model, case), "updates depend on noised sums alone")


def test_noise_that_is_added_before_the_clip_is_seen(model):
    """What is clipped after the noise is quiet where nobody is in."""
    bench = make_bench(model)
    bound = bench.mechanism.privacy.max_grad_norm

    def change(_, noise):
        return noise * (bound / noise.norm(dim=1, keepdim=True).clamp_min(bound))

    (check,) = check_noise_scale(_noise_changed(bench, change))
    assert not check.passed


def test_the_deviation_of_another_groups_weight_is_seen(model):
    bench = make_bench(model)
    weights = bench.config.privacy.group_weights
    assert weights["head"] < weights["adapters"]

    def change(mechanism, noise):  # the head gets sigma C / w of the adapters
        for name in mechanism.coordinates.extras:
            first, end = mechanism.coordinates.table.span(name)
            noise[:, first:end] *= weights["head"] / weights["adapters"]
        return noise

    (check,) = check_noise_scale(_noise_changed(bench, change))
    assert not check.passed


# -- draws -----------------------------------------------------------------------------------------------------


class _Fixed:
    """So many records each time, drawn without replacement."""

    def __init__(self, count, rate):
        self._count, self._size = count, round(count * rate)

    def draw(self):
        return np.sort(np.random.default_rng().choice(self._count, self._size, replace=False))


class _Kept:
    """One Poisson draw for all steps."""

    def __init__(self, count, rate):
        self._drawn = np.flatnonzero(np.random.default_rng().random(count) < rate)

    def draw(self):
        return self._drawn


class _Together:
    """One coin for all records."""

    def __init__(self, count, rate):
        self._count, self._rate = count, rate

    def draw(self):
        return np.arange(self._count if np.random.default_rng().random() < self._rate else 0)


@pytest.mark.parametrize("rate", [0.02, 0.2, 0.8])
@pytest.mark.parametrize(
    "made",
    [
        _Fixed,
        _Kept,
        _Together,
        lambda count, rate: ShuffleSampler(count, max(1, round(count * rate)), np.random.default_rng(1)),
        lambda count, rate: PoissonSampler(count, min(1.0, 1.25 * rate), drawing.OsCoins()),
    ],
    ids=["fixed size", "drawn once", "all or nobody", "shuffled", "larger rate"],
)
def test_draws_that_are_not_poisson_are_refused(model, rate, made, monkeypatch):
    config = _at_rate(make_bench(model), rate)
    assert releasecheck.check_draws(config).passed
    monkeypatch.setattr(drawing, "_sampler", lambda c, name, records, *rest: made(len(records), rate))
    assert not releasecheck.check_draws(config).passed


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 1e-3, 0.5, 0.999])
def test_small_and_large_rates_raise_no_alarm(model, rate):
    config = _at_rate(make_bench(model), rate)
    found = [releasecheck.check_draws(config) for _ in range(5)]
    assert all(one.passed for one in found), found


def _at_rate(bench, rate):
    training = bench.config.training
    changed = training.model_copy(update={"expected_batch_size": 10, "nominal_records": round(10 / rate)})
    return bench.config.model_copy(update={"training": changed})


def test_shuffled_batches_end_a_trainers_start(model, monkeypatch):
    monkeypatch.setattr(
        drawing,
        "_sampler",
        lambda c, n, records, *rest: ShuffleSampler(len(records), 6, np.random.default_rng(1)),
    )
    _refused(make_bench(model), "batches are Poisson draws")


# -- no false alarm --------------------------------------------------------------------------------------------


def test_few_numbers_and_large_blocks_are_told_apart():
    rows = np.random.default_rng(2).standard_normal((8, 1000))
    assert not releasecheck._alike(rows)
    assert releasecheck._alike(np.vstack([rows, -3.0 * rows[:1]]))
    assert not releasecheck._alike(rows[:, :10])
    assert releasecheck._alike(np.vstack([rows[:, :10], -rows[:1, :10]]))
    assert not releasecheck._alike(np.ones((2, 3)))


@pytest.mark.long
@pytest.mark.parametrize("case", sorted(CASES))
def test_no_false_alarm_of_the_release_checks_in_two_hundred_starts(model, case):
    bench = make_bench(model, case)
    records = public_records(bench.task, 6, 24)
    assert all(one.passed for _ in range(200) for one in releasecheck.check_release(bench, records))


def _centered(model, case):
    container = config_container(make_bench(model, case).config)
    container.pop("derived", None)
    container["adapter"]["head_input"] = "centered"
    config = config_from_container(container)
    parts = load_parts(config)
    return bind(derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout)), parts)


def _energy_bounds(bench, shape):
    """Least and largest mean square of (draws, directions) statistics of noise alone, whose head leaves u out.

    Directions of one label are correlated by c_ij = -u_i u_j / sqrt((1 - u_i^2)(1 - u_j^2)): the squares of all of them
    sum up to at most k^2, and no eigenvalue lies above k = 1 / (1 - max u_i^2).
    """
    draws, directions = shape
    (direction,) = bench.mechanism.left_out.values()
    largest = 1.0 / (1.0 - float(direction.double().square().max()))
    squares = draws * (directions + bench.config.model.num_labels * largest**2)
    return mixed_energy_bounds(squares, largest, draws * directions)


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_direction_that_is_left_out_is_no_missing_noise(model, case):
    """Of a centered head's noise the part along the common input is taken away: no block has too little for that."""
    bench = _centered(model, case)
    assert bench.mechanism.left_out
    for _ in range(5):
        (check,) = check_noise_scale(bench)
        assert check.passed, check.detail
    audit = GradientAudit(bench, canaries=20_000)
    plan = audit.plan()
    assert audit.bound(audit.attack(plan), plan) <= plan.claimed_epsilon
    mixed = case.startswith("noisy_projection") or case.endswith("per-layer")  # directions of several blocks
    (found, _) = audit.quiet(20_000 if mixed else 2_000)
    low, high = _energy_bounds(bench, found.shape)
    assert low < np.square(found).mean() < high


@pytest.mark.parametrize("case", ["lora_fa", "prism"])
def test_the_variance_along_a_left_out_direction_is_exact(model, case):
    """The head's statistics have variance 1 only if what is left out is accounted for: 3 % of 64 coordinates.

    5000 draws put that six deviations beyond the bounds, on either side.
    """
    bench = _centered(model, case)
    found, labels = GradientAudit(bench, canaries=20_000).quiet(10_000)
    head = np.square(found[:, labels == "classifier|weight"])
    assert head.shape == (5000, 64)
    low, high = _energy_bounds(bench, head.shape)
    assert low < head.mean() < high
    assert head.mean() * (1.0 - 1.0 / 32) < low  # a filter that takes the whole variance for granted
    assert head.mean() * (1.0 + 1.0 / 32) > high  # noise of which nothing is left out


@pytest.mark.parametrize("rank", [8, 15])
def test_a_core_that_stands_in_both_blocks_is_no_missing_clip(tmp_path, rank):
    """At a high rank most of a tangent vector is its core; a clip that works was taken for one that does not."""
    wide = write_model(tmp_path / "model", hidden=16)
    bench = make_bench(wide, "prism", rank=rank, group_weights={"adapters": 1.0, "head": 0.01})
    found = selfcheck.check_clip(bench, selfcheck.uneven_records(bench))
    assert found.passed, found.detail
    state = bench.mechanism.stages.open(
        bench.mechanism, bench.adapted, bench.mechanism.initial_payload(bench.adapted), 1
    )
    frames = selfcheck._inner_frames(state)
    assert len(frames) == len(bench.layout.modules)
    assert all(frame.shape == (1, 16, rank) for frame in frames.values())


def test_half_the_noise_of_a_centered_head_is_caught(model):
    def change(mechanism, noise):
        for name in mechanism.coordinates.extras:
            first, end = mechanism.coordinates.table.span(name)
            noise[:, first:end] *= 0.5
        return noise

    (check,) = check_noise_scale(_noise_changed(_centered(model, "lora_fa"), change))
    assert not check.passed


def test_a_seeded_test_run_of_the_noisy_projection_starts(model):
    """Its projection is the same in every draw without records, and where it is sent as lora_A it carries no noise."""
    bench = make_bench(model, "noisy_projection", noise_source="seeded-test-only")
    assert all(one.passed for one in selfcheck.require_selfchecks(bench))


# -- releases of whole clients ---------------------------------------------------------------------------------

CLIENT_CASES = {
    "mean_b": {},
    "tangent": {"mechanism": "prism", "aggregation": "tangent"},
    "shares": {"noise_at": "clients", "honest_clients": 4},
}


def _client_faulty(monkeypatch, change):
    """Change the noise of a client-level release: `change(blocks)` of one draw."""
    original = ClientMetric.noise
    monkeypatch.setattr(
        ClientMetric,
        "noise",
        lambda self, names, stddev, source: change(dict(original(self, names, stddev, source))),
    )


def _emptiness(model, case):
    return check_empty_rounds(*_client(model, case))


def _client(model, case):
    bench = make_client_bench(model, **CLIENT_CASES[case])
    return bench, bench.config.privacy


@pytest.mark.parametrize("case", sorted(CLIENT_CASES))
def test_noise_of_a_client_level_release_is_fresh(model, case):
    for _ in range(10):
        found = _emptiness(model, case)
        assert found.passed, found.detail


@pytest.mark.parametrize("case", sorted(CLIENT_CASES))
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_noise_that_is_kept_between_client_level_rounds_is_seen(model, case, sign, monkeypatch):
    kept = {}

    def change(blocks):
        return {name: sign * kept.setdefault(name, block) for name, block in blocks.items()}

    _client_faulty(monkeypatch, change)
    assert not _emptiness(model, case).passed


@pytest.mark.parametrize("case", sorted(CLIENT_CASES))
def test_a_value_of_a_client_level_release_without_noise_is_seen(model, case, monkeypatch):
    def change(blocks):
        name = max(blocks, key=lambda one: blocks[one].size)
        changed = np.array(blocks[name])
        changed.reshape(-1)[3] = 0.0
        return {**blocks, name: changed}

    _client_faulty(monkeypatch, change)
    assert "1 values without own noise" in _emptiness(model, case).detail


@pytest.mark.parametrize("case", sorted(CLIENT_CASES))
def test_noise_of_another_source_in_a_client_level_release_is_seen(model, case, monkeypatch):
    generator = np.random.default_rng(5)
    _client_faulty(
        monkeypatch,
        lambda blocks: {name: generator.standard_normal(block.shape) for name, block in blocks.items()},
    )
    assert not _emptiness(model, case).passed
