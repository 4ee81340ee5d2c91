"""Runs whose head leaves out the common part of its inputs and steps at the rate of their norm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from simulation_helpers import configuration

from fedlora.config import config_container, config_from_container, load_config
from fedlora.simulation.prepare import complete
from fedlora.simulation.run import simulate
from fedlora.training.session import load_parts
from fedlora.training.starting import read_adapter

WEIGHT = "classifier|weight"
KINDS = {"lora_fa": "mean_b", "prism": "tangent", "factor": "product"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_centered_head_does_not_move_along_the_common_part(world: Path, tmp_path: Path, kind: str) -> None:
    """Steps without an elementwise optimiser: what the head moved is orthogonal to u, noise and all."""
    mechanism = {"kind": kind, **({"adaptivity": "none"} if kind == "prism" else {})}
    config = configuration(
        world, tmp_path, mechanism=mechanism, adapter={"head_input": "centered", "head_start": "typical"},
        training={"optimizer": {"kind": "sgd", "lr": 0.1}}, federation={"aggregation": {"kind": KINDS[kind]}},
    )  # fmt: skip
    result = simulate(config, in_process=True)
    resolved = load_config(result.folder / "config.yaml")
    parts = load_parts(resolved)
    direction = parts.adapted.left_out[WEIGHT].cpu()
    start = torch.from_numpy(complete(resolved).bench.initial_payload().blocks[WEIGHT])
    moved = torch.from_numpy(read_adapter(result.folder).blocks[WEIGHT]) - start
    assert float(moved.norm()) > 0.05
    assert float((moved @ direction).norm()) < 1e-5 * float(moved.norm())


def test_head_rates_are_resolved_to_public_numbers(world: Path, tmp_path: Path) -> None:
    optimizer = {"kind": "adam", "lr": 0.05, "head_rates": "auto"}
    config = configuration(
        world, tmp_path, adapter={"head_input": "centered"}, federation={"server_optimizer": optimizer}
    )
    result = simulate(config, in_process=True)
    resolved = load_config(result.folder / "config.yaml")
    rates = resolved.federation.server_optimizer.head_rates
    assert set(rates) == {"classifier"}
    assert 0 < rates["classifier"] < 1000
    again = complete(resolved).config
    assert again.federation.server_optimizer.head_rates == rates
    assert config_from_container(config_container(resolved)) == resolved


def test_rates_of_a_head_that_is_not_trained_are_refused(world: Path, tmp_path: Path) -> None:
    optimizer = {"kind": "adam", "lr": 0.05, "head_rates": {"scroe": 2.0}}
    config = configuration(world, tmp_path, federation={"server_optimizer": optimizer})
    with pytest.raises(Exception, match="scroe is no trained head; allowed are classifier") as error:
        simulate(config, in_process=True)
    assert "head_rates" in str(error.value)
