"""What one adapted layer computes and what is collected per record: the engine's interface.

A mechanism describes each adapted module of one step by a `LayerView`; the taps read it in the
layer's forward and write per-record blocks in the layer's one backward.

| kind | forward | block per record | norm |
|---|---|---|---|
| `lora_b` | base + s (x D^T) U^T | `lora_B` = s G D^T | sum of squares |
| `factors` | the same | `lora_B` and `lora_A` = s U^T G | sum of squares |
| `tangent` | D = Q_in^T, U = Q_out S | `x_out` = G Q_in, `x_in` = G^T Q_out | tangent norm (core counted once) |
| `projected` | as `lora_b`, D and U optional | `lora_B` = G P^T for the probe P | ||G||_F by token Gram matrices |

G is the record's gradient with respect to the layer's weight (out, in); it is never formed.
Tensors are shared by all records, or carry a leading record axis when several clients share a batch
(`RecordAxis.gather` makes either from a per-client tensor).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from fedlora.names import LORA_A, LORA_B, TANGENT_IN, TANGENT_OUT, block_name
from fedlora.wire.payload import ModuleSpec

ViewKind = Literal["lora_b", "factors", "tangent", "projected"]


@dataclass(frozen=True)
class LayerView:
    """One adapted module in one step; tensors in the compute dtype, on the model's device.

    Attributes:
        kind: which blocks are collected.
        scaling: s; 1 for `tangent` and for `projected` blocks.
        down: D, (rank, in) or (records, rank, in); None if the adapter adds nothing yet.
        up: U, (out, rank) or (records, out, rank); None together with `down`.
        frame_out: Q_out, (out, rank) or (records, out, rank); `tangent` only.
        back: S Q_in^T, what carries G^T Q_out on to the input, (rank, in) or (records, rank, in); `tangent` only.
        probe: P, (rank, in) or (records, rank, in); `projected` only.
    """

    kind: ViewKind
    scaling: float
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    frame_out: torch.Tensor | None = None
    back: torch.Tensor | None = None
    probe: torch.Tensor | None = None

    def to(self, dtype: torch.dtype) -> LayerView:
        """Return the view in another compute dtype (under autocast the layers' outputs have their own).

        The probe stays as it is: the noise of a projection is drawn for these very numbers.
        """
        if self.down is None or self.down.dtype == dtype:
            return self
        names = ("down", "up", "frame_out", "back")
        blocks: dict[str, torch.Tensor | None] = {name: getattr(self, name) for name in names}
        cast: dict[str, Any] = {name: None if t is None else t.to(dtype) for name, t in blocks.items()}
        return replace(self, **cast)


def view_blocks(kind: ViewKind, module: str, spec: ModuleSpec) -> dict[str, tuple[int, ...]]:
    """Return the blocks that a view of this kind collects per record, with their shapes.

    Example:
        >>> view_blocks("lora_b", "q", ModuleSpec(4, 6, 2, 1.0))
        {'q|lora_B': (4, 2)}
    """
    if kind == "tangent":
        return {
            block_name(module, TANGENT_OUT): (spec.out_features, spec.rank),
            block_name(module, TANGENT_IN): (spec.in_features, spec.rank),
        }
    blocks: dict[str, tuple[int, ...]] = {block_name(module, LORA_B): (spec.out_features, spec.rank)}
    if kind == "factors":
        blocks[block_name(module, LORA_A)] = (spec.rank, spec.in_features)
    return blocks
