"""The running mean of products with bounded rank: what it costs in truncation error, and what its residual says."""

from __future__ import annotations

import resource
from dataclasses import replace

import numpy as np
import pytest
import torch
from aggregation_cases import aggregator, dense, random_payload, relative, run, truncated

from fedlora.geometry import complete_columns
from fedlora.wire import AdapterLayout, AdapterPayload, ModuleSpec


def scattered(count, spread, layout, seed=0):
    """Clients around a common change, and the dense mean of their changes."""
    rng = np.random.default_rng(seed)
    base = random_payload("factors", seed, layout, scale=0.1)
    sent, total = {}, 0.0
    for index in range(count):
        blocks = {
            n: (b + 0.1 * spread * rng.standard_normal(b.shape)).astype(np.float32)
            for n, b in base.blocks.items()
        }
        sent[f"c{index:03d}"] = replace(base, blocks=blocks)
        total = total + dense(sent[f"c{index:03d}"], "m") / count
    return base, sent, total


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("kind", ["product", "stack", "factor_mean", "aligned"])
def test_the_residual_of_a_bounded_mean_is_above_the_true_one_and_not_far(kind, spread):
    """The dropped parts of 120 clients add up to far less than their norms do."""
    layout = AdapterLayout({"m": ModuleSpec(90, 70, 4, 2.0)}, {}, "base")
    current, sent, mean = scattered(120, spread, layout)
    result = run(kind, current, sent, layout=layout, max_rank=8)
    true = relative(dense(result.payload, "m"), mean)
    assert result.bounded
    assert true <= result.residual <= 6 * true
    if kind == "product":
        best = relative(truncated(mean, 4), mean)
        assert best - 1e-9 <= true <= 1.02 * best


def one_rank(left, right, layout):
    blocks = {"m|lora_A": right[None].astype(np.float32), "m|lora_B": left[:, None].astype(np.float32)}
    return AdapterPayload("factors", blocks, dict(layout.modules), None, layout.base_fingerprint)


def test_the_residual_is_above_the_true_one_where_later_clients_undo_what_was_kept():
    """What is kept cancels, what was dropped stays: the mean is far smaller than the sketch ever was."""
    layout = AdapterLayout({"m": ModuleSpec(40, 30, 1, 1.0)}, {}, "base")
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((d, 3)))[0] for d in (40, 30))
    parts = [(2.0, 0), (1.0, 1), (0.5, 2), (-2.0, 0), (-1.0, 1)]
    sent = {f"c{i}": one_rank(s * u[:, k], v[:, k], layout) for i, (s, k) in enumerate(parts)}
    current = one_rank(u[:, 0], v[:, 0], layout)
    agg = aggregator("product", layout, max_rank=2)
    agg.begin(current)
    for client, payload in sent.items():
        agg.add(client, payload)
        agg.mode._merged["m"].flush()
    result = agg.finish()
    mean = np.mean([dense(p, "m") for p in sent.values()], axis=0)
    assert relative(dense(result.payload, "m"), mean) <= result.residual


def test_a_client_of_higher_rank_than_the_running_mean_gets_its_rank_back():
    layout = AdapterLayout({"m": ModuleSpec(60, 4000, 1, 1.0)}, {}, "base")
    wide = {"m": ModuleSpec(60, 4000, 40, 1.0)}
    agg = aggregator("product", layout)
    agg.begin(random_payload("factors", 0, layout))
    sent = {
        "a": random_payload("factors", 1, layout),
        "b": random_payload("factors", 2, layout, modules=wide),
    }
    for client, payload in sent.items():
        assert agg.add(client, payload)
    result = agg.finish()
    mine = agg.downlink(result.full, wide)
    expected = truncated(np.mean([dense(p, "m") for p in sent.values()], axis=0), 40)
    assert relative(dense(mine, "m"), expected) < 1e-6


def test_few_narrow_clients_of_a_wide_module_take_no_square_matrix():
    """Columns that complete a low rank are found beside it; a d x d QR would take minutes and a gigabyte a module."""
    layout = AdapterLayout({"m": ModuleSpec(11008, 4096, 8, 1.0)}, {}, "base")
    narrow = {"m": ModuleSpec(11008, 4096, 2, 1.0)}
    agg = aggregator("product", layout)
    agg.begin(random_payload("factors", 0, layout))
    one = random_payload("factors", 1, layout, modules=narrow)
    assert agg.add("a", one)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = agg.finish()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    sent, own = (
        p.blocks["m|lora_B"].astype(float) @ p.blocks["m|lora_A"][:, :50].astype(float)
        for p in (result.payload, one)
    )
    assert relative(sent, own) < 1e-6
    q = complete_columns(torch.eye(40, 5, dtype=torch.float64), 12)  # the unit vectors lie in the span
    torch.testing.assert_close(q.mT @ q, torch.eye(12, dtype=torch.float64))
