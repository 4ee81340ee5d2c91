"""Diagnostics against closed forms."""

from __future__ import annotations

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from fedlora.cli.diagnose import app
from fedlora.errors import ConfigError
from fedlora.mechanisms.diagnostics import (
    a_variance,
    injected_noise_by_layer,
    injected_noise_measure,
    intrinsic_noise_by_gauge,
    kaiming_bias,
    preconditioned_noise_by_sigma,
    sketch_moments,
)

F64 = torch.float64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_injected_noise_is_one_lora_step_against_one_full_step() -> None:
    w, g, a, lr = normal(6, 9), normal(6, 9, seed=1), normal(3, 9, seed=2), 0.3
    full, adapted = w - lr * g, w + (-lr * g @ a.mT) @ a
    assert injected_noise_measure(g, a, lr) == pytest.approx((full - adapted).norm().item(), rel=1e-12)


def test_layers_with_larger_gradients_get_more_noise_and_rank_lowers_it() -> None:
    g = {"small": normal(8, 64), "large": 5.0 * normal(8, 64, seed=3)}
    low, high = injected_noise_by_layer(g, 4, draws=20), injected_noise_by_layer(g, 32, draws=20)
    assert low["large"]["noise"] > 3 * low["small"]["noise"]
    for name in g:
        assert high[name]["noise"] < low[name]["noise"]
        assert high[name]["ratio"] == pytest.approx(math.sqrt(65 / 32), rel=0.1)


@pytest.mark.parametrize("init", ["gaussian", "kaiming", "he"])
@pytest.mark.parametrize("rank", [2, 8])
def test_sketch_moments_agree_with_the_lemmas(init: str, rank: int) -> None:
    found = sketch_moments(normal(40), rank, init=init, draws=3000)  # type: ignore[arg-type]
    assert found.mean_error < 1.5
    assert found.variance_ratio == pytest.approx(1.0, abs=0.03 if rank == 8 else 0.1)
    assert found.covariance_error < 0.12 * math.sqrt(8 / rank)
    assert found.bias == pytest.approx(rank * a_variance(rank, 40, init) - 1)  # type: ignore[arg-type]


def test_a_variance_five_percent_off_is_seen() -> None:
    """Power twin: scaling lora_A by sqrt(1.05) moves the variance ratio by 10 %."""
    q = normal(40)
    honest = sketch_moments(q, 8, draws=3000)
    assert abs(honest.variance_ratio - 1) < 0.03
    assert abs(honest.variance_ratio * 1.05**2 - 1) > 0.03
    assert abs(honest.variance_ratio * 0.95**2 - 1) > 0.03


def test_kaiming_cancels_nearly_the_whole_gradient_and_gaussian_is_unbiased() -> None:
    assert kaiming_bias(8, 768, "gaussian") == 0.0
    assert kaiming_bias(8, 768, "kaiming") == pytest.approx(-0.99653, abs=1e-5)
    assert kaiming_bias(8, 768, "he") == pytest.approx(2 * 8 / 768 - 1)
    with pytest.raises(ConfigError, match="gaussian"):
        kaiming_bias(8, 768, "xavier")  # type: ignore[arg-type]


def test_factor_noise_depends_on_the_gauge_and_tangent_noise_does_not() -> None:
    points = intrinsic_noise_by_gauge(
        normal(30, 4), normal(4, 20, seed=1), (0.1, 1.0, 10.0), stddev=0.01, draws=200
    )
    assert points[0].factor_measured > 20 * points[1].factor_measured
    assert points[2].factor_measured > 20 * points[1].factor_measured
    for p in points:
        assert p.factor_measured == pytest.approx(p.factor_first_order, rel=0.1)
        assert p.prism_exact == 4 * (30 + 20 - 4)
        assert p.prism_measured == pytest.approx(p.prism_exact, rel=0.03)


def test_prism_floor_bounds_preconditioned_noise() -> None:
    points = preconditioned_noise_by_sigma((0.001, 0.1, 1.0), steps=20)
    unit = math.sqrt(4 * (48 + 40 - 4))
    assert all(p.prism <= 1.1 * unit for p in points)
    assert points[0].prism < 0.05 * unit < 0.1 * points[0].adam * 10


@pytest.mark.parametrize("command", ["gauge", "noise", "preconditioned", "moments", "sketch-noise"])
def test_diagnose_prints_one_json_object(command: str) -> None:
    arguments = [command, "--json"] + (["--steps", "2"] if command == "gauge" else [])
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["ok"] is True
    if command == "gauge":
        assert data["max_relative_difference"] < 1e-4
        assert set(data["per_gauge"]) == {"c=0.25", "c=0.5", "c=2", "c=4", "R1", "R2", "R3"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["gauge", "--dtype", "float16"],
        ["gauge", "--adaptivity", "adam"],
        ["gauge", "--mechanism", "magic"],
        ["sketch-noise", "--norms", "[0]"],
    ],
)
def test_diagnose_refuses_wrong_arguments(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
