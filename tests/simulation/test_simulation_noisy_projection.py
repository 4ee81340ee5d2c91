"""Noisy projection through the whole spine: shared under mean_b, drawn by clients under product and stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulation_helpers import container, metric_lines

import strategies.fedlora_strategy as strategy_module
from fedlora.adapters.projection_recipe import SEED_NOTE
from fedlora.config import config_from_container
from fedlora.simulation.run import simulate


def settings(world: Path, runs: Path, source: str, aggregation: str) -> dict[str, Any]:
    values = container(
        world,
        runs,
        federation={"rounds": 3, "aggregation": {"kind": aggregation}},
        training={"optimizer": {"kind": "sgd", "lr": 1.0}},
    )
    values["mechanism"] = {
        "kind": "noisy_projection",
        "projection_source": source,
        "head_max_grad_norm": 0.5,
        "head_noise_multiplier": 2.0,
    }
    return values


@pytest.mark.parametrize(
    ("source", "aggregation"), [("shared", "mean_b"), ("client", "product"), ("client", "stack")]
)
def test_noisy_projection_runs_end_to_end(
    world: Path, tmp_path: Path, source: str, aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[str] = []
    original = strategy_module.with_projection

    def watched(payload: Any) -> Any:
        drawn = original(payload)
        seeds.append(str(drawn.notes[SEED_NOTE]))
        return drawn

    monkeypatch.setattr(strategy_module, "with_projection", watched)
    values = settings(world, tmp_path, source, aggregation)
    result = simulate(config_from_container(values), in_process=True)
    assert (result.status, result.rounds) == ("finished", 3)
    assert result.epsilon is not None
    assert result.epsilon > 0
    lines = metric_lines(result.folder)
    assert len({line["adapter"] for line in lines}) == 4
    assert len(set(seeds)) == (3 if source == "shared" else 0)
