"""A tiny model, rows and a trainer over a real ledger."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedlora.accounting import Event, epsilon_of
from fedlora.config import config_container, config_from_container
from fedlora.config.resolve import config_hash, derive_noise
from fedlora.config.schema import FedLoraConfig
from fedlora.data import load_rows
from fedlora.ledger import Ledger, open_ledger
from fedlora.training.charging import LedgerKeeper
from fedlora.training.policy import Policy
from fedlora.training.replies import LedgerReplies, MemoryReplies, NoReplies, Replies
from fedlora.training.requests import RoundRequest
from fedlora.training.session import Workbench, bind, load_parts, step_event
from fedlora.training.shelf import RowShelf
from fedlora.training.trainer import Trainer
from fedlora.wire.payload import AdapterPayload

WORDS = ["red", "blue", "green", "fast", "slow", "big", "small", "up", "down"]
SECRET = b"0123456789abcdef0123456789abcdef"


def write_model(folder: Path) -> Path:
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
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        BertModel(
            BertConfig(vocab_size=len(vocabulary), max_position_embeddings=40, **sizes)
        ).save_pretrained(folder)
    return folder


@dataclass
class CountingShelf:
    """A shelf that remembers what was opened and how often rows were loaded."""

    inner: RowShelf
    opened: list[str] = field(default_factory=list)
    loads: int = 0

    def clients(self) -> Sequence[str]:
        return self.inner.clients()

    def open(self, client: str, task: Any) -> Any:
        self.opened.append(client)
        return self.inner.open(client, task)


@dataclass
class World:
    """Model, rows and a resolved configuration."""

    root: Path
    config: FedLoraConfig
    bench: Workbench
    parts: Mapping[str, np.ndarray]

    def variant(self, **changes: Any) -> FedLoraConfig:
        """Return another resolved configuration."""
        values = config_container(self.config)
        values["derived"] = None
        privacy = values["privacy"]
        if "budget" in changes:
            privacy["budget"]["epsilon"] = changes["budget"]
        if "noise" in changes:
            privacy["noise_source"] = changes["noise"]
        if "sigma" in changes:
            privacy["noise_multiplier"] = changes["sigma"]
        if "mechanism" in changes:
            values["mechanism"] = {"kind": changes["mechanism"]}
            values["federation"]["aggregation"] = {"kind": "product"}
        if changes.get("unit") == "none":
            values["privacy"] = {"unit": "none"}
        config = config_from_container(values)
        return derive_noise(config, lambda asked: step_event(asked, self.bench.layout))

    def request(
        self,
        server_round: int,
        *,
        clients: Sequence[str] = ("client-0000", "client-0001"),
        payload: AdapterPayload | None = None,
        steps: int = 1,
        reduce: bool = False,
        **changes: Any,
    ) -> RoundRequest:
        config = self.variant(**changes) if changes else self.config
        return RoundRequest(
            run_id="run",
            server_round=server_round,
            config=config_container(config),
            config_hash=config_hash(config),
            payload=self.bench.initial_payload() if payload is None else payload,
            clients=tuple(clients),
            steps=steps,
            reduce=reduce,
        )

    def epsilon_of_rounds(self, rounds: int) -> float:
        event: Event = self.bench.event.times(rounds)
        return epsilon_of(event, 1e-4, adjacency="add_or_remove", accountant="best").epsilon

    def trainer(
        self,
        folder: Path,
        *,
        policy: Policy | None = None,
        budget: float | None = None,
        replies: str = "memory",
        ledger: Ledger | None = None,
        sign: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
        same_records: bool = False,
    ) -> tuple[Trainer, CountingShelf, Ledger]:
        del budget
        book = open_ledger(folder / "ledger.sqlite", secret=SECRET) if ledger is None else ledger
        parts = dict(self.parts)
        if same_records:
            parts["client-0001"] = parts["client-0000"]
        shelf: CountingShelf

        def load() -> Any:
            shelf.loads += 1
            return load_rows(self.config.data)

        shelf = CountingShelf(RowShelf(load, parts))
        kinds: dict[str, Replies] = {
            "memory": MemoryReplies(),
            "ledger": LedgerReplies(book),
            "none": NoReplies(),
        }
        trainer = Trainer(
            shelf,
            Policy() if policy is None else policy,
            LedgerKeeper(book),
            replies=kinds[replies],
            sign=sign,
        )
        return trainer, shelf, book


def make_world(root: Path) -> World:
    """Write everything and resolve a configuration with real noise."""
    write_model(root / "model")
    draw = random.Random(5)
    lines = []
    for _ in range(60):
        words = [draw.choice(WORDS) for _ in range(draw.randint(2, 6))]
        lines.append(json.dumps({"text": " ".join(words), "label": "warm" if words[0] == "red" else "cold"}))
    (root / "rows.jsonl").write_text("\n".join(lines) + "\n")
    config = config_from_container(
        {
            "schema": 1,
            "run": {"name": "tiny", "seed": 3, "dir": str(root / "runs")},
            "model": {
                "name_or_path": str(root / "model"),
                "task": "sequence-classification",
                "num_labels": 2,
                "device": "cpu",
            },
            "adapter": {
                "rank": 2,
                "lora_alpha": 4.0,
                "target_modules": ["query", "value"],
                "modules_to_save": ["classifier"],
            },
            "data": {
                "source": {"kind": "file", "paths": [str(root / "rows.jsonl")]},
                "columns": {"text": "text", "label": "label"},
                "labels": ["cold", "warm"],
                "max_length": 16,
                "name": "words-2026",
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
                "noise_source": "os",
            },
            "training": {
                "expected_batch_size": 6,
                "nominal_records": 30,
                "steps_per_round": 1,
                "optimizer": {"kind": "sgd", "lr": 0.1},
            },
            "federation": {"rounds": 5, "min_replies": 1, "aggregation": {"kind": "mean_b"}},
        }
    )
    parts = load_parts(config)
    config = derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout))
    split = {"client-0000": np.arange(0, 30), "client-0001": np.arange(30, 60)}
    return World(root, config, bind(config, parts), split)
