"""Noisy projection in 16 bits: what is released is the clipped gradient's projection, not its tokens' rounded ones."""

from __future__ import annotations

import pytest
import torch
from chosen_gradients import Chosen, ChosenTask, Layer
from engine_zoo import FINGERPRINT, config

from fedlora.adapters import inject
from fedlora.mechanisms.base import LocalState, Mechanism, build_mechanism
from fedlora.training.cohort_passes import PassRunner

OUT, IN, RANK, TOKENS, BOUND = 20, 96, 4, 2, 0.5
_PLAIN = ChosenTask()


def cancelling(common: float, dtype: torch.dtype, seed: int, apart: float = 1e-4) -> Chosen:
    """Two tokens with nearly one input and opposite output gradients, so that little of their gradients is left."""
    generator = torch.Generator().manual_seed(seed)
    shared = common * torch.randn(1, IN, generator=generator)
    x = shared + apart * common * torch.randn(TOKENS, IN, generator=generator)
    g = 1e3 * torch.randn(1, OUT, generator=generator)
    return Chosen(x.to(dtype), torch.cat([g, -g]).to(dtype))


def opened(
    dtype: torch.dtype, clients: int, dropout: float, task: ChosenTask = _PLAIN
) -> tuple[PassRunner, Mechanism, LocalState]:
    adapter = {"rank": RANK, "lora_alpha": float(RANK), "target_modules": ("q",), "dropout": dropout}
    settings = config(
        "noisy_projection",
        adapter=adapter,
        privacy={"max_grad_norm": BOUND},
        mechanism={"projection_source": "client"},
    )
    name = str(dtype).removeprefix("torch.")
    settings = settings.model_copy(update={"model": settings.model.model_copy(update={"dtype": name})})
    torch.manual_seed(3)
    adapted = inject(Layer(IN, OUT).to(dtype), settings.adapter, seed=7, fingerprint=FINGERPRINT)
    mechanism = build_mechanism(settings, adapted.layout)
    state = mechanism.stages.open(mechanism, adapted, mechanism.initial_payload(adapted), clients)
    return PassRunner(adapted, task), mechanism, mechanism.stages.prepare(mechanism, state)


def released(runner: PassRunner, mechanism: Mechanism, state: LocalState, draws) -> torch.Tensor:
    """Return each client's sum in the coordinates in which its noise is isotropic, (clients, out, rank)."""
    block = runner.clipped_sums(mechanism, state, draws).blocks["q|lora_B"].double()
    factor = torch.linalg.qr(state.own.projections["q"].double().mT, mode="r").R
    return torch.linalg.solve_triangular(factor, block, upper=True, left=False)


def expected(state: LocalState, client: int, record: Chosen) -> torch.Tensor:
    full = record.g.double().mT @ record.x.double()
    clipped = full * min(1.0, BOUND / float(full.norm()))
    frame = torch.linalg.qr(state.own.projections["q"][client].double().mT).Q
    return clipped @ frame


@pytest.mark.parametrize("dropout", [0.0, 1e-9], ids=["fused", "general"])
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_record_whose_tokens_cancel_releases_its_projected_gradient_and_no_more(
    dtype: torch.dtype, clients: int, dropout: float
) -> None:
    runner, mechanism, state = opened(dtype, clients, dropout)
    for seed in range(8):
        draws = [[cancelling(30.0, dtype, seed + 50 * k)] for k in range(clients)]
        moved = released(runner, mechanism, state, draws)
        for client, (record,) in enumerate(draws):
            exact = expected(state, client, record)
            assert float(moved[client].norm()) <= float(exact.norm()) + 1e-3 * BOUND


def test_the_probe_is_not_rounded_again_under_autocast() -> None:
    runner, mechanism, state = opened(torch.float32, 1, 0.0, ChosenTask(autocast=True))
    record = cancelling(1.0, torch.bfloat16, 1, apart=0.1)  # numbers that autocast does not change
    record = Chosen(record.x.float(), record.g.float())
    moved = released(runner, mechanism, state, [[record]])
    assert torch.allclose(moved[0], expected(state, 0, record), rtol=0.0, atol=2e-5 * BOUND)


def test_a_record_whose_projection_overflows_16_bits_leaves_the_sum_finite() -> None:
    runner, mechanism, state = opened(torch.float16, 1, 0.0)
    large = Chosen(torch.full((TOKENS, IN), 6e4).half(), torch.full((TOKENS, OUT), 1e-3).half())
    usual = cancelling(1.0, torch.float16, 2)
    moved = released(runner, mechanism, state, [[usual, large]])
    assert torch.isfinite(moved).all()
    alone = released(runner, mechanism, state, [[usual]])
    assert float((moved - alone).norm()) <= BOUND * (1 + 1e-3)
