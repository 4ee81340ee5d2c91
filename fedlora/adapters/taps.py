"""Attach taps to an adapted model once; they act only while a session is open.

PEFT keeps injection, naming and export. A tap is an instance attribute `forward` on PEFT's LoRA layer or
on a trained extra module; without an open session it calls the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fedlora.adapters.session import TapSession
from fedlora.adapters.tap_functions import AffineTap, FusedLoraTap, LinearTap, LookupTap, LoraTap
from fedlora.errors import ModelError

_MARK = "_fedlora_tap"


def _apply(function: Any, *arguments: Any) -> Any:
    """Call an autograd function (torch leaves `apply` untyped)."""
    return function.apply(*arguments)


class Taps:
    """The taps of one model; `open` makes them act on one pass."""

    def __init__(self) -> None:
        """Start with no session."""
        self._session: TapSession | None = None

    @property
    def session(self) -> TapSession | None:
        """The open session, if any."""
        return self._session

    @contextmanager
    def open(self, session: TapSession) -> Iterator[TapSession]:
        """Route the forward and backward inside the block through `session`.

        Raises:
            ModelError: if a session is open already.
        """
        if self._session is not None:
            raise ModelError(
                "taps: a pass is already open on this model; allowed is one at a time; close it first"
            )
        self._session = session
        try:
            yield session
        finally:
            self._session = None

    def attach(self, module: nn.Module, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a module's forward once; a second call on the same module changes nothing."""
        if getattr(module, _MARK, None) is not None:
            return
        module.forward = make(module.forward)
        object.__setattr__(module, _MARK, self)


def tap_lora(taps: Taps, name: str, layer: Any, adapter: str) -> None:
    """Tap a PEFT LoRA layer: its base layer is called as it is, then the view's product is added."""
    transposed = bool(layer.fan_in_fan_out)

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            session = taps.session
            if session is None or name not in session.views:
                return original(x, *args, **kwargs)
            if not args and not kwargs and fusible(layer.base_layer, layer.lora_dropout[adapter], x):
                weight = layer.base_layer.weight.t() if transposed else layer.base_layer.weight
                bias = layer.base_layer.bias
                return _apply(
                    FusedLoraTap, x, session.anchor, weight, bias, name, session.views[name], session
                )
            base = layer.base_layer(x, *args, **kwargs)
            dropped = layer.lora_dropout[adapter](x)
            return _apply(LoraTap, base, dropped, session.anchor, name, session.views[name], session)

        return forward

    taps.attach(layer, make)


def fusible(base: nn.Module, dropout: nn.Module, x: torch.Tensor) -> bool:
    """Return whether a base layer is a plain frozen matrix that the tap may multiply with itself.

    Quantised and other special layers, hooks, autocast and dropout take the general way, which calls the layer.
    """
    plain = type(base) is nn.Linear or (type(base).__name__ == "Conv1D" and hasattr(base, "nf"))
    if not plain or not isinstance(dropout, nn.Identity) or "forward" in base.__dict__:
        return False
    weight = base.weight
    return (
        isinstance(weight, torch.Tensor)
        and weight.dtype == x.dtype
        and not weight.requires_grad
        and not torch.is_autocast_enabled(x.device.type)
        and not (base._forward_hooks or base._forward_pre_hooks or base._backward_hooks)
    )


def _linear(taps: Taps, name: str, module: nn.Module, transposed: bool) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> Any:
            session = taps.session
            if session is None:
                return original(x)
            return _apply(LinearTap, x, session.anchor, name, transposed, session)

        return forward

    taps.attach(module, make)


def _layer_norm(taps: Taps, name: str, module: nn.LayerNorm) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> Any:
            session = taps.session
            if session is None:
                return original(x)
            normal = nn.functional.layer_norm(x, module.normalized_shape, None, None, module.eps)
            return _apply(AffineTap, normal, session.anchor, name, session)

        return forward

    taps.attach(module, make)


def _embedding(taps: Taps, name: str, module: nn.Embedding) -> None:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ids: torch.Tensor) -> Any:
            session = taps.session
            if session is None:
                return original(ids)
            records = session.records.num_records
            if ids.dim() == 1:
                ids = ids.unsqueeze(0)
            if ids.shape[0] == 1 and records > 1:  # positions shared by the batch: one row per record
                ids = ids.expand(records, *ids.shape[1:])
            elif ids.shape[0] != records:
                raise ModelError(
                    f"layer {name}: {ids.shape[0]} rows of ids for {records} records; leave it out of modules_to_save"
                )
            return _apply(LookupTap, ids, session.anchor, name, module.padding_idx, session)

        return forward

    taps.attach(module, make)


def tap_extra(taps: Taps, name: str, module: nn.Module) -> None:
    """Tap one trained leaf module of `modules_to_save`.

    Raises:
        ModelError: if per-record gradients of its type are not supported.
    """
    if isinstance(module, nn.Linear):
        _linear(taps, name, module, transposed=False)
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        _linear(taps, name, module, transposed=True)
    elif isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        _layer_norm(taps, name, module)
    elif isinstance(module, nn.Embedding) and plain_embedding(module):
        _embedding(taps, name, module)
    else:
        raise ModelError(
            f"modules_to_save: {name} is a {type(module).__name__}; allowed are Linear, Conv1D, LayerNorm and plain "
            "Embedding layers; leave it out of modules_to_save"
        )


def plain_embedding(module: nn.Embedding) -> bool:
    """Return whether a record's rows depend on that record only."""
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def stored_extra(module: nn.Module, parameter: str) -> bool:
    """Return whether a trained parameter's per-record gradient is stored (small) rather than kept factored."""
    return parameter == "bias" or isinstance(module, nn.LayerNorm)


def extra_shapes(leaves: Mapping[str, nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return "<module>|<parameter>" to shape for the leaves' own parameters."""
    return {
        f"{name}|{key}": tuple(value.shape)
        for name, module in leaves.items()
        for key, value in module.named_parameters(recurse=False)
    }
