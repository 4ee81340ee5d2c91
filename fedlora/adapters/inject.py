"""Inject a LoRA adapter with PEFT into a frozen base model and attach the taps."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.other import get_pattern_key
from torch import nn

from fedlora.adapters.adapted import ADAPTER, AdaptedModel
from fedlora.adapters.heads import find_head, parameter_leaves, refuse_coupling, refuse_tied, resolve_head
from fedlora.adapters.quantized import refuse_packed
from fedlora.adapters.recipe import ARecipe
from fedlora.adapters.sizes import is_one_of, refuse_sizes
from fedlora.adapters.spectral import RemovedPart, residual_fingerprint, split_base
from fedlora.adapters.taps import Taps, extra_shapes, tap_extra, tap_lora
from fedlora.config.schema import AdapterConfig
from fedlora.errors import ConfigError, ModelError
from fedlora.wire.payload import AdapterLayout, ModuleSpec

_LOG = logging.getLogger(__name__)
_PREFIX = "base_model.model."


def inject(
    base_model: Any,
    config: AdapterConfig,
    *,
    seed: int,
    fingerprint: str,
    adapt: Literal["lora", "full"] = "lora",
) -> AdaptedModel:
    """Adapt a frozen base model.

    Args:
        base_model: a transformers model, on its device.
        config: the `adapter` section.
        seed: the experiment's public seed; draws lora_A and nothing private.
        fingerprint: sha256 of the base weights.
        adapt: "lora", or "full" to train the target modules' whole weights (baseline).

    Returns:
        The adapted model with lora_A as the recipe says, lora_B = 0 (`spectral`: the base weight's leading part in
        the factors, the residual in the base), everything frozen, taps attached.

    Raises:
        ConfigError: if a rank or alpha pattern matches no layer (each listed with its count), or a rank or scaling is
            out of bounds.
        ModelError: if a target, a head or a trained layer is missing, tied or of a type without support.
    """
    if isinstance(base_model, PeftModel) or any(isinstance(m, LoraLayer) for m in base_model.modules()):
        raise ModelError(
            "base model: it carries an adapter already; allowed is a plain base model; load it again"
        )
    refuse_coupling(base_model)
    head = () if config.freeze_head else resolve_head(base_model, config.modules_to_save)
    chosen = {name: part for name, part in base_model.named_modules() if is_one_of(name, head)}
    leaves = {
        key: leaf for name, part in chosen.items() for key, leaf in parameter_leaves(name, part).items()
    }
    refuse_tied(base_model, leaves)
    refuse_packed(base_model, head, "adapter.modules_to_save")
    if adapt == "full":
        return _full(base_model, config, leaves, seed, fingerprint)
    return _lora(base_model, config, head, seed, fingerprint)


def _lora(
    base_model: nn.Module, config: AdapterConfig, head: tuple[str, ...], seed: int, fingerprint: str
) -> AdaptedModel:
    refuse_sizes(base_model, config, head)
    peft_model = _peft(base_model, config, head)
    layers = _lora_layers(peft_model)
    if not layers and config.target_modules:
        raise ModelError("adapter.target_modules: no layer was adapted; name modules of this model")
    _refuse_unmatched(config, list(layers))
    matches = _pattern_matches(config, list(layers))
    leaves = _saved_leaves(peft_model)
    modules = {name: _spec(layer) for name, layer in layers.items()}
    if config.init == "spectral":
        fingerprint = residual_fingerprint(fingerprint, {name: spec.rank for name, spec in modules.items()})
    layout = AdapterLayout(modules, extra_shapes(leaves), fingerprint)
    recipe = ARecipe.of(layout, seed, config.init)
    removed = _start(layers, recipe)
    taps = Taps()
    for name, layer in layers.items():
        tap_lora(taps, name, layer, ADAPTER)
    for name, leaf in leaves.items():
        tap_extra(taps, name, leaf)
    peft_model.requires_grad_(False)
    adapted = AdaptedModel(
        peft_model, layout, recipe, layers, leaves, taps, matches, config.dropout > 0.0, removed
    )
    _LOG.info("adapter: %d layers, %d trained values", len(layers), adapted.num_trained())
    return adapted


def _peft(base_model: Any, config: AdapterConfig, head: tuple[str, ...]) -> PeftModel:
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    if not targets and not head:
        raise ModelError(
            "adapter: neither target_modules nor modules_to_save names a layer; name at least one"
        )
    transposed = any(
        type(module).__name__ == "Conv1D" and (targets == "all-linear" or is_one_of(name, tuple(targets)))
        for name, module in base_model.named_modules()
    )
    alpha: Any = config.lora_alpha  # PEFT says int, and takes any number
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        target_modules=targets or DUMMY_TARGET_MODULES,  # no target: the head alone is trained
        exclude_modules=list(head or find_head(base_model)) or None if targets == "all-linear" else None,
        lora_dropout=config.dropout,
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
        use_rslora=config.use_rslora,
        modules_to_save=list(head) or None,
        fan_in_fan_out=transposed,
        init_lora_weights=True,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_peft_model(base_model, lora, adapter_name=ADAPTER)
    except (ValueError, ImportError) as problem:
        raise ModelError(
            f"adapter.target_modules: PEFT cannot adapt {targets} ({problem}); correct the names or the package"
        ) from problem


def _lora_layers(peft_model: nn.Module) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    for path, module in peft_model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = path.removeprefix(_PREFIX)
        weight = getattr(module.get_base_layer(), "weight", None)
        if ADAPTER not in module.lora_A or weight is None or not hasattr(module, "in_features"):
            raise ModelError(f"target module {name}: a {type(module.get_base_layer()).__name__} is not supported; "
                             "allowed are Linear and Conv1D layers; leave it out of target_modules")  # fmt: skip
        if len(module.lora_variant) > 0 or not isinstance(module.lora_A[ADAPTER], nn.Linear):
            raise ModelError(f"target module {name}: only plain LoRA is supported (no DoRA and no convolution); "
                             "leave the variant out")  # fmt: skip
        layers[name] = module
    return layers


def _saved_leaves(peft_model: nn.Module) -> dict[str, nn.Module]:
    leaves: dict[str, nn.Module] = {}
    for path, module in peft_model.named_modules():
        copies = getattr(module, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and ADAPTER in copies:
            leaves |= parameter_leaves(path.removeprefix(_PREFIX), copies[ADAPTER])
    return leaves


def _spec(layer: Any) -> ModuleSpec:
    return ModuleSpec(
        int(layer.out_features), int(layer.in_features), int(layer.r[ADAPTER]), float(layer.scaling[ADAPTER])
    )


def _refuse_unmatched(config: AdapterConfig, names: list[str]) -> None:
    if isinstance(config.target_modules, str):
        return
    lost = [entry for entry in config.target_modules if not any(is_one_of(name, (entry,)) for name in names)]
    if lost:
        raise ConfigError(
            f"adapter.target_modules: {lost} match no layer of this model",
            tuple(f"{entry}: 0 layers; name modules that the model has" for entry in lost),
        )


def _pattern_matches(config: AdapterConfig, names: list[str]) -> Mapping[str, int]:
    patterns: dict[str, Mapping[str, Any]] = {
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
    }
    counts: dict[str, int] = {}
    for section, pattern in patterns.items():
        for key in pattern:
            hits = [name for name in names if get_pattern_key(list(pattern), name) == key]
            counts[f"{section}.{key}"] = len(hits)
    if any(count == 0 for count in counts.values()):
        raise ConfigError(
            "adapter: a rank or alpha pattern matches no layer; write it without anchors, as a module name's end "
            "(for example q_proj or layers.0.self_attn.q_proj)",
            tuple(f"adapter.{key}: {count} layers" for key, count in counts.items()),
        )
    return counts


def _start(layers: Mapping[str, Any], recipe: ARecipe) -> dict[str, RemovedPart]:
    """Set the factors' starting values; return what `init: spectral` took out of the base weights."""
    if recipe.init == "spectral":
        return {name: split_base(name, layer, ADAPTER) for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.lora_A[ADAPTER].weight.data.copy_(torch.from_numpy(recipe.draw(name)))
        layer.lora_B[ADAPTER].weight.data.zero_()
    return {}


def _full(
    model: nn.Module, config: AdapterConfig, leaves: dict[str, nn.Module], seed: int, fingerprint: str
) -> AdaptedModel:
    """Train whole target matrices: they become trained leaves themselves."""
    if isinstance(config.target_modules, str):
        raise ConfigError("adapter.target_modules: all-linear is not offered for dp_sgd; name the modules")
    targets = {name: part for name, part in model.named_modules() if is_one_of(name, config.target_modules)}
    _refuse_unmatched(config, list(targets))
    trained = targets | leaves
    refuse_tied(model, trained)
    refuse_packed(model, targets, "adapter.target_modules")
    taps = Taps()
    for name, leaf in trained.items():
        tap_extra(taps, name, leaf)
    model.requires_grad_(False)
    layout = AdapterLayout({}, extra_shapes(trained), fingerprint)
    return AdaptedModel(model, layout, ARecipe.of(layout, seed), {}, trained, taps)
