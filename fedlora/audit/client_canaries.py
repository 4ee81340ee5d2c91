"""Canary clients: whole updates on orthogonal directions of what clients send, and how a noised sum shows them.

At a common lora_A a direction is one trained value. In frames it is a unit tangent vector of one module (a core
direction stands in both blocks, as a client's core does), or one extra value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from fedlora.aggregation.linear import frames_of
from fedlora.audit.tangent_canaries import ModuleDirections
from fedlora.names import TANGENT_IN, TANGENT_OUT, block_name
from fedlora.wire.layout import expected_blocks
from fedlora.wire.payload import AdapterLayout, AdapterPayload, PayloadKind

Float64 = npt.NDArray[np.float64]


class CanaryClients:
    """PUBLIC. Mutually orthogonal whole updates of norm 1 in the server's metric.

    Args:
        current: the global adapter that clients start from (lora_b values or frames).
        layout: its shapes.
        limit: canaries at most.
        seed: PUBLIC. Chooses directions only; coins and noise never come from it.
    """

    def __init__(self, current: AdapterPayload, layout: AdapterLayout, *, limit: int, seed: int) -> None:
        """Choose directions."""
        uplink: PayloadKind = "tangent" if current.kind == "frames" else "lora_b"
        shapes = expected_blocks(current.modules, layout.extra, uplink)
        self._modules = [
            ModuleDirections.of(module, frames.q_out, frames.q_in)
            for module in (current.modules if uplink == "tangent" else ())
            for frames in (frames_of(current, module),)
        ]
        flat = layout.extra if uplink == "tangent" else shapes
        self._flat = {name: math.prod(shapes[name]) for name in flat}
        self.numbers = sum(math.prod(shape) for shape in shapes.values())
        self.nobody = AdapterPayload(
            uplink, self._zeros(current, shapes), current.modules, current.recipe, current.base_fingerprint
        )
        self._tangents = sum(sum(one.sizes) for one in self._modules)
        total = self._tangents + sum(self._flat.values())
        generator = np.random.Generator(np.random.Philox(seed))
        self._order = generator.choice(total, min(total, limit), replace=False)
        self.size = len(self._order)
        parts = {one.module: sum(one.sizes) for one in self._modules} | self._flat
        self.labels = np.repeat(list(parts), list(parts.values()))[self._order]

    @staticmethod
    def _zeros(
        current: AdapterPayload, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Return what a client sends that has learned nothing: the current values, or a zero tangent."""
        if current.kind == "frames":
            return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
        return {name: current.blocks[name] for name in shapes}

    def update(self, number: int, length: float) -> AdapterPayload:
        """Return what canary client `number` sends: an update of this (signed) length along its direction."""
        direction = int(self._order[number])
        blocks = dict(self.nobody.blocks)
        for one in self._modules:
            size = sum(one.sizes)
            if direction < size:
                units = one.unit(direction)
                for block, unit in zip((TANGENT_OUT, TANGENT_IN), units, strict=True):
                    blocks[block_name(one.module, block)] = (length * unit).numpy().astype(np.float32)
                return replace(self.nobody, blocks=blocks)
            direction -= size
        for name, size in self._flat.items():
            if direction < size:
                moved = blocks[name].copy()
                moved.reshape(-1)[direction] += np.float32(length)
                blocks[name] = moved
                break
            direction -= size
        return replace(self.nobody, blocks=blocks)

    def read(self, update: Mapping[str, Float64]) -> Float64:
        """Return (size,) coordinates of a summed update along the canaries' directions."""
        parts = [
            one.read(
                torch.from_numpy(update[block_name(one.module, TANGENT_OUT)]),
                torch.from_numpy(update[block_name(one.module, TANGENT_IN)]),
            ).numpy()
            for one in self._modules
        ]
        parts += [np.asarray(update[name], dtype=np.float64).reshape(-1) for name in self._flat]
        found: Float64 = np.concatenate(parts)[self._order]
        return found
