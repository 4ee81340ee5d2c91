"""The cohort engine: equal to one by one, empty draws, out-of-memory, modes, memory over rounds."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mechanisms"))
from engine_zoo import ZooTask, adapted_model, config, moved_payload, records

from fedlora.accounting import NonPrivateEvent, PoissonGaussianEvent
from fedlora.errors import ModelError
from fedlora.mechanisms import build_mechanism
from fedlora.mechanisms.noise import OsNoise, SeededNoise
from fedlora.training.cohort import ClientJob, CohortEngine
from fedlora.training.cohort_passes import PassRunner, rounded

ADAM = {"optimizer": {"kind": "adam", "lr": 0.01}, "steps_per_round": 3}


def engine(family, kind="lora_fa", dtype=torch.float32, adapter=None, **sections):
    adapted = adapted_model(family, dtype, **(adapter or {}))
    run = config(kind, training=sections.pop("training", ADAM), **sections)
    mechanism = build_mechanism(run, adapted.layout)
    return CohortEngine(adapted, mechanism, ZooTask(family), run), moved_payload(
        mechanism.initial_payload(adapted)
    )


def jobs(family, draws, noise=None):
    """One job per client; draws[k] is a list of length lists, one per step."""
    made = []
    for k, steps in enumerate(draws):
        prepared = iter(
            [records(family, lengths, 10 * k + i, torch.float32) for i, lengths in enumerate(steps)]
        )
        source = SeededNoise(3, f"client-{k}", 1) if noise is None else noise()
        made.append(ClientJob(f"client-{k}", lambda it=prepared: next(it), source))
    return made


DRAWS = [
    [(3, 9), (5,), (2, 2, 31)],
    [(), (7, 4), ()],
    [(1,), (), (6, 6, 2, 14)],
]


@pytest.mark.parametrize("kind", ["lora_fa", "factor", "none"])
@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "t5"])
def test_cohort_equals_one_by_one(family, kind):
    privacy = {"unit": "none"} if kind == "none" else None
    # without noise Adam divides rounding errors by themselves, so its cohort cannot be compared
    sgd = {"optimizer": {"kind": "sgd", "lr": 0.01, "momentum": 0.9}, "steps_per_round": 3}
    both, payload = engine(family, kind, privacy=privacy, training=sgd if kind == "none" else ADAM)
    together = both.train(payload, jobs(family, DRAWS), 3)
    for k, update in enumerate(together):
        alone = both.train(payload, [jobs(family, DRAWS)[k]], 3)[0]
        assert (update.client, update.steps, alone.steps) == (f"client-{k}", 3, 3)
        assert update.event == alone.event
        for name, value in alone.payload.blocks.items():
            error = np.linalg.norm(update.payload.blocks[name] - value)
            assert error <= 1e-5 * max(np.linalg.norm(value), 1e-3), name
    assert not np.array_equal(*[next(iter(u.payload.blocks.values())) for u in together[:2]])


def test_fixed_cohort_size_gives_the_same_updates():
    both, payload = engine("bert")
    whole = both.train(payload, jobs("bert", DRAWS), 3)
    both._cohort = 2
    parts = both.train(payload, jobs("bert", DRAWS), 3)
    for a, b in zip(whole, parts, strict=True):
        assert all(np.allclose(a.payload.blocks[n], b.payload.blocks[n], atol=1e-6) for n in a.payload.blocks)


@pytest.mark.parametrize("empty_first", [True, False])
def test_h16_empty_draws_step_with_noise_and_count(empty_first):
    both, payload = engine("gpt2")
    steps = [(), (4, 4)] if empty_first else [(4, 4), ()]
    task = both._passes._task
    update = both.train(payload, jobs("gpt2", [steps]), 2)[0]
    assert update.steps == 2
    assert len(task.collated) == 1
    assert update.event == PoissonGaussianEvent(1.0, 0.25)
    only = both.train(payload, jobs("gpt2", [[()]]), 1)[0]
    moved = [np.abs(only.payload.blocks[n] - payload.blocks[n]).min() for n in payload.blocks]
    assert min(moved) > 0  # every number of an empty client's release carries noise


@pytest.mark.parametrize("seed", range(3))
def test_h16_no_draw_pattern_crashes(seed):
    both, payload = engine("gpt2")
    rng = np.random.default_rng(seed)
    draws = [[tuple(rng.integers(1, 9, rng.poisson(0.7))) for _ in range(5)] for _ in range(3)]
    assert [u.steps for u in both.train(payload, jobs("gpt2", draws), 5)] == [5, 5, 5]


def test_h15_divisor_is_the_public_batch_size():
    sgd = {"optimizer": {"kind": "sgd", "lr": 1.0}, "steps_per_round": 1}
    both, payload = engine("bert", "none", torch.float64, privacy={"unit": "none"}, training=sgd)
    rows = records("bert", (3, 4, 5, 6, 7))
    moves = []
    for drawn in (rows[:2], rows[2:], rows):
        update = both.train(payload, [ClientJob("c", lambda d=drawn: d, OsNoise())], 1)[0]
        moves.append(
            np.concatenate([(update.payload.blocks[n] - payload.blocks[n]).ravel() for n in payload.blocks])
        )
    assert np.allclose(moves[0] + moves[1], moves[2], atol=1e-6)  # sums add; a realised mean would not


def test_h11_the_first_step_moves_lora_b_and_nothing_trained_is_refused():
    both, _ = engine("bert")
    fresh = both.mechanism.initial_payload(both.adapted)
    update = both.train(fresh, jobs("bert", [[(3, 4)]]), 1)[0]
    assert all(np.abs(v).max() > 0 for n, v in update.payload.blocks.items() if n.endswith("lora_B"))
    again = both.train(update.payload, jobs("bert", [[(3, 4)]]), 1)[0]
    assert any(not np.array_equal(again.payload.blocks[n], v) for n, v in update.payload.blocks.items())
    bare = type(both.adapted)(
        both.adapted.model, type(both.adapted.layout)({}, {}, "0"), both.adapted.recipe, {}, {}
    )
    with pytest.raises(ModelError, match="0 trained"):
        CohortEngine(bare, both.mechanism, ZooTask("bert"), both.config)


def test_h23_same_seed_different_noise():
    both, payload = engine("bert")
    seen = []
    for _ in range(2):
        torch.manual_seed(42)
        seen += both.train(payload, jobs("bert", [[()], [()]], OsNoise), 1)
    flats = {u.payload.blocks["classifier|weight"].tobytes() for u in seen}
    assert len(flats) == 4


def test_h24_rounds_in_one_process_reuse_the_taps():
    both, payload = engine("bert")
    forwards = [layer.forward for layer in both.adapted.lora_layers.values()]
    first = both.train(payload, jobs("bert", DRAWS), 3)
    for _ in range(2):
        last = both.train(payload, jobs("bert", DRAWS), 3)
    assert [layer.forward for layer in both.adapted.lora_layers.values()] == forwards
    for a, b in zip(first, last, strict=True):
        assert all(np.array_equal(a.payload.blocks[n], b.payload.blocks[n]) for n in a.payload.blocks)
    gc.collect()
    count = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    for _ in range(5):
        both.train(payload, jobs("bert", DRAWS), 3)
    gc.collect()
    assert sum(isinstance(o, torch.Tensor) for o in gc.get_objects()) <= count + 2


@pytest.mark.parametrize("limit", [1, 3, 6])
def test_h31_out_of_memory_halves_the_pass_and_goes_on(limit):
    both, payload = engine("bert")
    expected = both.train(payload, jobs("bert", DRAWS), 3)

    class Tight(ZooTask):
        def per_record_loss(self, model, batch):
            if len(batch["labels"]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().per_record_loss(model, batch)

    both._passes = PassRunner(both.adapted, Tight("bert"))
    got = both.train(payload, jobs("bert", DRAWS), 3)
    for a, b in zip(expected, got, strict=True):
        assert a.steps == b.steps
        assert all(np.allclose(a.payload.blocks[n], b.payload.blocks[n], atol=1e-5) for n in a.payload.blocks)


def test_h31_a_record_that_never_fits_stops_with_one_line():
    both, payload = engine("bert")

    class Never(ZooTask):
        def per_record_loss(self, model, batch):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    both._passes = PassRunner(both.adapted, Never("bert"))
    with pytest.raises(ModelError, match="one record alone"):
        both.train(payload, jobs("bert", [[(3, 4)]]), 1)


def test_kept_optimiser_state_continues():
    both, payload = engine("bert", privacy={"unit": "none"})
    draws = [[(3, 9), (5,), (2, 2)]]
    whole = both.train(payload, jobs("bert", draws), 3)[0]
    job = jobs("bert", draws)[0]
    first = both.train(payload, [job], 1)[0]
    second = both.train(
        first.payload, [ClientJob("client-0", job.draw, job.noise, first.slots)], 2, first_step=1
    )[0]
    for name, value in whole.payload.blocks.items():
        assert np.allclose(second.payload.blocks[name], value, atol=1e-6)


def test_client_level_privacy_neither_clips_nor_adds_noise_here():
    client = {"unit": "client", "adjacency": "add_or_remove", "noise_multiplier": 1.0, "target_delta": 1e-5,
              "budget": {"epsilon": 8.0, "delta": 1e-5, "on_exhausted": "refuse"}, "noise_source": "os",
              "clipping_norm": 1.0}  # fmt: skip
    both, payload = engine("bert", privacy=client)
    update = both.train(payload, jobs("bert", [[(), ()]], OsNoise), 2)[0]
    assert update.event == NonPrivateEvent()
    assert all(np.array_equal(update.payload.blocks[n], v) for n, v in payload.blocks.items())


def passes_of(both, payload, draws):
    state = both.mechanism.stages.open(both.mechanism, both.adapted, payload, len(draws))
    return both._passes.clipped_sums(both.mechanism, state, draws).blocks.flat


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_gradient_checkpointing_gives_the_same_sums(family, reentrant):
    both, payload = engine(family, dtype=torch.float64)
    draws = [records(family, (3, 8)), records(family, (5, 2, 2))]
    plain = passes_of(both, payload, draws)
    if reentrant:
        both.adapted.model.enable_input_require_grads()
    both.adapted.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    assert torch.allclose(passes_of(both, payload, draws), plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_autocast_and_bf16_stay_close_and_clip_in_float32(family):
    both, payload = engine(family, privacy={"max_grad_norm": 0.01})
    rows = records(family, (3, 8, 5), dtype=torch.float32)
    exact = passes_of(both, payload, [rows])

    class Cast(ZooTask):
        def per_record_loss(self, model, batch):
            with torch.autocast("cpu", torch.bfloat16):
                return super().per_record_loss(model, batch)

    both._passes = PassRunner(both.adapted, Cast(family))
    assert float((passes_of(both, payload, [rows]) - exact).norm() / exact.norm()) < 0.1
    low, _ = engine(family, dtype=torch.bfloat16, privacy={"max_grad_norm": 0.01})
    sums = passes_of(low, payload, [rows])
    assert sums.dtype == torch.float32
    assert float((sums - exact).norm() / exact.norm()) < 0.2
    for row in rows:
        assert float(passes_of(low, payload, [[row]]).norm()) <= 0.01 * (1 + 1e-6)


def test_lora_dropout_runs_in_train_mode_and_per_record():
    both, payload = engine("bert", adapter={"dropout": 0.5})
    rows = records("bert", (6, 6), dtype=torch.float32)
    torch.manual_seed(1)
    first = passes_of(both, payload, [rows])
    assert not torch.allclose(first, passes_of(both, payload, [rows]))
    torch.manual_seed(1)
    assert torch.allclose(first, passes_of(both, payload, [rows]))


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_filling_a_pass_to_a_round_size_changes_nothing(family):
    both, payload = engine(family, dtype=torch.float64)
    draws = [records(family, (3, 8)), [], records(family, (5, 2, 2))]
    plain = passes_of(both, payload, draws)
    both._passes._task.collated.clear()
    both._passes.round_records = True
    assert torch.allclose(passes_of(both, payload, draws), plain, rtol=1e-10, atol=1e-13)
    assert both._passes._task.collated == [8]
    assert [rounded(n) for n in (1, 8, 9, 130, 257, 1000)] == [8, 8, 16, 136, 272, 1024]


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_the_fused_and_the_general_tap_agree(family):
    both, payload = engine(family, "factor", dtype=torch.float64)
    draws = [records(family, (3, 8)), records(family, (5, 2, 2))]
    fused = passes_of(both, payload, draws)
    for layer in both.adapted.lora_layers.values():
        layer.base_layer.register_forward_hook(lambda module, args, output: None)
    assert torch.allclose(passes_of(both, payload, draws), fused, rtol=1e-10, atol=1e-13)
