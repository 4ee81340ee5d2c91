"""Dirac canaries in a mechanism's own coordinates, and the matched filter that looks for them.

The auditor makes these gradients; no private record is involved. Each canary sits on a direction of its own, so
that canaries do not disturb each other. Its gradient is longer than the bound, so that a clip that does nothing shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedlora.adapters.blocks import BlockTable, FlatBlocks
from fedlora.adapters.deferred import OuterGradient
from fedlora.adapters.records import RecordAxis
from fedlora.errors import UnsupportedCombinationError
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.projection_rules import head_figures
from fedlora.mechanisms.stages import NoisyUpdate, PerRecordGradients
from fedlora.names import GROUP_ADAPTERS, LORA_B, block_name

Tensor = torch.Tensor
Places = npt.NDArray[np.int64]

OVERSHOOT: Final = 4.0
"""Length of a canary's gradient over the clip bound, before clipping."""
_LEAST_KEPT: Final = 0.1
"""Coordinates of which less is released carry no canary."""


@dataclass(frozen=True)
class Chosen:
    """Canaries that were drawn in one step, sorted by client.

    Attributes:
        client: (n,) client of each.
        place: (n,) number of the canary within its client.
        sign: (n,) +1 or -1.
    """

    client: Places
    place: Places
    sign: npt.NDArray[np.float32]

    def part(self, first: int, end: int) -> Chosen:
        """Return some of them."""
        return Chosen(self.client[first:end], self.place[first:end], self.sign[first:end])


class CanaryBasis(Protocol):
    """Mutually orthogonal canaries of one mechanism."""

    size: int
    """Canaries that one client can carry."""
    labels: npt.NDArray[np.str_]
    """(size,) block or module of each canary."""

    def gradients(self, state: LocalState, chosen: Chosen) -> PerRecordGradients:
        """Return the canaries' gradients as the engine would hand them to `clip`."""
        ...

    def filtered(self, state: LocalState, update: NoisyUpdate) -> tuple[Tensor, Tensor]:
        """Return (statistic, strength): (K, size) with unit variance under the claimed noise, mean = strength."""
        ...


def canary_basis(mechanism: Mechanism, state: LocalState, *, limit: int, seed: int) -> CanaryBasis:
    """Return at most `limit` canaries per client for a mechanism.

    Args:
        mechanism: with record-level privacy.
        state: opened local state (frames and projections are read from it).
        limit: canaries per client, >= 1.
        seed: PUBLIC. Chooses directions only; coins and noise never come from it.

    Raises:
        UnsupportedCombinationError: if the mechanism has no record-level noise.
    """
    if not mechanism.privacy.record_level:
        raise UnsupportedCombinationError(
            "audit: canaries need record-level privacy; got privacy.unit none or client; audit a run with unit: record"
        )
    generator = np.random.Generator(np.random.Philox(seed))
    if mechanism.coordinates.kind == "projected":
        return _ProjectedBasis(mechanism, limit, generator)
    if mechanism.coordinates.kind == "tangent":
        from fedlora.audit.tangent_canaries import TangentBasis

        return TangentBasis(mechanism, state, limit, generator)
    return CoordinateBasis(mechanism, limit, generator)


def overshoot(mechanism: Mechanism) -> float:
    """Return how much longer than C canaries are; 1 where the mechanism states a bound instead of clipping."""
    return OVERSHOOT if bool(getattr(mechanism.config.mechanism, "clipping", True)) else 1.0


class GradientRows:
    """Zero gradients of some records, to be filled with canaries."""

    def __init__(self, mechanism: Mechanism, chosen: Chosen, num_clients: int, like: Tensor) -> None:
        """Allocate zeros for the chosen canaries' records."""
        coordinates = mechanism.coordinates
        self.mechanism, self.count = mechanism, len(chosen.client)
        counts = np.bincount(chosen.client, minlength=num_clients).tolist()
        self.records = RecordAxis.of(counts, like.device)
        self.blocks = FlatBlocks(coordinates.stored, like.new_zeros(self.count, coordinates.stored.size))
        groups = dict.fromkeys(mechanism.metric.group_of.values())
        self.squared = {group: like.new_zeros(self.count) for group in groups}
        self.deferred = {
            name: OuterGradient(
                like.new_zeros(self.count, 1, shape[0]), like.new_zeros(self.count, 1, shape[1])
            )
            for name, shape in coordinates.table.shapes.items()
            if name not in coordinates.stored.shapes
        }

    def put(self, rows: Places, positions: Places, values: Tensor) -> None:
        """Set one coordinate of each row (flat positions of the whole table), and count its norm."""
        table = self.mechanism.coordinates.table
        for name in table.shapes:
            first, end = table.span(name)
            here = np.flatnonzero((positions >= first) & (positions < end))
            if len(here) == 0:
                continue
            at, offset = torch.from_numpy(rows[here]), positions[here] - first
            own = values[torch.from_numpy(here)]
            if name in self.deferred:
                width = table.shapes[name][1]
                self.deferred[name].g[at, 0, torch.from_numpy(offset // width)] = own
                self.deferred[name].x[at, 0, torch.from_numpy(offset % width)] = 1.0
            else:
                self.blocks.flat[at, torch.from_numpy(offset + self.blocks.table.span(name)[0])] = own
            self.squared[self.mechanism.metric.group_of[name]][at] += own.square()

    def done(self) -> PerRecordGradients:
        """Return what `clip` takes."""
        return PerRecordGradients(self.blocks, self.squared, self.records, dict(self.deferred))


def positions_of(mechanism: Mechanism, names: Sequence[str]) -> Places:
    """Return the flat positions of some blocks, but those that are (almost) left out; matrices and vectors only."""
    table: BlockTable = mechanism.coordinates.table
    usable = [n for n in names if n in mechanism.coordinates.stored.shapes or len(table.shapes[n]) == 2]
    parts = [np.arange(*table.span(name), dtype=np.int64) for name in usable]
    found = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    return found[kept_at(mechanism, found) > _LEAST_KEPT]


class CoordinateBasis:
    """Canaries on single coordinates; one in every layer where each layer is clipped alone."""

    def __init__(self, mechanism: Mechanism, limit: int, generator: np.random.Generator) -> None:
        """Choose positions."""
        self._mechanism = mechanism
        metric = mechanism.metric
        groups = tuple(dict.fromkeys(metric.group_of.values()))
        if metric.per_layer:
            columns = [generator.permutation(positions_of(mechanism, metric.blocks_of(g))) for g in groups]
            most = min(limit, *(len(c) for c in columns))
            self._positions = np.stack([c[:most] for c in columns], 1)
        else:
            everything = positions_of(mechanism, tuple(metric.group_of))
            self._positions = generator.permutation(everything)[:limit, None]
        self.size, self._parts = self._positions.shape
        self.labels = (
            np.full(self.size, "every layer")
            if self._parts > 1
            else block_labels(mechanism, self._positions[:, 0])
        )
        self._weights = weights_at(mechanism, self._positions)
        self._kept = np.sqrt(kept_at(mechanism, self._positions))

    def gradients(self, state: LocalState, chosen: Chosen) -> PerRecordGradients:
        """Return one spike per part, of length OVERSHOOT C in the metric."""
        mechanism, like = self._mechanism, state.values.flat
        rows = GradientRows(mechanism, chosen, like.shape[0], like)
        length = overshoot(mechanism) * mechanism.privacy.max_grad_norm
        everyone = np.arange(rows.count)
        for part in range(self._parts):
            values = chosen.sign * length / self._weights[chosen.place, part]
            rows.put(everyone, self._positions[chosen.place, part], torch.from_numpy(values).to(like))
        return rows.done()

    def filtered(self, state: LocalState, update: NoisyUpdate) -> tuple[Tensor, Tensor]:
        """Read the canaries' coordinates in units of the claimed noise."""
        sigma = self._mechanism.privacy.sigma()
        scale = self._weights / (sigma * self._mechanism.privacy.max_grad_norm * self._kept)
        read = update.blocks.flat[:, torch.from_numpy(self._positions)].double().cpu()
        statistic = (read * torch.from_numpy(scale)).sum(2) / math.sqrt(self._parts)
        strength = torch.from_numpy(self._kept.sum(1) / (math.sqrt(self._parts) * sigma))
        return statistic, strength.expand_as(statistic)


def block_labels(mechanism: Mechanism, positions: Places) -> npt.NDArray[np.str_]:
    """Return the block of each flat position."""
    table = mechanism.coordinates.table
    names = list(table.shapes)
    starts = np.array([table.span(name)[0] for name in names])
    order = np.argsort(starts)
    found: npt.NDArray[np.str_] = np.array(names)[order][
        np.searchsorted(starts[order], positions, side="right") - 1
    ]
    return found


def weights_at(mechanism: Mechanism, positions: Places) -> npt.NDArray[np.float64]:
    """Return the metric's weight at flat positions."""
    table, metric = mechanism.coordinates.table, mechanism.metric
    weights = np.ones(positions.shape)
    for name, group in metric.group_of.items():
        first, end = table.span(name)
        weights[(positions >= first) & (positions < end)] = metric.weight(group)
    return weights


def kept_at(mechanism: Mechanism, positions: Places) -> npt.NDArray[np.float64]:
    """Return the share of a coordinate's signal and of its noise's variance that is released, in [0, 1].

    Where a direction u is left out (`Mechanism.left_out`), the sum and its noise are projected: of coordinate i there
    remains 1 - u_i^2.
    """
    table = mechanism.coordinates.table
    kept = np.ones(positions.shape)
    for name, direction in mechanism.left_out.items():
        first, end = table.span(name)
        here = (positions >= first) & (positions < end)
        along = direction.detach().double().cpu().numpy()
        kept[here] = 1.0 - along[(positions[here] - first) % len(along)] ** 2
    return kept


class _ProjectedBasis:
    """Rank-one canaries C e_u v^T seen through the step's projection, with a spike in a head that has its own clip.

    The filter knows A: it whitens the row with (A A^T)^-1.
    """

    def __init__(self, mechanism: Mechanism, limit: int, generator: np.random.Generator) -> None:
        """Choose rows, right vectors and head positions."""
        self._mechanism = mechanism
        rows = [(m, u) for m, spec in mechanism.layout.modules.items() for u in range(spec.out_features)]
        order = generator.permutation(len(rows))[:limit]
        head = generator.permutation(positions_of(mechanism, mechanism.coordinates.extras))
        if mechanism.coordinates.extras:
            order = order[: len(head)]
        self.size = len(order)
        self._head = head[: self.size]
        self._where = {
            module: np.array([i for i, o in enumerate(order) if rows[o][0] == module], dtype=np.int64)
            for module in mechanism.layout.modules
        }
        self._row = np.array([rows[o][1] for o in order], dtype=np.int64)
        self.labels = np.array([rows[o][0] for o in order])
        self._vectors = {}
        for module, spec in mechanism.layout.modules.items():
            vector = generator.standard_normal(spec.in_features)
            self._vectors[module] = torch.from_numpy(vector / np.linalg.norm(vector))

    def _seen(self, state: LocalState, module: str) -> tuple[Tensor, Tensor]:
        """Return A v (K, r) and (A A^T)^-1 A v (K, r), float64."""
        a = state.own.projections[module].double()
        z = a @ self._vectors[module].to(a)
        return z, torch.linalg.solve(a @ a.mT, z)

    def gradients(self, state: LocalState, chosen: Chosen) -> PerRecordGradients:
        """Return projected canaries; norms are those of the full matrices."""
        mechanism, like = self._mechanism, state.values.flat
        rows = GradientRows(mechanism, chosen, like.shape[0], like)
        length = overshoot(mechanism) * mechanism.privacy.max_grad_norm
        for module, members in self._where.items():
            here = np.flatnonzero(np.isin(chosen.place, members))
            if len(here) == 0:
                continue
            z, _ = self._seen(state, module)
            values = z[torch.from_numpy(chosen.client[here])].to(like)
            values = values * torch.from_numpy(chosen.sign[here] * length).to(like)[:, None]
            at = (torch.from_numpy(here), torch.from_numpy(self._row[chosen.place[here]]))
            rows.blocks[block_name(module, LORA_B)][at] = values
        rows.squared[GROUP_ADAPTERS] = torch.full_like(rows.squared[GROUP_ADAPTERS], length**2)
        if len(self._head) > 0:
            spike = OVERSHOOT * head_figures(mechanism.config.mechanism)[0]  # type: ignore[arg-type]
            values = torch.from_numpy(chosen.sign * np.float32(spike)).to(like)
            rows.put(np.arange(rows.count), self._head[chosen.place], values)
        return rows.done()

    def filtered(self, state: LocalState, update: NoisyUpdate) -> tuple[Tensor, Tensor]:
        """Whiten with the known projection and add the head's evidence."""
        mechanism, clients = self._mechanism, update.blocks.flat.shape[0]
        sigma, bound = mechanism.privacy.sigma(), mechanism.privacy.max_grad_norm
        evidence = torch.zeros(clients, self.size, dtype=torch.float64)
        strength = torch.zeros_like(evidence)
        for module, members in self._where.items():
            if len(members) == 0:
                continue
            z, white = self._seen(state, module)
            read = update.blocks[block_name(module, LORA_B)].double()
            read = read[:, torch.from_numpy(self._row[members])]
            at = torch.from_numpy(members)
            evidence[:, at] = (read * white[:, None]).sum(2).cpu() / (bound * sigma**2)
            strength[:, at] = ((z * white).sum(1, keepdim=True) / sigma**2).cpu().expand(-1, len(members))
        if len(self._head) > 0:
            clip, head_sigma = head_figures(mechanism.config.mechanism)  # type: ignore[arg-type]
            read = update.blocks.flat[:, torch.from_numpy(self._head)].double().cpu()
            evidence = evidence + read / (clip * head_sigma**2)
            strength = strength + torch.from_numpy(kept_at(mechanism, self._head)) / head_sigma**2
        mean = strength.sqrt()
        return evidence / mean, mean


__all__ = [
    "CanaryBasis",
    "Chosen",
    "CoordinateBasis",
    "GradientRows",
    "block_labels",
    "canary_basis",
    "kept_at",
    "overshoot",
]
