"""One step of every group of PRISM after the noise: direction, retraction, transport (post-processing).

Numbers that change from step to step may be tensors on the device, so that `prism_graph` can record the step once
and replay it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fedlora.config.schema import AdamConfig, OptimizerConfig, PrismMechanism
from fedlora.geometry import (
    Frames,
    Spectrum,
    Tangent,
    project_product,
    retract_many,
    transport_tangent,
)
from fedlora.mechanisms.base import Mechanism
from fedlora.mechanisms.prism_direction import (
    precondition,
    spectra_of,
    transport_moments,
    update_moments,
)
from fedlora.mechanisms.prism_state import PrismGroup, share_core

Number = float | torch.Tensor


@dataclass(frozen=True)
class StepRule:
    """PUBLIC. What of a mechanism the step depends on.

    Attributes:
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        momentum: of the heavy ball; 0 without one.
        decay: weight decay.
        proximal_mu: weight of the proximal term.
        divisor: the public expected batch size.
        shared_core: whether the noised blocks hold their core once already (private runs).
    """

    beta1: float
    beta2: float
    momentum: float
    decay: float
    proximal_mu: float
    divisor: float
    shared_core: bool

    @classmethod
    def of(cls, mechanism: Mechanism, settings: PrismMechanism) -> StepRule:
        """Read the rule from a mechanism and its PRISM settings."""
        return cls(
            settings.beta1,
            settings.beta2,
            _momentum(mechanism.optimizer),
            mechanism.optimizer.weight_decay,
            mechanism.config.training.proximal_mu,
            mechanism.privacy.divisor,
            mechanism.privacy.record_level,
        )


class Advanced(NamedTuple):
    """A group at its next point, and the direction that led there."""

    group: PrismGroup
    direction: Tangent


def _momentum(optimizer: OptimizerConfig) -> float:
    return 0.0 if isinstance(optimizer, AdamConfig) else optimizer.momentum


def mean_tangents(rule: StepRule, groups: Sequence[PrismGroup], sums: Sequence[Tangent]) -> list[Tangent]:
    """Return noised sums divided by the public batch size, as consistent tangent vectors."""
    means = [x.scaled(1.0 / rule.divisor) for x in sums]
    if rule.shared_core:
        return means
    return [share_core(group.frames, x) for group, x in zip(groups, means, strict=True)]


def advance(
    rule: StepRule, groups: Sequence[PrismGroup], sums: Sequence[Tangent], variance: Number, lr: Number
) -> list[Advanced]:
    """Take one step in every group; small problems of all groups are solved together.

    Args:
        rule: the mechanism's public settings.
        groups: present points; `moments.steps` may be a tensor of no axes.
        sums: noised sums of the groups' tangent blocks, (K, L, ...); PUBLIC.
        variance: of an entry's noise after the division.
        lr: learning rate.
    """
    noised = mean_tangents(rule, groups, sums)
    known: Sequence[tuple[Spectrum, Spectrum] | None] = [None] * len(groups)
    if all(group.moments is not None for group in groups):
        groups = [_averaged(rule, group, x) for group, x in zip(groups, noised, strict=True)]
        known = spectra_of([group.moments for group in groups if group.moments is not None])
    elif rule.momentum > 0.0:
        groups = [
            replace(group, momentum=_heavy_ball(rule, group, x))
            for group, x in zip(groups, noised, strict=True)
        ]
    directions = [
        _direction(rule, group, x, variance, found)
        for group, x, found in zip(groups, noised, known, strict=True)
    ]
    frames = retract_many([group.frames for group in groups], directions, -lr)
    return [
        Advanced(_moved_to(rule, group, new, variance, found), direction)
        for group, new, direction, found in zip(groups, frames, directions, known, strict=True)
    ]


def _direction(
    rule: StepRule,
    group: PrismGroup,
    noised: Tangent,
    variance: Number,
    known: tuple[Spectrum, Spectrum] | None,
) -> Tangent:
    direction = noised if group.momentum is None else group.momentum
    if group.moments is not None:
        direction = precondition(
            group.moments,
            group.frames,
            beta1=rule.beta1,
            beta2=rule.beta2,
            noise_variance=variance,
            known=known,
        )
    pull = _pull(rule, group, noised)
    return direction if pull is None else direction.plus(pull)


def _pull(rule: StepRule, group: PrismGroup, like: Tangent) -> Tangent | None:
    """Weight decay and proximal term as tangent vectors at the present point (data-free), or None."""
    decay, mu = rule.decay, rule.proximal_mu
    if decay == 0.0 and mu == 0.0:
        return None
    f, b = group.frames, group.base
    pull = Tangent(f.q_out @ f.core, f.q_in @ f.core.mT).scaled(decay + mu)
    if mu > 0.0:
        lead = f.core.shape[0]
        left = (b.q_out @ b.core).expand(lead, -1, -1, -1)
        pull = pull.plus(project_product(f, left, b.q_in.mT.expand(lead, -1, -1, -1)).scaled(-mu))
    return pull


def _averaged(rule: StepRule, group: PrismGroup, noised: Tangent) -> PrismGroup:
    if group.moments is None:
        return group
    new = update_moments(group.moments, group.frames, noised, beta1=rule.beta1, beta2=rule.beta2)
    return replace(group, moments=new)


def _heavy_ball(rule: StepRule, group: PrismGroup, noised: Tangent) -> Tangent:
    return noised if group.momentum is None else group.momentum.scaled(rule.momentum).plus(noised)


def _moved_to(
    rule: StepRule,
    group: PrismGroup,
    new: Frames,
    variance: Number,
    known: tuple[Spectrum, Spectrum] | None,
) -> PrismGroup:
    """Return the group at its new frames, with moments and momentum carried along."""
    moments, momentum = group.moments, group.momentum
    if moments is not None:
        moments = transport_moments(
            moments, group.frames, new, beta2=rule.beta2, noise_variance=variance, known=known
        )
    if momentum is not None:
        momentum = transport_tangent(group.frames, new, momentum)
    return replace(group, frames=new, moments=moments, momentum=momentum)
