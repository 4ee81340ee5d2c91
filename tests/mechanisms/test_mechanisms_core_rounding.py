"""PRISM's per-record core: rounding of single tokens never takes what is released beyond C."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from chosen_gradients import Chosen, ChosenTask, Layer
from engine_zoo import FINGERPRINT, config

from fedlora.adapters import inject
from fedlora.geometry import Frames, complement
from fedlora.mechanisms.base import LocalState, Mechanism, build_mechanism
from fedlora.mechanisms.prism_state import take_tangent
from fedlora.training.cohort_passes import PassRunner

OUT, IN, RANK, TOKENS, BOUND = 20, 24, 4, 6, 0.5


def cancelling(frames: Frames, common: float, dtype: torch.dtype, seed: int) -> Chosen:
    """Tokens in the frames' span that share a large part of their input; their output gradients sum to zero.

    (As a key projection's do: a softmax does not see what all keys have in common.)
    """
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(size, RANK, generator=generator) for size in (1, TOKENS, TOKENS)]
    inputs, outputs = common * draw[0] + draw[1], 1e3 * (draw[2] - draw[2].mean(0))
    return Chosen((inputs @ frames.q_in[0, 0].T).to(dtype), (outputs @ frames.q_out[0, 0].T).to(dtype))


def opened(dtype: torch.dtype, clients: int) -> tuple[PassRunner, Mechanism, LocalState]:
    adapter = {"rank": RANK, "lora_alpha": float(RANK), "target_modules": ("q",)}
    settings = config("prism", adapter=adapter, privacy={"max_grad_norm": BOUND})
    name = str(dtype).removeprefix("torch.")
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"dtype": name})})
    torch.manual_seed(3)
    adapted = inject(Layer(IN, OUT).to(dtype), settings.adapter, seed=7, fingerprint=FINGERPRINT)
    mechanism = build_mechanism(settings, adapted.layout)
    payload = mechanism.initial_payload(adapted)
    core = np.random.default_rng(1).standard_normal((RANK, RANK)).astype(np.float32)
    payload = replace(payload, blocks={**payload.blocks, "q|core": core})
    return (
        PassRunner(adapted, ChosenTask()),
        mechanism,
        mechanism.stages.open(mechanism, adapted, payload, clients),
    )


@pytest.mark.parametrize("common", [0.0, 30.0, 1000.0])
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_record_whose_tokens_cancel_moves_the_released_sum_by_c_and_no_more(
    dtype: torch.dtype, clients: int, common: float
) -> None:
    runner, mechanism, state = opened(dtype, clients)
    group = state.own.groups[0]
    for seed in range(8):
        draws = [[cancelling(group.frames, common, dtype, seed + 50 * k)] for k in range(clients)]
        tangent = take_tangent(runner.clipped_sums(mechanism, state, draws).blocks, group)
        outside = complement(group.frames.q_in.double(), tangent.x_in.double())
        squared = tangent.x_out.double().square().sum((1, 2, 3)) + outside.square().sum((1, 2, 3))
        assert float(squared.sqrt().max()) <= BOUND
        assert float(squared.sqrt().min()) > BOUND * (1 - 1e-4)
