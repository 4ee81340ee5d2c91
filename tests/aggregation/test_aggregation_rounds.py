"""Rounds: H06, H07, too few answers, weights, robust means, optimisers, checkpoints, cost."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from aggregation_cases import KINDS, LAYOUT, aggregator, dense, federation, random_payload, relative, run

from fedlora.aggregation import RoundRules, aggregation_problems, build
from fedlora.aggregation.running_sum import RunningSum
from fedlora.aggregation.server_optimizer import ServerOptimizer
from fedlora.config.schema import NoPrivacy, ServerOptimizerConfig
from fedlora.errors import ConfigError, InconsistentRepliesError, TooFewRepliesError
from fedlora.wire import payload_fingerprint


def spoiled(payload, name, value):
    block = payload.blocks[name].copy()
    block[0, 1] = value
    return replace(payload, blocks={**payload.blocks, name: block})


@pytest.mark.parametrize(
    ("kind", "down", "up", "name"),
    [
        ("mean_b", "lora_b", "lora_b", "a.q|lora_B"),
        ("tangent", "frames", "tangent", "a.v|x_in"),
        ("product", "factors", "factors", "a.q|lora_A"),
        ("aligned", "factors", "factors", "a.v|lora_B"),
        ("stack", "factors", "factors", "score|weight"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_h06_one_bad_client_does_not_touch_the_round(kind, down, up, name, value):
    current = random_payload(down, 0)
    sent = {f"client-{i}": random_payload(up, i + 1) for i in range(5)}
    good = {client: payload for client, payload in sent.items() if client != "client-3"}
    sent["client-3"] = spoiled(sent["client-3"], name, value)
    result = run(kind, current, sent)
    assert result.accepted == tuple(good)
    assert set(result.rejected) == {"client-3"}
    module = name.split("|")[0]
    assert "client-3" in result.rejected["client-3"]
    assert module in result.rejected["client-3"]
    assert payload_fingerprint(result.payload) == payload_fingerprint(run(kind, current, good).payload)


@pytest.mark.parametrize("counts", [[0, 0, 0], [0], [0] * 7])
@pytest.mark.parametrize("weighted", [False, True])
def test_h07_all_clients_empty_fails_with_one_line_and_no_change(counts, weighted):
    current = random_payload("lora_b", 0)
    before = payload_fingerprint(current)
    agg = aggregator("mean_b", rules=RoundRules(min_replies=1, weighted=weighted))
    agg.begin(current)
    for i, count in enumerate(counts):
        assert not agg.add(f"c{i}", replace(random_payload("lora_b", i), notes={"num_examples": count}))
    with pytest.raises(TooFewRepliesError, match="no examples") as caught:
        agg.finish()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code != 0
    assert payload_fingerprint(current) == before


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("counts", [[0, 0, 5], [5, 0], [0, 7, 0, 0]])
def test_h07_empty_clients_are_skipped_by_name(counts, weighted):
    agg = aggregator("mean_b", rules=RoundRules(min_replies=1, weighted=weighted))
    agg.begin(random_payload("lora_b", 99))
    for i, count in enumerate(counts):
        agg.add(f"c{i}", replace(random_payload("lora_b", i), notes={"num_examples": count}))
    result = agg.finish()
    alone = next(i for i, count in enumerate(counts) if count)
    assert result.accepted == (f"c{alone}",)
    assert set(result.rejected) == {f"c{i}" for i, count in enumerate(counts) if not count}
    used = random_payload("lora_b", alone)
    for name, block in used.blocks.items():
        np.testing.assert_allclose(result.payload.blocks[name], block, rtol=1e-6)


def test_weights_by_examples_without_privacy():
    agg = aggregator("mean_b", rules=RoundRules(min_replies=1, weighted=True))
    agg.begin(random_payload("lora_b", 99))
    counts = [1, 3, 96]
    for i, count in enumerate(counts):
        agg.add(f"c{i}", replace(random_payload("lora_b", i), notes={"num_examples": count}))
    agg.add("liar", replace(random_payload("lora_b", 5), notes={"num_examples": "1000"}))
    agg.add("silent", random_payload("lora_b", 6))
    result = agg.finish()
    assert set(result.rejected) == {"liar", "silent"}
    name = "a.q|lora_B"
    parts = [
        random_payload("lora_b", i).blocks[name].astype(np.float64) * c / 100 for i, c in enumerate(counts)
    ]
    assert relative(result.payload.blocks[name], sum(parts)) < 1e-6


@pytest.mark.parametrize("answers", [0, 1, 2])
def test_too_few_answers_change_nothing_and_name_the_limit(answers):
    agg = aggregator("mean_b", rules=RoundRules(min_replies=3))
    agg.begin(random_payload("lora_b", 0))
    for i in range(answers):
        agg.add(f"c{i}", random_payload("lora_b", i))
    agg.add("other", random_payload("tangent", 3))
    with pytest.raises(TooFewRepliesError, match="min_replies is 3"):
        agg.finish()
    agg.begin(random_payload("lora_b", 0))
    for i in range(3):
        agg.add(f"c{i}", random_payload("lora_b", i))
    assert len(agg.finish().accepted) == 3


def test_duplicates_are_rejected_and_the_first_answer_stays():
    agg = aggregator("mean_b")
    agg.begin(random_payload("lora_b", 0))
    assert agg.add("c1", random_payload("lora_b", 1))
    assert not agg.add("c1", random_payload("lora_b", 2))
    result = agg.finish()
    assert result.accepted == ("c1",)
    np.testing.assert_allclose(
        result.payload.blocks["a.q|lora_B"], random_payload("lora_b", 1).blocks["a.q|lora_B"], rtol=1e-6
    )


def test_calls_out_of_order_are_refused():
    agg = aggregator("mean_b")
    for call in (agg.finish, lambda: agg.add("c", random_payload("lora_b", 1))):
        with pytest.raises(InconsistentRepliesError, match="begin"):
            call()


@pytest.mark.parametrize("kind", ["lora_b", "tangent", "factors"])
def test_an_aggregate_never_changes_what_it_was_given(kind):
    mode, down = {"lora_b": ("mean_b", "lora_b"), "tangent": ("tangent", "frames")}.get(
        kind, ("product", kind)
    )
    current = random_payload(down, 0)
    sent = {f"c{i}": random_payload(kind, i + 1) for i in range(9)}
    before = [payload_fingerprint(p) for p in (current, *sent.values())]
    run(mode, current, sent)
    assert [payload_fingerprint(p) for p in (current, *sent.values())] == before


# -- robust means ------------------------------------------------------------------------------------------


def robust_run(robust, current, sent, *, trim=0.2, bound=None, kind="mean_b"):
    rules = RoundRules(min_replies=1, robust=robust, trim_fraction=trim, max_norm=bound)
    agg = aggregator(kind, rules=rules)
    agg.begin(current)
    for client, payload in sent.items():
        agg.add(client, payload)
    return agg.finish()


@pytest.mark.parametrize("robust", ["trimmed", "median"])
@pytest.mark.parametrize("attack", [1e6, -1e6, 1e12])
def test_robust_means_bound_a_hostile_client(robust, attack):
    current = random_payload("lora_b", 0)
    sent = {f"c{i}": random_payload("lora_b", i + 1) for i in range(6)}
    sent["evil"] = random_payload("lora_b", 50, scale=attack)
    result = robust_run(robust, current, sent)
    for name, block in result.payload.blocks.items():
        honest = np.stack([p.blocks[name] for c, p in sent.items() if c != "evil"])
        assert (block <= honest.max(axis=0) + 1e-5).all()
        assert (block >= honest.min(axis=0) - 1e-5).all()
    plain = run("mean_b", current, sent)
    assert np.abs(plain.payload.blocks["a.q|lora_B"]).max() > 1e4


def test_trimmed_and_median_equal_numpy():
    current = random_payload("lora_b", 0)
    sent = {f"c{i}": random_payload("lora_b", i + 1) for i in range(5)}
    table = np.stack([p.blocks["a.v|lora_B"].astype(np.float64) for p in sent.values()])
    median = robust_run("median", current, sent).payload.blocks["a.v|lora_B"]
    np.testing.assert_allclose(median, np.median(table, axis=0), atol=1e-6)
    trimmed = robust_run("trimmed", current, sent, trim=0.2).payload.blocks["a.v|lora_B"]
    np.testing.assert_allclose(trimmed, np.sort(table, axis=0)[1:-1].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "down", "up"), [("mean_b", "lora_b", "lora_b"), ("tangent", "frames", "tangent")]
)
def test_norm_bounded_limits_each_client(kind, down, up):
    current = random_payload(down, 0)
    sent = {f"c{i}": random_payload(up, i + 1) for i in range(3)}
    sent["evil"] = random_payload(up, 9, scale=1e9)
    result = robust_run("norm_bounded", current, sent, bound=0.5, kind=kind)
    assert "evil" in result.accepted
    assert np.linalg.norm(result.payload.blocks["score|weight"] - current.blocks["score|weight"]) <= 0.5


def test_robust_settings_that_mean_nothing_are_refused_by_name():
    none = NoPrivacy(unit="none")
    for changes in ({"kind": "product", "robust": "median"}, {"robust": "norm_bounded"}):
        assert aggregation_problems(federation(**changes), none)
    assert not aggregation_problems(federation("tangent", robust="median"), none)
    with pytest.raises(TooFewRepliesError, match="trim"):
        robust_run("trimmed", random_payload("lora_b", 0), {"c": random_payload("lora_b", 1)}, trim=0.4)


# -- server optimisers and checkpoints ------------------------------------------------------------------------


def rounds(agg, current, up, count, start=0, gauge=None):
    for r in range(start, start + count):
        agg.begin(current)
        for i in range(3):
            agg.add(f"c{i}", random_payload(up, 100 * r + i, scale=0.2))
        current = agg.finish().payload
    return current


@pytest.mark.parametrize("kind", ["mean_b", "tangent", "product"])
@pytest.mark.parametrize(
    "optimizer", [{"kind": "momentum", "lr": 0.5}, {"kind": "adam", "lr": 0.1}, {"kind": "mean"}]
)
def test_h35_resume_is_bit_exact(kind, optimizer):
    down, up = {"mean_b": ("lora_b", "lora_b"), "tangent": ("frames", "tangent")}.get(
        kind, ("factors", "factors")
    )
    start = random_payload(down, 0)
    whole = rounds(aggregator(kind, optimizer=optimizer), start, up, 6)
    first = aggregator(kind, optimizer=optimizer)
    half = rounds(first, start, up, 3)
    state = {k: np.array(v) if isinstance(v, np.ndarray) else v for k, v in first.state().items()}
    second = aggregator(kind, optimizer=optimizer)
    second.restore(state)
    resumed = rounds(second, half, up, 3, start=3)
    assert payload_fingerprint(resumed) == payload_fingerprint(whole)
    if optimizer["kind"] != "mean":
        fresh = rounds(aggregator(kind, optimizer=optimizer), half, up, 3, start=3)
        assert payload_fingerprint(fresh) != payload_fingerprint(whole)


def test_momentum_and_adam_follow_their_formulas_at_a_common_a():
    current = random_payload("lora_b", 0)
    name = "a.q|lora_B"
    deltas = [random_payload("lora_b", 7 + i, scale=0.1).blocks[name].astype(np.float64) for i in range(3)]
    for kind in ("momentum", "adam"):
        agg = aggregator(
            "mean_b", optimizer={"kind": kind, "lr": 0.3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-2}
        )
        value, m, v = current.blocks[name].astype(np.float64), 0.0, 1e-4
        point = current
        for delta in deltas:
            sent = replace(
                point, blocks={**point.blocks, name: (point.blocks[name] + delta).astype(np.float32)}
            )
            agg.begin(point)
            agg.add("c", sent)
            point = agg.finish().payload
            if kind == "momentum":
                m = 0.8 * m + delta
                value = value + 0.3 * m
            else:
                m, v = 0.8 * m + 0.2 * delta, 0.95 * v + 0.05 * delta**2
                value = value + 0.3 * m / (np.sqrt(v) + 1e-2)
        np.testing.assert_allclose(point.blocks[name], value, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [{"kind": "mean"}, {"kind": "momentum"}, {"kind": "adam", "lr": 0.05}])
def test_a_heads_rate_multiplies_its_steps_and_no_other_blocks(kind, optimizer):
    down, up = KINDS[kind]
    start, sent = random_payload(down, 0), random_payload(up, 1, scale=0.1)
    ends = []
    for rates in ({}, {"score": 2.5}):
        agg = aggregator(kind, optimizer={**optimizer, "head_rates": rates})
        agg.begin(start)
        assert agg.add("c", sent)
        ends.append(agg.finish().payload)
    head = "score|weight"
    moved = [end.blocks[head] - start.blocks[head] for end in ends]
    np.testing.assert_allclose(moved[1], 2.5 * moved[0], rtol=1e-4, atol=1e-6)
    for name in ends[0].blocks.keys() - {head}:
        np.testing.assert_array_equal(ends[0].blocks[name], ends[1].blocks[name])


def test_rates_of_no_head_and_unresolved_rates_are_refused():
    with pytest.raises(ConfigError, match="not resolved"):
        ServerOptimizer(ServerOptimizerConfig(head_rates="auto"))
    problems = build._rate_problems(federation(optimizer={"head_rates": {"scroe": 2.0}}), LAYOUT)
    assert problems == ["federation.server_optimizer.head_rates: scroe is no trained head; allowed are score"]


@pytest.mark.parametrize("optimizer", [{"kind": "momentum", "lr": 0.5}, {"kind": "adam", "lr": 0.05}])
def test_tangent_optimisers_do_not_depend_on_the_frames_rotation(optimizer):
    """Turning both frames by orthogonal matrices must not change Z, round after round."""
    rng = np.random.default_rng(0)
    plain = random_payload("frames", 3)
    turned_blocks = dict(plain.blocks)
    for module, spec in LAYOUT.modules.items():
        o, p = (np.linalg.qr(rng.standard_normal((spec.rank,) * 2))[0] for _ in range(2))
        get = {x: plain.blocks[f"{module}|{x}"].astype(np.float64) for x in ("q_out", "core", "q_in")}
        new = {"q_out": get["q_out"] @ o, "core": o.T @ get["core"] @ p, "q_in": get["q_in"] @ p}
        turned_blocks.update({f"{module}|{x}": b.astype(np.float32) for x, b in new.items()})
    points = [plain, replace(plain, blocks=turned_blocks)]
    aggs = [aggregator("tangent", optimizer=optimizer) for _ in points]
    for r in range(4):
        gradients = {
            m: 0.3 * np.random.default_rng(50 + r).standard_normal((s.out_features, s.in_features))
            for m, s in LAYOUT.modules.items()
        }
        for k, agg in enumerate(aggs):
            blocks = {"score|weight": np.zeros((2, 12), dtype=np.float32)}
            for m, g in gradients.items():
                blocks[f"{m}|x_out"] = (g @ points[k].blocks[f"{m}|q_in"]).astype(np.float32)
                blocks[f"{m}|x_in"] = (g.T @ points[k].blocks[f"{m}|q_out"]).astype(np.float32)
            agg.begin(points[k])
            assert agg.add("c", replace(points[k], kind="tangent", blocks=blocks))
            points[k] = agg.finish().payload
        for m in LAYOUT.modules:
            assert relative(dense(points[1], m), dense(points[0], m)) < 1e-4


# -- cost ------------------------------------------------------------------------------------------------------


def test_linear_sums_hold_a_bounded_number_of_updates():
    import tracemalloc

    block = np.ones((512, 64), dtype=np.float32)
    peaks = []
    for count in (20, 200):
        total = RunningSum()
        tracemalloc.start()
        for _ in range(count):
            total.add({"m|x": block.copy()})
        total.flush()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert np.allclose(total.mean()["m|x"], 1.0)
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 16 * block.nbytes


@pytest.mark.long
def test_linear_modes_cost_at_most_three_copies_per_client():
    count = 1 << 22
    layout = replace(LAYOUT, modules={}, extra={"m|x": (count // 64, 64)})
    current = random_payload("lora_b", 0, layout)
    sent = [random_payload("lora_b", i, layout) for i in range(8)]
    target = np.empty_like(current.blocks["m|x"])
    ratios = []
    for _ in range(5):
        start = time.process_time()
        for payload in sent:
            np.copyto(target, payload.blocks["m|x"])
        copy = time.process_time() - start
        agg = aggregator("mean_b", layout)
        agg.begin(current)
        for payload in sent:
            agg.add("warm" + str(id(payload)), payload)
        start = time.process_time()
        for i, payload in enumerate(sent):
            agg.add(f"c{i}", payload)
        ratios.append((time.process_time() - start) / copy)
    assert min(ratios) < 3.0


def test_sums_are_accurate_for_many_clients():
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((50, 40)).astype(np.float32) for _ in range(1000)]
    total = RunningSum()
    for i, part in enumerate(parts):
        total.add({"m|x": part}, 1.0 if i % 2 else 0.25)
    exact = sum(p.astype(np.float64) * (1.0 if i % 2 else 0.25) for i, p in enumerate(parts))
    assert relative(total.total()["m|x"], exact) < 3e-7
    assert total.weights["m|x"] == pytest.approx(625.0)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_any_allowed_size_give_the_same_mean_and_others_are_refused(kind):
    """Weights below float32's smallest number would vanish from a group's sum and not from the divisor."""
    down, up = KINDS[kind]
    current, ends = random_payload(down, 0), []
    for weight in (1.0, 2.0**-40, 2.0**40):
        agg = aggregator(kind)
        agg.begin(current)
        assert all(agg.add(f"c{i}", random_payload(up, 9 + i, scale=0.1), weight) for i in range(3))
        ends.append(agg.finish().payload)
    for end in ends[1:]:
        np.testing.assert_allclose(end.blocks["score|weight"], ends[0].blocks["score|weight"], atol=1e-6)
    for weight in (0.0, -1.0, 1e-50, 2.0**41, float("nan"), float("inf")):
        agg = aggregator(kind)
        agg.begin(current)
        assert not agg.add("c", random_payload(up, 9), weight)
        assert "weight" in agg.rejected["c"]
