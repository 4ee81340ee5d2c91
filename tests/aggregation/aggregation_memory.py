"""Prints the memory that one mode's state takes after given numbers of clients, at a 7B model's adapter shapes.

    python aggregation_memory.py MODE LAYERS RANK MAX_RANK COUNTS...

One decoder layer has four 4096 x 4096 matrices, two of 11008 x 4096 and one of 4096 x 11008. Output: one JSON object
with the bytes of one client's factors and, per count, the bytes of all arrays that the aggregator
holds and the resident memory above that before the first client.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from dataclasses import replace

import numpy as np
import torch
from aggregation_cases import KINDS, RECIPE, aggregator

from fedlora.aggregation import RoundRules
from fedlora.names import block_name
from fedlora.wire import AdapterLayout, AdapterPayload, ModuleSpec, expected_blocks, payload_bytes


def layout_of(layers: int, rank: int, shrink: int = 1) -> AdapterLayout:
    wide, narrow = 11008 // shrink, 4096 // shrink
    square, up, down = ((narrow, narrow), (wide, narrow), (narrow, wide))
    shapes = {"q": square, "k": square, "v": square, "o": square, "gate": up, "up": up, "down": down}
    modules = {
        f"layers.{layer}.{name}": ModuleSpec(out, inn, rank, 2.0)
        for layer in range(layers)
        for name, (out, inn) in shapes.items()
    }
    return AdapterLayout(modules, {}, "base")


def payload_of(kind: str, layout: AdapterLayout, seed: int) -> AdapterPayload:
    rng = np.random.default_rng(seed)
    blocks = {}
    for name, shape in expected_blocks(layout.modules, {}, kind).items():
        blocks[name] = rng.standard_normal(shape, dtype=np.float32)
    if kind == "frames":
        for module in layout.modules:
            for block in ("q_out", "q_in"):
                name = block_name(module, block)
                blocks[name] = torch.linalg.qr(torch.from_numpy(blocks[name]))[0].numpy().copy()
    return AdapterPayload(kind, blocks, dict(layout.modules), RECIPE, layout.base_fingerprint)


def held(value: object, seen: dict[int, int] | None = None) -> int:
    """Return the bytes of all arrays and tensors reachable from an object, each buffer once and whole."""
    top, seen = seen is None, {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        seen[value.__array_interface__["data"][0]] = value.nbytes
    elif id(value) not in seen and not isinstance(value, str | bytes | int | float | type):
        seen[id(value)] = 0
        if isinstance(value, dict):
            inner = list(value.values())
        elif isinstance(value, list | tuple | set):
            inner = list(value)
        else:
            inner = list(getattr(value, "__dict__", {}).values())
        for one in inner:
            held(one, seen)
    return sum(seen.values()) if top else 0


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(mode: str, layers: int, rank: int, max_rank: int, counts: list[int], shrink: int = 1) -> dict:
    """Add clients; return bytes: of a client's factors and update, held by the aggregator and resident after counts."""
    layout = layout_of(layers, rank, shrink)
    down, up = KINDS[mode]
    current, updates = payload_of(down, layout, 0), [payload_of(up, layout, seed) for seed in (1, 2)]
    factors = 4 * sum(s.rank * (s.out_features + s.in_features) for s in layout.modules.values())
    agg = aggregator(mode, layout, rules=RoundRules(min_replies=1), max_rank=max_rank or None)
    base, before = held(current), resident()
    state, found = {}, {}
    agg.begin(current)
    for number in range(1, max(counts) + 1):
        one = updates[number % 2]
        arrived = replace(one, blocks={name: block.copy() for name, block in one.blocks.items()})
        assert agg.add(f"c{number}", arrived), agg.rejected
        del arrived
        if number in counts:
            found[number], state[number] = resident() - before, held(agg) - base
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    sizes = {"factors": factors, "update": payload_bytes(updates[0])}
    return {**sizes, "state": state, "resident": found, "peak": peak}


if __name__ == "__main__":
    torch.set_num_threads(1)
    numbers = [int(one) for one in sys.argv[2:]]
    print(json.dumps(measure(sys.argv[1], numbers[0], numbers[1], numbers[2], numbers[3:])))
