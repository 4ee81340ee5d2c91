"""Directions from noised sums: SGD, momentum and Adam on flat per-client tensors (post-processing)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedlora.adapters.blocks import FlatBlocks
from fedlora.config.schema import AdamConfig, OptimizerConfig, ScheduleConfig
from fedlora.mechanisms.stages import Direction, NoisyUpdate

Slots = Mapping[str, torch.Tensor]
"""Optimiser state per client: name to (K, size), or (K, 1) for counters. PUBLIC (after noise)."""


def empty_slots(optimizer: OptimizerConfig, values: FlatBlocks) -> dict[str, torch.Tensor]:
    """Return the state of an optimiser that has taken no step."""
    if isinstance(optimizer, AdamConfig):
        zeros = torch.zeros_like(values.flat)
        return {"first": zeros, "second": zeros.clone(), "count": values.flat.new_zeros(len(values.flat), 1)}
    if optimizer.momentum > 0.0:
        return {"first": torch.zeros_like(values.flat)}
    return {}


def direct(
    optimizer: OptimizerConfig, slots: Slots, update: NoisyUpdate, divisor: float
) -> tuple[Direction, dict[str, torch.Tensor]]:
    """Turn noised sums into a direction.

    Args:
        optimizer: PUBLIC.
        slots: state of each client. PUBLIC.
        update: PUBLIC noised sums.
        divisor: the public expected batch size, never the realised one.

    Returns:
        The direction and the new state; inputs are not changed.
    """
    mean = update.blocks.flat / divisor
    if isinstance(optimizer, AdamConfig):
        count = slots["count"] + 1.0
        first = torch.lerp(mean, slots["first"], optimizer.beta1)
        second = torch.lerp(mean.square(), slots["second"], optimizer.beta2)
        unbiased1 = first / (1.0 - optimizer.beta1**count)
        unbiased2 = second / (1.0 - optimizer.beta2**count)
        step = unbiased1 / (unbiased2.sqrt() + optimizer.eps)
        return Direction(update.blocks.like(step)), {"first": first, "second": second, "count": count}
    if optimizer.momentum > 0.0:
        first = slots["first"] * optimizer.momentum + mean
        return Direction(update.blocks.like(first)), {"first": first}
    return Direction(update.blocks.like(mean)), {}


@dataclass(frozen=True)
class Schedule:
    """PUBLIC. Learning rate as a function of the global step.

    Attributes:
        lr: peak rate.
        config: shape and warm-up.
        total_steps: local steps of the whole run.
    """

    lr: float
    config: ScheduleConfig
    total_steps: int

    def at(self, step: int) -> float:
        """Return the rate of step 0, 1, ...

        Example:
            >>> Schedule(1.0, ScheduleConfig(kind="linear"), 4).at(2)
            0.5
        """
        warm = self.config.warmup_steps
        if step < warm:
            return self.lr * (step + 1) / warm
        if self.config.kind == "constant":
            return self.lr
        progress = min(1.0, (step - warm) / max(1, self.total_steps - warm))
        if self.config.kind == "linear":
            return self.lr * (1.0 - progress)
        return self.lr * 0.5 * (1.0 + math.cos(math.pi * progress))


def euclidean_step(
    values: FlatBlocks,
    direction: Direction,
    lr: float,
    weight_decay: float,
    start: torch.Tensor,
    proximal_mu: float,
) -> FlatBlocks:
    """Return values - lr (direction + decay * values + mu (values - start)); start is where the round began.

    The proximal term is the gradient of (mu / 2) ||values - start||^2 (Li et al., Federated Optimization in
    Heterogeneous Networks, arXiv:1812.06127v5, Eq. 2): the squared norm.
    """
    new = torch.add(values.flat, direction.blocks.flat, alpha=-lr)
    if weight_decay > 0.0:
        new.add_(values.flat, alpha=-lr * weight_decay)
    if proximal_mu > 0.0:
        new.add_(values.flat - start, alpha=-lr * proximal_mu)
    return values.like(new)
