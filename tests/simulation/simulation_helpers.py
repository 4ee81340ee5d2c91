"""A tiny model and a tiny data set on disk, and configurations that use them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from fedlora.config import config_from_container
from fedlora.config.schema import FedLoraConfig

WORDS = ["red", "blue", "green", "fast", "slow", "big", "small", "up", "down", "left", "right", "old", "new"]


def write_model(
    folder: Path,
    hidden: int = 16,
    layers: int = 2,
    heads: int = 2,
    intermediate: int = 32,
    positions: int = 32,
) -> Path:
    """Write a random BERT, of two layers unless asked, with a word-level tokenizer; the same weights each time."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(
        zip(["pad_token", "unk_token", "cls_token", "sep_token", "mask_token"], special, strict=True)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            max_position_embeddings=positions,
        )
        BertModel(config).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, seed: int = 0, words: tuple[int, int] = (3, 8)) -> Path:
    """Write rows whose label is told by the first word."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        text = [draw.choice(WORDS) for _ in range(draw.randint(*words))]
        label = "warm" if text[0] in WORDS[:6] else "cold"
        lines.append(json.dumps({"text": " ".join(text), "label": label, "user": f"u{draw.randint(0, 9)}"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def make_world(root: Path) -> Path:
    """Write model, training rows and public rows into a folder."""
    write_model(root / "model")
    write_rows(root / "train.jsonl", 160, 1)
    write_rows(root / "public.jsonl", 40, 2)
    return root


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries; a value of None removes nothing, it is set."""
    merged = dict(base)
    for key, value in changes.items():
        known = merged.get(key)
        merged[key] = merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


def container(world: Path, runs: Path, **changes: Any) -> dict[str, Any]:
    """Return a complete configuration as plain values."""
    base: dict[str, Any] = {
        "schema": 1,
        "run": {"name": "tiny", "seed": 3, "dir": str(runs)},
        "model": {"name_or_path": str(world / "model"), "task": "sequence-classification"},
        "adapter": {
            "rank": 2,
            "lora_alpha": 4.0,
            "target_modules": ["query", "value"],
            "modules_to_save": ["classifier"],
        },
        "data": {
            "source": {"kind": "file", "paths": [str(world / "train.jsonl")]},
            "columns": {"text": "text", "label": "label"},
            "max_length": 16,
            "name": "words-2026",
            "partition": {"kind": "quantity", "clients": 4},
            "public_eval": {
                "source": {"kind": "file", "paths": [str(world / "public.jsonl")]},
                "every_rounds": 2,
            },
        },
        "mechanism": {"kind": "lora_fa"},
        "privacy": {
            "unit": "record",
            "adjacency": "add_or_remove",
            "noise_multiplier": 1.0,
            "target_delta": 1e-4,
            "max_grad_norm": 1.0,
            "group_weights": "equal",
            "budget": {"epsilon": 50.0, "delta": 1e-4, "on_exhausted": "refuse"},
            "noise_source": "seeded-test-only",
        },
        "training": {
            "expected_batch_size": 8,
            "nominal_records": 40,
            "steps_per_round": 1,
            "optimizer": {"kind": "adam", "lr": 0.01},
        },
        "federation": {
            "rounds": 4,
            "clients_per_round": "all",
            "min_replies": 2,
            "round_timeout_seconds": 120.0,
            "aggregation": {"kind": "mean_b"},
        },
        "simulation": {"workers": 2},
    }
    return merge(base, changes)


def configuration(world: Path, runs: Path, **changes: Any) -> FedLoraConfig:
    """Return a complete, checked configuration."""
    return config_from_container(container(world, runs, **changes))


def metric_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics file."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
