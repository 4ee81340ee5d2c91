"""The released noise: law with power twins, sources, groups, events, refusals."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from chance import LEVEL, energy_bounds, most_deviations, most_product_sum
from scipy import stats

from fedlora.accounting import NonPrivateEvent, PoissonGaussianEvent
from fedlora.adapters import BlockTable, FlatBlocks
from fedlora.errors import PrivacyParameterError, SensitivityMismatchError
from fedlora.mechanisms.noise import (
    OsNoise,
    SeededNoise,
    add_noise,
    box_muller,
    draw_gaussians,
    pass_through,
)
from fedlora.mechanisms.stages import ClippedSum, Metric

CPU = torch.device("cpu")
TABLE = BlockTable.of({"a|lora_B": (40, 50), "head|weight": (20, 50)})
GROUPS = {"a|lora_B": "adapters", "head|weight": "head"}


def accepts(values: np.ndarray, scale: float) -> bool:
    """Two-sided chi-square test of the variance and a test of the mean, each at `LEVEL`."""
    n = values.size
    low, high = energy_bounds(n)
    mean = abs(float(values.mean())) * math.sqrt(n) / scale
    return low < float((values**2).mean()) / scale**2 < high and mean < most_deviations()


def metric(weights=(1.0, 1.0), per_layer=False) -> Metric:
    groups = {"adapters": weights[0], "head": weights[1]}
    return Metric("euclidean", groups, GROUPS, per_layer)


def released(sigma, bound, m, sources, fill=0.0, clients=None):
    k = clients if clients is not None else len(sources)
    blocks = FlatBlocks(TABLE, torch.full((k, TABLE.size), fill, dtype=torch.float64))
    return add_noise(ClippedSum(blocks, bound, m), m, sources, sigma, 0.25)


@pytest.mark.parametrize("source", [OsNoise(), SeededNoise(5, "c", 1)], ids=["os", "seeded"])
def test_gaussians_have_the_normal_law(source):
    values = source.gaussians(200_001, CPU, torch.float64).numpy()
    assert values.shape == (200_001,)
    assert accepts(values, 1.0)
    assert stats.kstest(values, "norm").pvalue > LEVEL
    assert not accepts(values, 0.95)
    assert not accepts(values, 1.05)
    assert abs(float(values[:100_000] @ values[100_000:200_000])) < most_product_sum(100_000)


@pytest.mark.parametrize(
    ("sigma", "bound", "weights"), [(1.5, 2.0, (1.0, 1.0)), (0.7, 0.1, (1.0, 0.1)), (4.0, 1.0, (2.0, 0.5))]
)
def test_noise_has_sigma_c_over_the_group_weight_and_rejects_five_percent_off(sigma, bound, weights):
    update = released(
        sigma, bound, metric(weights), [SeededNoise(1, f"c{k}", 1) for k in range(12)], fill=3.0
    )
    for name, weight in (("a|lora_B", weights[0]), ("head|weight", weights[1])):
        noise = update.blocks[name].numpy().reshape(-1) - 3.0
        scale = sigma * bound / weight
        assert update.noise_stddev[GROUPS[name]] == pytest.approx(scale)
        assert accepts(noise, scale)
        assert not accepts(noise, 0.95 * scale)
        assert not accepts(noise, 1.05 * scale)
    assert update.event == PoissonGaussianEvent(sigma, 0.25)


def test_rows_and_columns_of_the_noise_are_uncorrelated():
    """Of 1500 columns that are correlated by .6 one at least lies four deviations beyond, of clients by .25 six."""
    update = released(1.0, 1.0, metric(), [OsNoise() for _ in range(400)])
    flat = update.blocks.flat.numpy()
    assert np.abs((flat[:, :1500] * flat[:, 1500:]).sum(0)).max() < most_product_sum(400, places=1500)
    assert np.abs((flat[:200] * flat[200:]).sum(1)).max() < most_product_sum(3000, places=200)
    shared = 0.6 * flat[:, :1500] + 0.8 * flat[:, 1500:]
    assert np.abs((flat[:, :1500] * shared).sum(0)).max() > most_product_sum(400, places=1500)
    partly = 0.25 * flat[:200] + math.sqrt(1.0 - 0.25**2) * flat[200:]
    assert np.abs((flat[:200] * partly).sum(1)).max() > most_product_sum(3000, places=200)


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_per_layer_clipping_is_one_gaussian_of_sensitivity_sqrt_layers(layers):
    table = BlockTable.of({f"m{i}|lora_B": (2, 2) for i in range(layers)})
    group_of = {name: name.partition("|")[0] for name in table.shapes}
    m = Metric("euclidean", dict.fromkeys(group_of.values(), 1.0), group_of, per_layer=True)
    clipped = ClippedSum(FlatBlocks(table, torch.zeros(1, table.size)), 1.0, m)
    event = add_noise(clipped, m, [OsNoise()], 2.0, 0.5).event
    assert event == PoissonGaussianEvent(2.0 / math.sqrt(layers), 0.5)


@pytest.mark.parametrize("seed", [0, 42, 2**62])
def test_h23_the_experiment_seed_does_not_reach_the_noise(seed):
    draws = []
    for _ in range(3):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        draws.append(draw_gaussians([OsNoise(), OsNoise()], 64, CPU, torch.float64))
    rows = torch.cat(draws)
    assert len({tuple(row.tolist()) for row in rows}) == 6
    assert OsNoise().private is True
    assert SeededNoise(seed, "a", 1).private is False


def test_h23_noise_differs_between_forked_processes():
    OsNoise().gaussians(4, CPU, torch.float64)  # the parent's generator is in use before the fork
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, OsNoise().gaussians(8, CPU, torch.float64).numpy().tobytes())
        os._exit(0)
    child = np.frombuffer(os.read(read, 64))
    os.waitpid(pid, 0)
    mine = OsNoise().gaussians(8, CPU, torch.float64).numpy()
    assert not set(child.tolist()) & set(mine.tolist())


def test_seeded_noise_repeats_per_client_and_round_only():
    def draw(seed, client, number):
        return tuple(SeededNoise(seed, client, number).gaussians(5, CPU, torch.float64).tolist())

    assert draw(1, "a", 1) == draw(1, "a", 1)
    assert len({draw(1, "a", 1), draw(1, "a", 2), draw(1, "b", 1), draw(2, "a", 1)}) == 4


def test_box_muller_stays_finite_at_the_ends():
    words = torch.tensor([0, -1, 2**11 - 1, -(2**63), 0, -1, 2**62, 5], dtype=torch.int64)
    assert bool(torch.isfinite(box_muller(words)).all())


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf])
def test_noise_refuses_a_multiplier_that_is_no_privacy(sigma):
    with pytest.raises(PrivacyParameterError, match="noise_multiplier"):
        released(sigma, 1.0, metric(), [OsNoise()])


def test_noise_refuses_another_metric_an_unclipped_sum_and_uncovered_blocks():
    blocks = FlatBlocks(TABLE, torch.zeros(1, TABLE.size))
    with pytest.raises(SensitivityMismatchError, match="another metric"):
        add_noise(ClippedSum(blocks, 1.0, metric((1.0, 2.0))), metric(), [OsNoise()], 1.0, 0.5)
    with pytest.raises(SensitivityMismatchError, match="not clipped"):
        add_noise(ClippedSum(blocks, math.inf, metric()), metric(), [OsNoise()], 1.0, 0.5)
    part = Metric("euclidean", {"adapters": 1.0}, {"a|lora_B": "adapters"})
    with pytest.raises(SensitivityMismatchError, match="no group"):
        add_noise(ClippedSum(blocks, 1.0, part), part, [OsNoise()], 1.0, 0.5)
    with pytest.raises(PrivacyParameterError, match="sources"):
        released(1.0, 1.0, metric(), [OsNoise()], clients=2)
    with pytest.raises(PrivacyParameterError, match="group weight"):
        released(1.0, 1.0, Metric("euclidean", {}, GROUPS), [OsNoise()])


def test_pass_through_says_so():
    m = metric()
    update = pass_through(ClippedSum(FlatBlocks(TABLE, torch.ones(1, TABLE.size)), math.inf, m))
    assert update.event == NonPrivateEvent()
    assert set(update.noise_stddev.values()) == {0.0}
