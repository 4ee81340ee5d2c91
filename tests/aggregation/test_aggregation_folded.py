"""The shared noisy projection: steps under one projection are averaged exactly and folded into one adapter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedlora.adapters.projection_recipe import (
    SEED_NOTE,
    new_projection_seed,
    projection_from_seed,
    projection_recipe,
)
from fedlora.aggregation.folded import FoldedMean
from fedlora.aggregation.round import Aggregator, RoundRules
from fedlora.aggregation.server_optimizer import ServerOptimizer
from fedlora.config.schema import ServerOptimizerConfig
from fedlora.errors import InconsistentRepliesError
from fedlora.wire.payload import AdapterLayout, AdapterPayload, ModuleSpec

SPEC = ModuleSpec(7, 9, 2, 0.5)
LAYOUT = AdapterLayout({"m": SPEC}, {"head|weight": (3, 4)}, "0" * 64)


def start(rank: int, seed: str | None = None) -> AdapterPayload:
    seed = seed or new_projection_seed()
    blocks = {
        "m|lora_A": np.zeros((rank, 9), np.float32),
        "m|lora_B": np.zeros((7, rank), np.float32),
        "head|weight": np.ones((3, 4), np.float32),
    }
    return AdapterPayload(
        "factors",
        blocks,
        {"m": replace(SPEC, rank=rank)},
        projection_recipe(seed),
        "0" * 64,
        {SEED_NOTE: seed},
    )


def update(current: AdapterPayload, seed: int) -> AdapterPayload:
    rng = np.random.default_rng(seed)
    blocks = {
        "m|lora_B": rng.standard_normal((7, 2)).astype(np.float32),
        "head|weight": rng.standard_normal((3, 4)).astype(np.float32),
    }
    return AdapterPayload("projected", blocks, {"m": SPEC}, current.recipe, "0" * 64)


def aggregator() -> Aggregator:
    mode = FoldedMean(ServerOptimizer(ServerOptimizerConfig()))
    return Aggregator(mode, LAYOUT, None, RoundRules(min_replies=1))


def dense(payload: AdapterPayload) -> np.ndarray:
    spec = payload.modules["m"]
    return spec.scaling * payload.blocks["m|lora_B"].astype(float) @ payload.blocks["m|lora_A"]


@pytest.mark.parametrize("rank", [7, 4])
def test_rounds_fold_to_the_exact_sum_up_to_the_stated_truncation(rank: int) -> None:
    agg, current, want = aggregator(), start(rank), np.zeros((7, 9))
    for number in range(3):
        agg.begin(current)
        sent = [update(current, 10 * number + k) for k in range(4)]
        a = projection_from_seed(current.notes[SEED_NOTE], "m", 2, 9).double().numpy()
        mean = np.mean([u.blocks["m|lora_B"] for u in sent], axis=0)
        head = np.mean([u.blocks["head|weight"] for u in sent], axis=0)
        for k, u in enumerate(sent):
            assert agg.add(f"c{k}", u)
        before = dense(current) + 0.5 * mean @ a
        result = agg.finish()
        want = want + 0.5 * mean @ a
        error = np.linalg.norm(dense(result.payload) - before) / np.linalg.norm(before)
        assert error == pytest.approx(result.residual, abs=1e-6)
        assert np.allclose(result.payload.blocks["head|weight"], head, atol=1e-6)
        assert result.payload.notes[SEED_NOTE] != current.notes[SEED_NOTE]
        assert result.payload.recipe == projection_recipe(result.payload.notes[SEED_NOTE])
        current = result.payload
    if rank == 7:
        assert np.allclose(dense(current), want, atol=1e-5)


def test_h03_an_update_under_another_projection_is_rejected_by_name() -> None:
    for other in (projection_recipe(new_projection_seed()), None, "0" * 64):
        agg, current = aggregator(), start(4)
        agg.begin(current)
        assert agg.add("good", update(current, 1))
        assert not agg.add("bad", replace(update(current, 2), recipe=other))
        result = agg.finish()
        assert result.accepted == ("good",)
        assert "bad" in result.rejected


@pytest.mark.parametrize("shape", [(7, 4), (7, 1), (9, 2)])
def test_an_update_of_another_rank_is_rejected_and_the_round_goes_on(shape: tuple[int, int]) -> None:
    agg, current = aggregator(), start(4)
    agg.begin(current)
    assert agg.add("good", update(current, 1))
    wrong = update(current, 2)
    blocks = {**wrong.blocks, "m|lora_B": np.zeros(shape, np.float32)}
    specs = {"m": replace(SPEC, rank=shape[1])}
    assert not agg.add("bad", replace(wrong, blocks=blocks, modules=specs))
    assert agg.finish().accepted == ("good",)


@pytest.mark.parametrize("notes", [{}, {SEED_NOTE: "ab" * 32}, {SEED_NOTE: 7}])
def test_a_round_without_its_own_projection_does_not_begin(notes: dict[str, str | int]) -> None:
    with pytest.raises(InconsistentRepliesError, match="projection"):
        aggregator().begin(replace(start(4), notes=notes))
