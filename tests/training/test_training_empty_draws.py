"""The check at the start that trains on draws without records."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from fedlora.config.schema import RecordPrivacy
from fedlora.training import selfcheck


def check(monkeypatch, bias, steps=1):
    """Run the check on updates whose one small block is what `bias(turn)` says."""

    def train(bench, turn):
        blocks = {"large": np.full(9, float(turn)), "bias": np.asarray(bias(turn))}
        return SimpleNamespace(payload=SimpleNamespace(blocks=blocks), steps=steps)

    monkeypatch.setattr(selfcheck, "_train_on_nothing", train)
    config = SimpleNamespace(privacy=RecordPrivacy.model_construct(), seeded_noise=False)
    return selfcheck.check_empty_draws(SimpleNamespace(config=config))


def test_a_block_of_two_signs_that_coincides_once_does_not_stop_a_run(monkeypatch):
    """Adam's first step is nearly the learning rate times a sign: 1 run in 200 with a two-number head did not start."""
    signs = {1: [0.01, -0.01], 2: [0.01, -0.01], 3: [0.01, 0.01]}
    assert check(monkeypatch, signs.__getitem__).passed


@pytest.mark.parametrize("steps", [0, 1])
def test_a_block_that_never_has_noise_is_found(monkeypatch, steps):
    found = check(monkeypatch, lambda turn: [0.0, 0.0], steps)
    assert not found.passed
    assert "noise 1" in found.detail


def test_an_empty_draw_that_is_not_counted_is_found(monkeypatch):
    assert not check(monkeypatch, lambda turn: [float(turn)], 0).passed
