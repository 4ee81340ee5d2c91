"""What travels between server and clients: one adapter in stated coordinates.

| kind | blocks per module | sent by |
|---|---|---|
| `lora_b` | lora_B (lora_A by recipe) | mean_b: both ways (up: the client's new lora_B) |
| `factors` | lora_A, lora_B | product, stack, aligned, factor_mean: both ways |
| `frames` | q_out, core, q_in | tangent: down |
| `tangent` | x_out, x_in | tangent: up (the update's tangent blocks at the frames that came down) |
| `projected` | lora_B-shaped update and its projection's recipe | noisy_projection, shared: up |

Trained extra modules (`modules_to_save`) travel as "<module>|<parameter>" in every kind: values
both ways, except under `tangent` uplinks, where they are updates (new - old).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

PayloadKind = Literal["lora_b", "factors", "frames", "tangent", "projected"]
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ModuleSpec:
    """Public shape of one adapted module: weight (out_features, in_features), rank and scaling."""

    out_features: int
    in_features: int
    rank: int
    scaling: float


@dataclass(frozen=True)
class AdapterLayout:
    """Public: which modules are adapted and which extra parameters are trained.

    Attributes:
        modules: module path (without wrapper prefixes) to its spec, in model order.
        extra: "<module>|<parameter>" of every parameter in `modules_to_save` to its shape.
        base_fingerprint: sha256 over the frozen base weights.
    """

    modules: Mapping[str, ModuleSpec]
    extra: Mapping[str, tuple[int, ...]]
    base_fingerprint: str


@dataclass(frozen=True)
class AdapterPayload:
    """One adapter (or update) in the coordinates `kind`; float32 arrays.

    Attributes:
        kind: see the module's table.
        blocks: payload name to array.
        modules: module path to spec as the sender has it (ranks may differ between clients).
        recipe: sha256 of the shared lora_A recipe, where lora_A does not travel.
        base_fingerprint: sha256 of the base model.
        notes: small public extras (for example a tangent update's dropped norm where allowed).
    """

    kind: PayloadKind
    blocks: Mapping[str, Array]
    modules: Mapping[str, ModuleSpec]
    recipe: str | None
    base_fingerprint: str
    notes: Mapping[str, str | int | float] = field(default_factory=dict)
