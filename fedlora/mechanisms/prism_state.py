"""PRISM's local state: frames of every module, stacked by shape so that small linear algebra is batched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.philox_normal import normals
from fedlora.errors import LayoutMismatchError
from fedlora.geometry import (
    Frames,
    Tangent,
    check_frames,
    check_rank,
    complement,
    frames_from_factors,
)
from fedlora.mechanisms.coordinates import shape_groups
from fedlora.mechanisms.prism_direction import PrismMoments
from fedlora.mechanisms.prism_paper import PaperState
from fedlora.mechanisms.stages import PerRecordGradients
from fedlora.names import (
    CORE,
    FRAME_IN,
    FRAME_OUT,
    LORA_A,
    LORA_B,
    TANGENT_IN,
    TANGENT_OUT,
    block_name,
)
from fedlora.wire.payload import AdapterLayout, AdapterPayload, Array

Tensor = torch.Tensor

_RECORDS_AT_ONCE: Final = 64
"""Records of several clients whose frames are spread at once (memory)."""


@dataclass(frozen=True)
class PrismGroup:
    """PUBLIC after noise. Modules of one shape (out, in, rank) for K clients.

    Attributes:
        modules: module paths, L of them.
        base: frames that came down, (1, L, ...).
        frames: present frames, (K, L, ...).
        moments: adaptive averages at `frames`, or None.
        momentum: heavy-ball tangent at `frames`, or None.
        paper: factors and moments of the paper's form, or None.
        update: the exact tangent update at `base` while only one step was taken, else None.
    """

    modules: tuple[str, ...]
    base: Frames
    frames: Frames
    moments: PrismMoments | None = None
    momentum: Tangent | None = None
    paper: PaperState | None = None
    update: Tangent | None = None


@dataclass(frozen=True)
class PrismState:
    """PUBLIC after noise. All groups and the number of local steps taken.

    Attributes:
        groups: one for each shape, in order of first appearance.
        steps: local steps since the payload came down.
    """

    groups: tuple[PrismGroup, ...]
    steps: int = 0


def initial_frames(adapted: AdaptedModel) -> dict[str, Array]:
    """Return the frames of the starting point as payload blocks.

    lora_B = 0 (the usual start): q_in spans lora_A's rows, core = 0, and q_out is a public Haar-random frame. Any
    other adapter (`init: spectral` is one): QR of its factors.
    """
    factors = adapted.write_factors()
    blocks: dict[str, Array] = {}
    for module, spec in factors.modules.items():
        check_rank(spec.out_features, spec.in_features, spec.rank)
        a = torch.from_numpy(factors.blocks[block_name(module, LORA_A)]).double()
        b = torch.from_numpy(factors.blocks[block_name(module, LORA_B)]).double()
        frames = frames_from_factors(b, a, spec.scaling)
        if not bool((b != 0).any()):
            frames = Frames(_outer_frame(adapted, module), torch.zeros_like(frames.core), frames.q_in)
        values = {FRAME_OUT: frames.q_out, CORE: frames.core, FRAME_IN: frames.q_in}
        blocks |= {block_name(module, key): t.float().numpy() for key, t in values.items()}
    return blocks


def _outer_frame(adapted: AdaptedModel, module: str) -> Tensor:
    spec = adapted.layout.modules[module]
    name = f"fedlora q_out|1|{adapted.recipe.seed}|{module}|{spec.out_features}|{spec.rank}"
    normal = torch.from_numpy(normals(name, spec.out_features * spec.rank))
    frame: Tensor = torch.linalg.qr(normal.reshape(spec.out_features, spec.rank)).Q
    return frame


def open_groups(
    adapted: AdaptedModel, payload: AdapterPayload, layout: AdapterLayout, num_clients: int
) -> tuple[PrismGroup, ...]:
    """Stack a `frames` payload's modules by shape and repeat them for K clients.

    Raises:
        LayoutMismatchError: if the payload is of another kind.
        NotOnManifoldError: if frames are not orthonormal.
    """
    if payload.kind != "frames":
        raise LayoutMismatchError(f"adapter payload: got kind {payload.kind!r}; prism takes 'frames'")
    groups = []
    for modules in shape_groups(layout):
        parts = [
            torch.from_numpy(
                np.stack([np.asarray(payload.blocks[block_name(m, key)], dtype=np.float32) for m in modules])
            ).to(device=adapted.device, dtype=adapted.accumulate_dtype)
            for key in (FRAME_OUT, CORE, FRAME_IN)
        ]
        received = Frames(*parts)
        check_frames(received, tolerance=1e-4)
        single = Frames(_polish(received.q_out), received.core, _polish(received.q_in))
        base = Frames(*(t.unsqueeze(0) for t in (single.q_out, single.core, single.q_in)))
        frames = Frames(*(t.repeat(num_clients, 1, 1, 1) for t in (base.q_out, base.core, base.q_in)))
        groups.append(PrismGroup(modules, base, frames))
    return tuple(groups)


def _polish(q: Tensor) -> Tensor:
    """One Newton-Schulz step towards the nearest orthonormal frame: removes float32 rounding, keeps the frame."""
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return q @ (1.5 * eye - 0.5 * (q.mT @ q))


def take_tangent(blocks: FlatBlocks, group: PrismGroup) -> Tangent:
    """Return a group's tangent blocks (K, L, ...) as views of flat storage."""
    x_out, x_in = (
        blocks.together([block_name(module, key) for module in group.modules])
        for key in (TANGENT_OUT, TANGENT_IN)
    )
    return Tangent(x_out, x_in)


def share_core(frames: Frames, blocks: Tangent) -> Tangent:
    """Return the tangent vector with x_out as given and x_in's core replaced by x_out's."""
    core = frames.q_out.mT @ blocks.x_out
    return Tangent(blocks.x_out, complement(frames.q_in, blocks.x_in) + frames.q_in @ core.mT)


def squared_cores(groups: Sequence[PrismGroup], gradients: PerRecordGradients) -> Tensor:
    """Return (records,) sums of ||Q_in^T X_in||^2 over modules, from the blocks as they are released. SENSITIVE."""
    owners = gradients.client_of_record
    total = gradients.blocks.flat.new_zeros(owners.shape[0])
    for group in groups:
        x_in, q_in = take_tangent(gradients.blocks, group).x_in, group.frames.q_in
        if q_in.shape[0] == 1:
            cores = torch.einsum("lia,nlib->nlab", q_in[0], x_in)
            total += cores.square().sum((1, 2, 3))
            continue
        for first in range(0, owners.shape[0], _RECORDS_AT_ONCE):
            some = slice(first, first + _RECORDS_AT_ONCE)
            cores = torch.einsum("nlia,nlib->nlab", q_in.index_select(0, owners[some]), x_in[some])
            total[some] += cores.square().sum((1, 2, 3))
    return total


def tangent_arrays(groups: Mapping[tuple[str, ...], Tangent], client: int) -> dict[str, Array]:
    """Return one client's tangent blocks as payload arrays."""
    arrays: dict[str, Array] = {}
    for modules, tangent in groups.items():
        for key, values in ((TANGENT_OUT, tangent.x_out), (TANGENT_IN, tangent.x_in)):
            rows = values[client].to(torch.float32).cpu().numpy()
            arrays |= {block_name(m, key): rows[i] for i, m in enumerate(modules)}
    return arrays
