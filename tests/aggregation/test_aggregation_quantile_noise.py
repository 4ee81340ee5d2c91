"""Adaptive clipping: the bits' sum is noised with its own multiplier before it moves the clip."""

from __future__ import annotations

import math

import numpy as np
import pytest
from aggregation_cases import random_payload

from fedlora.aggregation.client_privacy import ClientPlan, ClientRelease


class Fixed:
    """A source whose every normal number is `value`."""

    private = False

    def __init__(self, value: float) -> None:
        self.value = value

    def normal(self, shape):
        return np.full(shape, self.value)


def next_clip(below: int, above: int, normal: float, multiplier: float) -> float:
    current = random_payload("lora_b", 0)
    shapes = {name: block.shape for name, block in current.blocks.items()}
    plan = ClientPlan(
        clipping_norm=2.0,
        noise_multiplier=1.0,
        expected_clients=10.0,
        sample_rate=None,
        quantile=0.5,
        quantile_noise_multiplier=multiplier,
    )
    release = ClientRelease(plan, current, shapes)
    for size, count in ((0.0, below), (100.0, above)):
        for _ in range(count):
            release.add({name: block + np.float32(size) for name, block in current.blocks.items()})
    return release.release(Fixed(normal))[1]


@pytest.mark.parametrize(("below", "above"), [(7, 3), (2, 8), (0, 0)])
@pytest.mark.parametrize("multiplier", [0.5, 4.0])
def test_the_clip_moves_by_the_noised_sum_of_bits(below: int, above: int, multiplier: float) -> None:
    start = next_clip(below, above, 0.0, multiplier)
    assert start == pytest.approx(2.0 * math.exp(-0.2 * (below - above) / 2 / 10))
    for normal in (-2.0, 1.0, 3.0):
        moved = next_clip(below, above, normal, multiplier) / start
        assert math.log(moved) == pytest.approx(-0.2 * 0.5 * multiplier * normal / 10)
