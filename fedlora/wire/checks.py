"""What must hold before one number of a payload is used.

Every refusal names the client, the layer and the reason. The checks cost one pass: the float32 dot
product of a block with itself is NaN or infinite exactly if the block holds NaN or infinity or its
squares overflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np

from fedlora.errors import (
    LayoutMismatchError,
    NonFinitePayloadError,
    PayloadTooLargeError,
    StaleRoundError,
)
from fedlora.names import split_block_name
from fedlora.wire.layout import expected_blocks, payload_bytes
from fedlora.wire.payload import AdapterLayout, AdapterPayload, Array, ModuleSpec, PayloadKind

_PREFIXES: Final = ("base_model.model.", "_module.", "module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_NEEDS_RECIPE: Final = ("lora_b", "projected")
LARGEST_SCALING: Final = 1e6
"""Largest scaling (and its inverse the smallest): with it the product of two usable factors stays within float32."""


def check_payload(
    payload: AdapterPayload,
    layout: AdapterLayout,
    recipe: str | None,
    *,
    kind: PayloadKind,
    client: str = "?",
    mixed: bool = False,
    max_bytes: int | None = None,
    max_norm: float | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> float:
    """Refuse a payload that is not exactly what was agreed.

    Args:
        payload: untrusted.
        layout: PUBLIC shapes of this run.
        recipe: sha256 of the shared lora_A (or projection) recipe; None where none is shared.
        kind: the coordinates that were asked for.
        client: whose payload it is, for messages only.
        mixed: clients may have their own rank, scaling and a subset of the modules.
        max_bytes: largest size of the blocks, in bytes.
        max_norm: largest Euclidean norm over all blocks (absurd updates).
        shapes: `expected_blocks` of the layout, where many payloads are checked (not with `mixed`).

    Returns: the Euclidean norm over all blocks (SENSITIVE where the payload is).

    Raises:
        LayoutMismatchError: kind, base model, recipe, names or shapes differ.
        NonFinitePayloadError: a block holds NaN, infinity, or overflows when squared.
        PayloadTooLargeError: too many bytes.
    """
    who = f"client {client!r}"
    if payload.kind != kind:
        raise LayoutMismatchError(f"{who} sent coordinates {payload.kind!r}; this run needs {kind!r}")
    if payload.base_fingerprint != layout.base_fingerprint:
        raise LayoutMismatchError(
            f"{who} adapts base model {payload.base_fingerprint[:12]}..., this run needs "
            f"{layout.base_fingerprint[:12]}...; install the same base weights"
        )
    _check_modules(payload, layout, who, mixed)
    if max_bytes is not None and payload_bytes(payload) > max_bytes:
        raise PayloadTooLargeError(f"{who} sent {payload_bytes(payload)} bytes; allowed: {max_bytes}")
    if kind in _NEEDS_RECIPE and (recipe is None or payload.recipe != recipe):
        raise LayoutMismatchError(
            f"{who} used another shared lora_A in layer {next(iter(payload.modules), '?')!r} "
            "(and possibly all): "
            f"recipe {_short(payload.recipe)}, this run needs {_short(recipe)}; its lora_B cannot be averaged"
        )
    if shapes is None or mixed:
        shapes = expected_blocks(payload.modules if mixed else layout.modules, layout.extra, kind)
    check_names(payload.blocks, shapes, who)
    return check_numbers(payload, shapes, who, max_norm)


def _short(fingerprint: str | None) -> str:
    return "none" if fingerprint is None else f"{fingerprint[:12]}..."


def _check_modules(payload: AdapterPayload, layout: AdapterLayout, who: str, mixed: bool) -> None:
    unknown = [path for path in payload.modules if path not in layout.modules]
    missing = [path for path in layout.modules if path not in payload.modules]
    if unknown or (missing and not mixed) or (not payload.modules and layout.modules):
        raise LayoutMismatchError(
            f"{who} adapts other modules: not in this run {_examples(unknown)}, missing {_examples(missing)}"
            + _prefix_hint(unknown)
        )
    for path, spec in payload.modules.items():
        want = layout.modules[path]
        if not isinstance(spec, ModuleSpec) or type(spec.rank) is not int:
            raise LayoutMismatchError(f"{who}, layer {path!r}: no module shape; this run needs {_spec(want)}")
        same_weight = (spec.out_features, spec.in_features) == (want.out_features, want.in_features)
        if not same_weight or not 1 <= spec.rank <= min(spec.out_features, spec.in_features):
            raise LayoutMismatchError(
                f"{who}, layer {path!r}: shape {_spec(spec)}; this run needs {_spec(want)}"
            )
        if not 1.0 / LARGEST_SCALING <= spec.scaling <= LARGEST_SCALING:
            raise LayoutMismatchError(
                f"{who}, layer {path!r}: scaling {spec.scaling}; allowed: finite, above 0, "
                f"{1.0 / LARGEST_SCALING:g} to {LARGEST_SCALING:g}"
            )
        if not mixed and spec != want:
            raise LayoutMismatchError(
                f"{who}, layer {path!r}: {_spec(spec)}; this run needs {_spec(want)}. Clients of different "
                "rank or scaling can be combined by federation.aggregation.kind product or stack"
            )


def _spec(spec: ModuleSpec) -> str:
    return f"{spec.out_features}x{spec.in_features} rank {spec.rank} scaling {spec.scaling:g}"


def _examples(names: Iterable[str]) -> list[str]:
    return sorted(names)[:3]


def _prefix_hint(names: Iterable[str]) -> str:
    for prefix in _PREFIXES:
        if any(name.startswith(prefix) for name in names):
            return f"; names carry the wrapper prefix {prefix!r}: read them from the unwrapped model"
    return ""


def check_names(blocks: Iterable[str], expected: Mapping[str, tuple[int, ...]], who: str = "payload") -> None:
    """Require exactly the expected block names, both ways.

    Raises:
        LayoutMismatchError: with up to three examples of missing and unknown names.
    """
    got = {str(name) if not isinstance(name, str) else name for name in blocks}
    unknown, missing = got - expected.keys(), expected.keys() - got
    if unknown or missing:
        raise LayoutMismatchError(
            f"{who}: {len(unknown)} unknown blocks {_examples(unknown)}, {len(missing)} missing "
            f"{_examples(missing)}; the key sets must be equal{_prefix_hint(unknown)}"
        )


def check_numbers(
    payload: AdapterPayload,
    shapes: Mapping[str, tuple[int, ...]],
    who: str = "payload",
    max_norm: float | None = None,
) -> float:
    """Require float32 blocks of the expected shapes whose squares are finite; return their joint norm.

    Raises:
        LayoutMismatchError: a shape or dtype differs.
        NonFinitePayloadError: NaN, infinity, overflow when squared, or a norm above `max_norm`.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        total = sum(_squared(name, block, shapes[name], who) for name, block in payload.blocks.items())
    norm = math.sqrt(total)
    if max_norm is not None and not norm <= max_norm:
        raise NonFinitePayloadError(
            f"{who}: the update's norm is above the allowed {max_norm:g} "
            "(federation.aggregation.max_update_norm)"
        )
    return norm


def _squared(name: str, block: Array, shape: tuple[int, ...], who: str) -> float:
    if type(block) is not np.ndarray:  # a masked array would hide NaN from the sum below
        raise LayoutMismatchError(
            f"{who}, layer {_layer(name)}: {type(block).__name__}; allowed: a plain array"
        )
    if block.dtype != np.float32 or block.shape != shape:
        raise LayoutMismatchError(
            f"{who}, layer {_layer(name)}: {block.dtype} {block.shape}; allowed: float32 {shape}"
        )
    flat = block.reshape(-1)
    squared = float(np.dot(flat, flat))
    if not math.isfinite(squared):
        raise NonFinitePayloadError(
            f"{who}, layer {_layer(name)}: NaN, infinity, or numbers that overflow when squared"
        )
    return squared


def _layer(name: str) -> str:
    try:
        module, block = split_block_name(name)
    except ValueError:
        return repr(name)
    return f"{module!r} ({block})"


class ReplyGuard:
    """Refuses answers of another run or round, from clients that were not asked, and repeated ones.

    One guard serves one round; `accept` marks a client as answered.
    """

    def __init__(self, run_id: str, server_round: int, clients: Iterable[str]) -> None:
        """Remember the run, the round and the clients that were asked."""
        self._run_id, self._round = run_id, server_round
        self._open = set(clients)
        self._seen: set[str] = set()

    @property
    def missing(self) -> tuple[str, ...]:
        """Clients that were asked and have not answered, in id order."""
        return tuple(sorted(self._open))

    def check_round(self, run_id: str, server_round: int, who: str = "a node") -> None:
        """Refuse a reply of another run or round.

        Raises:
            StaleRoundError: naming both.
        """
        if run_id != self._run_id or server_round != self._round:
            raise StaleRoundError(
                f"{who} answered run {run_id!r} round {server_round}; this is run {self._run_id!r} "
                f"round {self._round}; the answer is dropped"
            )

    def accept(self, client: str) -> None:
        """Mark one client as answered.

        Raises:
            StaleRoundError: if it was not asked this round or has answered already.
        """
        if client in self._seen:
            raise StaleRoundError(
                f"client {client!r} answered round {self._round} twice; the second is dropped"
            )
        if client not in self._open:
            raise StaleRoundError(
                f"client {client!r} was not asked in round {self._round}; its answer is dropped"
            )
        self._open.discard(client)
        self._seen.add(client)
