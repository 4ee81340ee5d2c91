"""Tiny models and resolved workbenches for audits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedlora.config import config_container, config_from_container
from fedlora.config.resolve import derive_noise
from fedlora.training.session import Workbench, bind, load_parts, step_event

WORDS = ["red", "blue", "green", "fast", "slow", "big", "small", "up", "down"]
HEAD = {"head_max_grad_norm": 1.0, "head_noise_multiplier": 1.0}
WEIGHTS = {"head": 0.3, "adapters": 1.0}

CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "lora_fa": ({"kind": "lora_fa"}, "mean_b", {"group_weights": WEIGHTS}),
    "lora_fa-replace-one": ({"kind": "lora_fa"}, "mean_b", {"adjacency": "replace_one"}),
    "lora_fa-per-layer": ({"kind": "lora_fa", "per_layer_clip": True}, "mean_b", {}),
    "factor": ({"kind": "factor"}, "product", {}),
    "prism": ({"kind": "prism"}, "tangent", {"group_weights": WEIGHTS}),
    "dp_sgd": ({"kind": "dp_sgd"}, "mean_b", {}),
    "noisy_projection": (
        {"kind": "noisy_projection", "projection_source": "client", **HEAD},
        "product",
        {"noise_multiplier": 0.6},
    ),
    "noisy_projection-shared": (
        {"kind": "noisy_projection", "projection_source": "shared", **HEAD},
        "mean_b",
        {"noise_multiplier": 0.6},
    ),
}

CLIENT_PRIVACY: dict[str, Any] = {
    "unit": "client",
    "adjacency": "add_or_remove",
    "noise_multiplier": 2.0,
    "target_delta": 1e-3,
    "clipping_norm": 0.5,
    "budget": {"epsilon": 50.0, "delta": 1e-3, "on_exhausted": "refuse"},
    "noise_source": "os",
}


def write_model(folder: Path, hidden: int = 8) -> Path:
    """Write a random one-layer BERT."""
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
        sizes = {
            "hidden_size": hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        BertModel(
            BertConfig(vocab_size=len(vocabulary), max_position_embeddings=40, **sizes)
        ).save_pretrained(folder)
    return folder


def make_bench(
    model: Path,
    case: str = "lora_fa",
    *,
    seed: int = 3,
    rounds: int = 5,
    rank: int = 2,
    dropout: float = 0.0,
    **privacy: Any,
) -> Workbench:
    """Resolve a configuration and load it."""
    mechanism, aggregation, changes = CASES[case]
    terms = {
        "unit": "record",
        "adjacency": "add_or_remove",
        "noise_multiplier": 1.0,
        "target_delta": 1e-4,
        "max_grad_norm": 1.0,
        "group_weights": "equal",
        "budget": {"epsilon": 50.0, "delta": 1e-4, "on_exhausted": "refuse"},
        "noise_source": "os",
    }
    config = config_from_container(
        {
            "schema": 1,
            "run": {"name": "tiny", "seed": seed, "dir": str(model.parent / "runs")},
            "model": {
                "name_or_path": str(model),
                "task": "sequence-classification",
                "num_labels": 2,
                "device": "cpu",
            },
            "adapter": {
                "rank": rank,
                "dropout": dropout,
                "lora_alpha": 2.0 * rank,
                "target_modules": ["query", "value"],
                "modules_to_save": ["classifier"],
            },
            "data": {
                "source": {"kind": "file", "paths": [str(model.parent / "rows.jsonl")]},
                "columns": {"text": "text", "label": "label"},
                "labels": ["cold", "warm"],
                "max_length": 16,
                "name": "words-2026",
            },
            "mechanism": mechanism,
            "privacy": {**terms, **changes, **privacy},
            "training": {
                "expected_batch_size": 6,
                "nominal_records": 30,
                "steps_per_round": 1,
                "optimizer": {"kind": "sgd", "lr": 0.5},
            },
            "federation": {"rounds": rounds, "min_replies": 1, "aggregation": {"kind": aggregation}},
        }
    )
    parts = load_parts(config)
    config = derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout))
    return bind(config, parts)


def make_client_bench(
    model: Path,
    *,
    seed: int = 3,
    mechanism: str = "lora_fa",
    aggregation: str = "mean_b",
    clients_per_round: Any = "all",
    **privacy: Any,
) -> Workbench:
    """Resolve a configuration with client-level privacy and load it."""
    container = config_container(make_bench(model, seed=seed).config)
    del container["derived"]
    shares = privacy.get("noise_at") == "clients"
    container["mechanism"] = {"kind": mechanism}
    container["privacy"] = {**CLIENT_PRIVACY, **privacy}
    container["federation"] |= {
        "clients_per_round": clients_per_round,
        "aggregation": {"kind": aggregation},
        "secure_aggregation": shares,
        "min_replies": privacy.get("honest_clients", 1),
    }
    config = config_from_container(container)
    parts = load_parts(config)
    config = derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout))
    return bind(config, parts)
