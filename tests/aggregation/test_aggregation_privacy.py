"""Client-level privacy: sensitivity, noise law, order, quantile, refusals, and flwr's faults beside ours."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from aggregation_cases import LAYOUT, aggregator, federation, random_payload, relative
from scipy import stats

from fedlora.accounting import GaussianEvent, PoissonGaussianEvent, epsilon_of
from fedlora.aggregation import ClientPlan, RoundRules, aggregation_problems, clip_and_share
from fedlora.aggregation.client_privacy import ClientMetric
from fedlora.config.schema import BudgetConfig, ClientPrivacy
from fedlora.errors import (
    BudgetExceededError,
    PrivacyParameterError,
    TooFewRepliesError,
    UnsupportedEventError,
)
from fedlora.wire import expected_blocks


class Normals:
    private = False

    def __init__(self, seed=0, scale=1.0):
        self.rng, self.scale = np.random.default_rng(seed), scale

    def normal(self, shape):
        return self.scale * self.rng.standard_normal(shape)


class Charges(list):
    def __call__(self, event):
        self.append(event)


def plan(**changes):
    base = {
        "clipping_norm": 1.0,
        "noise_multiplier": 1.0,
        "expected_clients": 4.0,
        "sample_rate": None,
    }
    return ClientPlan(**{**base, **changes})


def private(kind, the_plan, *, seed=0, scale=1.0, charge=None, rules=None):
    return aggregator(
        kind,
        plan=the_plan,
        noise=Normals(seed, scale),
        charge=Charges() if charge is None else charge,
        rules=rules,
    )


KINDS = [("mean_b", "lora_b", "lora_b"), ("tangent", "frames", "tangent")]


def metric_distance(current, one, two, kind):
    """Norm of the difference of two noiseless sums, in the metric that is noised."""
    metric = ClientMetric(current)
    difference = {name: one[name] - two[name] for name in one}
    return (
        metric.norm(difference)
        if kind == "tangent"
        else math.sqrt(sum(float(np.square(block).sum()) for block in difference.values()))
    )


def noiseless_sum(kind, current, payloads, the_plan):
    from fedlora.aggregation.client_privacy import ClientRelease

    up = "lora_b" if kind == "mean_b" else "tangent"
    release = ClientRelease(the_plan, current, expected_blocks(current.modules, LAYOUT.extra, up))
    for payload in payloads:
        release.add(payload.blocks)
    mean, _ = release.release(Normals(scale=0.0))
    return {name: block * the_plan.expected_clients for name, block in mean.items()}


@pytest.mark.parametrize(("kind", "down", "up"), KINDS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e15])
def test_h21_one_client_moves_the_sum_by_at_most_the_bound(kind, down, up, scale):
    current = random_payload(down, 0)
    others = [random_payload(up, 10 + i) for i in range(4)]
    for seed in range(3):
        extra = random_payload(up, 50 + seed, scale=scale)
        with_client = noiseless_sum(kind, current, [*others, extra], plan())
        without = noiseless_sum(kind, current, others, plan())
        distance = metric_distance(current, with_client, without, kind)
        assert distance <= 1.0 + 1e-9
        if scale >= 1.0:
            assert distance > 0.99


@pytest.mark.parametrize("counts", [[10_000, 10, 10, 10, 10], [1, 1, 10**9], [10, 10]])
@pytest.mark.parametrize(("kind", "down", "up"), KINDS)
def test_h21_claimed_counts_have_no_influence(kind, down, up, counts):
    current = random_payload(down, 0)
    results = []
    for claim in (False, True):
        agg = private(kind, plan(), scale=0.0)
        agg.begin(current)
        for i, count in enumerate(counts):
            payload = random_payload(up, i)
            agg.add(f"c{i}", replace(payload, notes={"num_examples": count}) if claim else payload)
        results.append(agg.finish().payload)
    for name, block in results[0].blocks.items():
        np.testing.assert_array_equal(results[1].blocks[name], block)


def test_h21_weighting_is_refused_with_the_reason():
    privacy = client_privacy()
    problems = aggregation_problems(federation("mean_b", weights="num_examples"), privacy)
    assert any("num_examples" in line and "equal" in line for line in problems)


def client_privacy(**changes):
    base = {
        "unit": "client",
        "adjacency": "add_or_remove",
        "noise_multiplier": 1.0,
        "target_delta": 1e-5,
        "budget": BudgetConfig(epsilon=8.0, delta=1e-5, on_exhausted="refuse"),
        "noise_source": "os",
        "clipping_norm": 1.0,
    }
    return ClientPrivacy(**{**base, **changes})


@pytest.mark.parametrize("kind", ["product", "stack", "aligned", "factor_mean"])
def test_modes_with_noiseless_components_are_refused_by_name(kind):
    problems = aggregation_problems(federation(kind), client_privacy())
    assert any(kind in line and "mean_b" in line and "tangent" in line for line in problems)


@pytest.mark.parametrize("robust", ["trimmed", "median", "norm_bounded"])
def test_robust_means_are_refused_under_client_level_privacy(robust):
    fed = federation("mean_b", robust=robust, max_update_norm=1.0)
    assert aggregation_problems(fed, client_privacy())
    assert not aggregation_problems(federation("mean_b"), client_privacy())


# -- the noise -----------------------------------------------------------------------------------------


def released_noise(kind, down, up, scale=1.0, rounds=60, clients=0):
    """Values of noise per coordinate of the release, in units of sigma C / m, isotropic coordinates."""
    current = random_payload(down, 0)
    metric = ClientMetric(current)
    shapes = expected_blocks(current.modules, LAYOUT.extra, up)
    draws = [metric.noise(shapes, 1.0, Normals(100 + i, scale)) for i in range(rounds)]
    return metric, draws


@pytest.mark.parametrize(("kind", "down", "up"), KINDS)
@pytest.mark.parametrize(("scale", "passes"), [(1.0, True), (0.95, False), (1.05, False)])
def test_noise_energy_has_the_right_law_and_five_percent_off_is_seen(kind, down, up, scale, passes):
    rounds = 150
    metric, draws = released_noise(kind, down, up, scale, rounds)
    energy = sum(metric.norm(draw) ** 2 for draw in draws)
    if kind == "tangent":
        dims = sum(s.rank * (s.out_features + s.in_features - s.rank) for s in LAYOUT.modules.values()) + 24
    else:
        dims = sum(s.rank * s.out_features for s in LAYOUT.modules.values()) + 24
    low, high = stats.chi2.interval(1 - 1e-4, rounds * dims)
    assert bool(low < energy < high) is passes


def test_tangent_noise_shares_one_core_and_is_gaussian_in_every_coordinate():
    metric, draws = released_noise("tangent", "frames", "tangent", rounds=200)
    from fedlora.aggregation.linear import tangent_of
    from fedlora.geometry import core_mismatch

    frames = metric._frames["a.q"]
    for draw in draws[:5]:
        assert float(core_mismatch(frames, tangent_of(draw, "a.q"))) < 1e-12
    for block in ("x_out", "x_in"):
        values = np.concatenate([draw[f"a.q|{block}"].reshape(-1) for draw in draws])
        assert stats.kstest(values[:5000], "norm").pvalue > 1e-4


@pytest.mark.parametrize(("kind", "down", "up"), KINDS)
def test_the_release_is_mean_plus_noise_over_the_public_divisor(kind, down, up):
    current = random_payload(down, 0)
    noisy = private(kind, plan(expected_clients=40.0, noise_multiplier=2.0, clipping_norm=0.5), seed=7)
    noisy.begin(current)
    for i in range(3):
        noisy.add(f"c{i}", random_payload(up, i))
    result = noisy.finish()
    name = "score|weight"
    quiet = private(kind, plan(expected_clients=40.0, clipping_norm=0.5), scale=0.0)
    quiet.begin(current)
    for i in range(3):
        quiet.add(f"c{i}", random_payload(up, i))
    step = quiet.finish().payload.blocks[name] - current.blocks[name]
    assert np.linalg.norm(step) <= 3 * 0.5 / 40.0 + 1e-6
    noise = result.payload.blocks[name] - current.blocks[name] - step
    assert 0.3 < noise.std() / (2.0 * 0.5 / 40.0) < 2.0
    assert result.event == GaussianEvent(2.0)


@pytest.mark.parametrize(("kind", "down", "up"), KINDS)
@pytest.mark.parametrize("answers", [0, 1, 3])
def test_noise_is_the_same_whoever_answers(kind, down, up, answers):
    current = random_payload(down, 0)
    outcomes = []
    for scale in (0.0, 1.0):
        agg = private(kind, plan(), seed=3, scale=scale, rules=RoundRules(min_replies=4))
        agg.begin(current)
        for i in range(answers):
            agg.add(f"c{i}", random_payload(up, i))
        outcomes.append(agg.finish().payload.blocks["score|weight"])
    agg = private(kind, plan(), seed=3)
    agg.begin(current)
    alone = agg.finish().payload.blocks["score|weight"] - current.blocks["score|weight"]
    np.testing.assert_allclose(outcomes[1] - outcomes[0], alone, atol=1e-6)


def test_h06_rejected_updates_leave_the_private_sum_alone():
    current = random_payload("lora_b", 0)
    good = [random_payload("lora_b", i) for i in range(3)]
    for value in (np.nan, np.inf, 1e38):
        bad = random_payload("lora_b", 9)
        block = bad.blocks["a.v|lora_B"].copy()
        block[0, 0] = value
        bad = replace(bad, blocks={**bad.blocks, "a.v|lora_B": block})
        agg = private("mean_b", plan(), scale=0.0)
        agg.begin(current)
        for i, payload in enumerate(good):
            agg.add(f"c{i}", payload)
        assert not agg.add("bad", bad)
        result = agg.finish()
        assert "a.v" in result.rejected["bad"]
        assert all(np.isfinite(b).all() for b in result.payload.blocks.values())


# -- ledger and event ------------------------------------------------------------------------------------


def test_nothing_is_released_if_the_charge_fails():
    def refuse(event):
        raise BudgetExceededError("over", spent=1.0, projected=2.0, budget=1.5)

    class NeverAsked:
        private = True

        def normal(self, shape):
            raise AssertionError("noise was drawn before the charge")

    agg = aggregator("mean_b", plan=plan(), noise=NeverAsked(), charge=refuse)
    agg.begin(random_payload("lora_b", 0))
    agg.add("c", random_payload("lora_b", 1))
    with pytest.raises(BudgetExceededError):
        agg.finish()


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        ({}, GaussianEvent(1.0)),
        ({"sample_rate": 0.25}, PoissonGaussianEvent(1.0, 0.25)),
        ({"sample_rate": 1.0}, GaussianEvent(1.0)),
        (
            {"quantile": 0.5, "quantile_noise_multiplier": 2.0, "sample_rate": 0.25},
            PoissonGaussianEvent((1.0 + 0.25) ** -0.5, 0.25),
        ),
    ],
)
def test_the_event_is_what_the_round_releases(changes, event):
    charges = Charges()
    agg = private("mean_b", plan(**changes), charge=charges)
    for _ in range(3):
        agg.begin(random_payload("lora_b", 0))
        agg.add("c", random_payload("lora_b", 1))
        assert agg.finish().event == event
    assert charges == [event] * 3


def test_the_quantile_bit_costs_epsilon():
    bare = epsilon_of(plan(sample_rate=0.1).event.times(3), 1e-5, accountant="rdp").epsilon
    adaptive = plan(sample_rate=0.1, quantile=0.5, quantile_noise_multiplier=1.0)
    assert epsilon_of(adaptive.event.times(3), 1e-5, accountant="rdp").epsilon > 1.1 * bare


def test_missing_noise_or_ledger_is_refused():
    for parts in ({"noise": Normals()}, {"charge": Charges()}, {}):
        with pytest.raises(UnsupportedEventError):
            aggregator("mean_b", plan=plan(), **parts)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["clipping_norm", "noise_multiplier", "expected_clients", "sample_rate"])
def test_plans_fail_closed(name, value):
    with pytest.raises(PrivacyParameterError):
        plan(**{name: value})


# -- adaptive clipping ------------------------------------------------------------------------------------


def clip_after(start, median, rounds=120, clients=40, noise=0.5):
    """Clipping norm after some rounds of clients whose update norms have the given median."""
    the_plan = plan(
        clipping_norm=start, expected_clients=float(clients), quantile=0.5, quantile_noise_multiplier=noise
    )
    agg = private("mean_b", the_plan, seed=5)
    rng = np.random.default_rng(1)
    current = random_payload("lora_b", 0)
    for _ in range(rounds):
        agg.begin(current)
        for i in range(clients):
            delta = random_payload("lora_b", i)
            norm = math.sqrt(sum(float(np.square(b.astype(float)).sum()) for b in delta.blocks.values()))
            target = median * math.exp(rng.normal(0, 0.2))
            blocks = {
                n: (current.blocks[n] + b * np.float32(target / norm)).astype(np.float32)
                for n, b in delta.blocks.items()
            }
            agg.add(f"c{i:02d}", replace(delta, blocks=blocks))
        agg.finish()
    return agg.plan.clipping_norm


@pytest.mark.parametrize("start", [0.3, 0.9, 1.1, 4.0])
def test_adaptive_clipping_finds_the_median_where_flwr_runs_away(start):
    assert 0.8 < clip_after(start, 1.0, rounds=60, clients=20) < 1.25


@pytest.mark.parametrize(("start", "runs_to"), [(0.9, "zero"), (1.1, "infinity")])
def test_flwr_adaptive_clipping_has_the_wrong_sign(start, runs_to):
    from flwr.supercore.differential_privacy import adaptive_clip_inputs_inplace

    clip = start
    for _ in range(100):
        bits = 0
        for norm in np.exp(np.random.default_rng(0).normal(0, 0.01, 10)):
            bits += adaptive_clip_inputs_inplace([np.array([norm])], clip)
        clip *= math.exp(-0.2 * (bits / 10 - 0.5))
    assert clip < 1e-3 if runs_to == "zero" else clip > 1e3


def test_flwr_clip_lets_nan_pass_and_ours_refuses():
    from flwr.supercore.differential_privacy import clip_inputs_inplace

    update = [np.array([np.nan, 3.0])]
    clip_inputs_inplace(update, 1.0)
    assert update[0][1] == 3.0
    agg = private("mean_b", plan(), scale=0.0)
    current = random_payload("lora_b", 0)
    agg.begin(current)
    bad = random_payload("lora_b", 1)
    block = bad.blocks["score|weight"].copy()
    block[0, 0] = np.nan
    assert not agg.add("c", replace(bad, blocks={**bad.blocks, "score|weight": block}))
    with pytest.raises(ZeroDivisionError):
        clip_inputs_inplace([np.zeros(3)], 1.0)
    assert agg.add("still", current)
    result = agg.finish()
    assert relative(result.payload.blocks["a.q|lora_B"], current.blocks["a.q|lora_B"]) < 1e-7


def test_flwr_noise_ignores_weights_and_ours_has_none():
    from flwr.supercore.differential_privacy import compute_stdv

    counts = [10_000, 10, 10, 10, 10]
    clip, sigma = 1.0, 1.0
    stdv = compute_stdv(sigma, clip, len(counts))
    moved = clip * max(counts) / sum(counts)
    assert moved / stdv > 4.5
    quiet = private("mean_b", plan(expected_clients=5.0), scale=0.0)
    current = random_payload("lora_b", 0)
    quiet.begin(current)
    for i, count in enumerate(counts):
        payload = random_payload("lora_b", 1) if i == 0 else current
        quiet.add(f"c{i}", replace(payload, notes={"num_examples": count}))
    result = quiet.finish().payload
    norm = math.sqrt(sum(float(np.square(result.blocks[n] - b).sum()) for n, b in current.blocks.items()))
    assert norm == pytest.approx(clip / 5, rel=1e-5)


# -- shares of noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "down", "up"), KINDS)
def test_shares_of_noise_add_up_and_too_few_honest_answers_release_nothing(kind, down, up):
    current = random_payload(down, 0)
    the_plan = plan(noise_at="clients", honest_clients=4, noise_multiplier=1.5, clipping_norm=0.5)
    assert the_plan.share_stddev == pytest.approx(1.5 * 0.5 / 2)
    squares, rounds = 0.0, 40
    metric = ClientMetric(current)
    dims = 0
    for r in range(rounds):
        total = None
        for i in range(4):
            own = random_payload(up, i)
            sent = clip_and_share(own, current, the_plan, Normals(1000 * r + i))
            quiet = clip_and_share(own, current, the_plan, Normals(scale=0.0))
            noise = {n: b.astype(np.float64) - quiet.blocks[n] for n, b in sent.blocks.items()}
            total = noise if total is None else {n: total[n] + b for n, b in noise.items()}
        squares += metric.norm(total) ** 2
    if kind == "tangent":
        dims = sum(s.rank * (s.out_features + s.in_features - s.rank) for s in LAYOUT.modules.values()) + 24
    else:
        dims = sum(s.rank * s.out_features for s in LAYOUT.modules.values()) + 24
    assert squares / (rounds * dims) == pytest.approx((1.5 * 0.5) ** 2, rel=0.1)
    agg = private(kind, the_plan)
    agg.begin(current)
    for i in range(3):
        agg.add(f"c{i}", random_payload(up, i))
    with pytest.raises(TooFewRepliesError, match="honest"):
        agg.finish()


def test_shares_need_the_honest_count():
    with pytest.raises(PrivacyParameterError, match="honest"):
        plan(noise_at="clients")
