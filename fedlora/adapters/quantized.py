"""Bases in 4 or 8 bits (bitsandbytes): which layers stay whole, and that no record changes another's rounding."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

from fedlora.adapters.heads import covered, output_embeddings, outside_backbone
from fedlora.config.schema import ModelConfig
from fedlora.errors import ModelError

_METHODS: Final = {"4bit": "bitsandbytes_4bit", "8bit": "bitsandbytes_8bit"}
"""transformers' names of what `model.quantization` asks for."""


def check_quantization(config: ModelConfig, device: torch.device) -> None:
    """Refuse a quantised base where its package or a GPU is missing.

    Raises:
        ModelError: naming what is missing.
    """
    if config.quantization is None:
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"model.quantization {config.quantization!r} needs the package 'bitsandbytes'; "
            "run: pip install bitsandbytes, or set model.quantization: null"
        )
    if device.type != "cuda":
        raise ModelError(
            f"model.quantization {config.quantization!r} needs a GPU; set model.quantization: null for CPU"
        )


def quantization_arguments(config: ModelConfig, dtype: torch.dtype, skeleton: Any) -> dict[str, Any]:
    """Return what `from_pretrained` needs to load the base in few bits; a stored quantised one keeps its own settings.

    Heads stay whole: they are trained. So does the product with the output embeddings, as transformers leaves it.

    8 bits go without LLM.int8()'s outlier columns (`llm_int8_threshold`): a column counts as one once any token of the
    batch exceeds the threshold, and then all tokens of all records are multiplied otherwise, so that one record would
    move the others' gradients by more than the clip bound covers.

    Args:
        config: the `model` section, with `quantization` set.
        dtype: that of what stays whole, and of products.
        skeleton: the transformers model, weights on any device (meta will do).
    """
    import transformers

    place = {"device_map": {"": 0}}
    if getattr(skeleton.config, "quantization_config", None) is not None:
        return place
    bits: Any = transformers.BitsAndBytesConfig
    kept = list(whole_modules(skeleton))
    if config.quantization == "8bit":
        chosen = bits(load_in_8bit=True, llm_int8_threshold=0.0, llm_int8_skip_modules=kept)
    else:
        chosen = bits(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=kept,
        )
    return place | {"quantization_config": chosen}


def whole_modules(model: Any) -> tuple[str, ...]:
    """Return the modules that are not quantised: all outside the backbone, and the output embeddings.

    Example: ("classifier",) for a BERT classifier, ("lm_head",) for GPT-2 and T5.
    """
    kept = set(outside_backbone(model)) if hasattr(model, model.base_model_prefix) else set()
    output = output_embeddings(model)
    kept |= {name for name, module in model.named_modules() if module is output}
    return tuple(sorted(kept))


def refuse_stored_quantization(config: ModelConfig, stored: Any) -> None:
    """Refuse a checkpoint that is quantised already in another way than `model.quantization` says.

    Other methods may round a record's activations by a scale of the whole batch, which nothing here bounds.

    Args:
        config: the `model` section.
        stored: transformers' configuration of the checkpoint.

    Raises:
        ModelError: naming the method.
    """
    section = getattr(stored, "quantization_config", None)
    if section is None:
        return
    values = section if isinstance(section, dict) else section.to_dict()
    method = str(values.get("quant_method", "unknown"))
    if method == "bitsandbytes":
        method += "_4bit" if values.get("load_in_4bit", values.get("_load_in_4bit")) else "_8bit"
    if config.quantization is not None and method == _METHODS[config.quantization]:
        return
    fits = next((key for key, value in _METHODS.items() if value == method), None)
    remedy = f"set model.quantization: {fits}" if fits else "use the checkpoint that was not quantised"
    raise ModelError(
        f"model {config.name_or_path!r} is stored quantised ({method}), and model.quantization is "
        f"{config.quantization!r}; allowed are plain weights, and bitsandbytes weights under their own name; {remedy}"
    )


def without_outliers(model: nn.Module) -> None:
    """Switch off LLM.int8()'s outlier columns in every 8-bit layer, also where the checkpoint brings them along."""
    for module in model.modules():
        state: Any = getattr(module, "state", None)
        if getattr(state, "threshold", 0.0):
            state.threshold = 0.0


def refuse_packed(model: nn.Module, names: Iterable[str], key: str) -> None:
    """Refuse to train weights that are stored in few bits.

    Args:
        model: the base model.
        names: the modules that would be trained whole.
        key: the configuration's key that names them.

    Raises:
        ModelError: naming the first.
    """
    chosen = tuple(names)
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.is_floating_point() and covered(path, chosen):
                raise ModelError(
                    f"{key}: {path} is stored in {str(parameter.dtype).removeprefix('torch.')} (model.quantization) "
                    "and cannot be trained itself; leave it out, or set model.quantization: null"
                )
