"""Noisy projection on the engine: exact clipped sums, neighbours, noise rows N(0, A A^T), freshness, folding."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_zoo import FAMILIES, ZooTask, adapted_model, config, records

from fedlora.accounting import NoisyProjectionEvent, epsilon_of, theorem5
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.projection_recipe import SEED_NOTE, with_projection
from fedlora.cli.export import at_export_rank
from fedlora.errors import (
    LayoutMismatchError,
    PrivacyParameterError,
    RankMismatchError,
    UnsupportedCombinationError,
    UnsupportedEventError,
)
from fedlora.mechanisms import build_mechanism
from fedlora.mechanisms.noise import SeededNoise
from fedlora.mechanisms.noisy_projection import truncated_export
from fedlora.mechanisms.stages import ClippedSum
from fedlora.names import LORA_A, LORA_B, block_name
from fedlora.training.cohort import ClientJob, CohortEngine
from fedlora.training.cohort_passes import PassRunner

F64 = torch.float64
HEAD = {"head_max_grad_norm": 0.2, "head_noise_multiplier": 3.0}


def settings(family, source="client", **more):
    head = HEAD if family in ("bert", "gpt2", "vit") else {}
    return {"projection_source": source, **head, **more}


def setup(family, dtype=F64, source="client", clients=1, privacy=None, training=None, folded=True, **more):
    adapted = adapted_model(family, dtype)
    run = config(
        "noisy_projection", mechanism=settings(family, source, **more), privacy=privacy, training=training
    )
    run = run.model_copy(update={"model": run.model.model_copy(update={"dtype": "float32"})})
    mechanism = build_mechanism(run, adapted.layout)
    payload = mechanism.initial_payload(adapted)
    if folded:
        rng = np.random.default_rng(2)
        blocks = {
            n: (v + 0.1 * rng.standard_normal(v.shape)).astype(np.float32) for n, v in payload.blocks.items()
        }
        payload = replace(payload, blocks=blocks)
    adapted.load(payload)
    task = ZooTask(family)
    state = mechanism.stages.prepare(mechanism, mechanism.stages.open(mechanism, adapted, payload, clients))
    return adapted, mechanism, payload, task, PassRunner(adapted, task), state


def reference(adapted, task, record):
    """Dense gradients of the target weights and of the head, by plain autograd."""
    weights = {n: layer.get_base_layer().weight for n, layer in adapted.lora_layers.items()}
    extras = {
        f"{n}|{k}": p for n, leaf in adapted.leaves.items() for k, p in leaf.named_parameters(recurse=False)
    }
    values = [*weights.values(), *extras.values()]
    for v in values:
        v.requires_grad_(True)
    loss = task.per_record_loss(adapted.model, task.collate([record])).sum()
    grads = torch.autograd.grad(loss, values, allow_unused=True)
    for v in values:
        v.requires_grad_(False)
    names = [*weights, *extras]
    full = {n: torch.zeros_like(v) if g is None else g for n, v, g in zip(names, values, grads, strict=True)}
    dense = {n: full[n].t() if adapted.lora_layers[n].fan_in_fan_out else full[n] for n in weights}
    return dense, {n: full[n] for n in extras}


def with_folded_weights(family, dtype, adapted, state):
    """A second model with W0 + scaling up down in its base weights, a zero adapter and the same extra parameters."""
    twin = adapted_model(family, dtype)
    with torch.no_grad():
        for n, layer in twin.lora_layers.items():
            up, down = state.own.folded[n]
            change = adapted.layout.modules[n].scaling * up[0] @ down[0]
            layer.get_base_layer().weight.add_(change.t() if layer.fan_in_fan_out else change)
            layer.lora_B["default"].weight.zero_()
        for n, leaf in twin.leaves.items():
            for k, value in leaf.named_parameters(recurse=False):
                value.copy_(state.values[f"{n}|{k}"][0])
    return twin


def norm(tensors) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors.values()))


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_clipped_sum_equals_one_record_at_a_time(family, dtype):
    adapted, _, _, task, passes, state = setup(family, dtype)
    rows = records(family, dtype=dtype)
    dense_twin = with_folded_weights(family, dtype, adapted, state)
    singles = [reference(dense_twin, task, row) for row in rows]
    bound = sorted(norm(d) for d, _ in singles)[len(rows) // 2]
    _, mechanism, *_ = setup(family, dtype, privacy={"max_grad_norm": bound})
    clipped = passes.clipped_sums(mechanism, state, [rows])
    want = {n: torch.zeros_like(v[0]) for n, v in clipped.blocks.items()}
    for dense, extras in singles:
        alpha = min(1.0, bound / norm(dense))
        for n, g in dense.items():
            want[block_name(n, LORA_B)] += alpha * g @ state.own.projections[n][0].mT
        beta = min(1.0, HEAD["head_max_grad_norm"] / max(norm(extras), 1e-30)) if extras else 1.0
        for n, g in extras.items():
            want[n] += beta * g
    gap = {n: clipped.blocks[n][0] - w for n, w in want.items()}
    assert norm(gap) / norm(want) < (1e-10 if dtype == F64 else 1e-5)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_neighbours_move_each_clip_group_by_at_most_its_own_bound(family):
    """In the metric of the noise: full-matrix norm C before the projection, C_h for the head."""
    adapted, mechanism, _, task, passes, state = setup(family, privacy={"max_grad_norm": 0.001})
    rows = records(family, (2, 45, 1, 30, 7))
    everyone = passes.clipped_sums(mechanism, state, [rows])
    for dropped, row in enumerate(rows):
        rest = passes.clipped_sums(mechanism, state, [rows[:dropped] + rows[dropped + 1 :]])
        dense, extras = reference(adapted, task, row)
        assert norm(dense) > 0.001  # clipped, so a looser clip would be seen
        for n, g in dense.items():
            moved = (everyone.blocks[block_name(n, LORA_B)] - rest.blocks[block_name(n, LORA_B)])[0]
            want = g * (0.001 / norm(dense)) @ state.own.projections[n][0].mT
            assert torch.allclose(moved, want, rtol=1e-5, atol=1e-9)
        head = {n: (everyone.blocks[n] - rest.blocks[n])[0] for n in extras}
        assert not head or norm(head) <= HEAD["head_max_grad_norm"] * (1 + 1e-6)


@pytest.mark.parametrize("scale", [1.0, 0.95, 1.05])
def test_released_noise_has_rows_of_law_a_a_transposed(scale):
    clients = 300
    _, mechanism, _, _, _, state = setup("bert", clients=clients)
    table = mechanism.coordinates.table
    zero = ClippedSum(
        FlatBlocks(table, torch.zeros(clients, table.size, dtype=F64)),
        mechanism.privacy.max_grad_norm,
        mechanism.metric,
    )
    update = mechanism.noise(state, zero, [SeededNoise(1, f"c{i}", 1) for i in range(clients)])
    tau = 1.0 * 0.5 * scale
    energy, freedom = 0.0, 0
    for module in mechanism.layout.modules:
        a = state.own.projections[module]
        rows = update.blocks[block_name(module, LORA_B)] / tau
        energy += float((rows @ torch.linalg.inv(a @ a.mT) * rows).sum())
        freedom += rows.numel()
    assert (abs(energy - freedom) / math.sqrt(2 * freedom) < 4.5) == (scale == 1.0)
    head = torch.cat([update.blocks[n].flatten() for n in mechanism.coordinates.extras]) / (0.2 * 3.0 * scale)
    assert (abs(float(head.square().sum()) - head.numel()) / math.sqrt(2 * head.numel()) < 4.5) == (
        scale == 1.0
    )


def test_the_event_names_every_group_and_who_draws():
    _, mechanism, *_ = setup("bert", source="shared")
    event = mechanism.step_event()
    assert isinstance(event, NoisyProjectionEvent)
    assert (event.clip, event.projection_source, event.sample_rate) == ("separate", "shared", 0.25)
    assert {g.name: (g.width, g.rank, g.kappa) for g in event.groups} == {
        "adapters": (16, 3, 1.0),
        "head": (None, None, 1.0 / 3.0),
    }
    _, plain, *_ = setup("llama")
    event = plain.step_event()
    assert event.clip == "shared"
    assert {(g.width, g.rank) for g in event.groups} == {(16, 3), (24, 3)}
    small = epsilon_of(event.times(50), 1e-5).epsilon
    assert small < epsilon_of(plain.step_event(0.8).times(50), 1e-5).epsilon


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_merged_layers_cannot_be_counted_as_one_by_the_published_union(kind):
    """A group that stands for several layers has their directions together: Theorem 5 refuses it."""
    _, mechanism, *_ = setup(kind)
    event = mechanism.step_event()
    assert len(mechanism.layout.modules) > len([g for g in event.groups if g.width is not None])
    assert all(group.out_width is None for group in event.groups)
    with pytest.raises(UnsupportedEventError, match="out_width"):
        theorem5.composed(event, 10, 1e-5)


def jobs_for(draws, seed=5):
    return [ClientJob(f"c{k}", iter(d).__next__, SeededNoise(seed, f"c{k}", 1)) for k, d in enumerate(draws)]


def test_every_step_draws_a_fresh_projection_and_clients_draw_their_own():
    _, mechanism, _, _, _, state = setup("bert", clients=40, privacy={"noise_source": "os"})
    again = mechanism.stages.prepare(mechanism, state)
    for module, a in state.own.projections.items():
        assert not torch.equal(a[0], a[1])
        assert not torch.equal(a, again.own.projections[module])
        assert a.var().item() == pytest.approx(1 / 3, rel=0.25)  # 7.7 deviations of 1920 numbers


def test_a_shared_projection_serves_one_step_only():
    adapted, mechanism, payload, task, _, state = setup("bert", source="shared", clients=2)
    for a in state.own.projections.values():
        assert torch.equal(a[0], a[1])
    engine = CohortEngine(adapted, mechanism, task, mechanism.config)
    rows = records("bert", dtype=F64)
    with pytest.raises(PrivacyParameterError, match="second step"):
        engine.train(payload, jobs_for([[rows, rows]]), 2)
    with pytest.raises(UnsupportedCombinationError, match="one step"):
        setup("bert", source="shared", training={"steps_per_round": 2})


@pytest.mark.parametrize("fault", ["no seed", "other seed", "guessable seed"])
def test_a_shared_round_without_a_sound_seed_is_refused(fault):
    adapted, mechanism, payload, *_ = setup("bert", source="shared")
    notes = {"no seed": {}, "other seed": {SEED_NOTE: "ab" * 32}, "guessable seed": {SEED_NOTE: "42"}}[fault]
    with pytest.raises((LayoutMismatchError, PrivacyParameterError)):
        mechanism.stages.open(mechanism, adapted, replace(payload, notes=notes), 1)
    fresh = with_projection(payload)
    assert fresh.notes[SEED_NOTE] != payload.notes[SEED_NOTE]
    assert fresh.recipe != payload.recipe


def test_client_updates_fold_the_steps_into_the_weights_exactly():
    adapted, mechanism, payload, task, passes, _ = setup("bert")
    rows = [records("bert", (3, 8), 1), [], records("bert", (4,), 3)]
    engine = CohortEngine(adapted, mechanism, task, mechanism.config)
    sent = engine.train(payload, jobs_for([rows]), 3)[0].payload
    own = mechanism.stages.open(mechanism, adapted, payload, 1)
    source, dense = SeededNoise(5, "c0", 1), {}
    for draw in rows:
        own = mechanism.stages.prepare(mechanism, own)
        a = own.own.projections
        update = mechanism.noise(own, passes.clipped_sums(mechanism, own, [draw]), [source])
        for m in mechanism.layout.modules:
            step = -0.1 / 4 * update.blocks[block_name(m, LORA_B)][0] @ a[m][0]
            dense[m] = dense.get(m, 0) + step
        own = mechanism.stages.update(mechanism, own, update, 0.1)
    assert sent.kind == "factors"
    for m, spec in sent.modules.items():
        new, old = (
            spec.scaling * p.blocks[block_name(m, LORA_B)].astype(float) @ p.blocks[block_name(m, LORA_A)]
            for p in (sent, payload)
        )
        assert np.allclose(new - old, dense[m].numpy(), atol=1e-6)


def test_long_local_training_stays_within_the_rank_cap():
    adapted, mechanism, payload, task, *_ = setup("bert", rank_cap=4, folded=False)
    rows = records("bert", (3,), 1)
    engine = CohortEngine(adapted, mechanism, task, mechanism.config)
    sent = engine.train(payload, jobs_for([[rows] * 12]), 12)[0].payload
    for spec in sent.modules.values():
        assert spec.rank <= min(4 + 8 * 3, spec.out_features, spec.in_features)


def test_shared_update_is_lora_b_shaped_and_names_its_projection():
    adapted, mechanism, payload, task, *_ = setup("bert", source="shared")
    engine = CohortEngine(adapted, mechanism, task, mechanism.config)
    sent = engine.train(payload, jobs_for([[records("bert")]]), 1)[0].payload
    assert (sent.kind, sent.recipe) == ("projected", payload.recipe)
    for m, spec in adapted.layout.modules.items():
        assert sent.blocks[block_name(m, LORA_B)].shape == (spec.out_features, 3)
        assert block_name(m, LORA_A) not in sent.blocks


def test_export_at_a_chosen_rank_states_its_error():
    *_, payload, _, _, _ = setup("bert")
    for rank in (1, 4, 99):
        out, errors = truncated_export(payload, rank)
        for m, spec in payload.modules.items():
            full, short = (
                p.blocks[block_name(m, LORA_B)].astype(float) @ p.blocks[block_name(m, LORA_A)]
                for p in (payload, out)
            )
            error = np.linalg.norm(full - short) / np.linalg.norm(full)
            assert error == pytest.approx(errors[m], abs=1e-6)
            assert out.modules[m].rank == min(rank, spec.out_features, spec.in_features)


def test_without_clipping_the_stated_bound_is_the_sensitivity():
    adapted, mechanism, _, task, passes, state = setup("llama", clipping=False, gradient_bound=7.0)
    rows = records("llama")
    clipped = passes.clipped_sums(mechanism, state, [rows])
    want = {n: torch.zeros_like(v[0]) for n, v in clipped.blocks.items()}
    for row in rows:
        for n, g in reference(adapted, task, row)[0].items():
            want[block_name(n, LORA_B)] += g @ state.own.projections[n][0].mT
    assert norm({n: clipped.blocks[n][0] - w for n, w in want.items()}) / norm(want) < 1e-6
    update = mechanism.noise(state, clipped, [SeededNoise(1, "c", 1)])
    assert update.noise_stddev == {"adapters": 7.0}
    with pytest.raises(PrivacyParameterError, match="gradient_bound"):
        setup("llama", clipping=False)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"training": {"optimizer": {"kind": "adam", "lr": 0.1}}}, "sgd"),
        ({"training": {"optimizer": {"kind": "sgd", "lr": 0.1, "momentum": 0.9}}}, "sgd"),
        ({"training": {"proximal_mu": 0.1}}, "proximal"),
        ({"privacy": {"group_weights": {"adapters": 1.0, "head": 0.1}}}, "group_weights"),
        ({"head_noise_multiplier": None}, "head_noise_multiplier"),
        ({"privacy": {"unit": "none"}}, "record"),
    ],
)
def test_combinations_without_a_bound_are_refused(change, match):
    with pytest.raises(UnsupportedCombinationError, match=match):
        setup("bert", **change)


def test_rank_above_the_width_is_refused():
    layout = adapted_model("llama").layout
    wide = replace(layout, modules={name: replace(spec, rank=17) for name, spec in layout.modules.items()})
    with pytest.raises(RankMismatchError, match="singular"):
        build_mechanism(config("noisy_projection", adapter={"rank": 17}, mechanism=settings("llama")), wide)


def test_cohorts_equal_single_clients():
    adapted, mechanism, payload, task, *_ = setup("bert")
    draws = [[records("bert", (3, 8), 1)], [[]], [records("bert", (5,), 2)]]
    engine = CohortEngine(adapted, mechanism, task, mechanism.config)
    together = engine.train(payload, jobs_for(draws), 1)
    for k, update in enumerate(together):
        alone = engine.train(
            payload, [ClientJob(f"c{k}", iter(draws[k]).__next__, SeededNoise(5, f"c{k}", 1))], 1
        )[0]
        for name, block in update.payload.blocks.items():
            assert np.allclose(block, alone.payload.blocks[name], atol=1e-6), name
    assert LORA_A  # factors carry both sides


@pytest.mark.parametrize("rank", [None, 2, 99])
def test_export_rank_cuts_the_exported_adapter_and_says_what_was_lost(rank):
    adapted, mechanism, payload, *_ = setup("bert", export_rank=rank)
    cut, lost = at_export_rank(mechanism.config, payload)
    if rank is None:
        assert (cut, lost) == (payload, None)
        return
    assert {spec.rank for spec in cut.modules.values()} == {min(rank, 16)}
    assert f"rank {rank}" in lost
    assert (float(lost.rsplit(" ", 1)[1]) > 0.01) == (rank == 2)
    adapted.load(cut)
