"""Factors in and out of payloads, with every scaling on the left side of the product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from fedlora.geometry import Frames, complete_columns, frames_to_factors, product_svd
from fedlora.names import LORA_A, LORA_B, block_name, split_block_name
from fedlora.wire.payload import AdapterPayload, ModuleSpec

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pair:
    """A change Z = left @ right, scaling included; float64, (out, r) and (r, in)."""

    left: torch.Tensor
    right: torch.Tensor


def pair_of(payload: AdapterPayload, module: str) -> Pair:
    """Return one module's change with its own scaling folded into `left`."""
    left = torch.from_numpy(payload.blocks[block_name(module, LORA_B)].astype(np.float64))
    right = torch.from_numpy(payload.blocks[block_name(module, LORA_A)].astype(np.float64))
    return Pair(left * payload.modules[module].scaling, right)


def write_pair(module: str, pair: Pair, scaling: float) -> dict[str, Array]:
    """Return the blocks of one module with `scaling` divided out of lora_B."""
    return {
        block_name(module, LORA_A): np.ascontiguousarray(pair.right.numpy(), dtype=np.float32),
        block_name(module, LORA_B): np.ascontiguousarray((pair.left / scaling).numpy(), dtype=np.float32),
    }


def rank_frames(pair: Pair, rank: int) -> tuple[Frames, float]:
    """Return the best rank-`rank` frames of a product and the norm of what they drop.

    A product of rank 0 (no update at all) gives fixed orthonormal frames with a zero core.
    """
    u, s, v = product_svd(pair.left, pair.right)
    dropped = float(torch.linalg.vector_norm(s[rank:]))
    kept = min(rank, s.shape[0])
    core = torch.zeros(rank, rank, dtype=s.dtype)
    core[:kept, :kept] = torch.diag(s[:kept])
    if kept < rank:
        return Frames(complete_columns(u[:, :kept], rank), core, complete_columns(v[:, :kept], rank)), dropped
    return Frames(u[:, :rank], core, v[:, :rank]), dropped


def payload_from_frames(
    like: AdapterPayload,
    specs: Mapping[str, ModuleSpec],
    frames: Mapping[str, Frames],
    extras: Mapping[str, Array],
) -> AdapterPayload:
    """Write frames as balanced factors in the given specs (a zero point keeps unit rows in lora_A).

    Balanced factors of Z = 0 would both be zero, where no gradient flows; then lora_A gets the
    orthonormal frame and lora_B zero, as at LoRA's start.
    """
    blocks = dict(extras)
    for module, spec in specs.items():
        point = frames[module]
        singular = torch.diagonal(point.core)
        cut = float(singular.max()) * 1e-12 if singular.numel() else 0.0
        left, right = frames_to_factors(point, balanced=True)
        weak = singular <= cut
        if bool(weak.any()):
            ones = torch.where(weak, torch.ones_like(singular), torch.zeros_like(singular))
            left, right = left * (1 - ones), right * (1 - ones)[:, None] + ones[:, None] * point.q_in.mT
        blocks.update(write_pair(module, Pair(left, right), spec.scaling))
    return replace(like, blocks=blocks, modules=dict(specs), notes={})


def balanced_pair(pair: Pair, rank: int) -> Pair:
    """Return the balanced factors (equal Gram matrices) of the best rank-`rank` part of a product."""
    u, s, v = product_svd(pair.left, pair.right)
    root = s[:rank].sqrt()
    return Pair(u[:, :rank] * root, (v[:, :rank] * root).mT)


def pad_rank(pair: Pair, rank: int) -> Pair:
    """Return the same product with zero columns and rows up to `rank` (cut to its best part above it)."""
    have = pair.left.shape[1]
    if have == rank:
        return pair
    if have > rank:
        return balanced_pair(pair, rank)
    left = torch.nn.functional.pad(pair.left, (0, rank - have))
    return Pair(left, torch.nn.functional.pad(pair.right, (0, 0, 0, rank - have)))


def extras_of(payload: AdapterPayload) -> dict[str, Array]:
    """Return the blocks of parameters that belong to no adapted module."""
    return {
        name: block
        for name, block in payload.blocks.items()
        if split_block_name(name)[0] not in payload.modules
    }


def reduce_rank(payload: AdapterPayload, rank: int) -> tuple[AdapterPayload, float]:
    """Compress a `factors` payload to a lower rank (post-processing).

    Returns: (payload, relative error ||dropped|| / ||Z|| over all modules).
    """
    frames, specs = {}, {}
    lost = total = 0.0
    for module, spec in payload.modules.items():
        pair = pair_of(payload, module)
        new_rank = min(rank, spec.rank)
        frames[module], dropped = rank_frames(pair, new_rank)
        specs[module] = replace(spec, rank=new_rank)
        lost += dropped**2
        total += dropped**2 + float(frames[module].core.square().sum())
    return payload_from_frames(payload, specs, frames, extras_of(payload)), (
        lost / total
    ) ** 0.5 if total > 0 else 0.0
