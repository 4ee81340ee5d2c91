"""A process's wish for fast, rounded matrix products does not reach norms, clip, noise and frames."""

from __future__ import annotations

import pytest
import torch
from engine_zoo import ZooTask, adapted_model, config, records

from fedlora.mechanisms import build_mechanism
from fedlora.mechanisms.noise import SeededNoise
from fedlora.training.cohort import ClientJob, CohortEngine


@pytest.mark.parametrize("asked", ["medium", "high"])
@pytest.mark.parametrize("kind", ["prism", "lora_fa"])
def test_fast_float32_products_are_off_while_clients_train(kind, asked):
    adapted = adapted_model("bert", torch.float32)
    mechanism = build_mechanism(config(kind), adapted.layout)
    engine = CohortEngine(adapted, mechanism, ZooTask("bert"), config(kind))
    seen = []

    def draw():
        seen.append(torch.get_float32_matmul_precision())
        return records("bert", dtype=torch.float32)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(asked)
    try:
        engine.train(mechanism.initial_payload(adapted), [ClientJob("c", draw, SeededNoise(1, "c", 1))], 2)
        assert seen == ["highest", "highest"]
        assert torch.get_float32_matmul_precision() == asked
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("kind", ["prism", "lora_fa"])
def test_autocast_around_training_does_not_reach_clip_and_noise(kind):
    adapted = adapted_model("bert", torch.float32)
    mechanism = build_mechanism(config(kind), adapted.layout)
    engine = CohortEngine(adapted, mechanism, ZooTask("bert"), config(kind))

    def trained(autocast):
        job = ClientJob("c", lambda: records("bert", dtype=torch.float32), SeededNoise(1, "c", 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return engine.train(mechanism.initial_payload(adapted), [job], 2)[0].payload.blocks

    plain, cast = trained(False), trained(True)
    assert all((plain[name] == cast[name]).all() for name in plain)
