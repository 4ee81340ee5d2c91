"""Canaries for PRISM: an orthonormal basis of the tangent space, so that every canary is a consistent tangent.

At Z = Q_out S Q_in^T the tangent vectors u q_b^T (u outside Q_out), q_a v^T (v outside Q_in) and q_a q_b^T (the core)
are orthonormal. A core canary appears in both blocks, X_out and X_in, as a record's core does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedlora.adapters.blocks import FlatBlocks
from fedlora.audit.canaries import (
    Chosen,
    GradientRows,
    block_labels,
    kept_at,
    overshoot,
    positions_of,
    weights_at,
)
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.stages import NoisyUpdate, PerRecordGradients
from fedlora.names import GROUP_ADAPTERS, TANGENT_IN, TANGENT_OUT, block_name

Tensor = torch.Tensor


@dataclass(frozen=True)
class ModuleDirections:
    """Orthonormal tangent directions of one module: its frames and their complements, float64 on the host.

    Directions are numbered out side first, then in side, then core.

    Attributes:
        module: its path.
        q_out: (out, r) orthonormal.
        q_in: (in, r) orthonormal.
        u: (out, out - r) what q_out leaves out.
        v: (in, in - r) what q_in leaves out.
    """

    module: str
    q_out: Tensor
    q_in: Tensor
    u: Tensor
    v: Tensor

    @classmethod
    def of(cls, module: str, q_out: Tensor, q_in: Tensor) -> ModuleDirections:
        """Complete two frames to bases."""
        return cls(module, q_out, q_in, _complement(q_out), _complement(q_in))

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of out-side, in-side and core directions."""
        rank = self.q_out.shape[1]
        return self.u.shape[1] * rank, self.v.shape[1] * rank, rank * rank

    def unit(self, number: int) -> tuple[Tensor, Tensor]:
        """Return one direction's blocks (X_out, X_in): a vector of norm 1, a core in both blocks."""
        outer, inner, _ = self.sizes
        x_out, x_in = torch.zeros_like(self.q_out), torch.zeros_like(self.q_in)
        rank = self.q_out.shape[1]
        if number < outer:
            x_out[:, number % rank] = self.u[:, number // rank]
        elif number < outer + inner:
            x_in[:, (number - outer) % rank] = self.v[:, (number - outer) // rank]
        else:
            a, b = divmod(number - outer - inner, rank)
            x_out[:, b], x_in[:, a] = self.q_out[:, a], self.q_in[:, b]
        return x_out, x_in

    def read(self, x_out: Tensor, x_in: Tensor) -> Tensor:
        """Return a tangent vector's coordinates (..., directions) in the order of the numbers."""
        parts = (self.u.mT @ x_out, self.v.mT @ x_in, self.q_out.mT @ x_out)
        return torch.cat([part.flatten(-2) for part in parts], -1)


def _frames(mechanism: Mechanism, state: LocalState) -> list[ModuleDirections]:
    found = {}
    for group in state.own.groups:
        for index, module in enumerate(group.modules):
            q_out = group.base.q_out[0, index].double().cpu()
            q_in = group.base.q_in[0, index].double().cpu()
            found[module] = ModuleDirections.of(module, q_out, q_in)
    return [found[module] for module in mechanism.layout.modules]


def _complement(q: Tensor) -> Tensor:
    """Return an orthonormal basis of what `q` leaves out."""
    full: Tensor = torch.linalg.qr(q, mode="complete").Q
    return full[:, q.shape[1] :]


class TangentBasis:
    """Tangent canaries of every module, and spikes in the extra parameters."""

    def __init__(
        self, mechanism: Mechanism, state: LocalState, limit: int, generator: np.random.Generator
    ) -> None:
        """Choose directions; the frames are those that came down, the same for all clients."""
        self._mechanism, self._frames = mechanism, _frames(mechanism, state)
        tangents = sum(sum(frame.sizes) for frame in self._frames)
        extras = positions_of(mechanism, mechanism.coordinates.extras)
        self._order = generator.permutation(tangents + len(extras))[:limit]
        self.size, self._tangents, self._extras = len(self._order), tangents, extras
        modules = [np.full(sum(frame.sizes), frame.module) for frame in self._frames]
        self.labels = np.concatenate([*modules, block_labels(mechanism, extras)])[self._order]

    def gradients(self, state: LocalState, chosen: Chosen) -> PerRecordGradients:
        """Return tangents of length OVERSHOOT C in the metric."""
        mechanism, like = self._mechanism, state.values.flat
        rows = GradientRows(mechanism, chosen, like.shape[0], like)
        length = overshoot(mechanism) * mechanism.privacy.max_grad_norm
        directions = self._order[chosen.place]
        amplitude = length / mechanism.metric.weight(GROUP_ADAPTERS) * chosen.sign.astype(np.float64)
        first = 0
        for frame in self._frames:
            self._fill(rows, frame, directions - first, amplitude, like)
            first += sum(frame.sizes)
        for name in mechanism.coordinates.adapters:
            rows.squared[GROUP_ADAPTERS] += rows.blocks[name].square().sum((1, 2))
        at = np.flatnonzero(directions >= self._tangents)
        if len(at) > 0:
            positions = self._extras[directions[at] - self._tangents]
            values = chosen.sign[at] * length / weights_at(mechanism, positions)
            rows.put(at, positions, torch.from_numpy(values).to(like))
        return rows.done()

    def _fill(
        self,
        rows: GradientRows,
        frame: ModuleDirections,
        number: np.ndarray,
        amplitude: np.ndarray,
        like: Tensor,
    ) -> None:
        """Write the canaries whose direction lies in one module."""
        rank = frame.q_out.shape[1]
        outer, inner, core = frame.sizes
        x_out = rows.blocks[block_name(frame.module, TANGENT_OUT)]
        x_in = rows.blocks[block_name(frame.module, TANGENT_IN)]

        def select(low: int, high: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            here = np.flatnonzero((number >= low) & (number < high))
            a, b = np.divmod(number[here] - low, rank)
            return tuple(torch.from_numpy(t) for t in (here, a, b, amplitude[here]))  # type: ignore[return-value]

        at, a, b, value = select(0, outer)
        x_out[at, :, b] = (frame.u[:, a] * value).T.to(like)
        at, a, b, value = select(outer, outer + inner)
        x_in[at, :, b] = (frame.v[:, a] * value).T.to(like)
        at, a, b, value = select(outer + inner, outer + inner + core)
        x_out[at, :, b] = (frame.q_out[:, a] * value).T.to(like)
        x_in[at, :, a] = (frame.q_in[:, b] * value).T.to(like)

    def filtered(self, state: LocalState, update: NoisyUpdate) -> tuple[Tensor, Tensor]:
        """Project the release on every direction, in units of the claimed noise."""
        mechanism = self._mechanism
        unit = mechanism.privacy.sigma() * mechanism.privacy.max_grad_norm
        parts = [self._read(frame, update.blocks) for frame in self._frames]
        tangents = torch.cat(parts, 1) * (mechanism.metric.weight(GROUP_ADAPTERS) / unit)
        extras = update.blocks.flat[:, torch.from_numpy(self._extras)].double().cpu()
        kept = torch.from_numpy(np.sqrt(kept_at(mechanism, self._extras)))
        extras = extras * torch.from_numpy(weights_at(mechanism, self._extras) / unit) / kept
        order = torch.from_numpy(self._order)
        statistic = torch.cat([tangents, extras], 1)[:, order]
        strength = torch.cat([torch.ones(self._tangents, dtype=torch.float64), kept])[order]
        return statistic, (strength / mechanism.privacy.sigma()).expand_as(statistic)

    @staticmethod
    def _read(frame: ModuleDirections, blocks: FlatBlocks) -> Tensor:
        x_out = blocks[block_name(frame.module, TANGENT_OUT)].double().cpu()
        return frame.read(x_out, blocks[block_name(frame.module, TANGENT_IN)].double().cpu())


__all__ = ["ModuleDirections", "TangentBasis"]
