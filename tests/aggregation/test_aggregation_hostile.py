"""Odd and hostile numbers, counts, orders and resumes that no honest client sends, in every mode."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from aggregation_cases import (
    KINDS,
    LAYOUT,
    RECIPE,
    aggregator,
    dense,
    random_payload,
    relative,
    run,
    truncated,
    with_gauge,
)
from scipy import stats

from fedlora.accounting import GaussianEvent
from fedlora.aggregation import ClientPlan, RoundRules
from fedlora.aggregation.client_privacy import ClientMetric, ClientRelease
from fedlora.aggregation.running_sum import GROUP, RunningSum
from fedlora.names import block_name
from fedlora.wire import ModuleSpec, expected_blocks

LINEAR = ["mean_b", "tangent"]
FACTORS = ["product", "stack", "aligned", "factor_mean"]


class Normals:
    private = False

    def __init__(self, seed=0, scale=1.0):
        self.rng, self.scale = np.random.default_rng(seed), scale

    def normal(self, shape):
        return self.scale * self.rng.standard_normal(shape)


def clients(kind, count, scale=1.0):
    return {f"c{i:02d}": random_payload(KINDS[kind][1], 10 + i, scale=scale) for i in range(count)}


def scaled(payload, factor):
    return replace(
        payload, blocks={n: (b * np.float32(factor)).astype(np.float32) for n, b in payload.blocks.items()}
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e-12, 1e12])
def test_extreme_scales_give_finite_adapters(kind, scale):
    current = random_payload(KINDS[kind][0], 0)
    result = run(kind, current, clients(kind, 4, scale))
    assert len(result.accepted) == 4
    assert np.isfinite(result.residual)
    assert all(np.isfinite(b).all() for b in result.payload.blocks.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [1e38, -1e38, np.nan, np.inf])
def test_one_impossible_element_is_refused_with_its_layer_in_every_mode(kind, value):
    current, sent = random_payload(KINDS[kind][0], 0), clients(kind, 4)
    name = next(n for n in sent["c02"].blocks if n.startswith("a.v"))
    block = sent["c02"].blocks[name].copy()
    block[-1, -1] = value
    sent["c02"] = replace(sent["c02"], blocks={**sent["c02"].blocks, name: block})
    result = run(kind, current, sent)
    assert result.accepted == ("c00", "c01", "c03")
    assert "'c02'" in result.rejected["c02"]
    assert "a.v" in result.rejected["c02"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.int32, np.float16, np.float64, np.bool_, np.complex64])
def test_other_dtypes_are_refused_in_every_mode(kind, dtype):
    current, sent = random_payload(KINDS[kind][0], 0), clients(kind, 3)
    name = "score|weight"
    odd = {**sent["c01"].blocks, name: np.ones(sent["c01"].blocks[name].shape, dtype=dtype)}
    sent["c01"] = replace(sent["c01"], blocks=odd)
    result = run(kind, current, sent)
    assert result.accepted == ("c00", "c02")
    assert "float32" in result.rejected["c01"]


@pytest.mark.parametrize("kind", KINDS)
def test_negative_zeros_are_zeros(kind):
    current = random_payload(KINDS[kind][0], 0)
    zero = {"c": scaled(random_payload(KINDS[kind][1], 1), 0.0)}
    minus = {"c": scaled(random_payload(KINDS[kind][1], 1), -0.0)}
    one, two = run(kind, current, zero), run(kind, current, minus)
    for name, block in one.payload.blocks.items():
        np.testing.assert_array_equal(np.abs(two.payload.blocks[name]), np.abs(block))


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("kind", FACTORS)
def test_clients_of_rank_zero_or_less_are_refused(kind, rank):
    spec = replace(LAYOUT.modules["a.q"], rank=rank)
    honest = random_payload("factors", 1)
    empty = {
        block_name("a.q", "lora_A"): np.zeros((0, 9), dtype=np.float32),
        block_name("a.q", "lora_B"): np.zeros((12, 0), dtype=np.float32),
    }
    odd = replace(honest, modules={**honest.modules, "a.q": spec}, blocks={**honest.blocks, **empty})
    result = run(kind, random_payload("factors", 0), {"a": honest, "b": odd})
    assert result.accepted == ("a",)
    assert "a.q" in result.rejected["b"]


@pytest.mark.parametrize("scaling", [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300, 1e7, 1e-7])
def test_a_clients_scaling_cannot_make_the_aggregate_infinite(scaling):
    honest = random_payload("factors", 1)
    modules = {m: replace(s, scaling=scaling) for m, s in honest.modules.items()}
    result = run(
        "product", random_payload("factors", 0), {"a": honest, "b": replace(honest, modules=modules)}
    )
    assert result.accepted == ("a",)
    assert "scaling" in result.rejected["b"]
    assert all(np.isfinite(b).all() for b in result.payload.blocks.values())


@pytest.mark.parametrize("scaling", [1e6, 1e-6])
@pytest.mark.parametrize("kind", ["product", "stack", "aligned"])
def test_the_largest_factors_at_the_extreme_scalings_stay_finite(kind, scaling):
    sent = {}
    for i, size in enumerate((1e17, 1.0)):
        honest = random_payload("factors", i, scale=size)
        sent[f"c{i}"] = replace(
            honest, modules={m: replace(s, scaling=scaling) for m, s in honest.modules.items()}
        )
    result = run(kind, random_payload("factors", 9), sent)
    assert result.accepted == ("c0", "c1")
    assert all(np.isfinite(b).all() for b in result.payload.blocks.values())


@pytest.mark.parametrize("kind", LINEAR)
def test_ten_thousand_cancelling_clients_leave_the_small_rest(kind):
    """Every client but the last is undone by its neighbour; what stays is ten orders of magnitude smaller."""
    pairs, total = 5000, RunningSum()
    big = random_payload(KINDS[kind][1], 1, scale=1e3)
    undone = scaled(big, -1.0)
    small = random_payload(KINDS[kind][1], 2, scale=1e-3)
    for _ in range(pairs):
        total.add(big.blocks)
        total.add(undone.blocks)
    total.add(small.blocks)
    for name, block in small.blocks.items():
        largest = float(np.abs(big.blocks[name]).max())
        np.testing.assert_allclose(total.total()[name], block, atol=GROUP * 2.0**-24 * largest * 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_any_order_of_arrival_gives_the_same_adapter(kind, seed):
    current, sent = random_payload(KINDS[kind][0], 0), clients(kind, 9, 0.3)
    order = list(np.random.default_rng(seed).permutation(sorted(sent)))
    one, two = run(kind, current, sent), run(kind, current, {str(c): sent[str(c)] for c in order})
    assert one.accepted == two.accepted
    for module in LAYOUT.modules:
        if KINDS[kind][0] == "lora_b":
            name = block_name(module, "lora_B")
            np.testing.assert_allclose(two.payload.blocks[name], one.payload.blocks[name], atol=1e-6)
        else:
            assert relative(dense(two.payload, module), dense(one.payload, module)) < 2e-5


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_product_is_the_truncated_svd_of_the_dense_mean_under_gauges_orders_and_scalings(seed, count):
    rng = np.random.default_rng(seed)
    sent = {}
    for i in range(count):
        honest = random_payload("factors", 100 * seed + i)
        modules = {m: replace(s, scaling=float(rng.uniform(0.1, 9.0))) for m, s in honest.modules.items()}
        sent[f"c{i}"] = with_gauge(replace(honest, modules=modules), 7 * i)
    shuffled = {c: sent[c] for c in rng.permutation(sorted(sent)).tolist()}
    result = run("product", random_payload("factors", 0), shuffled)
    lost = whole = 0.0
    for module, spec in LAYOUT.modules.items():
        mean = sum(dense(p, module) for p in sent.values()) / count
        best = truncated(mean, spec.rank)
        assert relative(dense(result.payload, module), best) < 1e-5
        lost += np.linalg.norm(mean - best) ** 2
        whole += np.linalg.norm(mean) ** 2
    assert result.residual == pytest.approx(np.sqrt(lost / whole), abs=1e-5)


# -- resume -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [{"kind": "momentum", "lr": 0.7}, {"kind": "adam", "lr": 0.05}])
@pytest.mark.parametrize("kind", LINEAR)
def test_resume_in_the_middle_carries_moments_and_the_adaptive_clip(kind, optimizer):
    plan = ClientPlan(0.5, 1.0, 4.0, None, quantile=0.6, quantile_noise_multiplier=1.0)

    def fresh(seed):
        return aggregator(kind, optimizer=optimizer, plan=plan, noise=Normals(seed), charge=lambda e: None)

    def one(agg, current, number):
        agg._noise = Normals(number)
        agg.begin(current)
        for i in range(4):
            agg.add(f"c{i}", random_payload(KINDS[kind][1], 10 * number + i))
        return agg.finish().payload

    whole, current = fresh(0), random_payload(KINDS[kind][0], 0)
    for number in range(1, 6):
        current = one(whole, current, number)
    first, halfway = fresh(0), random_payload(KINDS[kind][0], 0)
    for number in (1, 2):
        halfway = one(first, halfway, number)
    first.begin(halfway)
    first.add("lost", random_payload(KINDS[kind][1], 77))  # a round in progress is not part of the state
    second = fresh(9)
    second.restore(first.state())
    assert second.plan.clipping_norm == first.plan.clipping_norm != plan.clipping_norm
    for number in (3, 4, 5):
        halfway = one(second, halfway, number)
    for name, block in current.blocks.items():
        np.testing.assert_array_equal(halfway.blocks[name], block)


# -- memory ---------------------------------------------------------------------------------------------------------


def seven_billion(rank=16):
    widths = {"q": (4096, 4096), "k": (4096, 4096), "v": (4096, 4096), "o": (4096, 4096)}
    widths |= {"gate": (11008, 4096), "up": (11008, 4096), "down": (4096, 11008)}
    return {f"h.{i}.{n}": ModuleSpec(o, k, rank, 2.0) for i in range(32) for n, (o, k) in widths.items()}


def test_the_state_of_ten_thousand_clients_of_a_7b_adapter_is_that_of_a_few():
    """Counted in bytes: linear sums (float64) and one group of updates; `product` at 2 and at 8 times the rank."""
    modules = seven_billion()
    numbers = {
        kind: sum(int(np.prod(s)) for s in expected_blocks(modules, {}, kind).values())
        for kind in ("lora_b", "factors")
    }
    assert 35e6 < numbers["factors"] < 45e6
    for kind in numbers:
        update = 4 * numbers[kind]
        state = 8 * numbers[kind] + GROUP * update
        assert state <= 10 * update
    for multiple, few in ((2, 8), (8, 32)):
        ranks = multiple * 16 + max(multiple * 16, 32)  # the sketch, and pairs that wait to be merged
        state = 8 * sum(ranks * (s.out_features + s.in_features) for s in modules.values())
        assert state <= few * 4 * numbers["factors"]


# -- client-level privacy ----------------------------------------------------------------------------------------


def neighbours_apart(kind, extra, others, bound=0.7):
    down, up = KINDS[kind]
    current = random_payload(down, 0)
    metric = ClientMetric(current)
    plan = ClientPlan(bound, 1.0, 4.0, None)
    sums = []
    for group in ([*others, extra], others):
        release = ClientRelease(plan, current, expected_blocks(current.modules, LAYOUT.extra, up))
        for payload in group:
            release.add(payload.blocks)
        mean, _ = release.release(Normals(scale=0.0))
        sums.append({n: 4.0 * b for n, b in mean.items()})
    return metric.norm({n: sums[0][n] - sums[1][n] for n in sums[0]})


def attack_blocks(kind, attack):
    payload = random_payload(KINDS[kind][1], 5)
    first = next(iter(payload.blocks))
    change = {
        "huge": lambda n, b: b * np.float32(1e17),
        "one element": lambda n, b: np.where(
            np.arange(b.size).reshape(b.shape) == 3, np.float32(1e18), 0 * b
        ),
        "one block": lambda n, b: b * np.float32(1e15 if n == first else 0),
        "denormal": lambda n, b: b * np.float32(1e-42),
        "just above": lambda n, b: b * np.float32(1.0001),
        "mixed signs": lambda n, b: b * np.where(np.arange(b.size).reshape(b.shape) % 2, -1e9, 1e9),
    }[attack]
    return replace(payload, blocks={n: change(n, b).astype(np.float32) for n, b in payload.blocks.items()})


@pytest.mark.parametrize(
    "attack", ["huge", "one element", "one block", "denormal", "just above", "mixed signs"]
)
@pytest.mark.parametrize("kind", LINEAR)
def test_no_client_moves_the_released_sum_by_more_than_the_bound(kind, attack):
    others = [random_payload(KINDS[kind][1], i) for i in range(3)]
    for notes in ({}, {"num_examples": 10**12}, {"num_examples": -5}, {"weight": 1e9}):
        extra = replace(attack_blocks(kind, attack), notes=notes)
        assert neighbours_apart(kind, extra, others) <= 0.7 * (1 + 1e-9)


@pytest.mark.parametrize("count", [10**12, -1, 0, True, "many", 1e9])
def test_hostile_counts_and_weights_change_nothing_that_is_released(count):
    current, sent = random_payload("lora_b", 0), clients("mean_b", 3)
    results = []
    for notes, weight in (({}, 1.0), ({"num_examples": count}, 1e6)):
        plan = ClientPlan(1.0, 1.0, 3.0, None)
        agg = aggregator(
            "mean_b", plan=plan, noise=Normals(4), charge=lambda e: None, rules=RoundRules(min_replies=1)
        )
        agg.begin(current)
        used = [agg.add(c, replace(p, notes=notes), weight) for c, p in sent.items()]
        results.append((used, agg.finish()))
    if results[1][0] == [True] * 3:
        for name, block in results[0][1].payload.blocks.items():
            np.testing.assert_array_equal(results[1][1].payload.blocks[name], block)
    else:
        assert count == 0
        assert results[1][1].event == GaussianEvent(1.0)


@pytest.mark.parametrize(("scale", "passes"), [(1.0, True), (0.95, False), (1.05, False)])
@pytest.mark.parametrize("kind", LINEAR)
def test_the_noise_of_what_is_released_has_the_right_law_and_a_twin_five_percent_off_is_rejected(
    kind, scale, passes
):
    """From the adapters that leave, not from the noise function: chi-square of the step over sigma C / m."""
    down, _ = KINDS[kind]
    current = random_payload(down, 0)
    plan, energy, rounds, values = ClientPlan(0.5, 2.0, 10.0, None), 0.0, 400, []
    agg = aggregator(kind, plan=plan, noise=Normals(1, scale), charge=lambda e: None)
    for _ in range(rounds):
        agg.begin(current)
        step = agg.finish().payload.blocks["score|weight"].astype(float) - current.blocks["score|weight"]
        values.append(step.reshape(-1) / (2.0 * 0.5 / 10.0))
    flat = np.concatenate(values)
    energy = float(flat @ flat)
    low, high = stats.chi2.interval(1 - 1e-4, flat.size)
    assert bool(low < energy < high) is passes
    if passes:
        assert stats.kstest(flat, "norm").pvalue > 1e-4
        pairs = [
            abs(float(np.corrcoef(values[i], values[j])[0, 1])) for i, j in itertools.pairwise(range(40))
        ]
        assert max(pairs) < 0.9


def test_recipes_of_the_cases_are_shared():
    assert random_payload("lora_b", 0).recipe == RECIPE
