"""Server optimisers: mean, momentum and Adam on the mean update, in intrinsic coordinates.

Plain blocks (lora_B at a common lora_A, heads) have fixed coordinates and use the elementwise rules of
"Adaptive Federated Optimization" (Reddi et al., Algorithm 2: no bias correction, v starts at eps^2).
Tangent updates use rank-space moments in the frames; the next round moves them to its own frames, so that the step
does not depend on how a point is written as factors. Everything here is post-processing of the mean.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fedlora.aggregation.types import Float64, State
from fedlora.config.schema import ServerOptimizerConfig
from fedlora.errors import ConfigError
from fedlora.geometry import (
    Frames,
    Tangent,
    inverse_sqrt,
    split_core,
    tangent_from_lift,
    transport_first_moment,
)
from fedlora.names import block_name
from fedlora.wire.payload import Array


class ServerOptimizer:
    """Turns mean updates into steps and carries the moments between rounds."""

    def __init__(self, config: ServerOptimizerConfig) -> None:
        """Start with zero moments.

        Raises:
            ConfigError: if `head_rates` is not resolved yet.
        """
        if config.head_rates == "auto":
            raise ConfigError(
                "federation.server_optimizer.head_rates: auto is not resolved yet; that takes the model"
            )
        self._config = config
        self._rates = {block_name(module, "weight"): rate for module, rate in config.head_rates.items()}
        self._frames: dict[str, Array] = {}
        self._first: dict[str, Float64] = {}
        self._second: dict[str, Float64] = {}

    @property
    def plain(self) -> bool:
        """True if the adapters' step is exactly the mean update (heads may have rates of their own)."""
        return self._config.kind == "mean" and self._config.lr == 1.0

    def step_block(self, name: str, update: Float64) -> Float64:
        """Return the step of a block with fixed coordinates (head, or lora_B at a common lora_A).

        Args:
            name: payload name, the key of the moments.
            update: mean update, float64; PUBLIC by now.
        """
        cfg = self._config
        lr = cfg.lr * self._rates.get(name, 1.0)
        if cfg.kind == "mean":
            return lr * update
        first = self._first.get(name)
        if cfg.kind == "momentum":
            first = update if first is None else cfg.beta1 * first + update
            self._first[name] = first
            return lr * first
        first = (1 - cfg.beta1) * update if first is None else cfg.beta1 * first + (1 - cfg.beta1) * update
        second = self._second.get(name, np.full_like(update, cfg.eps**2))
        second = cfg.beta2 * second + (1 - cfg.beta2) * np.square(update)
        self._first[name], self._second[name] = first, second
        step: Float64 = lr * first / (np.sqrt(second) + cfg.eps)
        return step

    def step_tangent(self, module: str, frames: Frames, update: Tangent) -> Tangent:
        """Return the step of one module's tangent update at `frames`, covariant under rotations of them.

        Momentum is kept as a lift with the core split evenly; Adam's second moments are the r x r
        matrices X^T X / rows, and the step is M (V + eps^2 I)^(-1/2).
        """
        cfg = self._config
        if cfg.kind == "mean":
            return update.scaled(cfg.lr)
        self._move(module, frames)
        lifts = dict(zip(("out", "in"), split_core(frames, update), strict=True))
        gain = 1.0 if cfg.kind == "momentum" else 1 - cfg.beta1
        for side, lift in lifts.items():
            key = f"{module}|{side}"
            new = gain * lift.numpy()
            self._first[key] = new if key not in self._first else cfg.beta1 * self._first[key] + new
        if cfg.kind == "adam":
            for side, block in (("out", update.x_out), ("in", update.x_in)):
                self._update_gram(f"{module}|{side}", block)
        steps = [self._lift(f"{module}|{side}") for side in ("out", "in")]
        return tangent_from_lift(frames, steps[0], steps[1]).scaled(cfg.lr)

    def _update_gram(self, key: str, block: torch.Tensor) -> None:
        rank = block.shape[-1]
        old = self._second.get(key, self._config.eps**2 * np.eye(rank))
        gram = (block.mT @ block / block.shape[-2]).numpy()
        self._second[key] = self._config.beta2 * old + (1 - self._config.beta2) * gram

    def _lift(self, key: str) -> torch.Tensor:
        first = torch.from_numpy(self._first[key])
        if self._config.kind != "adam":
            return first
        return first @ inverse_sqrt(torch.from_numpy(self._second[key]), self._config.eps**2)

    def _move(self, module: str, new: Frames) -> None:
        """Carry one module's moments from the frames they are written in to `new`, and note these.

        M_out and V_out live in the columns of q_in and move with Q_in,old^T Q_in,new; the others likewise. The old
        frames are kept, never found again from factors: an SVD gives them back up to signs and rotations only.
        """
        for side, q, columns in (("out", new.q_in, "in"), ("in", new.q_out, "out")):
            key, place = f"{module}|{side}", f"{module}|{columns}"
            if place in self._frames:
                overlap = torch.from_numpy(self._frames[place].astype(np.float64)).mT @ q
                self._carry(key, overlap)
            self._frames[place] = q.numpy().astype(np.float32)

    def _carry(self, key: str, overlap: torch.Tensor) -> None:
        if key in self._first:
            self._first[key] = transport_first_moment(torch.from_numpy(self._first[key]), overlap).numpy()
        if key in self._second:
            floor = self._config.eps**2
            eye = np.eye(overlap.shape[-1])
            turn = overlap.numpy()
            self._second[key] = turn.T @ (self._second[key] - floor * eye) @ turn + floor * eye

    def state(self) -> State:
        """Return the moments and the frames they are written in, name to array."""
        first = {f"first/{key}": value.copy() for key, value in self._first.items()}
        second = {f"second/{key}": value.copy() for key, value in self._second.items()}
        return {**first, **second, **{f"frames/{key}": value.copy() for key, value in self._frames.items()}}

    def restore(self, state: Mapping[str, object]) -> None:
        """Take back what `state` returned."""
        self._first = _take(state, "first/")
        self._second = _take(state, "second/")
        self._frames = {key: value.astype(np.float32) for key, value in _take(state, "frames/").items()}


def _take(state: Mapping[str, object], prefix: str) -> dict[str, Float64]:
    return {
        key[len(prefix) :]: np.array(value, dtype=np.float64)
        for key, value in state.items()
        if key.startswith(prefix)
    }
