"""`init: spectral`: the start is the base model, training moves it, and the export fits the untouched base."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_zoo import FAMILIES, FINGERPRINT, ZooTask, adapted_model, base_model, config, records, targets

from fedlora.adapters import inject
from fedlora.adapters.export import write_peft_folder
from fedlora.adapters.export_probe import load_peft
from fedlora.adapters.spectral import split_base
from fedlora.config.schema import AdapterConfig, ModelConfig
from fedlora.errors import ModelError, UnsupportedCombinationError
from fedlora.mechanisms import build_mechanism
from fedlora.names import CORE, LORA_A, LORA_B, block_name

F64 = torch.float64


def losses(model: Any, family: str) -> torch.Tensor:
    task, rows = ZooTask(family), records(family)
    with torch.no_grad():
        return task.per_record_loss(model.eval(), task.collate(rows))


def settings(family: str, **changes: Any) -> AdapterConfig:
    return AdapterConfig(
        **{"rank": 3, "lora_alpha": 6.0, "target_modules": targets(family), "init": "spectral", **changes}
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 2e-5)])
def test_spectral_start_is_the_base_model(family, dtype, tolerance):
    expected = losses(base_model(family, dtype), family)
    adapted = adapted_model(family, dtype, init="spectral")
    assert torch.allclose(losses(adapted.model, family), expected, rtol=tolerance, atol=tolerance)
    for name, layer in adapted.lora_layers.items():
        weight = layer.get_base_layer().weight.double()
        weight = weight.t() if layer.fan_in_fan_out else weight
        part = adapted.removed[name]
        whole = (
            weight
            + part.scaling * torch.from_numpy(part.lora_b).double() @ torch.from_numpy(part.lora_a).double()
        )
        values = torch.linalg.svdvals(whole)
        assert torch.allclose(torch.linalg.svdvals(weight)[: len(values) - 3], values[3:], atol=1e-5)


def perturbed(adapted: Any) -> Any:
    """An adapter as training might leave it: every factor and the head moved."""
    start = adapted.write_factors()
    generator = torch.Generator().manual_seed(3)
    blocks = {
        name: block + 0.2 * torch.randn(block.shape, generator=generator).numpy()
        for name, block in start.blocks.items()
    }
    return type(start)(start.kind, blocks, start.modules, start.recipe, start.base_fingerprint)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("case", ["one rank", "two ranks", "rslora"])
def test_spectral_export_fits_the_untouched_base(family, case, tmp_path):
    changes: dict[str, Any] = {"use_rslora": case == "rslora"}
    if case == "two ranks":
        changes["rank_pattern"] = {next(iter(adapted_model(family).layout.modules)): 2}
    adapted = adapted_model(family, torch.float32, init="spectral", **changes)
    adapted.load(perturbed(adapted))
    trained = losses(adapted.model, family)
    task = "causal-lm" if family == "llama" else "sequence-classification"
    rank = write_peft_folder(adapted, ModelConfig(name_or_path="tiny", task=task), tmp_path)
    assert rank == 6
    plain = base_model(family, torch.float32)
    before = losses(copy.deepcopy(plain), family)
    reloaded = load_peft(plain, tmp_path)
    assert torch.allclose(losses(reloaded, family), trained, rtol=1e-4, atol=1e-4)
    assert (trained - before).abs().max() > 1e-3
    merged = reloaded.merge_and_unload(safe_merge=True)
    assert torch.allclose(losses(merged, family), trained, rtol=1e-4, atol=1e-4)


def test_spectral_prism_starts_at_the_leading_part():
    adapted = adapted_model("bert", init="spectral")
    mechanism = build_mechanism(config("prism", adapter={"init": "spectral"}), adapted.layout)
    before = losses(adapted.model, "bert")
    payload = mechanism.initial_payload(adapted)
    adapted.load(payload)
    assert torch.allclose(losses(adapted.model, "bert"), before, atol=1e-5)
    assert all(payload.blocks[block_name(m, CORE)].any() for m in adapted.layout.modules)


def test_spectral_residual_does_not_depend_on_the_decompositions_signs():
    """Two parties whose libraries choose other signs agree on the base to rounding."""

    @dataclass
    class Base:
        weight: Any

    class Layer:
        fan_in_fan_out = False

        def __init__(self, weight: torch.Tensor) -> None:
            self.base, self.r, self.scaling = Base(weight), {"a": 2}, {"a": 2.0}
            self.lora_A = {"a": torch.nn.Linear(6, 2, bias=False)}
            self.lora_B = {"a": torch.nn.Linear(2, 5, bias=False)}

        def get_base_layer(self) -> Base:
            return self.base

    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    one, other = Layer(weight), Layer(-weight)
    first, second = split_base("m", one, "a"), split_base("m", other, "a")
    assert torch.allclose(one.base.weight, -other.base.weight, atol=1e-6)
    assert first.lora_b.shape == second.lora_b.shape == (5, 2)
    with pytest.raises(ModelError, match="not determined"):
        split_base("m", Layer(torch.eye(5, 6)), "a")
    with pytest.raises(ModelError, match="float32"):
        split_base("m", Layer(weight.bfloat16()), "a")


def test_spectral_adapters_belong_to_another_base_than_plain_ones():
    plain, residual = adapted_model("bert"), adapted_model("bert", init="spectral")
    assert plain.layout.base_fingerprint == FINGERPRINT != residual.layout.base_fingerprint
    fresh = inject(base_model("bert"), settings("bert"), seed=8, fingerprint=FINGERPRINT)
    assert fresh.layout.base_fingerprint == residual.layout.base_fingerprint
    for key in (LORA_A, LORA_B):
        assert any(block_name(m, key) in fresh.write_factors().blocks for m in fresh.layout.modules)


@pytest.mark.parametrize(
    "mechanism", [{"kind": "lora_fa"}, {"kind": "noisy_projection", "projection_source": "client"}]
)
def test_spectral_is_refused_where_lora_a_does_not_travel(mechanism):
    adapted = adapted_model("bert", init="spectral")
    with pytest.raises(UnsupportedCombinationError, match="spectral"):
        build_mechanism(config(adapter={"init": "spectral"}, mechanism=mechanism), adapted.layout)
