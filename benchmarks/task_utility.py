"""Accuracy with and without privacy, several seeds: the same engine, mechanisms and aggregation, without Flower.

    FEDLORA_DATA=/path/to/data python benchmarks/task_utility.py strategies/presets/sentiment-sst2.yaml \
        --seeds 1 2 3 --set training.optimizer.lr=0.003 --out table.json

One line of JSON per run; `privacy: none` rows are the same run without clipping and noise, and the
`base` row is the untouched model with a random head (chance).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from fedlora.aggregation import build_aggregator
from fedlora.config import load_config
from fedlora.config.schema import FedLoraConfig, NoPrivacy
from fedlora.data import EncodedRows, public_eval_rows
from fedlora.data.evaluation import non_private_config
from fedlora.simulation.prepare import complete, make_federation
from fedlora.training.cohort import CohortEngine
from fedlora.training.drawing import make_job
from fedlora.training.shelf import LazyRecords
from fedlora.training.slots import keeps_slots


def run(config: FedLoraConfig, *, with_base: bool = True) -> dict[str, Any]:
    """Train one configuration and return its row; the base model's figures can be left out."""
    if config.federation.clients_per_round != "all":
        raise SystemExit(
            "task_utility trains every client in every round; set federation.clients_per_round=all"
        )
    federation = make_federation(config)
    prepared = complete(federation.config)
    config, bench = prepared.config, prepared.bench
    engine = CohortEngine(bench.adapted, bench.mechanism, bench.task, config)
    aggregator = build_aggregator(
        config,
        bench.layout,
        bench.adapted.recipe.sha256,
        num_clients=len(federation.parts),
        uplink=bench.mechanism.uplink,
    )
    records = {
        name: LazyRecords(federation.rows, index, bench.task)
        for name, index in sorted(federation.parts.items())
    }
    public = EncodedRows(bench.task, public_eval_rows(config.data))
    payload = bench.initial_payload()
    bench.adapted.load(payload)
    base = bench.task.evaluate(bench.adapted.model, public, 256) if with_base else None
    slots: dict[str, Any] = {}
    started = time.perf_counter()
    steps = config.training.local_steps
    for number in range(1, config.federation.rounds + 1):
        request: Any = SimpleNamespace(server_round=number)
        jobs = [
            replace(make_job(config, name, own, request, steps), slots=slots.get(name))
            for name, own in records.items()
        ]
        aggregator.begin(payload)
        for update in engine.train(payload, jobs, steps, (number - 1) * steps):
            if keeps_slots(bench.mechanism):
                slots[update.client] = update.slots
            aggregator.add(update.client, update.payload)
        payload = aggregator.finish().payload
    seconds = time.perf_counter() - started
    bench.adapted.load(payload)
    privacy = config.privacy
    private = not isinstance(privacy, NoPrivacy)
    return {
        "run": config.run.name,
        "seed": config.run.seed,
        "mechanism": config.mechanism.kind,
        "privacy": "none" if isinstance(privacy, NoPrivacy) else privacy.unit,
        "epsilon": getattr(privacy, "target_epsilon", None),
        "noise_multiplier": getattr(privacy, "noise_multiplier", None),
        "group_weights": getattr(privacy, "group_weights", None) if private else None,
        "lr": config.training.optimizer.lr,
        "server_lr": config.federation.server_optimizer.lr,
        "rounds": config.federation.rounds,
        "dtype": config.model.dtype,
        "base": base,
        "metrics": bench.task.evaluate(bench.adapted.model, public, 256),
        "seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def main() -> None:
    """Run every seed with and without privacy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("config")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--set", nargs="*", default=[], help="dotted overrides")
    parser.add_argument("--only", choices=["private", "none"], default=None)
    parser.add_argument("--no-base", action="store_true", help="leave the untouched model's figures out")
    parser.add_argument("--out", type=Path, default=None, help="append the rows to this file")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        config = load_config(arguments.config, [*arguments.set, f"run.seed={seed}"])
        wanted = {"private": config, "none": non_private_config(config)}
        for name, one in wanted.items():
            if arguments.only in (None, name):
                line = json.dumps(run(one, with_base=not arguments.no_base))
                print(line, flush=True)
                if arguments.out is not None:
                    with arguments.out.open("a", encoding="utf-8") as stream:
                        stream.write(line + "\n")


if __name__ == "__main__":
    main()
