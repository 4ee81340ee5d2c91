"""Every mode against dense float64 references; H01, H02, gauge and order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from aggregation_cases import (
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

from fedlora.aggregation import reduce_payloads, reduce_rank
from fedlora.errors import InconsistentRepliesError
from fedlora.wire import AdapterLayout, AdapterPayload, ModuleSpec, payload_fingerprint

CLIENTS = [f"client-{i}" for i in range(5)]


def updates(kind, count=5, **options):
    return {f"client-{i}": random_payload(kind, 10 + i, **options) for i in range(count)}


def mean_dense(payloads, module):
    return np.mean([dense(p, module) for p in payloads], axis=0)


def factors(matrices, spec, layout):
    """A factors payload of one module from (B, A)."""
    b, a = (np.array(m, dtype=np.float32) for m in matrices)
    return AdapterPayload(
        "factors", {"m|lora_A": a, "m|lora_B": b}, {"m": spec}, None, layout.base_fingerprint
    )


# -- H01 --------------------------------------------------------------------------------------------


def h01_layout(rank):
    return AdapterLayout({"m": ModuleSpec(2, 2, rank, 1.0)}, {}, "base")


@pytest.mark.parametrize("kind", ["product", "stack"])
@pytest.mark.parametrize(
    "clients",
    [
        [([[1], [0]], [[1, 0]]), ([[0], [1]], [[0, 1]])],
        [([[2], [0]], [[0, 1]]), ([[0], [-4]], [[1, 0]])],
        [([[1], [1]], [[1, 1]]), ([[1], [-1]], [[1, -1]])],
    ],
)
def test_h01_exact_modes_give_the_mean_of_the_products(kind, clients):
    layout = h01_layout(1)
    current = factors(([[0], [0]], [[1, 0]]), layout.modules["m"], layout)
    sent = {f"c{i}": factors(pair, layout.modules["m"], layout) for i, pair in enumerate(clients)}
    agg = aggregator(kind, layout)
    agg.begin(current)
    for client, payload in sent.items():
        agg.add(client, payload)
    result = agg.finish()
    expected = mean_dense(sent.values(), "m")
    np.testing.assert_allclose(dense(result.full, "m"), expected, atol=1e-6)
    wide = agg.downlink(result.full, {"m": ModuleSpec(2, 2, 2, 3.0)})
    np.testing.assert_allclose(dense(wide, "m"), expected, atol=1e-6)
    away = relative(dense(result.payload, "m"), expected)
    assert result.residual == pytest.approx(away, abs=1e-6)


def test_h01_rank_two_holds_the_identity_half_exactly():
    layout = h01_layout(2)
    pad = ([[1, 0], [0, 0]], [[1, 0], [0, 0]]), ([[0, 0], [1, 0]], [[0, 1], [0, 0]])
    sent = {f"c{i}": factors(pair, layout.modules["m"], layout) for i, pair in enumerate(pad)}
    current = factors((np.zeros((2, 2)), np.eye(2)), layout.modules["m"], layout)
    result = run("product", current, sent, layout=layout)
    np.testing.assert_allclose(dense(result.payload, "m"), np.diag([0.5, 0.5]), atol=1e-6)
    assert result.residual < 1e-6


def test_h01_factor_mean_says_that_it_is_inexact_and_by_how_much():
    layout = h01_layout(1)
    sent = {
        "c1": factors(([[1], [0]], [[1, 0]]), layout.modules["m"], layout),
        "c2": factors(([[0], [1]], [[0, 1]]), layout.modules["m"], layout),
    }
    current = factors(([[0], [0]], [[1, 0]]), layout.modules["m"], layout)
    result = run("factor_mean", current, sent, layout=layout)
    np.testing.assert_allclose(dense(result.payload, "m"), np.full((2, 2), 0.25), atol=1e-7)
    away = np.linalg.norm(np.diag([0.5, 0.5]) - 0.25) / np.linalg.norm(np.diag([0.5, 0.5]))
    assert result.residual == pytest.approx(away, abs=1e-6)
    assert "inexact" in result.notes


def test_h01_shared_a_modes_average_at_the_common_a():
    for seed in range(3):
        current = random_payload("lora_b", seed)
        sent = updates("lora_b")
        result = run("mean_b", current, sent)
        for name in current.blocks:
            expected = np.mean([p.blocks[name].astype(np.float64) for p in sent.values()], axis=0)
            assert relative(result.payload.blocks[name], expected) < 1e-6
        assert result.residual == 0.0


# -- H02 --------------------------------------------------------------------------------------------

H02 = {
    "given": {"a": (4, 8), "b": (8, 8), "c": (16, 32)},
    "equal ranks": {"a": (4, 8), "b": (4, 4), "c": (4, 64)},
    "five": {"a": (1, 1), "b": (2, 8), "c": (3, 1), "d": (16, 16), "e": (8, 2)},
}


@pytest.mark.parametrize("kind", ["product", "stack"])
@pytest.mark.parametrize("name", H02)
def test_h02_each_client_keeps_its_own_scaling(kind, name):
    layout = AdapterLayout({"m": ModuleSpec(40, 30, 16, 1.0)}, {}, "base")
    sent, specs = {}, {}
    for seed, (client, (rank, alpha)) in enumerate(H02[name].items()):
        specs[client] = {"m": ModuleSpec(40, 30, rank, alpha / rank)}
        sent[client] = random_payload("factors", seed, layout, specs[client])
    current = random_payload("factors", 99, layout)
    agg = aggregator(kind, layout)
    agg.begin(current)
    for client, payload in sent.items():
        assert agg.add(client, payload)
    result = agg.finish()
    expected = mean_dense(sent.values(), "m")
    assert relative(dense(result.full, "m"), expected) < 1e-6
    assert relative(dense(result.payload, "m"), truncated(expected, 16)) < 1e-6
    assert result.residual == pytest.approx(
        np.linalg.norm(expected - truncated(expected, 16)) / np.linalg.norm(expected), abs=1e-6
    )
    for own in specs.values():
        loaded = agg.downlink(result.full, own)
        assert loaded.modules == own
        assert relative(dense(loaded, "m"), truncated(expected, own["m"].rank)) < 1e-6


def test_h02_linear_modes_refuse_mixed_scalings_by_name():
    current = random_payload("lora_b", 0)
    agg = aggregator("mean_b")
    agg.begin(current)
    specs = {**LAYOUT.modules, "a.q": replace(LAYOUT.modules["a.q"], scaling=1.0)}
    assert not agg.add("client-x", random_payload("lora_b", 1, modules=specs))
    agg.add("client-y", random_payload("lora_b", 2))
    result = agg.finish()
    assert "client-x" in result.rejected
    assert "product or stack" in result.rejected["client-x"]
    with pytest.raises(InconsistentRepliesError, match="product or stack"):
        agg.downlink(current, specs)


def test_clients_may_adapt_different_modules():
    current = random_payload("factors", 0)
    only_q = {"a.q": LAYOUT.modules["a.q"]}
    sent = {"c1": random_payload("factors", 1, modules=only_q), "c2": random_payload("factors", 2)}
    result = run("product", current, sent)
    expected = mean_dense(sent.values(), "a.q")
    assert relative(dense(result.full, "a.q"), expected) < 1e-6
    assert relative(dense(result.full, "a.v"), dense(sent["c2"], "a.v")) < 1e-6
    result = run("product", current, {"c1": sent["c1"]})
    assert relative(dense(result.payload, "a.v"), dense(current, "a.v")) < 1e-6


# -- exactness, gauge, order ------------------------------------------------------------------------


def test_product_equals_the_truncated_svd_of_the_dense_mean():
    for seed in range(3):
        current = random_payload("factors", seed)
        sent = {f"c{i}": random_payload("factors", 100 * seed + i) for i in range(7)}
        result = run("product", current, sent)
        for module, spec in LAYOUT.modules.items():
            expected = mean_dense(sent.values(), module)
            assert relative(dense(result.payload, module), truncated(expected, spec.rank)) < 1e-6


def test_product_error_bound_holds_when_the_running_rank_is_small():
    layout = AdapterLayout({"m": ModuleSpec(60, 50, 2, 1.0)}, {}, "base")
    current = random_payload("factors", 0, layout)
    sent = {f"c{i:02d}": random_payload("factors", i, layout) for i in range(40)}
    result = run("product", current, sent, layout=layout, max_rank=6)
    expected = mean_dense(sent.values(), "m")
    assert result.bounded
    assert result.residual >= relative(dense(result.payload, "m"), expected) - 1e-9
    exact = run("product", current, sent, layout=layout, max_rank=50)
    assert not exact.bounded or exact.residual < 1.0
    assert relative(dense(exact.payload, "m"), truncated(expected, 2)) < 1e-6


@pytest.mark.parametrize("optimizer", [None, {"kind": "momentum", "lr": 0.7}, {"kind": "adam", "lr": 0.1}])
@pytest.mark.parametrize("kind", ["product", "stack", "aligned"])
def test_modes_do_not_depend_on_the_clients_gauge(kind, optimizer):
    if kind == "aligned":
        optimizer = None
    current = random_payload("factors", 0)
    sent = updates("factors")
    turned = {client: with_gauge(payload, i) for i, (client, payload) in enumerate(sent.items())}
    one, two = (run(kind, current, s, optimizer=optimizer) for s in (sent, turned))
    for module in LAYOUT.modules:
        assert relative(dense(two.payload, module), dense(one.payload, module)) < 2e-5
    assert two.residual == pytest.approx(one.residual, abs=1e-5)


def test_factor_mean_depends_on_the_gauge_and_its_residual_shows_it():
    current = random_payload("factors", 0)
    sent = updates("factors")
    turned = {client: with_gauge(payload, i) for i, (client, payload) in enumerate(sent.items())}
    one, two = run("factor_mean", current, sent), run("factor_mean", current, turned)
    assert relative(dense(two.payload, "a.q"), dense(one.payload, "a.q")) > 0.05
    for result, payloads in ((one, sent), (two, turned)):
        gap = norm = 0.0
        for module in LAYOUT.modules:
            mean = mean_dense(payloads.values(), module)
            gap += np.linalg.norm(mean - dense(result.payload, module)) ** 2
            norm += np.linalg.norm(mean) ** 2
        assert result.residual == pytest.approx(np.sqrt(gap / norm), rel=1e-4)


def test_aligned_is_exact_for_rotated_copies_and_factor_mean_is_not():
    current = random_payload("factors", 0)
    one = random_payload("factors", 5)
    sent = {f"c{i}": with_gauge(one, i) for i in range(4)}
    aligned = run("aligned", current, sent)
    assert aligned.residual < 1e-5
    assert relative(dense(aligned.payload, "a.q"), dense(one, "a.q")) < 1e-5
    assert run("factor_mean", current, sent).residual > 0.1


def test_aligned_starts_from_an_untrained_adapter():
    start = random_payload("factors", 0)
    zero_b = {n: np.zeros_like(b) if n.endswith("lora_B") else b for n, b in start.blocks.items()}
    sent = {f"c{i}": with_gauge(random_payload("factors", 5), i) for i in range(3)}
    assert run("aligned", replace(start, blocks=zero_b), sent).residual < 1e-5


@pytest.mark.parametrize("kind", ["mean_b", "tangent", "product", "stack", "aligned", "factor_mean"])
def test_order_of_clients_does_not_matter_and_sorted_sums_repeat(kind):
    down = {"mean_b": "lora_b", "tangent": "frames"}.get(kind, "factors")
    up = {"frames": "tangent"}.get(down, down)
    current = random_payload(down, 0)
    sent = updates(up, 11, scale=0.1)
    forward = run(kind, current, sent)
    again = run(kind, current, dict(sent))
    back = run(kind, current, dict(reversed(sent.items())))
    assert payload_fingerprint(forward.payload) == payload_fingerprint(again.payload)
    for module in LAYOUT.modules:
        if down != "lora_b":
            assert relative(dense(back.payload, module), dense(forward.payload, module)) < 1e-5
    for name in ("score|weight", *(list(current.blocks) if down == "lora_b" else [])):
        assert relative(back.payload.blocks[name], forward.payload.blocks[name]) < 1e-6


# -- tangent ------------------------------------------------------------------------------------------


def tangent_update(current, seed, scale):
    """Blocks of P(G) for random dense G, and its dense projection."""
    rng = np.random.default_rng(seed)
    blocks, whole = {}, {}
    for module, spec in current.modules.items():
        q_out, q_in = (current.blocks[f"{module}|{x}"].astype(np.float64) for x in ("q_out", "q_in"))
        g = scale * rng.standard_normal((spec.out_features, spec.in_features))
        blocks[f"{module}|x_out"] = (g @ q_in).astype(np.float32)
        blocks[f"{module}|x_in"] = (g.T @ q_out).astype(np.float32)
        po, pi = q_out @ q_out.T, q_in @ q_in.T
        whole[module] = po @ g + g @ pi - po @ g @ pi
    for name, shape in LAYOUT.extra.items():
        blocks[name] = rng.standard_normal(shape).astype(np.float32)
    return AdapterPayload("tangent", blocks, dict(current.modules), RECIPE, "base"), whole


@pytest.mark.parametrize("zero_core", [False, True])
def test_tangent_mean_is_exact_and_retracted_once(zero_core):
    current = random_payload("frames", 3)
    if zero_core:
        blocks = {n: np.zeros_like(b) if n.endswith("core") else b for n, b in current.blocks.items()}
        current = replace(current, blocks=blocks)
    sent, wholes = {}, []
    for i in range(6):
        sent[f"c{i}"], whole = tangent_update(current, i, 0.3)
        wholes.append(whole)
    result = run("tangent", current, sent)
    gap = norm = 0.0
    for module, spec in LAYOUT.modules.items():
        exact = dense(current, module) + np.mean([w[module] for w in wholes], axis=0)
        best = truncated(exact, spec.rank)
        assert relative(dense(result.payload, module), best) < 2e-6
        gap += np.linalg.norm(exact - best) ** 2
        norm += np.linalg.norm(exact) ** 2
        for block in ("q_out", "q_in"):
            q = result.payload.blocks[f"{module}|{block}"].astype(np.float64)
            assert np.abs(q.T @ q - np.eye(spec.rank)).max() < 1e-6
    assert result.residual == pytest.approx(np.sqrt(gap / norm), abs=1e-5)
    extra = "score|weight"
    step = np.mean([p.blocks[extra].astype(np.float64) for p in sent.values()], axis=0)
    np.testing.assert_allclose(result.payload.blocks[extra], current.blocks[extra] + step, atol=1e-6)


def test_tangent_zero_updates_leave_the_point():
    current = random_payload("frames", 3)
    sent = {f"c{i}": tangent_update(current, i, 0.0)[0] for i in range(2)}
    result = run("tangent", current, sent)
    for module in LAYOUT.modules:
        assert relative(dense(result.payload, module), dense(current, module)) < 1e-6


def test_a_hostile_pair_of_cores_is_made_consistent():
    from fedlora.aggregation.linear import consistent_tangent, frames_of, tangent_of
    from fedlora.geometry import core_mismatch, tangent_squared_norm

    current = random_payload("frames", 3)
    hostile = random_payload("tangent", 4)
    frames = frames_of(current, "a.q")
    blocks = {name: block.astype(np.float64) for name, block in hostile.blocks.items()}
    fixed = consistent_tangent(frames, tangent_of(blocks, "a.q"))
    assert float(core_mismatch(frames, fixed)) < 1e-12
    assert float(tangent_squared_norm(frames, fixed)) >= 0


# -- nodes and rank reduction ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mean_b", "tangent"])
def test_sums_formed_on_nodes_give_the_same_mean(kind):
    down, up = ("lora_b", "lora_b") if kind == "mean_b" else ("frames", "tangent")
    current, sent = random_payload(down, 0), updates(up, 9)
    whole = run(kind, current, sent)
    agg = aggregator(kind)
    agg.begin(current)
    names = sorted(sent)
    for part in (names[:4], names[4:8]):
        total, used, bad = reduce_payloads({n: sent[n] for n in part}, LAYOUT, RECIPE, up)
        assert (used, bad) == (tuple(part), {})
        assert agg.add_reduced(used, total)
    assert agg.add(names[8], sent[names[8]])
    parts = agg.finish()
    assert parts.accepted == whole.accepted
    for name, block in whole.payload.blocks.items():
        if "q_" not in name and "core" not in name:
            np.testing.assert_allclose(parts.payload.blocks[name], block, atol=1e-6)
    if kind == "tangent":
        for module in LAYOUT.modules:
            assert relative(dense(parts.payload, module), dense(whole.payload, module)) < 1e-6


def test_node_sums_leave_bad_clients_out_and_are_refused_where_they_mean_nothing():
    sent = updates("lora_b", 3)
    block = sent["client-1"].blocks["a.q|lora_B"].copy()
    block[0, 0] = np.nan
    sent["client-1"] = replace(sent["client-1"], blocks={**sent["client-1"].blocks, "a.q|lora_B": block})
    total, used, bad = reduce_payloads(sent, LAYOUT, RECIPE, "lora_b")
    assert used == ("client-0", "client-2")
    assert "a.q" in bad["client-1"]
    assert np.isfinite(total.blocks["a.q|lora_B"]).all()
    with pytest.raises(InconsistentRepliesError):
        reduce_payloads(sent, LAYOUT, RECIPE, "factors")
    agg = aggregator("product")
    agg.begin(random_payload("factors", 0))
    with pytest.raises(InconsistentRepliesError):
        agg.add_reduced(["c1"], random_payload("factors", 1))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rank_reduction_is_the_best_one_and_states_its_error(rank):
    payload = random_payload("factors", 1)
    small, error = reduce_rank(payload, rank)
    gap = norm = 0.0
    for module in LAYOUT.modules:
        exact = dense(payload, module)
        assert relative(dense(small, module), truncated(exact, rank)) < 1e-6
        gap += np.linalg.norm(exact - truncated(exact, rank)) ** 2
        norm += np.linalg.norm(exact) ** 2
    assert error == pytest.approx(np.sqrt(gap / norm), abs=1e-6)
    assert small.modules["a.q"].rank == rank


def test_zero_change_still_gives_an_adapter_that_can_learn():
    current = random_payload("factors", 0)
    zero = {n: np.zeros_like(b) if n.endswith("lora_B") else b for n, b in current.blocks.items()}
    result = run("product", current, {"c1": replace(current, blocks=zero)})
    assert relative(result.payload.blocks["a.q|lora_B"] + 1.0, np.ones((12, 3))) < 1e-9
    assert np.linalg.matrix_rank(result.payload.blocks["a.q|lora_A"]) == 3
