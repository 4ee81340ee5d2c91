"""Noisy projection through the whole spine: shared under mean_b, drawn by clients under product and stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulation_helpers import container, metric_lines

import strategies.fedlora_strategy as strategy_module
from fedlora.adapters.projection_recipe import SEED_NOTE, seed_of_test_run
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


SOURCES = [("shared", "mean_b"), ("client", "product"), ("client", "stack")]


@pytest.mark.parametrize(("source", "aggregation"), SOURCES)
def test_h35_a_resumed_run_repeats_its_projections_under_the_test_source(
    world: Path, tmp_path: Path, source: str, aggregation: str
) -> None:
    """A shared projection came from real entropy: no two runs were alike, nor a resumed one and a whole one."""
    whole = simulate(
        config_from_container(settings(world, tmp_path / "a", source, aggregation)), in_process=True
    )
    values = settings(world, tmp_path / "b", source, aggregation)
    part = simulate(config_from_container(values), in_process=True, stop_after=2)
    resumed = simulate(resume=part.folder, in_process=True)
    assert [line["adapter"] for line in metric_lines(resumed.folder)] == [
        line["adapter"] for line in metric_lines(whole.folder)
    ]


@pytest.mark.parametrize(("source", "aggregation"), SOURCES)
def test_clients_together_give_what_they_give_one_by_one_in_every_round(
    world: Path, tmp_path: Path, source: str, aggregation: str
) -> None:
    """Projections hung on the last bit of the weights: rounding in round 1 changed them altogether in round 2."""
    losses = []
    for cohort in (1, "auto"):
        values = settings(world, tmp_path / str(cohort), source, aggregation)
        values["simulation"]["cohort"] = cohort
        result = simulate(config_from_container(values), in_process=True)
        losses.append(result.metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("source", "aggregation"), SOURCES)
def test_noisy_projection_runs_end_to_end(
    world: Path, tmp_path: Path, source: str, aggregation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[str] = []
    original = strategy_module.with_projection

    def watched(payload: Any, test_seed: int | None) -> Any:
        drawn = original(payload, test_seed)
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


def test_real_runs_draw_their_projections_from_real_entropy(world: Path, tmp_path: Path) -> None:
    """The experiment seed reaches projections under the test source only."""
    starts = []
    for run in "ab":
        values = settings(world, tmp_path / run, "shared", "mean_b")
        values["privacy"]["noise_source"] = "os"
        config = config_from_container(values)
        assert seed_of_test_run(config) is None
        starts.append(metric_lines(simulate(config, in_process=True, stop_after=0).folder)[0]["adapter"])
    assert starts[0] != starts[1]
