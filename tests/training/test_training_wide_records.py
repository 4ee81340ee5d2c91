"""Models whose positions follow the longest record of a batch: records beyond that length are refused, not coupled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from trainer_helpers import make_world

from fedlora.adapters.heads import uncoupled_width
from fedlora.config import config_container, config_from_container
from fedlora.errors import ModelError
from fedlora.training.session import bind, load_parts

FIRST, MOST = 16, 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0],
    "long_factor": [1.0, 8.0],
    "original_max_position_embeddings": FIRST,
}
KINDS: dict[str, tuple[dict[str, Any], int | None]] = {
    "default": ({"rope_type": "default", "rope_theta": 10000.0}, None),
    "linear": ({"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, None),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, MOST),
    "longrope": (LONGROPE, FIRST),
}


def rotary_model(rope: dict[str, Any]) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = hf.LlamaConfig(
            vocab_size=14, max_position_embeddings=MOST, rope_parameters=rope, pad_token_id=0, **sizes
        )
        return hf.LlamaForCausalLM(config).double().eval()


@pytest.mark.parametrize("kind", KINDS)
def test_the_stated_width_is_where_one_record_begins_to_change_the_others(kind: str) -> None:
    rope, limit = KINDS[kind]
    model = rotary_model(rope)
    assert uncoupled_width(model) == limit
    ids = torch.arange(1, 11).repeat(2, 1)

    def first_record(width: int) -> torch.Tensor:
        padded = torch.zeros(2, width, dtype=torch.int64)
        padded[:, :10], mask = ids, torch.ones(2, width, dtype=torch.int64)
        mask[0, 10:] = 0
        with torch.no_grad():
            return model(input_ids=padded, attention_mask=mask).logits[0, :10]

    alone = first_record(10)
    for width in (FIRST, FIRST + 1, MOST, MOST + 1):
        same = bool(torch.allclose(first_record(width), alone, rtol=0.0, atol=1e-12))
        assert same == (limit is None or width <= limit)


def test_records_that_may_be_longer_are_refused_before_any_is_read(tmp_path) -> None:
    world = make_world(tmp_path)
    rotary_model(LONGROPE).save_pretrained(tmp_path / "model")

    def bound(length: int | None, **privacy: Any) -> Any:
        values = config_container(world.config)
        values["derived"] = None
        values["model"] |= {"task": "causal-lm", "num_labels": None}
        values["data"] |= {"max_length": length, "labels": None}
        values["adapter"] |= {"target_modules": ["q_proj"], "modules_to_save": []}
        values["privacy"] = privacy or values["privacy"]
        config = config_from_container(values)
        return bind(config, load_parts(config))

    assert bound(FIRST).task.window == FIRST
    assert bound(None, unit="none").task.window == MOST
    for length in (FIRST + 1, None):
        with pytest.raises(ModelError, match=f"data.max_length to {FIRST} or less"):
            bound(length)
