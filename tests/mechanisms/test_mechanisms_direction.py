"""The divisor is the public expected batch size, whatever was drawn (H15)."""

from __future__ import annotations

import pytest
import torch

from fedlora.accounting import PoissonGaussianEvent
from fedlora.adapters.blocks import BlockTable, FlatBlocks
from fedlora.config.schema import AdamConfig, SgdConfig, TrainingConfig
from fedlora.mechanisms.base import StepPrivacy
from fedlora.mechanisms.direction import direct, empty_slots, euclidean_step
from fedlora.mechanisms.stages import Direction, NoisyUpdate


def make_update(values: list[list[float]]) -> NoisyUpdate:
    flat = torch.tensor(values, dtype=torch.float64)
    blocks = FlatBlocks(BlockTable.of({"a|lora_B": (flat.shape[1],)}), flat)
    return NoisyUpdate(blocks, {"adapters": 1.0}, PoissonGaussianEvent(1.0, 0.1))


@pytest.mark.parametrize("divisor", [2.0, 16.0, 32.0])
def test_h15_a_step_is_the_sum_over_the_public_batch_size(divisor):
    update = make_update([[3.0, -8.0], [0.5, 1.0]])
    optimizer = SgdConfig(kind="sgd", lr=1.0)
    direction, _ = direct(optimizer, empty_slots(optimizer, update.blocks), update, divisor)
    torch.testing.assert_close(direction.blocks.flat, update.blocks.flat / divisor)


def test_h15_moments_see_the_divided_sum():
    update = make_update([[3.0, -8.0]])
    optimizer = AdamConfig(kind="adam", lr=1.0, beta1=0.5, beta2=0.5)
    _, slots = direct(optimizer, empty_slots(optimizer, update.blocks), update, 4.0)
    torch.testing.assert_close(slots["first"], 0.5 * update.blocks.flat / 4.0)
    torch.testing.assert_close(slots["second"], 0.5 * (update.blocks.flat / 4.0).square())


@pytest.mark.parametrize(("batch", "nominal"), [(2, 3), (2, 4), (4, 10), (64, 65)])
def test_h15_divisor_and_rate_are_public_constants(batch, nominal):
    class Config:
        training = TrainingConfig(
            expected_batch_size=batch,
            nominal_records=nominal,
            steps_per_round=1,
            optimizer=SgdConfig(kind="sgd", lr=1.0),
        )
        privacy = None

    figures = StepPrivacy.of(Config)
    assert figures.divisor == batch
    assert figures.sample_rate == batch / nominal


@pytest.mark.parametrize(("lr", "mu"), [(1.0, 0.1), (0.5, 0.1), (2.0, 0.3)])
def test_h40_the_proximal_term_is_the_gradient_of_the_squared_norm(lr, mu):
    """Differences 3 and 4: penalty mu / 2 * 25, gradient mu * (3, 4)."""
    table = BlockTable.of({"a|lora_B": (1,), "b|lora_B": (1,)})
    values = FlatBlocks(table, torch.tensor([[4.0, 6.0]], dtype=torch.float64))
    start = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    still = Direction(FlatBlocks(table, torch.zeros(1, 2, dtype=torch.float64)))
    new = euclidean_step(values, still, lr, 0.0, start, mu)
    torch.testing.assert_close(
        new.flat, values.flat - lr * mu * torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    )
