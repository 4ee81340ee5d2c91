from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fedlora.config.schema import DataConfig, ModelConfig

WORDS = [
    "the cat sat on the mat and the dog ran home",
    "numbers 1 2 3 4 5 6 7 8 9 0 plus minus",
    "hello world",
]


def data_config(**changes: Any) -> DataConfig:
    base: dict[str, Any] = {"source": {"kind": "file", "paths": ["unused.jsonl"]}, "name": "t"}
    return DataConfig.model_validate_json(json.dumps(base | changes))


def model_config(task: str, **changes: Any) -> ModelConfig:
    return ModelConfig.model_validate_json(json.dumps({"name_or_path": "tiny", "task": task} | changes))


def byte_tokenizer(window: int = 64) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=window
    )


def word_tokenizer(words: list[str], special: list[str], **tokens: str) -> PreTrainedTokenizerFast:
    """One token for each word and line break, so that masks can be counted by hand."""
    names = dict.fromkeys(["<unk>", "\n", *special, *words])
    tokenizer = Tokenizer(
        models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\S+"), behavior="removed", invert=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", model_max_length=512, **tokens
    )
    fast.add_special_tokens({"additional_special_tokens": special})
    return fast


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def tiny() -> Callable[..., Any]:
    return tiny_model


def tiny_model(kind: str, labels: int = 3, window: int = 64) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(_gpt2(window)).eval()
    if kind == "gpt2-classifier":
        return hf.GPT2ForSequenceClassification(_gpt2(window, num_labels=labels)).eval()
    if kind in ("bert", "bert-tokens"):
        config = hf.BertConfig(
            vocab_size=300,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=window,
            num_labels=labels,
        )
        name = "BertForSequenceClassification" if kind == "bert" else "BertForTokenClassification"
        return getattr(hf, name)(config).eval()
    if kind == "t5":
        config = hf.T5Config(
            vocab_size=300,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=1,
        )
        return hf.T5ForConditionalGeneration(config).eval()
    config = hf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=4,
        num_labels=labels,
    )
    return hf.ViTForImageClassification(config).eval()


def _gpt2(window: int, **changes: Any) -> Any:
    import transformers as hf

    return hf.GPT2Config(
        vocab_size=300,
        n_positions=window,
        n_embd=16,
        n_layer=2,
        n_head=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        **changes,
    )
