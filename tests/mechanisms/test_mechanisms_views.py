"""Tangent and projected blocks equal what the full weight gradient of one record gives."""

from __future__ import annotations

import pytest
import torch
from engine_zoo import FAMILIES, ZooTask, adapted_model, records

from fedlora.adapters import LayerView, RecordAxis
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.per_record import per_record_gradients
from fedlora.mechanisms.stages import Metric


def full_gradient(adapted, task, record):
    """Module to (out, in): one record's gradient of the frozen weight, by autograd."""
    weights = {name: layer.get_base_layer().weight for name, layer in adapted.lora_layers.items()}
    for weight in weights.values():
        weight.requires_grad_(True)
    loss = task.per_record_loss(adapted.model, task.collate([record])).sum()
    grads = torch.autograd.grad(loss, list(weights.values()))
    for weight in weights.values():
        weight.requires_grad_(False)
    turned = [adapted.lora_layers[name].fan_in_fan_out for name in weights]
    return {n: (g.t() if t else g) for n, g, t in zip(weights, grads, turned, strict=True)}


def tangent_views(adapted, generator):
    views, frames = {}, {}
    for name, spec in adapted.layout.modules.items():
        q_out = torch.linalg.qr(
            torch.randn(spec.out_features, spec.rank, generator=generator, dtype=torch.float64)
        )[0]
        q_in = torch.linalg.qr(
            torch.randn(spec.in_features, spec.rank, generator=generator, dtype=torch.float64)
        )[0]
        core = torch.randn(spec.rank, spec.rank, generator=generator, dtype=torch.float64) * 0.3
        frames[name] = (q_out, core, q_in)
        views[name] = LayerView(
            "tangent", 1.0, down=q_in.t(), up=q_out @ core, frame_out=q_out, back=core @ q_in.t()
        )
    return views, frames


def set_peft(adapted, frames):
    for name, (q_out, core, q_in) in frames.items():
        layer = adapted.lora_layers[name]
        layer.lora_A["default"].weight.data = q_in.t().contiguous()
        layer.lora_B["default"].weight.data = q_out @ core / adapted.layout.modules[name].scaling


def gather(adapted, kind, views, rows):
    task = ZooTask(adapted_family[adapted.model])
    coordinates = Coordinates.of(adapted.layout, kind)
    group_of = {name: name.partition("|")[0] for name in coordinates.table.shapes}
    metric = Metric(kind, dict.fromkeys(group_of.values(), 1.0), group_of)
    extras = {
        f"{name}|{key}": value.unsqueeze(0)
        for name, leaf in adapted.leaves.items()
        for key, value in leaf.named_parameters()
    }
    batch = task.collate(rows)
    return per_record_gradients(
        adapted, coordinates, metric, views, extras, RecordAxis.of([len(rows)]),
        lambda: task.per_record_loss(adapted.model, batch),
    )  # fmt: skip


adapted_family = {}


@pytest.fixture(params=FAMILIES)
def prepared(request):
    adapted = adapted_model(request.param)
    adapted_family[adapted.model] = request.param
    return adapted, ZooTask(request.param), records(request.param)


def test_tangent_blocks_and_norms_with_the_core_in_both(prepared):
    adapted, task, rows = prepared
    views, frames = tangent_views(adapted, torch.Generator().manual_seed(3))
    set_peft(adapted, frames)
    got = gather(adapted, "tangent", views, rows)
    for number, row in enumerate(rows):
        for name, full in full_gradient(adapted, task, row).items():
            q_out, _, q_in = frames[name]
            p_out, p_in = q_out @ q_out.t(), q_in @ q_in.t()
            tangent = full @ p_in + p_out @ full - p_out @ full @ p_in
            assert torch.allclose(got.blocks[f"{name}|x_out"][number], full @ q_in, rtol=1e-10, atol=1e-12)
            assert torch.allclose(
                got.blocks[f"{name}|x_in"][number], full.t() @ q_out, rtol=1e-10, atol=1e-12
            )
            core = q_out.t() @ full @ q_in
            assert float(got.squared_norms[name][number] - core.square().sum()) == pytest.approx(
                float(tangent.square().sum()), rel=1e-9
            )


def test_projected_blocks_and_full_norms(prepared):
    adapted, task, rows = prepared
    generator = torch.Generator().manual_seed(4)
    probes = {
        name: torch.randn(spec.rank, spec.in_features, generator=generator, dtype=torch.float64)
        for name, spec in adapted.layout.modules.items()
    }
    views = {name: LayerView("projected", 1.0, probe=probe) for name, probe in probes.items()}
    got = gather(adapted, "projected", views, rows)
    for number, row in enumerate(rows):
        for name, full in full_gradient(adapted, task, row).items():
            assert torch.allclose(
                got.blocks[f"{name}|lora_B"][number], full @ probes[name].t(), rtol=1e-10, atol=1e-12
            )
            assert float(got.squared_norms[name][number]) == pytest.approx(
                float(full.square().sum()), rel=1e-9
            )


def test_projected_view_with_an_adapter_in_place(prepared):
    adapted, task, rows = prepared
    generator = torch.Generator().manual_seed(5)
    views, frames = {}, {}
    for name, spec in adapted.layout.modules.items():
        up = 0.2 * torch.randn(spec.out_features, spec.rank, generator=generator, dtype=torch.float64)
        down = torch.randn(spec.rank, spec.in_features, generator=generator, dtype=torch.float64)
        probe = torch.randn(spec.rank, spec.in_features, generator=generator, dtype=torch.float64)
        frames[name] = (up, torch.eye(spec.rank, dtype=torch.float64), down.t())
        views[name] = LayerView("projected", 1.0, down=down, up=up, probe=probe)
    set_peft(adapted, frames)
    got = gather(adapted, "projected", views, rows)
    for number, row in enumerate(rows):
        for name, full in full_gradient(adapted, task, row).items():
            expected = full @ views[name].probe.t()
            assert torch.allclose(got.blocks[f"{name}|lora_B"][number], expected, rtol=1e-10, atol=1e-12)
