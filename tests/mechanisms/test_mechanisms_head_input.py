"""Heads that do not move along the common part of their inputs (`adapter.head_input: centered`)."""

from __future__ import annotations

import pytest
import torch
from engine_zoo import ZooTask, adapted_model, config, records

from fedlora.adapters import RecordAxis
from fedlora.adapters.session import without_direction
from fedlora.mechanisms.base import build_mechanism
from fedlora.mechanisms.clip import zero_sum
from fedlora.mechanisms.noise import SeededNoise
from fedlora.training import heads
from fedlora.training.cohort_passes import PassRunner

WEIGHT = "classifier|weight"
KINDS = ("lora_fa", "prism", "factor")


@pytest.fixture
def centered(monkeypatch):
    monkeypatch.setattr(heads, "public_records", lambda task, count=64: records("bert", (5,) * count))
    adapted = adapted_model("bert")
    found = heads.center_heads(config("lora_fa"), ZooTask("bert"), adapted)
    assert set(found) == {WEIGHT}
    return adapted, found[WEIGHT]


def built(kind, adapted, **changes):
    return build_mechanism(config(kind, **changes), adapted.layout, adapted.left_out)


def sums(mechanism, adapted, rows):
    state = mechanism.stages.open(mechanism, adapted, mechanism.initial_payload(adapted), 1)
    state = mechanism.stages.prepare(mechanism, state)
    return state, PassRunner(adapted, ZooTask("bert")).clipped_sums(mechanism, state, [rows])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_along_the_common_part_is_released(centered, kind):
    adapted, direction = centered
    mechanism = built(kind, adapted)
    state, clipped = sums(mechanism, adapted, records("bert"))
    assert float((clipped.blocks[WEIGHT] @ direction).abs().max()) < 1e-12
    noised = mechanism.noise(state, clipped, [SeededNoise(1, "c", 1)])
    assert float((noised.blocks[WEIGHT] @ direction).abs().max()) < 1e-12
    assert float(noised.blocks[WEIGHT].abs().max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_draw_releases_noise_of_the_same_law(centered, kind):
    """Noise along the direction in an empty draw only would tell that nobody was drawn."""
    adapted, direction = centered
    mechanism = built(kind, adapted)
    state, clipped = sums(mechanism, adapted, records("bert"))
    nobody = zero_sum(
        mechanism.coordinates.table, RecordAxis.of([0]), mechanism.metric, clipped.bound, clipped.blocks.flat
    )
    source = [SeededNoise(3, "c", 1)], [SeededNoise(3, "c", 1)]
    full, empty = mechanism.noise(state, clipped, source[0]), mechanism.noise(state, nobody, source[1])
    assert float((empty.blocks[WEIGHT] @ direction).abs().max()) < 1e-12
    for name in clipped.blocks:
        assert torch.allclose(full.blocks[name] - empty.blocks[name], clipped.blocks[name], atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_one_record_moves_the_sum_by_at_most_the_bound(centered, kind):
    adapted, _ = centered
    mechanism = built(kind, adapted, privacy={"max_grad_norm": 0.05})
    rows = records("bert")
    _, whole = sums(mechanism, adapted, rows)
    for place in range(len(rows)):
        _, without = sums(mechanism, adapted, rows[:place] + rows[place + 1 :])
        gap = whole.blocks.like(whole.blocks.flat - without.blocks.flat)
        head = sum(float(gap[name].square().sum()) for name in gap if name.startswith("classifier"))
        assert head**0.5 <= 0.05 * (1 + 1e-9)


def test_the_common_part_takes_up_nothing_of_the_clip_norm(centered):
    """The head's squared norm is that of g (x - (x u) u), not of g x."""
    adapted, direction = centered
    mechanism = built("lora_fa", adapted)
    seen = []
    leaf, rows = adapted.leaves["classifier"], records("bert")
    handle = leaf.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    adapted.load(mechanism.initial_payload(adapted))
    batch = ZooTask("bert").collate(rows)
    with torch.no_grad():
        ZooTask("bert").per_record_loss(adapted.model, batch)
        probabilities = torch.softmax(leaf(seen[0]), 1)
    handle.remove()
    probabilities[torch.arange(len(rows)), batch["labels"]] -= 1.0
    rest = without_direction(seen[0], direction)
    assert float(rest.norm()) < 0.9 * float(seen[0].norm())
    _, clipped = sums(built("lora_fa", adapted, privacy={"max_grad_norm": 1e6}), adapted, rows)
    assert torch.allclose(clipped.blocks[WEIGHT][0], probabilities.mT @ rest, rtol=1e-9, atol=1e-12)


def test_what_is_left_out_is_taken_off_to_rounding():
    direction = torch.nn.functional.normalize(torch.randn(5, dtype=torch.float64), dim=0)
    rows = torch.randn(7, 3, 5, dtype=torch.float64) + 1e6 * direction
    assert float((without_direction(rows, direction) @ direction).abs().max()) < 1e-9


def test_only_the_rows_that_tell_in_the_loss_are_looked_at():
    """GPT-2 scores every token and takes the last one's logits: one row for each record, padding left out."""
    adapted, rows = adapted_model("gpt2"), records("gpt2")
    (name,) = heads.new_heads(config("lora_fa"), adapted)
    found = heads.head_inputs({name: adapted.leaves[name]}, ZooTask("gpt2"), adapted, rows)[name]
    assert found.shape[0] == len(rows)
    alone = [
        heads.head_inputs({name: adapted.leaves[name]}, ZooTask("gpt2"), adapted, [row])[name] for row in rows
    ]
    assert torch.allclose(found, torch.cat(alone), atol=1e-10)
    assert not adapted.leaves[name]._forward_hooks
