"""H26: bases in 4 or 8 bits keep their heads whole, couple no records, and are refused where that is not known.

What needs bitsandbytes itself loads on the CPU; a run on a GPU is in tests/data/test_data_training_options.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_models_offline import model_config
from torch import nn
from transformers import AutoModelForCausalLM as Causal
from transformers import AutoModelForSeq2SeqLM as Seq2Seq
from transformers import AutoModelForSequenceClassification as Classifier
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
)

from fedlora.adapters import inject, models, quantized
from fedlora.adapters.models import fingerprint_weights, load_base
from fedlora.config.schema import AdapterConfig, ModelConfig
from fedlora.errors import ModelError


def asked(bits: str | None, **changes: Any) -> ModelConfig:
    return model_config(quantization=bits, **changes)


@pytest.mark.parametrize(
    ("auto", "config", "kept"),
    [
        (Classifier, BertConfig, ("classifier",)),
        (Classifier, RobertaConfig, ("classifier",)),
        (Classifier, DistilBertConfig, ("classifier", "pre_classifier")),
        (Classifier, GPT2Config, ("score",)),
        (Classifier, LlamaConfig, ("score",)),
        (Classifier, T5Config, ("classification_head",)),
        (Causal, GPT2Config, ("lm_head",)),
        (Causal, LlamaConfig, ("lm_head",)),
        (Seq2Seq, T5Config, ("lm_head",)),
    ],
)
def test_h26_heads_and_output_embeddings_stay_whole(auto: Any, config: Any, kept: tuple[str, ...]) -> None:
    with torch.device("meta"):
        assert quantized.whole_modules(auto.from_config(config())) == kept


@pytest.mark.parametrize(
    ("section", "bits", "remedy"),
    [
        ({"quant_method": "gptq", "bits": 4}, None, "use the checkpoint that was not quantised"),
        ({"quant_method": "fp8"}, "8bit", "use the checkpoint that was not quantised"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, None, "set model.quantization: 8bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "4bit", "set model.quantization: 8bit"),
        ({"quant_method": "bitsandbytes", "_load_in_4bit": True}, None, "set model.quantization: 4bit"),
        ({}, None, "stored quantised \\(unknown\\)"),
    ],
)
def test_h26_a_checkpoint_quantised_otherwise_is_refused(section: Any, bits: str | None, remedy: str) -> None:
    stored = SimpleNamespace(quantization_config=section)
    with pytest.raises(ModelError, match=remedy):
        quantized.refuse_stored_quantization(asked(bits), stored)


def test_h26_plain_checkpoints_and_those_asked_for_by_name_are_taken() -> None:
    four = SimpleNamespace(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    quantized.refuse_stored_quantization(asked("4bit"), four)
    quantized.refuse_stored_quantization(asked("8bit"), SimpleNamespace())
    quantized.refuse_stored_quantization(asked(None), SimpleNamespace(quantization_config=None))


def test_h26_eight_bits_are_asked_for_without_outlier_columns() -> None:
    with torch.device("meta"):
        skeleton = Classifier.from_config(BertConfig())
    asked_for = quantized.quantization_arguments(asked("8bit"), torch.bfloat16, skeleton)
    chosen = asked_for["quantization_config"]
    assert chosen.load_in_8bit
    assert chosen.llm_int8_threshold == 0.0
    assert chosen.llm_int8_skip_modules == ["classifier"]


def test_h26_outlier_columns_that_a_checkpoint_brings_along_are_switched_off() -> None:
    layer = nn.Linear(2, 2)
    layer.state = SimpleNamespace(threshold=6.0)  # type: ignore[assignment]
    quantized.without_outliers(nn.Sequential(nn.Linear(2, 2), layer))
    assert layer.state.threshold == 0.0


def packed(model: nn.Module, path: str) -> nn.Module:
    """Give a layer whole numbers for weights, as a quantised one has."""
    layer = model.get_submodule(path)
    layer.weight = nn.Parameter(torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8), False)  # type: ignore[union-attr, operator]
    return model


@pytest.mark.parametrize(
    ("changes", "adapt", "key"),
    [
        ({"modules_to_save": ("classifier", "pooler.dense")}, "lora", "modules_to_save: bert.pooler.dense"),
        ({"target_modules": ("pooler.dense",)}, "full", "target_modules: bert.pooler.dense"),
    ],
)
def test_h26_a_layer_in_few_bits_is_not_trained_whole(changes: Any, adapt: Any, key: str) -> None:
    small = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    model = packed(Classifier.from_config(small), "bert.pooler.dense")
    config = AdapterConfig(**{"rank": 2, "lora_alpha": 2.0, "target_modules": ("query",)} | changes)
    with pytest.raises(ModelError, match=f"{key} is stored in uint8"):
        inject(model, config, seed=0, fingerprint="0" * 64, adapt=adapt)


def test_the_fingerprint_covers_the_scales_of_quantised_layers() -> None:
    class Scaled(nn.Linear):
        scale: torch.Tensor

        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
            destination[prefix + "SCB"] = self.scale

    one, tied = Scaled(2, 2), nn.Linear(2, 2)
    one.scale = torch.ones(2)
    first = fingerprint_weights(one)
    one.scale = 2 * torch.ones(2)
    assert fingerprint_weights(one) != first
    both = nn.ModuleDict({"a": tied, "b": tied})
    assert fingerprint_weights(both) == fingerprint_weights(nn.ModuleDict({"a": tied}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=20, **shape)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]").save_pretrained(folder)
    return folder


def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = quantized.quantization_arguments
    monkeypatch.setattr(models, "check_quantization", lambda *_: None)
    monkeypatch.setattr(
        models, "quantization_arguments", lambda *given: real(*given) | {"device_map": {"": "cpu"}}
    )


def changes_of_others(layer: nn.Module) -> float:
    """How far one record with an outlying activation moves the outputs of the others."""
    records = torch.randn(4, 5, 64, generator=torch.Generator().manual_seed(1))
    loud = records.clone()
    loud[3, :, 2] = 50.0
    with torch.no_grad():
        return float((layer(loud)[:3] - layer(records)[:3]).abs().max())


def test_h26_a_record_with_outlying_activations_changes_no_other_record(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LLM.int8() as it comes multiplies a column otherwise for the whole batch once one token exceeds the threshold."""
    on_cpu(monkeypatch)
    base = load_base(asked("8bit", name_or_path=str(checkpoint)))
    layer = base.model.get_submodule("bert.encoder.layer.0.attention.self.query")
    assert changes_of_others(layer) == 0.0
    layer.state.threshold = 6.0
    assert changes_of_others(layer) > 1e-5
    base.model.config.quantization_config.llm_int8_threshold = 6.0  # a checkpoint that brings it along
    base.model.save_pretrained(tmp_path / "stored")
    base.tokenizer.save_pretrained(tmp_path / "stored")
    stored = load_base(asked("8bit", name_or_path=str(tmp_path / "stored")))
    again = stored.model.get_submodule("bert.encoder.layer.0.attention.self.query")
    assert type(again).__name__ == "Linear8bitLt"
    assert changes_of_others(again) == 0.0


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_h26_a_quantised_base_takes_an_adapter_and_a_whole_head(
    bits: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu(monkeypatch)
    base = load_base(asked(bits, name_or_path=str(checkpoint)))
    assert type(base.model.classifier) is nn.Linear
    assert not base.model.bert.pooler.dense.weight.is_floating_point()
    config = AdapterConfig(rank=2, lora_alpha=2.0, target_modules=("query", "value"))
    adapted = inject(base.model, config, seed=0, fingerprint=base.fingerprint)
    assert sorted(adapted.layout.modules) == [
        f"bert.encoder.layer.0.attention.self.{name}" for name in ("query", "value")
    ]
    assert adapted.layout.extra["classifier|weight"] == (3, 64)
