"""Noise of the claimed variance that is no Gaussian mechanism, records that count twice, coins that clients share.

Attacks on releases hardly see any of them; start-up self-checks refuse each.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from audit_helpers import CASES, make_bench, write_model

from fedlora.errors import SensitivityMismatchError
from fedlora.mechanisms.noise import OsNoise
from fedlora.training import batchcheck, selfcheck
from fedlora.training.cohort_passes import PassRunner
from fedlora.training.lawcheck import check_added, check_law, judge_law

DRAW = OsNoise.gaussians


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("audit-law") / "model", hidden=32)


def _refused(bench, check):
    with pytest.raises(SensitivityMismatchError, match=check):
        selfcheck.require_selfchecks(bench)


@pytest.mark.parametrize("case", sorted(CASES))
def test_sound_noise_is_gaussian_and_added_as_it_is(model, case):
    bench = make_bench(model, case)
    found = [check_law(bench), check_added(bench)]
    assert all(one.passed for one in found), found


# -- what a source hands out -----------------------------------------------------------------------------------


def _uniform(self, count, device, dtype):
    return ((torch.from_numpy(np.random.default_rng().random(count)) - 0.5) * 12**0.5).to(dtype)


def _cut(self, count, device, dtype):
    return DRAW(self, count, device, dtype).clamp(-3.5, 3.5)


def _on_a_grid(self, count, device, dtype):
    return DRAW(self, count, device, dtype).to(torch.bfloat16).to(dtype)


def _in_pairs(self, count, device, dtype):
    return DRAW(self, (count + 1) // 2, device, dtype).repeat_interleave(2)[:count]


def _cancelling(self, count, device, dtype):
    half = DRAW(self, (count + 1) // 2, device, dtype)
    return torch.cat([half, -half])[:count]


class _Stale:
    """A third of every second draw is the third of the draw before."""

    def __init__(self):
        self.kept = {}

    def __call__(self, source, count, device, dtype):
        found = DRAW(source, count, device, dtype)
        if count in self.kept:
            found[-count // 3 :] = self.kept.pop(count)[-count // 3 :]
        else:
            self.kept[count] = found.clone()
        return found


class _Remembering:
    """Each draw is partly the one before; the variance is right."""

    def __init__(self):
        self.last = {}

    def __call__(self, source, count, device, dtype):
        found = DRAW(source, count, device, dtype)
        if count in self.last:
            found = 0.3 * self.last[count] + (1 - 0.3**2) ** 0.5 * found
        self.last[count] = found.clone()
        return found


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (_uniform, "from a Gaussian's"),
        (_cut, "0 numbers beyond 3.5"),
        (_on_a_grid, "of the numbers stand once"),
        (_in_pairs, "of the numbers stand once"),
        (_cancelling, "of the numbers stand once"),
        (_Stale(), "of the numbers stand once"),
        (_Remembering(), "correlated"),
    ],
    ids=["uniform", "cut off", "16 bits", "pairs", "cancelling halves", "a third again", "remembering"],
)
def test_noise_of_the_right_variance_and_another_law_is_refused(model, draw, said, monkeypatch):
    monkeypatch.setattr(OsNoise, "gaussians", lambda self, *asked: draw(self, *asked))
    _refused(make_bench(model), f"noise is Gaussian .*{said}")


@pytest.mark.parametrize(("scale", "passes"), [(1.0, True), (0.95, False), (1.05, False)])
def test_the_law_is_told_from_one_of_another_deviation(scale, passes):
    generator = np.random.Generator(np.random.Philox(7))
    draws = [scale * generator.standard_normal(2**18) for _ in range(4)]
    assert ("from a Gaussian's" in judge_law(draws)[1]) is not passes


# -- what the stage makes of it ------------------------------------------------------------------------------------


def _shorter_beside_a_long_sum(total, noise):
    return total + noise * torch.where(total.norm(dim=1, keepdim=True) > 3.0, 0.5, 1.0)


def _growing_with_the_sum(total, noise):
    return total + noise * (1.0 + total.norm(dim=1, keepdim=True))


def _beside_the_sum(total, noise):
    share = (noise * total).sum(1, keepdim=True) / total.square().sum(1, keepdim=True).clamp_min(1e-12)
    return total + noise - share * total


def _with_the_sums_sign(total, noise):
    return total + torch.where(total == 0.0, noise, noise.abs() * total.sign())


def _rounded_sum(total, noise):
    return total.bfloat16().float() + noise


def _rounded_noise(total, noise):
    return total + noise.half().float()


def _added_in_16_bits(total, noise):
    return (total.bfloat16() + noise.bfloat16()).float()


def _cut_in_the_stage(total, noise):
    return total + noise.clamp(-2.5, 2.5)


@pytest.mark.parametrize("case", ["lora_fa", "prism", "noisy_projection", "dp_sgd"])
@pytest.mark.parametrize(
    "released",
    [
        _shorter_beside_a_long_sum,
        _growing_with_the_sum,
        _beside_the_sum,
        _with_the_sums_sign,
        _rounded_sum,
        _rounded_noise,
        _added_in_16_bits,
        _cut_in_the_stage,
    ],
)
def test_noise_that_is_not_added_as_it_is_is_refused(model, case, released):
    bench = make_bench(model, case)
    original = bench.mechanism.stages.noise

    def noise(mechanism, state, total, sources):
        update, clean = original(mechanism, state, total, sources), total.blocks.flat
        return dataclasses.replace(
            update, blocks=update.blocks.like(released(clean, update.blocks.flat - clean))
        )

    stages = dataclasses.replace(bench.mechanism.stages, noise=noise)
    _refused(
        dataclasses.replace(bench, mechanism=dataclasses.replace(bench.mechanism, stages=stages)),
        "noise is added as it is",
    )


# -- passes and coins ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_record_that_counts_in_two_passes_is_refused(model, case, monkeypatch):
    original = PassRunner._plan

    def plan(self, drawn, places):
        found = original(self, drawn, places)
        return [*found[:1], *(np.unique(np.append(b, a[-1])) for a, b in itertools.pairwise(found))]

    monkeypatch.setattr(PassRunner, "_plan", plan)
    _refused(make_bench(model, case), "passes add up to one sum")


def test_passes_that_leave_a_record_out_are_refused(model, monkeypatch):
    original = PassRunner._plan
    monkeypatch.setattr(
        PassRunner,
        "_plan",
        lambda self, drawn, places: [
            one[: len(one) - (at > 0)] for at, one in enumerate(original(self, drawn, places))
        ],
    )
    _refused(make_bench(model), "passes add up to one sum")


def test_coins_that_all_clients_of_a_round_share_are_refused(model, monkeypatch):
    """Each client is sampled as claimed; who knows what it drew itself knows what the others drew."""
    original, kept = batchcheck.make_job, {}

    class Shared:
        private = True

        def __init__(self, number):
            self._generator = np.random.Generator(np.random.Philox(kept.setdefault(number, len(kept))))

        def words(self, count):
            return self._generator.integers(0, 2**64, size=count, dtype=np.uint64)

    monkeypatch.setattr(
        batchcheck, "make_job", lambda *asked: original(*asked, lambda client, number: Shared(number))
    )
    _refused(make_bench(model), "clients side by side: drawn twice running")
