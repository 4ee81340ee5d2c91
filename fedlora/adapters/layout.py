"""Names and shapes of an adapter, and strict checks of what is loaded into it."""

from __future__ import annotations

from collections.abc import Iterable

from fedlora.errors import LayoutMismatchError
from fedlora.names import CORE, FRAME_IN, FRAME_OUT, LORA_A, LORA_B, TANGENT_IN, TANGENT_OUT, block_name
from fedlora.wire.payload import AdapterLayout, AdapterPayload, ModuleSpec, PayloadKind


def module_blocks(kind: PayloadKind, module: str, spec: ModuleSpec) -> dict[str, tuple[int, ...]]:
    """Return the blocks of one module in a payload kind, with their shapes."""
    out, width, rank = spec.out_features, spec.in_features, spec.rank
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "lora_b": {LORA_B: (out, rank)},
        "projected": {LORA_B: (out, rank)},
        "factors": {LORA_A: (rank, width), LORA_B: (out, rank)},
        "frames": {FRAME_OUT: (out, rank), CORE: (rank, rank), FRAME_IN: (width, rank)},
        "tangent": {TANGENT_OUT: (out, rank), TANGENT_IN: (width, rank)},
    }
    return {block_name(module, block): shape for block, shape in shapes[kind].items()}


def payload_shapes(payload: AdapterPayload, layout: AdapterLayout) -> dict[str, tuple[int, ...]]:
    """Return every block a payload must have, with the ranks that it states itself."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module in layout.modules:
        if module in payload.modules:
            shapes |= module_blocks(payload.kind, module, payload.modules[module])
    return shapes | dict(layout.extra)


def check_names(what: str, got: Iterable[str], expected: Iterable[str]) -> None:
    """Require equal name sets, both ways.

    Raises:
        LayoutMismatchError: naming up to three examples of each kind.
    """
    have, want = set(got), set(expected)
    if have == want:
        return
    missing, surplus = sorted(want - have), sorted(have - want)
    raise LayoutMismatchError(
        f"{what}: names differ; {len(missing)} missing (such as {missing[:3]}), {len(surplus)} unknown (such as "
        f"{surplus[:3]}); expected exactly the layout's names, without wrapper prefixes"
    )


def check_payload_fits(payload: AdapterPayload, layout: AdapterLayout) -> None:
    """Require that a payload fits a layout exactly: base model, modules, names and shapes.

    Raises:
        LayoutMismatchError: otherwise.
    """
    if payload.base_fingerprint != layout.base_fingerprint:
        raise LayoutMismatchError(
            f"base model: payload is for {payload.base_fingerprint[:12]}, this side has "
            f"{layout.base_fingerprint[:12]}; load the same base model (name, revision and dtype)"
        )
    check_names("adapter modules", payload.modules, layout.modules)
    for name, spec in layout.modules.items():
        other = payload.modules[name]
        if (other.out_features, other.in_features) != (spec.out_features, spec.in_features):
            raise LayoutMismatchError(
                f"module {name}: payload has weight ({other.out_features}, {other.in_features}), this side "
                f"({spec.out_features}, {spec.in_features}); load the same base model"
            )
    expected = payload_shapes(payload, layout)
    check_names("adapter blocks", payload.blocks, expected)
    for name, shape in expected.items():
        if tuple(payload.blocks[name].shape) != shape:
            raise LayoutMismatchError(
                f"block {name}: shape {tuple(payload.blocks[name].shape)}; expected {shape}"
            )
