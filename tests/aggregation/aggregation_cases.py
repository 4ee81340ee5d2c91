"""Small layouts, clients and dense references shared by the aggregation tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedlora.aggregation import Aggregator, RoundRules, build_mode
from fedlora.config.schema import AggregationConfig, FederationConfig, ServerOptimizerConfig
from fedlora.names import block_name
from fedlora.wire import AdapterLayout, AdapterPayload, ModuleSpec, expected_blocks

SPEC = ModuleSpec(12, 9, 3, 2.0)
LAYOUT = AdapterLayout({"a.q": SPEC, "a.v": ModuleSpec(7, 9, 3, 0.5)}, {"score|weight": (2, 12)}, "base")
RECIPE = "recipe-1"
KINDS = {
    "mean_b": ("lora_b", "lora_b"),
    "tangent": ("frames", "tangent"),
    "product": ("factors", "factors"),
    "stack": ("factors", "factors"),
    "aligned": ("factors", "factors"),
    "factor_mean": ("factors", "factors"),
}


def federation(kind="mean_b", *, min_replies=1, optimizer=None, **aggregation):
    return FederationConfig(
        rounds=1,
        min_replies=min_replies,
        aggregation=AggregationConfig(kind=kind, **aggregation),
        server_optimizer=ServerOptimizerConfig(**(optimizer or {})),
    )


def aggregator(kind="mean_b", layout=LAYOUT, *, rules=None, optimizer=None, max_rank=None, **parts):
    mode = build_mode(federation(kind, optimizer=optimizer, max_rank=max_rank))
    return Aggregator(mode, layout, RECIPE, rules or RoundRules(min_replies=1), **parts)


def random_payload(kind, seed, layout=LAYOUT, modules=None, scale=1.0):
    rng = np.random.default_rng(seed)
    modules = dict(layout.modules) if modules is None else dict(modules)
    shapes = expected_blocks(modules, layout.extra, kind)
    blocks = {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    if kind == "frames":
        for module in modules:
            for block in ("q_out", "q_in"):
                name = block_name(module, block)
                blocks[name] = np.linalg.qr(blocks[name])[0].astype(np.float32)
    return AdapterPayload(kind, blocks, modules, RECIPE, layout.base_fingerprint)


def dense(payload, module):
    """scaling * B @ A in float64 (factors), or q_out core q_in^T (frames)."""
    get = {
        name.split("|")[1]: block.astype(np.float64)
        for name, block in payload.blocks.items()
        if name.startswith(module + "|")
    }
    if payload.kind == "frames":
        return get["q_out"] @ get["core"] @ get["q_in"].T
    return payload.modules[module].scaling * get["lora_B"] @ get["lora_A"]


def truncated(matrix, rank):
    u, s, vh = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vh[:rank]


def relative(a, b):
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300)


def with_gauge(payload, seed):
    """The same change written with another random R per module."""
    rng = np.random.default_rng(seed)
    blocks = dict(payload.blocks)
    for module, spec in payload.modules.items():
        gauge = rng.standard_normal((spec.rank, spec.rank)) + 2 * np.eye(spec.rank)
        b, a = (blocks[block_name(module, x)].astype(np.float64) for x in ("lora_B", "lora_A"))
        blocks[block_name(module, "lora_B")] = (b @ np.linalg.inv(gauge)).astype(np.float32)
        blocks[block_name(module, "lora_A")] = (gauge @ a).astype(np.float32)
    return replace(payload, blocks=blocks)


def run(kind, current, updates, **options):
    agg = aggregator(kind, **options)
    agg.begin(current)
    for client, payload in updates.items():
        agg.add(client, payload)
    return agg.finish()
