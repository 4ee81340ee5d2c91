"""A 7B model's adapters in every mode: the state is a few updates, whatever the number of clients.

No state is shared between modules and all of it is as long as the modules' sides, so what one layer at a sixteenth of
the size holds is counted exactly and gives the whole model's; a long test allocates all 224 modules at their own
shapes, of which it must say the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import aggregation_memory
import pytest

from fedlora.aggregation.products import SKETCH_BYTES, running_rank
from fedlora.geometry.products import PROBES
from fedlora.wire import ModuleSpec

SCRIPT = Path(__file__).with_name("aggregation_memory.py")
RANK = 16


def measure(mode: str, layers: int, counts: list[int], max_rank: int = 0) -> dict:
    """In this process, for factors at sides a sixteenth of the model's: what is held is as long as the sides."""
    shrink = 1 if mode in ("mean_b", "tangent") else 16  # small linear updates are packed, another way
    return aggregation_memory.measure(mode, layers, RANK, max_rank, counts, shrink=shrink)


def measure_whole(mode: str, layers: int, counts: list[int], max_rank: int = 0) -> dict:
    """In a process of its own, at the model's own shapes."""
    arguments = [mode, str(layers), str(RANK), str(max_rank), *(str(one) for one in counts)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], check=True, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    found["state"] = {int(count): size for count, size in found["state"].items()}
    return found


@pytest.mark.parametrize("mode", ["mean_b", "tangent"])
def test_linear_state_is_one_group_of_updates_and_one_sum(mode):
    found = measure(mode, 1, [7, 8, 15, 16, 31, 32])
    update, state = found["update"], found["state"]
    assert state[8] == state[16] == state[32] == 2 * update  # the float64 sum
    assert state[15] == state[31] == 9 * update  # and seven updates that wait
    assert state[7] == 7 * update


PROBE = 4 * PROBES * 7 * 256
"""What was dropped seen through Gaussian vectors: float32, the shorter side of seven modules."""


@pytest.mark.parametrize(("mode", "extra"), [("product", 0), ("factor_mean", 2), ("aligned", 2)])
def test_factor_state_is_the_sketch_and_what_waits(mode, extra):
    found = measure(mode, 1, [1, 2, 3, 4, 7, 8], max_rank=2 * RANK)
    small = 7 * 8 * 2 * RANK  # singular values
    sketch = 2 * 2 * found["factors"] + small  # float64, twice the rank
    plain = extra * found["factors"]  # the float64 sums of both factors
    assert found["state"][2] == sketch + plain  # nothing was dropped yet
    assert found["state"][3] == sketch + plain + found["factors"]
    assert found["state"][4] == found["state"][8] == sketch + plain + PROBE
    assert found["state"][7] == sketch + plain + PROBE + found["factors"]


@pytest.mark.parametrize("rank", [4, 8, 16, 64])
def test_the_default_rank_of_product_takes_few_updates_of_a_large_model(rank):
    """Twice the rank in float64 is four updates; at small ranks a megabyte a module may be more, in all 235 MB."""
    for spec in aggregation_memory.layout_of(1, rank).modules.values():
        sides = spec.out_features + spec.in_features
        default = running_rank(spec)
        assert default >= 2 * rank
        assert default == 2 * rank or 8 * default * sides <= SKETCH_BYTES


def test_the_default_rank_holds_several_clients_of_small_modules_exactly():
    assert running_rank(ModuleSpec(768, 768, 8, 1.0)) == running_rank(ModuleSpec(1024, 1024, 8, 1.0)) == 64
    assert running_rank(ModuleSpec(256, 256, 32, 1.0)) == 256


def test_layers_add_up():
    one, two = (measure("product", layers, [3, 4], max_rank=2 * RANK) for layers in (1, 2))
    assert two["factors"] == 2 * one["factors"]
    for count, size in one["state"].items():
        assert two["state"][count] == 2 * size


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("mode", "counts", "most"), [("mean_b", [15, 16], 6), ("tangent", [15, 16], 11), ("product", [4, 5], 8)]
)
def test_all_modules_of_a_7b_model_fit_in_a_few_updates(mode, counts, most):
    found = measure_whole(mode, 32, counts)
    small = measure(mode, 1, counts, max_rank=2 * RANK)
    probe = 4 * PROBES * 4096 * 224 if mode == "product" else 0
    factors = found["factors"]
    assert factors == 159_907_840
    gigabytes = {name: found[name] / 1e9 for name in ("factors", "update", "peak")}
    sys.stderr.write(
        f"\n{mode}: {gigabytes}, state {max(found['state'].values()) / factors:.2f} updates of factors\n"
    )
    assert max(found["state"].values()) <= most * factors
    singular = 224 * 8 * 2 * RANK if mode == "product" else 0
    for count, size in small["state"].items():
        rest = size - singular // 32 - (PROBE if probe else 0)
        counted = rest * factors / small["factors"] + singular + probe
        assert abs(found["state"][count] - counted) < 1000
