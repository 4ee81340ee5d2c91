"""PRISM on the engine: exact clipped sums, neighbours in the tangent metric, the released noise's law, whole rounds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_zoo import FAMILIES, ZooTask, adapted_model, config, records

import fedlora.geometry as geo
from fedlora.adapters.blocks import FlatBlocks
from fedlora.errors import LayoutMismatchError, NotOnManifoldError, RankMismatchError
from fedlora.mechanisms import build_mechanism
from fedlora.mechanisms.noise import SeededNoise
from fedlora.mechanisms.prism_state import shape_groups, share_core, take_tangent
from fedlora.mechanisms.stages import ClippedSum, NoisyUpdate
from fedlora.names import CORE, GROUP_ADAPTERS, GROUP_HEAD, TANGENT_IN, TANGENT_OUT, block_name
from fedlora.training.cohort import ClientJob, CohortEngine
from fedlora.training.cohort_passes import PassRunner

F64 = torch.float64
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def moved(payload, seed=1):
    """The starting point with a core that is not zero."""
    rng = np.random.default_rng(seed)
    blocks = dict(payload.blocks)
    for name in blocks:
        if name.endswith(CORE):
            blocks[name] = (0.3 * rng.standard_normal(blocks[name].shape)).astype(np.float32)
        elif "|q_" not in name:
            blocks[name] = (blocks[name] + 0.3 * rng.standard_normal(blocks[name].shape)).astype(np.float32)
    return replace(payload, blocks=blocks)


def setup(
    family, dtype=F64, start="moved", clients=1, privacy=None, mechanism=None, training=None, **changes
):
    adapted = adapted_model(family, dtype, **changes)
    made = build_mechanism(
        config("prism", privacy=privacy, mechanism=mechanism, training=training), adapted.layout
    )
    payload = made.initial_payload(adapted)
    payload = moved(payload) if start == "moved" else payload
    adapted.load(payload)
    task = ZooTask(family)
    state = made.stages.open(made, adapted, payload, clients)
    return adapted, made, payload, task, PassRunner(adapted, task), state


def frames_of(state, module):
    for group in state.own.groups:
        if module in group.modules:
            i = group.modules.index(module)
            return geo.Frames(group.frames.q_out[0, i], group.frames.core[0, i], group.frames.q_in[0, i])
    raise KeyError(module)


def reference(adapted, task, state, record):
    """One record's tangent blocks from dense weight gradients by plain autograd, at the state's own point."""
    for name, layer in adapted.lora_layers.items():
        f, scaling = frames_of(state, name), layer.scaling["default"]
        layer.lora_A["default"].weight.data.copy_(f.q_in.mT)
        layer.lora_B["default"].weight.data.copy_(f.q_out @ f.core / scaling)
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
    blocks, squared = {}, 0.0
    for name, value, grad in zip([*weights, *extras], values, grads, strict=True):
        grad = torch.zeros_like(value) if grad is None else grad
        if name in extras:
            blocks[name] = grad
            squared += float(grad.square().sum())
            continue
        dense = grad.t() if adapted.lora_layers[name].fan_in_fan_out else grad
        frames = frames_of(state, name)
        tangent = geo.project_dense(frames, dense)
        blocks[block_name(name, TANGENT_OUT)], blocks[block_name(name, TANGENT_IN)] = (
            tangent.x_out,
            tangent.x_in,
        )
        squared += float(geo.tangent_squared_norm(frames, tangent))
    return blocks, math.sqrt(squared)


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("start", ["zero", "moved"])
@pytest.mark.parametrize("family", FAMILIES)
def test_clipped_sum_equals_one_record_at_a_time(family, start, dtype):
    adapted, mechanism, _, task, passes, state = setup(family, dtype, start)
    rows = records(family, dtype=dtype)
    singles = [reference(adapted, task, state, row) for row in rows]
    bound = sorted(norm for _, norm in singles)[len(rows) // 2]
    mechanism = build_mechanism(config("prism", privacy={"max_grad_norm": bound}), adapted.layout)
    clipped = passes.clipped_sums(mechanism, state, [rows])
    want = {
        name: sum(blocks[name] * min(1.0, bound / norm) for blocks, norm in singles)
        for name in clipped.blocks
    }
    error = math.sqrt(sum(float((clipped.blocks[n][0] - w).square().sum()) for n, w in want.items()))
    scale = math.sqrt(sum(float(w.square().sum()) for w in want.values()))
    assert error / scale < TOLERANCE[dtype]


def tangent_norm(state, blocks):
    """Norm of a difference of sums in the metric that the noise is isotropic in."""
    squared = 0.0
    for group in state.own.groups:
        squared += float(geo.tangent_squared_norm(group.frames, take_tangent(blocks, group)).sum())
    extras = [n for n in blocks if not n.endswith((TANGENT_OUT, TANGENT_IN))]
    return math.sqrt(squared + sum(float(blocks[n].square().sum()) for n in extras))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_neighbours_move_the_released_vector_by_at_most_c(family, dtype):
    adapted, _, _, _, passes, state = setup(family, dtype)
    run = config("prism", privacy={"max_grad_norm": 0.01})
    run = run.model_copy(update={"model": run.model.model_copy(update={"dtype": str(dtype)[6:]})})
    mechanism = build_mechanism(run, adapted.layout)
    # in bf16 two records share the longest length, so that no record decides the batch's width (docs/mechanisms.md)
    lengths = (2, 45, 1, 30, 7) if dtype == torch.float32 else (2, 45, 1, 45, 7)
    rows = records(family, lengths, dtype=dtype)
    everyone = passes.clipped_sums(mechanism, state, [rows])
    distances = []
    for dropped in range(len(rows)):
        rest = passes.clipped_sums(mechanism, state, [rows[:dropped] + rows[dropped + 1 :]])
        gap = everyone.blocks.like(everyone.blocks.flat - rest.blocks.flat)
        for group in state.own.groups:  # what leaves is x_out and the outside part of x_in
            x = take_tangent(gap, group)
            shared = share_core(group.frames, x)
            for i, m in enumerate(group.modules):
                gap[block_name(m, TANGENT_IN)].copy_(shared.x_in[:, i])
        distances.append(tangent_norm(state, gap))
    slack = 2e-4 if dtype == torch.float32 else 2e-3  # batches of other sizes round differently
    assert max(distances) <= 0.01 * (1 + slack)
    assert min(distances) > 0.0085


def zero_sum(mechanism, state, clients=1):
    table = mechanism.coordinates.table
    flat = torch.zeros(clients, table.size, dtype=F64)
    return ClippedSum(FlatBlocks(table, flat), mechanism.privacy.max_grad_norm, mechanism.metric)


@pytest.mark.parametrize("scale", [1.0, 0.95, 1.05])
@pytest.mark.parametrize("start", ["zero", "moved"])
def test_released_noise_has_the_stated_energy_per_group(start, scale):
    """Tangent energy r(out + in - r) (sigma C / w)^2 for adapters and (sigma C / w)^2 per head coordinate."""
    weights = {GROUP_ADAPTERS: 1.0, GROUP_HEAD: 0.2}
    privacy = {"group_weights": weights, "max_grad_norm": 0.5, "noise_multiplier": 1.3}
    adapted, mechanism, _, _, _, state = setup("bert", start=start, privacy=privacy, clients=400)
    sources = [SeededNoise(3, f"c{i}", 1) for i in range(400)]
    update = mechanism.noise(state, zero_sum(mechanism, state, 400), sources)
    tau = 1.3 * 0.5 * scale
    energy, freedom = 0.0, 0
    for group in state.own.groups:
        tangent = take_tangent(update.blocks, group)
        assert float(geo.core_mismatch(group.frames, tangent).max()) < 1e-6  # frames travel as float32
        energy += float(geo.tangent_squared_norm(group.frames, tangent).sum()) / tau**2
        for m in group.modules:
            spec = adapted.layout.modules[m]
            freedom += 400 * geo.tangent_dimension(spec.out_features, spec.in_features, spec.rank)
    assert (abs(energy - freedom) / math.sqrt(2 * freedom) < 4.5) == (scale == 1.0)
    head = torch.cat([update.blocks[n].flatten() for n in mechanism.coordinates.extras])
    z = (float((head * 0.2 / tau).square().sum()) - head.numel()) / math.sqrt(2 * head.numel())
    assert (abs(z) < 4.5) == (scale == 1.0)
    assert update.noise_stddev == {GROUP_ADAPTERS: 0.65, GROUP_HEAD: 3.25}


def test_the_event_is_one_subsampled_gaussian_whatever_the_weights():
    _, mechanism, *_ = setup("bert", privacy={"group_weights": {GROUP_ADAPTERS: 1.0, GROUP_HEAD: 0.1}})
    assert mechanism.step_event().to_json() == {
        "kind": "poisson_gaussian",
        "noise_multiplier": 1.0,
        "sample_rate": 0.25,
    }


def run_round(adapted, mechanism, payload, task, steps, draws, clients=1, noise_seed=5):
    engine = CohortEngine(adapted, mechanism, task, mechanism.config)
    jobs = [
        ClientJob(f"c{k}", iter(draws[k]).__next__, SeededNoise(noise_seed, f"c{k}", 1))
        for k in range(clients)
    ]
    return engine.train(payload, jobs, steps)


@pytest.mark.parametrize("adaptivity", ["frames", "none", "paper"])
@pytest.mark.parametrize("start", ["zero", "moved"])
def test_rounds_give_finite_consistent_tangents_and_cohorts_equal_single_clients(adaptivity, start):
    mech = {"adaptivity": adaptivity}
    adapted, mechanism, payload, task, _, _ = setup("bert", start=start, mechanism=mech)
    draws = [[records("bert", (3, 8), 1), [], records("bert", (4,), 3)], [records("bert", (5,), 2), [], []]]
    together = run_round(adapted, mechanism, payload, task, 3, draws, clients=2)
    for k, update in enumerate(together):
        engine = CohortEngine(adapted, mechanism, task, mechanism.config)
        alone = engine.train(
            payload, [ClientJob(f"c{k}", iter(draws[k]).__next__, SeededNoise(5, f"c{k}", 1))], 3
        )[0]
        assert update.payload.kind == "tangent"
        assert update.payload.notes["dropped_norm"] >= 0
        for name, block in update.payload.blocks.items():
            assert np.isfinite(block).all()
            # the paper's form divides by small Gram matrices and amplifies rounding
            assert np.allclose(
                block, alone.payload.blocks[name], atol=1e-6 if adaptivity != "paper" else 1e-3
            )


def test_one_step_sends_the_exact_step_and_the_server_retracts_it():
    """From S = 0 a local retraction would lose half of the tangent before the mean is taken."""
    adapted, mechanism, payload, task, _, state = setup(
        "bert", start="zero", mechanism={"adaptivity": "none"}
    )
    update = run_round(adapted, mechanism, payload, task, 1, [[records("bert")]])[0]
    assert update.payload.notes["dropped_norm"] == 0.0
    module = next(iter(adapted.layout.modules))
    frames = frames_of(state, module)
    tangent = geo.Tangent(
        *(
            torch.from_numpy(update.payload.blocks[block_name(module, k)]).double()
            for k in (TANGENT_OUT, TANGENT_IN)
        )
    )
    assert geo.core_mismatch(frames, tangent).item() < 1e-5
    assert torch.linalg.matrix_rank(geo.tangent_dense(frames, tangent), rtol=1e-4).item() == 2 * frames.rank


def test_weight_decay_and_proximal_term_are_data_free_and_pull_as_stated():
    """With no records and no noise, Z shrinks by (1 - lr decay) a step; the proximal term pulls back to the start."""
    training = {"optimizer": {"kind": "sgd", "lr": 0.5, "weight_decay": 0.2}}
    privacy = {"unit": "none"}
    adapted, mechanism, payload, task, _, state = setup(
        "bert", privacy=privacy, training=training, mechanism={"adaptivity": "none"}
    )
    update = run_round(adapted, mechanism, payload, task, 1, [[[]]])[0]
    module = next(iter(adapted.layout.modules))
    frames = frames_of(state, module)
    tangent = geo.Tangent(
        *(
            torch.from_numpy(update.payload.blocks[block_name(module, k)]).double()
            for k in (TANGENT_OUT, TANGENT_IN)
        )
    )
    assert torch.allclose(geo.tangent_dense(frames, tangent), -0.1 * frames.dense(), atol=1e-6)
    assert "dropped_norm" not in update.payload.notes


@pytest.mark.parametrize("fault", ["scaled", "repeated", "nan"])
def test_frames_off_the_manifold_are_refused(fault):
    adapted, mechanism, payload, *_ = setup("bert")
    name = next(n for n in payload.blocks if n.endswith("q_in"))
    q = payload.blocks[name].copy()
    q = q * 1.01 if fault == "scaled" else q
    if fault == "repeated":
        q[:, 1] = q[:, 0]
    if fault == "nan":
        q[0, 0] = np.nan
    with pytest.raises(NotOnManifoldError):
        mechanism.stages.open(mechanism, adapted, replace(payload, blocks={**payload.blocks, name: q}), 1)


def test_other_payload_kinds_and_impossible_ranks_are_refused():
    adapted, mechanism, *_ = setup("bert")
    with pytest.raises(LayoutMismatchError, match="frames"):
        mechanism.stages.open(mechanism, adapted, adapted.write_factors(), 1)
    wide = {name: replace(spec, rank=17) for name, spec in adapted.layout.modules.items()}
    with pytest.raises(RankMismatchError, match="rank 17"):
        shape_groups(replace(adapted.layout, modules=wide))


@pytest.mark.parametrize("init", ["gaussian", "orthonormal", "kaiming"])
def test_every_start_is_z_zero_with_orthonormal_frames(init):
    adapted = adapted_model("bert", init=init)
    mechanism = build_mechanism(config("prism", adapter={"init": init}), adapted.layout)
    payload = mechanism.initial_payload(adapted)
    adapted.load(payload)
    for module in adapted.layout.modules:
        assert not payload.blocks[block_name(module, CORE)].any()
        for key in ("q_out", "q_in"):
            q = torch.from_numpy(payload.blocks[block_name(module, key)])
            assert geo.orthonormality_residual(q).item() < 1e-6


@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["fp64", "fp32"])
def test_engine_gives_the_same_z_from_rotated_frames(dtype):
    """The residual gauge O(r) x O(r), on a real model with the engine and shared ambient noise, over 20 steps."""
    adapted, mechanism, payload, _, passes, _ = setup(
        "bert", dtype, training={"optimizer": {"kind": "sgd", "lr": 0.02}}
    )
    ends = [_ambient_run(adapted, mechanism, payload, passes, rotate) for rotate in (False, True)]
    gap = max(float((a - b).norm() / b.norm()) for a, b in zip(*ends, strict=True))
    assert gap < (1e-10 if dtype == torch.float64 else 1e-5)


def _rotated(group, seed=0):
    g = torch.Generator().manual_seed(seed)
    shape = (*group.frames.core.shape[1:3], group.frames.rank)
    out, inn = (
        torch.linalg.qr(torch.randn(*shape, generator=g, dtype=F64)).Q.to(group.frames.core) for _ in "ab"
    )
    return replace(group, frames=geo.rotate_frames(group.frames, out, inn))


def _ambient_run(adapted, mechanism, payload, passes, rotate):
    state = mechanism.stages.open(mechanism, adapted, payload, 1)
    if rotate:
        own = replace(state.own, groups=tuple(_rotated(group) for group in state.own.groups))
        state = replace(state, own=own)
    generator = torch.Generator().manual_seed(4)
    rows = records("bert", dtype=adapted.accumulate_dtype)
    for _ in range(20):
        clipped = passes.clipped_sums(mechanism, state, [rows])
        noised = clipped.blocks.like(clipped.blocks.flat.clone())
        for group in state.own.groups:
            for i, m in enumerate(group.modules):
                spec = adapted.layout.modules[m]
                ambient = 0.25 * torch.randn(
                    spec.out_features, spec.in_features, generator=generator, dtype=F64
                )
                f = group.frames
                one = geo.Frames(f.q_out[0, i], f.core[0, i], f.q_in[0, i])
                t = geo.project_dense(one, ambient.to(f.q_out))
                noised[block_name(m, TANGENT_OUT)].add_(t.x_out)
                noised[block_name(m, TANGENT_IN)].add_(t.x_in)
        stddev = {GROUP_ADAPTERS: 0.25, GROUP_HEAD: 0.0}
        update = NoisyUpdate(noised, stddev, mechanism.step_event())
        state = mechanism.stages.update(mechanism, state, update, 0.02)
    return [g.frames.dense() for g in state.own.groups]
