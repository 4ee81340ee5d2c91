"""Small updates take a quick way: the same sums and the same refusals as the plain one, at few copies per client."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from aggregation_cases import LAYOUT, RECIPE, aggregator, random_payload

from fedlora.aggregation import RoundRules, packed
from fedlora.wire import AdapterLayout, ModuleSpec

KINDS = [("mean_b", "lora_b", "lora_b"), ("tangent", "frames", "tangent")]


def rounds(kind, current, updates, monkeypatch, *, quick, rules=None, layout=LAYOUT):
    monkeypatch.setattr("fedlora.aggregation.round.LARGEST", packed.LARGEST if quick else 0)
    agg = aggregator(kind, layout, rules=rules)
    agg.begin(current)
    assert (agg._packed is not None) is quick
    used = {client: agg.add(client, payload) for client, payload in updates.items()}
    return used, agg.finish()


def hurt(payload, name, value=None, **changes):
    blocks = dict(payload.blocks)
    if value is not None:
        blocks[name] = value(blocks[name].copy())
    return replace(payload, blocks=blocks, **changes)


def put(value):
    def change(block):
        block.flat[-1] = value
        return block

    return change


def faults(good):
    first = next(iter(good.blocks))
    rest = {n: b for n, b in good.blocks.items() if n != first}
    other = {m: replace(s, scaling=s.scaling * 2) for m, s in good.modules.items()}
    return {
        "nan": hurt(good, first, put(np.nan)),
        "inf": hurt(good, "score|weight", put(np.inf)),
        "minus inf": hurt(good, first, put(-np.inf)),
        "overflow": hurt(good, first, put(1e38)),
        "float64": hurt(good, first, lambda b: b.astype(np.float64)),
        "integers": hurt(good, first, lambda b: np.ones(b.shape, dtype=np.int32)),
        "big endian": hurt(good, first, lambda b: b.astype(">f4")),
        "shape": hurt(good, first, lambda b: b[:-1]),
        "transposed": hurt(good, first, lambda b: np.ascontiguousarray(b.T)),
        "flat": hurt(good, first, lambda b: b.reshape(-1)),
        "scalar": hurt(good, first, lambda b: np.float32(1.0).reshape(())),
        "missing": replace(good, blocks=rest),
        "unknown": replace(good, blocks={**good.blocks, "zz|x": np.zeros(1, dtype=np.float32)}),
        "renamed": replace(good, blocks={**rest, "module." + first: good.blocks[first]}),
        "base": replace(good, base_fingerprint="other"),
        "kind": replace(good, kind="factors"),
        "scaling": replace(good, modules=other),
        "fewer modules": replace(good, modules={}),
        "large": hurt(good, first, lambda b: b * 1e6),
        "zero examples": replace(good, notes={"num_examples": 0}),
    }


@pytest.mark.parametrize("max_norm", [None, 50.0])
@pytest.mark.parametrize(("kind", "down", "up"), KINDS)
def test_every_refusal_and_every_sum_is_the_plain_ways(kind, down, up, max_norm, monkeypatch):
    current = random_payload(down, 0)
    good = {f"c{i:02d}": random_payload(up, i) for i in range(11)}
    bad = faults(random_payload(up, 99)) | {"recipe": replace(random_payload(up, 98), recipe="x")}
    updates = {**good, **bad}
    rules = RoundRules(min_replies=1, max_norm=max_norm, max_bytes=10**6)
    results = [rounds(kind, current, updates, monkeypatch, quick=q, rules=rules) for q in (True, False)]
    assert results[0][0] == results[1][0]
    quick, plain = (result for _, result in results)
    assert quick.rejected == plain.rejected
    assert quick.accepted == plain.accepted
    assert quick.uplink_bytes == plain.uplink_bytes
    assert set(plain.rejected) >= set(bad) - {"large", "recipe"}
    assert ("large" in plain.rejected) is (max_norm is not None)
    for name, block in plain.payload.blocks.items():
        if down == "lora_b" or name == "score|weight":
            tolerance = 3e-6 * max(1.0, float(np.abs(block).max()))
            np.testing.assert_allclose(quick.payload.blocks[name], block, atol=tolerance)


@pytest.mark.parametrize("norm", [0.9, 0.9985, 1.0 - 1e-6, 1.0 + 1e-6, 1.1])
def test_norms_beside_the_limit_are_judged_by_the_plain_check(norm, monkeypatch):
    update = random_payload("lora_b", 3)
    size = float(np.sqrt(sum(np.vdot(b.astype(float), b.astype(float)) for b in update.blocks.values())))
    rules = RoundRules(min_replies=1, max_norm=size / norm)
    answers = [
        rounds("mean_b", random_payload("lora_b", 0), {"ok": random_payload("lora_b", 1, scale=1e-3), "c": update},
               monkeypatch, quick=quick, rules=rules)[0]
        for quick in (True, False)
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert answers[0]["c"] is (norm < 1.0)


@pytest.mark.parametrize("order", ["F", "strided", "reversed"])
def test_blocks_in_any_memory_order_are_the_same_update(order, monkeypatch):
    current, update = random_payload("lora_b", 0), random_payload("lora_b", 1)
    change = {
        "F": np.asfortranarray,
        "strided": lambda b: np.repeat(b, 2, axis=0)[::2],
        "reversed": lambda b: b[::-1].copy()[::-1],
    }[order]
    odd = replace(update, blocks={n: change(b) for n, b in update.blocks.items()})
    _, result = rounds("mean_b", current, {"c": odd}, monkeypatch, quick=True)
    for name, block in update.blocks.items():
        np.testing.assert_allclose(result.payload.blocks[name], block, atol=1e-6)


def test_weights_by_examples_hold_on_the_quick_way(monkeypatch):
    current = random_payload("lora_b", 0)
    counts = {"a": 3, "b": 1000, "c": 17}
    sent = {c: replace(random_payload("lora_b", n), notes={"num_examples": n}) for c, n in counts.items()}
    rules = RoundRules(min_replies=1, weighted=True)
    _, result = rounds("mean_b", current, sent, monkeypatch, quick=True, rules=rules)
    for name in current.blocks:
        mean = sum(n * sent[c].blocks[name].astype(float) for c, n in counts.items()) / 1020
        np.testing.assert_allclose(result.payload.blocks[name], mean, atol=1e-6)


def test_an_update_that_is_changed_after_add_does_not_change_the_sum(monkeypatch):
    current, update = random_payload("lora_b", 0), random_payload("lora_b", 1)
    before = {n: b.copy() for n, b in update.blocks.items()}
    monkeypatch.setattr("fedlora.aggregation.round.LARGEST", packed.LARGEST)
    agg = aggregator("mean_b")
    agg.begin(current)
    assert agg.add("c", update)
    for block in update.blocks.values():
        block[:] = np.nan
    result = agg.finish()
    for name, block in before.items():
        np.testing.assert_allclose(result.payload.blocks[name], block, atol=1e-6)


def test_an_update_that_fails_half_way_leaves_no_trace(monkeypatch):
    """A refused update's row is overwritten; NaN of it may not reach the sum, at any place in a group."""
    current = random_payload("lora_b", 0)
    good, bad = random_payload("lora_b", 1), hurt(random_payload("lora_b", 2), "score|weight", put(np.nan))
    for place in range(20):
        updates = {f"c{i:02d}": bad if i == place else good for i in range(20)}
        used, result = rounds("mean_b", current, updates, monkeypatch, quick=True)
        assert [c for c, ok in used.items() if not ok] == [f"c{place:02d}"]
        for name, block in good.blocks.items():
            np.testing.assert_allclose(result.payload.blocks[name], block, atol=1e-6)


def test_node_sums_and_single_updates_add_up(monkeypatch):
    monkeypatch.setattr("fedlora.aggregation.round.LARGEST", packed.LARGEST)
    current = random_payload("lora_b", 0)
    one, two, three = (random_payload("lora_b", i) for i in (1, 2, 3))
    total = replace(one, blocks={n: b + two.blocks[n] for n, b in one.blocks.items()})
    agg = aggregator("mean_b")
    agg.begin(current)
    assert agg.add_reduced(["a", "b"], total)
    assert agg.add("c", three)
    result = agg.finish()
    assert result.weight == 3.0
    for name in current.blocks:
        mean = (one.blocks[name].astype(float) + two.blocks[name] + three.blocks[name]) / 3
        np.testing.assert_allclose(result.payload.blocks[name], mean, atol=1e-6)


def sized(megabytes, kind):
    modules, rank = {0.1: (8, 8), 1.0: (16, 16), 10.0: (64, 16)}[megabytes]
    dim = int(megabytes * 1e6 / (modules * rank * (4 if kind == "mean_b" else 8)))
    specs = {f"h.{i}.q": ModuleSpec(dim, dim, rank, 2.0) for i in range(modules)}
    return AdapterLayout(specs, {}, "base")


def copies(kind, down, up, megabytes):
    """CPU time of one client's update over that of a copy of its bytes; 64 MB of distinct updates, as they arrive."""
    layout = sized(megabytes, kind)
    current = random_payload(down, 0, layout)
    first = random_payload(up, 1, layout)
    count = max(8, int(64 / megabytes))
    sent = [replace(first, blocks={n: b.copy() for n, b in first.blocks.items()}) for _ in range(count)]
    flat = [np.concatenate([b.reshape(-1) for b in one.blocks.values()]) for one in sent]
    targets = [np.empty_like(one) for one in flat]
    ratios = []
    for _ in range(7):
        start = time.process_time()
        for target, source in zip(targets, flat, strict=True):
            np.copyto(target, source)
        copied = time.process_time() - start
        agg = aggregator(kind, layout)
        agg.begin(current)
        start = time.process_time()
        for i, one in enumerate(sent):
            agg.add(str(i), one)
        ratios.append((time.process_time() - start) / copied)
    return min(ratios)


@pytest.mark.long
@pytest.mark.parametrize("megabytes", [0.1, 1.0, 10.0])
@pytest.mark.parametrize(("kind", "down", "up"), KINDS)
def test_one_update_costs_at_most_three_copies_of_its_bytes_at_every_size(kind, down, up, megabytes):
    assert copies(kind, down, up, megabytes) < 3.0


def test_the_recipe_is_checked_on_the_quick_way(monkeypatch):
    current = random_payload("lora_b", 0)
    sent = {"a": random_payload("lora_b", 1), "b": replace(random_payload("lora_b", 2), recipe=RECIPE + "x")}
    used, result = rounds("mean_b", current, sent, monkeypatch, quick=True)
    assert used == {"a": True, "b": False}
    assert "another shared lora_A" in result.rejected["b"]
