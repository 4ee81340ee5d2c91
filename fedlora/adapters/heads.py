"""Find the trained head of a model, and the leaf layers inside `modules_to_save`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import nn

from fedlora.errors import ModelError

_HEADED: Final = ("ForSequenceClassification", "ForTokenClassification", "ForImageClassification")


def find_head(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a classification model's head modules: what lies outside its backbone.

    Example: ("score",) for GPT-2, ("pre_classifier", "classifier") for DistilBERT, () for a causal LM.
    """
    if not type(model).__name__.endswith(_HEADED):
        return ()
    return outside_backbone(model)


def outside_backbone(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's own children with parameters that are not its backbone."""
    backbone = getattr(model, "base_model_prefix", "")
    return tuple(
        name
        for name, child in model.named_children()
        if name != backbone and any(True for _ in child.parameters())
    )


def output_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the layer that turns a language model's features into logits; None where there is none."""
    find: Any = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def covered(name: str, chosen: Iterable[str]) -> bool:
    """Return whether a module path is one of the chosen modules (by suffix) or lies inside one."""
    return any(f".{name}.".find(f".{other}.") >= 0 for other in chosen)


def resolve_head(model: nn.Module, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return `modules_to_save`, filled in with the model's head where the configuration leaves it open.

    Raises:
        ModelError: if some are given but the head is not among them, or a name matches nothing.
    """
    head = find_head(model)
    if not chosen:
        return head
    names = [name for name, _ in model.named_modules()]
    lost = [
        entry for entry in chosen if not any(name == entry or name.endswith("." + entry) for name in names)
    ]
    if lost:
        raise ModelError(
            f"adapter.modules_to_save: {lost} match no module; allowed are module names; correct them"
        )
    missing = [name for name in head if not covered(name, chosen)]
    if missing:
        raise ModelError(
            f"adapter.modules_to_save: got {list(chosen)}, but this model's head also has {missing}, which would stay "
            f"untrained; add {missing} (or leave modules_to_save empty: the head is then found by itself)"
        )
    return tuple(chosen)


def parameter_leaves(prefix: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own parameters themselves, by path."""
    leaves = {}
    for name, leaf in module.named_modules():
        if any(True for _ in leaf.parameters(recurse=False)):
            leaves[f"{prefix}.{name}" if name else prefix] = leaf
    return leaves


def refuse_tied(model: nn.Module, leaves: dict[str, nn.Module]) -> None:
    """Refuse trained parameters that another module shares: the copy and the original would part.

    Raises:
        ModelError: naming the module and its twin.
    """
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for name, leaf in leaves.items():
        for parameter in leaf.parameters(recurse=False):
            twins = [other for other in owners.get(id(parameter), []) if other != name]
            if twins:
                raise ModelError(
                    f"adapter.modules_to_save: {name} shares its weights with {twins[0]} (tied); allowed are untied "
                    "layers; leave it out, or untie the model (tie_word_embeddings: false)"
                )


def refuse_coupling(model: nn.Module) -> None:
    """Refuse layers that couple the records of a batch.

    Raises:
        ModelError: for batch normalisation and for routers with a balance loss.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ModelError(
                f"layer {name}: batch normalisation couples the records of a batch; allowed are models without it; "
                "choose another base model"
            )
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "output_router_logits", False):
        raise ModelError(
            "model: output_router_logits is on, whose balance loss couples the records of a batch; switch it off"
        )


def uncoupled_width(model: nn.Module) -> int | None:
    """Return the longest batch in tokens whose records do not change one another's positions; None for any.

    Rotary frequencies of the types `longrope` and `dynamic` follow the longest record of a batch: once it is beyond the
    length that the model was first trained for, every record of the batch is computed otherwise.
    """
    limits = [limit for module in model.modules() for limit in _rotary_limits(module)]
    return min(limits, default=None)


def _rotary_limits(module: nn.Module) -> list[int]:
    kinds: Any = getattr(module, "rope_type", None)
    named = kinds if isinstance(kinds, dict) else {None: kinds}
    limits = []
    for layer, kind in named.items():
        if not isinstance(kind, str) or not (kind == "longrope" or "dynamic" in kind):
            continue
        rope: Any = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        rope = rope if layer is None else rope.get(layer, {})
        limit: Any = getattr(module, "original_max_seq_len", 0)
        limits.append(int(rope.get("original_max_position_embeddings", 0) if kind == "longrope" else limit))
    return limits
