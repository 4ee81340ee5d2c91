"""Bounds on ranks and scalings, checked on the base model's layers before an adapter's weights are allocated."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Final

from peft.utils.other import get_pattern_key
from torch import nn

from fedlora.adapters.heads import covered, find_head, output_embeddings
from fedlora.config.schema import AdapterConfig
from fedlora.errors import ConfigError

SCALINGS: Final = (1e-4, 1e4)
"""Least and largest scaling (alpha / rank): what every supported dtype holds with room for values around it."""


def is_one_of(name: str, chosen: tuple[str, ...]) -> bool:
    """Return whether a module path is one of the chosen names or ends with one."""
    return any(name == entry or name.endswith("." + entry) for entry in chosen)


def refuse_sizes(model: nn.Module, config: AdapterConfig, head: tuple[str, ...] = ()) -> None:
    """Refuse a rank above a targeted layer's own, and a scaling out of `SCALINGS`; nothing is allocated.

    A matrix of shape (out, in) has rank min(out, in) at most: a larger adapter only costs memory and noise.

    Args:
        model: the plain base model.
        config: the `adapter` section.
        head: trained head modules, which get no adapter.

    Raises:
        ConfigError: naming the first layers concerned, what they got and what is allowed.
    """
    _refuse_patterns(config)
    problems = []
    for name, (out_features, in_features) in _targets(model, config, head):
        rank, scaling = _asked(name, config)
        most = min(out_features, in_features)
        if rank > most:
            problems.append(f"{name} ({out_features} x {in_features}): rank {rank}; allowed is 1 to {most}")
        elif not (SCALINGS[0] <= scaling <= SCALINGS[1]):
            allowed = f"{SCALINGS[0]:g} to {SCALINGS[1]:g}"
            problems.append(
                f"{name}: lora_alpha and rank give the scaling {scaling:.3g}; allowed is {allowed}"
            )
    if problems:
        raise ConfigError(
            f"adapter: rank or lora_alpha out of bounds for {len(problems)} layers; lower adapter.rank, "
            "adapter.lora_alpha or their patterns",
            (*problems[:3], *([f"and {len(problems) - 3} more"] if len(problems) > 3 else [])),
        )


def _refuse_patterns(config: AdapterConfig) -> None:
    for section in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, section):
            try:
                re.compile(key)
            except (re.error, RecursionError, OverflowError) as fault:
                raise ConfigError(
                    f"adapter.{section}: {key!r} is no regular expression ({fault}); write a module name's end, "
                    "for example q_proj"
                ) from None


def _targets(
    model: nn.Module, config: AdapterConfig, head: tuple[str, ...]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield (path, (out_features, in_features)) of the linear layers that would be adapted."""
    everything = isinstance(config.target_modules, str)
    kept_out = (head or find_head(model)) if everything else ()
    output = output_embeddings(model) if everything else None
    for name, module in model.named_modules():
        shape = _shape(module)
        if shape is None or module is output or covered(name, kept_out):
            continue
        if everything or is_one_of(name, tuple(config.target_modules)):
            yield name, shape


def _shape(module: nn.Module) -> tuple[int, int] | None:
    if isinstance(module, nn.Linear):
        return int(module.out_features), int(module.in_features)
    if type(module).__name__ == "Conv1D":  # transformers': the weight is stored (in, out)
        weight: Any = module.weight
        return int(weight.shape[1]), int(weight.shape[0])
    return None


def _asked(name: str, config: AdapterConfig) -> tuple[int, float]:
    """Return (rank, scaling) that PEFT will give a layer."""
    rank = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), name), config.rank)
    alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), name), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)
