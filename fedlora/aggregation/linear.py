"""The linear modes: `mean_b` at a common lora_A, and `tangent` at a common base point. Both are exact.

`mean_b`: mean(s B_k A) = s mean(B_k) A, so the mean of lora_B is the mean of the products.
`tangent`: at the same transmitted frames the tangent vectors form a linear space; the mean of the
blocks is the tangent vector of the mean, and one retraction (truncated SVD) gives the new frames.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from fedlora.aggregation.running_sum import RunningSum
from fedlora.aggregation.server_optimizer import ServerOptimizer
from fedlora.aggregation.types import Float64, Outcome, State
from fedlora.errors import InconsistentRepliesError
from fedlora.geometry import Frames, Tangent, expand
from fedlora.names import CORE, FRAME_IN, FRAME_OUT, TANGENT_IN, TANGENT_OUT, block_name
from fedlora.wire.payload import AdapterPayload, ModuleSpec, PayloadKind

Means = Mapping[str, Float64]


class LinearMode:
    """What both linear modes share: a running sum whose means become one step."""

    kind: str
    uplink: PayloadKind
    downlink: PayloadKind
    linear: bool = True
    mixed: bool = False
    exact: bool = True

    def __init__(self, optimizer: ServerOptimizer) -> None:
        """Keep the server optimiser; the sum starts with `begin`."""
        self._optimizer = optimizer
        self._current: AdapterPayload | None = None
        self._sum = RunningSum()

    @property
    def current(self) -> AdapterPayload:
        """The global adapter of this round.

        Raises:
            InconsistentRepliesError: if no round has begun.
        """
        if self._current is None:
            raise InconsistentRepliesError("no round has begun: call begin(global payload, ...) first")
        return self._current

    def begin(self, current: AdapterPayload) -> None:
        """Start a round at `current`."""
        self._current, self._sum = current, RunningSum()

    def add(self, payload: AdapterPayload, weight: float) -> None:
        """Add one client's checked blocks."""
        self._sum.add(payload.blocks, weight)

    def add_reduced(self, payload: AdapterPayload, count: float) -> None:
        """Add a node's sum over `count` clients."""
        self._sum.add(payload.blocks, 1.0, count=count)

    def add_sums(self, sums: Mapping[str, Float64], weight: float) -> None:
        """Add sums of checked blocks of clients with this weight in all."""
        self._sum.add_sums(sums, weight)

    def finish(self) -> Outcome:
        """Average and step."""
        means = self._sum.mean()
        self._sum = RunningSum()
        return self.apply(self.updates(means))

    def updates(self, means: Means) -> dict[str, Float64]:
        """Turn means of what clients sent into mean updates (new - old)."""
        raise NotImplementedError

    def apply(self, updates: Means) -> Outcome:
        """Step from the current global adapter by mean updates (averaged, robust or noised)."""
        raise NotImplementedError

    def downlink_for(self, current: AdapterPayload, modules: Mapping[str, ModuleSpec]) -> AdapterPayload:
        """Return `current`: in the linear modes every client has the same specs."""
        if dict(modules) != dict(current.modules):
            raise InconsistentRepliesError(
                f"federation.aggregation.kind {self.kind} needs the same rank, scaling and modules at every "
                "client; use product or stack for mixed ones"
            )
        return current

    def state(self) -> State:
        """Return the moments."""
        return self._optimizer.state()

    def restore(self, state: State) -> None:
        """Take back the moments."""
        self._optimizer.restore(state)


class MeanB(LinearMode):
    """Exact mean at a common, frozen lora_A: lora_B (values) is averaged."""

    kind = "mean_b"
    uplink: PayloadKind = "lora_b"
    downlink: PayloadKind = "lora_b"

    def updates(self, means: Means) -> dict[str, Float64]:
        """Subtract the current values."""
        return {name: mean - self.current.blocks[name] for name, mean in means.items()}

    def apply(self, updates: Means) -> Outcome:
        """Add the optimiser's step to the current values."""
        current, blocks = self.current, {}
        for name, block in current.blocks.items():
            if name in updates:
                step = self._optimizer.step_block(name, np.asarray(updates[name]))
                blocks[name] = (block + step).astype(np.float32)
            else:
                blocks[name] = block
        return Outcome(replace(current, blocks=blocks, notes={}), residual=0.0)


class TangentMean(LinearMode):
    """Exact mean at a common base point: tangent blocks are averaged, one retraction follows."""

    kind = "tangent"
    uplink: PayloadKind = "tangent"
    downlink: PayloadKind = "frames"

    def updates(self, means: Means) -> dict[str, Float64]:
        """Clients sent updates already."""
        return dict(means)

    def apply(self, updates: Means) -> Outcome:
        """Make the blocks one tangent vector, step, retract; extras step in their own coordinates."""
        current = self.current
        blocks = dict(current.blocks)
        lost = whole = 0.0
        for module in current.modules:
            frames = frames_of(current, module)
            update = consistent_tangent(frames, tangent_of(updates, module))
            q_out, q_in, core = expand(frames, update)
            lost += float(torch.linalg.svdvals(core)[frames.rank :].square().sum())
            whole += float(core.square().sum())
            if self._optimizer.plain:
                new = _truncate(q_out, q_in, core, frames.rank)
            else:
                step = self._optimizer.step_tangent(module, frames, update)
                new = _truncate(*expand(frames, step), frames.rank)
            for block, value in ((FRAME_OUT, new.q_out), (CORE, new.core), (FRAME_IN, new.q_in)):
                blocks[block_name(module, block)] = np.ascontiguousarray(value.numpy(), dtype=np.float32)
        for name in _extras(current):
            step_block = self._optimizer.step_block(name, np.asarray(updates[name]))
            blocks[name] = (current.blocks[name] + step_block).astype(np.float32)
        residual = math.sqrt(lost / whole) if whole > 0 else 0.0
        return Outcome(replace(current, blocks=blocks, notes={}), residual=residual)


def frames_of(payload: AdapterPayload, module: str) -> Frames:
    """Return one module's frames in float64, orthonormal to float64's precision (float32 travelled).

    The small triangular corrections of the two QRs go into the core, so Z is the transmitted one.
    """
    q_out, core, q_in = (
        torch.from_numpy(payload.blocks[block_name(module, block)].astype(np.float64))
        for block in (FRAME_OUT, CORE, FRAME_IN)
    )
    return _polished(Frames(q_out, core, q_in))


def _polished(frames: Frames) -> Frames:
    q_out, up_out = _orthonormal(frames.q_out)
    q_in, up_in = _orthonormal(frames.q_in)
    return Frames(q_out, up_out @ frames.core @ up_in.mT, q_in)


def _orthonormal(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    basis, upper = torch.linalg.qr(q)
    signs = torch.where(torch.diagonal(upper) < 0, -1.0, 1.0).to(q)
    return basis * signs, signs[:, None] * upper


def tangent_of(blocks: Mapping[str, Float64], module: str) -> Tangent:
    """Return one module's tangent blocks in float64."""
    out, inn = (
        torch.from_numpy(np.asarray(blocks[block_name(module, block)], dtype=np.float64))
        for block in (TANGENT_OUT, TANGENT_IN)
    )
    return Tangent(out, inn)


def consistent_tangent(frames: Frames, tangent: Tangent) -> Tangent:
    """Return the nearest pair of blocks that share one core (an orthogonal projection, so linear).

    Honest blocks change by rounding only; a sender cannot smuggle two different cores.
    """
    core_out = frames.q_out.mT @ tangent.x_out
    core_in = tangent.x_in.mT @ frames.q_in
    core = 0.5 * (core_out + core_in)
    return Tangent(
        tangent.x_out + frames.q_out @ (core - core_out),
        tangent.x_in + frames.q_in @ (core - core_in).mT,
    )


def _truncate(q_out: torch.Tensor, q_in: torch.Tensor, core: torch.Tensor, rank: int) -> Frames:
    u, s, vh = torch.linalg.svd(core)
    return Frames(q_out @ u[:, :rank], torch.diag(s[:rank]), q_in @ vh[:rank].mT)


def _extras(payload: AdapterPayload) -> list[str]:
    frames = {block_name(m, b) for m in payload.modules for b in (FRAME_OUT, CORE, FRAME_IN)}
    return [name for name in payload.blocks if name not in frames]
