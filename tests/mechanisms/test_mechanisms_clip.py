"""The clip: bound in the group metric, non-finite records, directions and schedules."""

from __future__ import annotations

import math

import pytest
import torch
from engine_zoo import (
    ZooTask,
    adapted_model,
    config,
    moved_payload,
    records,
    reference_gradients,
    reference_sum,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.accounting import NonPrivateEvent, PoissonGaussianEvent
from fedlora.adapters import BlockTable, FlatBlocks, RecordAxis
from fedlora.adapters.deferred import LookupGradient, OuterGradient
from fedlora.config.schema import AdamConfig, ScheduleConfig, SgdConfig
from fedlora.errors import (
    ModelError,
    PrivacyParameterError,
    SensitivityMismatchError,
    UnsupportedCombinationError,
)
from fedlora.mechanisms import build_mechanism, mechanism_kinds
from fedlora.mechanisms.clip import add_sums, clip_and_sum
from fedlora.mechanisms.direction import Schedule, direct, empty_slots, euclidean_step
from fedlora.mechanisms.stages import Direction, Metric, NoisyUpdate, PerRecordGradients
from fedlora.training.cohort_passes import PassRunner, refuse_packed

TABLE = BlockTable.of({"a|lora_B": (3, 2), "b|lora_B": (2, 2), "h|bias": (2,)})
GROUPS = {"a|lora_B": "adapters", "b|lora_B": "adapters", "h|bias": "head"}


def gradients(flat, counts, m):
    norms = {}
    for group in dict.fromkeys(m.group_of.values()):
        names = m.blocks_of(group)
        norms[group] = sum(flat[:, a:b].square().sum(1) for a, b in TABLE.spans(names))
    return PerRecordGradients(FlatBlocks(TABLE, flat), norms, RecordAxis.of(counts))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.floats(1e-6, 1e6), st.floats(0.01, 100.0), st.integers(0, 2**31), st.booleans())
def test_one_record_moves_its_clients_sum_by_at_most_c(number, scale, weight, seed, per_layer):
    m = Metric("euclidean", {"adapters": 1.0, "head": weight}, GROUPS, per_layer)
    flat = scale * torch.randn(number + 1, TABLE.size, generator=torch.Generator().manual_seed(seed))
    full = clip_and_sum(gradients(flat, [number + 1], m), TABLE, m, 0.7).blocks
    less = clip_and_sum(gradients(flat[1:], [number], m), TABLE, m, 0.7).blocks
    moved = dict.fromkeys(m.group_weights, 0.0)
    for name in TABLE.shapes:
        moved[GROUPS[name]] += (
            float((full[name] - less[name]).double().square().sum()) * m.group_weights[GROUPS[name]] ** 2
        )
    size = max(moved.values()) if per_layer else sum(moved.values())
    slack = 1e-5 * (number + 1) * max(1.0, weight)
    assert math.sqrt(size) <= 0.7 + slack


@pytest.mark.parametrize("weights", [(1.0, 0.1), (1.0, 3.0), (0.5, 1.0)])
def test_group_weights_enter_the_norm(weights):
    adapted = adapted_model("bert")
    chosen = {"adapters": weights[0], "head": weights[1]}
    mechanism = build_mechanism(
        config(privacy={"group_weights": chosen, "max_grad_norm": 0.3}), adapted.layout
    )
    payload = moved_payload(mechanism.initial_payload(adapted))
    adapted.load(payload)
    task = ZooTask("bert")
    rows = records("bert")
    state = mechanism.stages.open(mechanism, adapted, payload, 1)
    got = PassRunner(adapted, task).clipped_sums(mechanism, state, [rows])
    singles = [reference_gradients(adapted, task, row, False) for row in rows]

    def weight_of(name):
        return chosen["head" if name.startswith("classifier") else "adapters"]

    for name, value in reference_sum(singles, 0.3, weight_of).items():
        assert torch.allclose(got.blocks[name][0], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_record_that_is_not_finite_contributes_zero(family, bad):
    adapted = adapted_model(family, torch.float32)
    mechanism = build_mechanism(config(), adapted.layout)
    payload = moved_payload(mechanism.initial_payload(adapted))
    task = ZooTask(family)
    rows = records(family, dtype=torch.float32)
    state = mechanism.stages.open(mechanism, adapted, payload, 2)
    clean = PassRunner(adapted, task).clipped_sums(mechanism, state, [rows[:2], rows[3:]])

    class Poisoned(ZooTask):
        def per_record_loss(self, model, batch):
            losses = super().per_record_loss(model, batch)
            poison = torch.ones_like(losses)
            poison[(batch["attention_mask"].sum(1) == len(rows[2])).nonzero()[0]] = bad
            return losses * poison

    runner = PassRunner(adapted, Poisoned(family))
    runner._plan = lambda drawn, places: [places]
    dirty = runner.clipped_sums(mechanism, state, [rows[:3], rows[3:]])
    assert bool(torch.isfinite(dirty.blocks.flat).all())
    assert torch.allclose(dirty.blocks.flat, clean.blocks.flat, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("apart", [1e-2, 1e-3, 5e-4, 1e-4])
def test_a_factored_norm_is_never_below_the_gradient_that_is_released_where_tokens_cancel(apart):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    g, x = draw(200, 1, 384), draw(200, 1, 384)
    dense = OuterGradient(torch.cat([g, -g], 1), x + apart * draw(200, 2, 384))
    rows = torch.cat([g, -g], 1) + apart * draw(200, 2, 384)
    lookup = LookupGradient(rows, torch.ones(200, 2, dtype=torch.int64), 3)
    for gradient, full in (
        (dense, torch.bmm(dense.g.double().mT, dense.x.double())),
        (lookup, rows.double().sum(1)),
    ):
        true = full.flatten(1).norm(dim=1)
        assert bool((gradient.squared_norms().double().sqrt() >= true * (1 - 1e-6)).all())


def test_deferred_gradients_agree_with_their_materialised_form():
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(5, 4, 3, generator=generator, dtype=torch.float64)
    x = torch.randn(5, 4, 6, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 7, (5, 4), generator=generator)
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    for axis in (RecordAxis.of([5]), RecordAxis.of([2, 0, 3])):
        for deferred in (OuterGradient(g, x), OuterGradient(g, x, True), LookupGradient(g, ids, 7)):
            full = deferred.per_record()
            assert torch.allclose(deferred.squared_norms(), full.flatten(1).square().sum(1), rtol=1e-12)
            expected = torch.zeros(axis.num_clients, *full.shape[1:], dtype=torch.float64)
            expected.index_add_(0, axis.client, full * weights.view(-1, 1, 1))
            assert torch.allclose(deferred.weighted_sum(weights, axis), expected, atol=1e-12)
            keep = torch.tensor([True, False, True, True, False])
            assert float(deferred.masked(keep).squared_norms()[1]) == 0.0


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_clip_refuses_a_bad_bound(bound):
    m = Metric("euclidean", {"adapters": 1.0, "head": 1.0}, GROUPS)
    with pytest.raises(PrivacyParameterError, match="max_grad_norm"):
        clip_and_sum(gradients(torch.ones(2, TABLE.size), [2], m), TABLE, m, bound)


def test_micro_batches_of_different_clips_do_not_add():
    m = Metric("euclidean", {"adapters": 1.0, "head": 1.0}, GROUPS)
    one = clip_and_sum(gradients(torch.ones(2, TABLE.size), [2], m), TABLE, m, 1.0)
    other = clip_and_sum(gradients(torch.ones(2, TABLE.size), [2], m), TABLE, m, 2.0)
    with pytest.raises(SensitivityMismatchError):
        add_sums(one, other)


@pytest.mark.parametrize(
    "optimizer",
    [
        SgdConfig(kind="sgd", lr=0.1),
        SgdConfig(kind="sgd", lr=0.1, momentum=0.9),
        AdamConfig(kind="adam", lr=0.1),
    ],
)
def test_directions_equal_torch_optimisers(optimizer):
    start = torch.randn(2, TABLE.size, dtype=torch.float64)
    values = FlatBlocks(TABLE, start.clone())
    parameter = start.clone().requires_grad_(True)
    if isinstance(optimizer, AdamConfig):
        torch_optimizer = torch.optim.Adam([parameter], lr=0.1)
    else:
        torch_optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=optimizer.momentum)
    slots = empty_slots(optimizer, values)
    for _ in range(4):
        grad = torch.randn(2, TABLE.size, dtype=torch.float64)
        update = NoisyUpdate(values.like(grad * 8.0), {}, NonPrivateEvent())
        direction, slots = direct(optimizer, slots, update, 8.0)
        values = euclidean_step(values, direction, 0.1, 0.0, start, 0.0)
        parameter.grad = grad
        torch_optimizer.step()
    assert torch.allclose(values.flat, parameter.detach(), rtol=1e-7, atol=1e-9)


def test_h40_proximal_term_is_the_squared_norms_gradient():
    start = torch.zeros(1, TABLE.size, dtype=torch.float64)
    values = FlatBlocks(TABLE, torch.full_like(start, 2.0))
    still = Direction(values.like(torch.zeros_like(start)))
    moved = euclidean_step(values, still, 0.1, 0.0, start, 0.5)
    assert torch.allclose(moved.flat, torch.full_like(start, 2.0 - 0.1 * 0.5 * 2.0))


def test_schedules():
    assert [Schedule(1.0, ScheduleConfig(warmup_steps=2), 10).at(i) for i in range(3)] == [0.5, 1.0, 1.0]
    assert Schedule(1.0, ScheduleConfig(kind="cosine"), 10).at(5) == pytest.approx(0.5)
    assert Schedule(2.0, ScheduleConfig(kind="linear"), 10).at(10) == 0.0


def test_events_follow_from_the_configuration():
    layout = adapted_model("bert").layout
    q = 4 / 16
    assert build_mechanism(config(), layout).step_event() == PoissonGaussianEvent(1.0, q)
    assert build_mechanism(config("factor"), layout).step_event(2.5) == PoissonGaussianEvent(2.5, q)
    per_layer = build_mechanism(config(mechanism={"per_layer_clip": True}), layout)
    modules = len(layout.modules) + 1  # the head is one more
    assert per_layer.step_event() == PoissonGaussianEvent(1.0 / math.sqrt(modules), q)
    assert build_mechanism(config("none", privacy={"unit": "none"}), layout).step_event() == NonPrivateEvent()
    unresolved = config(privacy={"noise_multiplier": None, "target_epsilon": 3.0})
    with pytest.raises(PrivacyParameterError, match="resolve"):
        build_mechanism(unresolved, layout).step_event()


def test_combinations_without_sense_are_refused():
    layout = adapted_model("bert").layout
    with pytest.raises(UnsupportedCombinationError, match="none"):
        build_mechanism(config("none"), layout)
    with pytest.raises(UnsupportedCombinationError, match="spectral"):
        build_mechanism(config(adapter={"init": "spectral"}), layout)
    with pytest.raises(UnsupportedCombinationError, match="full"):
        build_mechanism(config("dp_sgd"), layout)
    with pytest.raises(PrivacyParameterError, match="groups"):
        build_mechanism(config(privacy={"group_weights": {"head": 0.1}}), layout)
    auto = build_mechanism(config(privacy={"group_weights": "auto"}), layout)
    with pytest.raises(PrivacyParameterError, match="group weight"):
        auto.metric.weight("head")
    assert set(mechanism_kinds()) == {"none", "factor", "lora_fa", "prism", "noisy_projection", "dp_sgd"}


def test_losses_that_couple_records_or_packing_are_refused():
    adapted = adapted_model("bert")
    mechanism = build_mechanism(config(), adapted.layout)
    payload = mechanism.initial_payload(adapted)
    state = mechanism.stages.open(mechanism, adapted, payload, 1)

    class Mean(ZooTask):
        def per_record_loss(self, model, batch):
            return super().per_record_loss(model, batch).mean()

    with pytest.raises(ModelError, match="one number for each"):
        PassRunner(adapted, Mean("bert")).clipped_sums(mechanism, state, [records("bert")])
    with pytest.raises(ModelError, match="packed"):
        refuse_packed({"input_ids": torch.zeros(1), "cu_seq_lens_q": torch.zeros(1)})
    assert adapted.taps.session is None
