"""Time and peak memory of every aggregation mode against naive stacking and a dense SVD.

Run: python benchmarks/aggregation.py [--clients 10 100 1000 10000] [--modes ...] [--json FILE]
Each cell runs in a process of its own; "extra MB" is its peak resident memory above the same process with
one client's update in hand. Times are CPU seconds of the one thread; making the updates is not timed.
Updates share a low-rank signal plus noise of their own, as clients of one task do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedlora.aggregation import Aggregator, RoundRules, build_mode
from fedlora.config.schema import AggregationConfig, FederationConfig
from fedlora.wire import AdapterLayout, AdapterPayload, ModuleSpec, expected_blocks

WIDTH, RANK, MODULES = 768, 8, 4
LAYOUT = AdapterLayout({f"m{i}": ModuleSpec(WIDTH, WIDTH, RANK, 2.0) for i in range(MODULES)}, {}, "base")
MODES = ("mean_b", "tangent", "product", "stack", "aligned", "factor_mean")
NAIVE = ("naive_stack", "dense_svd")
KINDS = {"mean_b": ("lora_b", "lora_b"), "tangent": ("frames", "tangent")}


def make(kind: str, seed: int, signal: dict[str, np.ndarray] | None = None) -> AdapterPayload:
    rng = np.random.default_rng(seed)
    shapes = expected_blocks(LAYOUT.modules, {}, kind)  # type: ignore[arg-type]
    blocks = {}
    for name, shape in shapes.items():
        block = 0.1 * rng.standard_normal(shape, dtype=np.float32)
        if signal is not None:
            block += signal[name]
        elif kind == "frames":
            block = np.linalg.qr(block)[0] if "q_" in name else np.diag(np.arange(RANK, 0, -1.0))
        blocks[name] = np.ascontiguousarray(block, dtype=np.float32)
    return AdapterPayload(kind, blocks, dict(LAYOUT.modules), "r", "base")  # type: ignore[arg-type]


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_mode(mode: str, clients: int) -> dict[str, Any]:
    down, up = KINDS.get(mode, ("factors", "factors"))
    fed = FederationConfig(rounds=1, min_replies=1, aggregation=AggregationConfig(kind=mode))  # type: ignore[arg-type]
    aggregator = Aggregator(build_mode(fed), LAYOUT, "r", RoundRules(min_replies=1))
    current = make(down, 0)
    signal = {n: b * 5 for n, b in make(up, 1).blocks.items()}
    update = make(up, 2, signal)
    target = {name: np.empty_like(block) for name, block in update.blocks.items()}
    aggregator.begin(current)
    for i in range(10):
        aggregator.add(f"warm{i}", update)
    aggregator.finish()
    before, spent, copied = peak_mb(), 0.0, 0.0
    aggregator.begin(current)
    for i in range(clients):
        update = make(up, 10 + i, signal)
        start = time.process_time()
        aggregator.add(f"c{i:06d}", update)
        spent += time.process_time() - start
        start = time.process_time()
        for name, block in update.blocks.items():
            np.copyto(target[name], block)
        copied += time.process_time() - start
    start = time.process_time()
    result = aggregator.finish()
    finish = time.process_time() - start
    return {
        "ms_per_client": 1e3 * spent / clients,
        "copies_per_client": spent / copied,
        "finish_s": finish,
        "extra_mb": peak_mb() - before,
        "residual": result.residual,
    }


def run_naive(mode: str, clients: int) -> dict[str, Any]:
    """Stack all updates and average (naive_stack), or average dense products and take their SVD (dense_svd)."""
    signal = {n: b * 5 for n, b in make("factors", 1).blocks.items()}
    before, kept, spent = peak_mb(), [], 0.0
    dense = {m: np.zeros((WIDTH, WIDTH)) for m in LAYOUT.modules}
    for i in range(clients):
        update = make("factors", 10 + i, signal)
        start = time.process_time()
        if mode == "naive_stack":
            kept.append(update)
        else:
            for m in dense:
                dense[m] += 2.0 * update.blocks[f"{m}|lora_B"] @ update.blocks[f"{m}|lora_A"] / clients
        spent += time.process_time() - start
    start = time.process_time()
    if kept:
        for m in LAYOUT.modules:
            left = np.concatenate([2.0 / clients * p.blocks[f"{m}|lora_B"] for p in kept], axis=1)
            right = np.concatenate([p.blocks[f"{m}|lora_A"] for p in kept], axis=0)
            np.linalg.svd(left @ right if left.shape[1] > WIDTH else left, full_matrices=False)
    else:
        for m in dense:
            np.linalg.svd(dense[m], full_matrices=False)
    return {
        "ms_per_client": 1e3 * spent / clients,
        "copies_per_client": None,
        "finish_s": time.process_time() - start,
        "extra_mb": peak_mb() - before,
        "residual": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--modes", nargs="+", default=[*MODES, *NAIVE])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--shape", type=int, nargs=3, default=[768, 8, 4], metavar=("WIDTH", "RANK", "MODULES")
    )
    args = parser.parse_args()
    global WIDTH, RANK, LAYOUT
    WIDTH, RANK, count = args.shape
    LAYOUT = AdapterLayout({f"m{i}": ModuleSpec(WIDTH, WIDTH, RANK, 2.0) for i in range(count)}, {}, "base")
    size = sum(b.nbytes for b in make("factors", 0).blocks.values())
    print(f"{count} modules of {WIDTH} x {WIDTH}, rank {RANK}; factors of one client {size / 2**20:.2f} MB")
    print("| mode | clients | ms a client | copies a client | finish s | extra MB | residual |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for mode in args.modes:
        for clients in args.clients:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                cell = pool.apply(run_naive if mode in NAIVE else run_mode, (mode, clients))
            rows.append({"mode": mode, "clients": clients, **cell})
            copies = "" if cell["copies_per_client"] is None else f"{cell['copies_per_client']:.1f}"
            residual = "" if cell["residual"] is None else f"{cell['residual']:.4f}"
            print(
                f"| {mode} | {clients} | {cell['ms_per_client']:.3f} | {copies} | {cell['finish_s']:.3f} | "
                f"{cell['extra_mb']:.1f} | {residual} |",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
