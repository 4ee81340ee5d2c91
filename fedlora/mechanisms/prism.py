"""PRISM in frames: clip and noise in the tangent space of the rank-r matrices, one global clip over modules.

PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA, arXiv:2606.00944v1, Alg. 1, with the state
Z = Q_out S Q_in^T carried in orthonormal frames (see `prism_direction` for what that corrects, and
`docs/mechanisms.md`). What is released per module is (X_out, (I - P_in) X_in): a tangent vector in coordinates
that hold its core once; the second copy of the core is rebuilt from the first. A Gaussian mechanism on a subspace
fixed by the history, at S = 0 too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import BlockTable, FlatBlocks
from fedlora.adapters.layout import check_payload_fits
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.views import LayerView
from fedlora.config.schema import AdamConfig, FedLoraConfig, PrismMechanism
from fedlora.errors import UnsupportedCombinationError
from fedlora.geometry import (
    Frames,
    Spectrum,
    Tangent,
    complement,
    project_change,
    project_product,
    retract_many,
    transport_tangent,
)
from fedlora.mechanisms.base import (
    LocalState,
    Mechanism,
    Stages,
    StepPrivacy,
    usual_event,
    usual_prepare,
)
from fedlora.mechanisms.build import build_metric, build_schedule
from fedlora.mechanisms.clip import clip_and_sum
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.direction import direct, empty_slots, euclidean_step
from fedlora.mechanisms.noise import NoiseSource, add_noise
from fedlora.mechanisms.prism_direction import (
    PrismMoments,
    precondition,
    spectra_of,
    transport_moments,
    update_moments,
)
from fedlora.mechanisms.prism_paper import PaperState, paper_lift, paper_step
from fedlora.mechanisms.prism_state import (
    PrismGroup,
    PrismState,
    initial_frames,
    open_groups,
    take_tangent,
    tangent_arrays,
)
from fedlora.mechanisms.stages import ClippedSum, NoisyUpdate, PerRecordGradients
from fedlora.names import GROUP_ADAPTERS
from fedlora.wire.payload import AdapterLayout, AdapterPayload

_CORE_MARGIN = 4.0
"""Rounding units of the compute dtype by which a record's core counts more, on the private side."""


def _initial(mechanism: Mechanism, adapted: AdaptedModel) -> AdapterPayload:
    blocks = initial_frames(adapted) | adapted.extra_values()
    modules = dict(adapted.write_factors().modules)
    return AdapterPayload("frames", blocks, modules, None, adapted.layout.base_fingerprint)


def _open(
    mechanism: Mechanism, adapted: AdaptedModel, payload: AdapterPayload, num_clients: int
) -> LocalState:
    groups = open_groups(adapted, payload, mechanism.layout, num_clients)
    check_payload_fits(payload, mechanism.layout)
    table = _extras_table(mechanism)
    arrays = [torch.from_numpy(payload.blocks[name].reshape(-1).copy()) for name in table.shapes]
    row = torch.cat([*arrays, torch.zeros(0)]).to(device=adapted.device, dtype=adapted.accumulate_dtype)
    values = FlatBlocks(table, row.repeat(num_clients, 1))
    settings = _settings(mechanism)
    if settings.adaptivity == "paper":
        groups = tuple(_with_factors(g) for g in groups)
    if settings.adaptivity == "frames":
        groups = tuple(replace(g, moments=PrismMoments.zeros(g.frames)) for g in groups)
    slots = empty_slots(mechanism.optimizer, values)
    return LocalState(values, slots, values.flat, payload, {}, PrismState(groups))


def _with_factors(group: PrismGroup) -> PrismGroup:
    f = group.frames
    return replace(group, paper=PaperState.start(f.q_out @ f.core, f.q_in))


def _settings(mechanism: Mechanism) -> PrismMechanism:
    settings = mechanism.config.mechanism
    if not isinstance(settings, PrismMechanism):
        raise UnsupportedCombinationError(f"mechanism.kind: got {settings.kind}, expected prism")
    return settings


def _extras_table(mechanism: Mechanism) -> BlockTable:
    return mechanism.coordinates.table.only(mechanism.coordinates.extras)


def _views(
    mechanism: Mechanism, state: LocalState, low: FlatBlocks, records: RecordAxis
) -> Mapping[str, LayerView]:
    own: PrismState = state.own
    dtype = low.flat.dtype
    views: dict[str, LayerView] = {}
    for group in own.groups:
        f = group.frames
        down, back = f.q_in.mT, f.core @ f.q_in.mT
        up = f.q_out @ f.core
        axis = 0 if records.num_clients == 1 else 1
        parts = [records.gather(t.to(dtype)).unbind(axis) for t in (down, up, f.q_out, back)]
        for module, *each in zip(group.modules, *parts, strict=True):
            views[module] = LayerView(
                "tangent", 1.0, down=each[0], up=each[1], frame_out=each[2], back=each[3]
            )
    return {module: views[module] for module in mechanism.layout.modules}


def _clip(mechanism: Mechanism, gradients: PerRecordGradients) -> ClippedSum:
    """Clip in the tangent norm, each record's core counted a few rounding units more.

    The engine takes the core from rounded activations. With C' the core that the released vector really has,
    | ||C'|| - ||C|| | is a few units of the compute dtype, so the margin keeps the bound in bf16 as well.
    """
    squared = dict(gradients.squared_norms)
    if gradients.cores is not None and GROUP_ADAPTERS in squared:
        cores = gradients.cores.flat.square().sum(1)
        squared[GROUP_ADAPTERS] = squared[GROUP_ADAPTERS] + _margin(mechanism, cores.dtype) * cores
    guarded = replace(gradients, squared_norms=squared)
    bound = mechanism.privacy.max_grad_norm
    return clip_and_sum(guarded, mechanism.coordinates.table, mechanism.metric, bound)


def _margin(mechanism: Mechanism, accumulated: torch.dtype) -> float:
    """Return the relative margin for the dtype in which activations are rounded."""
    computed: torch.dtype = getattr(torch, mechanism.config.model.dtype)
    return _CORE_MARGIN * float(torch.finfo(accumulated if accumulated == torch.float64 else computed).eps)


def _noise(
    mechanism: Mechanism, state: LocalState, clipped: ClippedSum, sources: Sequence[NoiseSource]
) -> NoisyUpdate:
    """Isotropic tangent noise: X_out + tau Omega_1, and the part of X_in + tau Omega_2 outside Q_in.

    The in-side core is replaced by the noised out-side core, so the core is released once.
    """
    privacy = mechanism.privacy
    noised = add_noise(clipped, mechanism.metric, sources, privacy.sigma(), privacy.sample_rate)
    own: PrismState = state.own
    blocks = noised.blocks.like(noised.blocks.flat)
    for group in own.groups:
        x = take_tangent(blocks, group)
        x.x_in.copy_(share_core(group.frames, x).x_in)
    return replace(noised, blocks=blocks)


def share_core(frames: Frames, blocks: Tangent) -> Tangent:
    """Return the tangent vector with x_out as given and x_in's core replaced by x_out's."""
    core = frames.q_out.mT @ blocks.x_out
    return Tangent(blocks.x_out, complement(frames.q_in, blocks.x_in) + frames.q_in @ core.mT)


def _update(mechanism: Mechanism, state: LocalState, update: NoisyUpdate, lr: float) -> LocalState:
    own: PrismState = state.own
    privacy = mechanism.privacy
    deviation = update.noise_stddev.get(GROUP_ADAPTERS, 0.0) / privacy.divisor
    noised = [take_tangent(update.blocks, group).scaled(1.0 / privacy.divisor) for group in own.groups]
    if not privacy.record_level:
        noised = [share_core(group.frames, x) for group, x in zip(own.groups, noised, strict=True)]
    if _settings(mechanism).adaptivity == "paper":
        groups = [
            _step_paper(_settings(mechanism), group, x, deviation**2, lr)
            for group, x in zip(own.groups, noised, strict=True)
        ]
    else:
        groups = _step_groups(mechanism, own, noised, deviation**2, lr)
    values, slots = _step_extras(mechanism, state, update, lr)
    return replace(state, values=values, slots=slots, own=PrismState(tuple(groups), own.steps + 1))


def _pull(mechanism: Mechanism, group: PrismGroup, like: Tangent) -> Tangent | None:
    """Weight decay and proximal term as tangent vectors at the present point (data-free), or None."""
    decay, mu = mechanism.optimizer.weight_decay, mechanism.config.training.proximal_mu
    if decay == 0.0 and mu == 0.0:
        return None
    f, b = group.frames, group.base
    pull = Tangent(f.q_out @ f.core, f.q_in @ f.core.mT).scaled(decay + mu)
    if mu > 0.0:
        lead = f.core.shape[0]
        left = (b.q_out @ b.core).expand(lead, -1, -1, -1)
        pull = pull.plus(project_product(f, left, b.q_in.mT.expand(lead, -1, -1, -1)).scaled(-mu))
    return pull


def _step_groups(
    mechanism: Mechanism, own: PrismState, noised: Sequence[Tangent], variance: float, lr: float
) -> list[PrismGroup]:
    """Take one step in every group; small problems of all groups are solved together."""
    settings, groups = _settings(mechanism), list(own.groups)
    known: Sequence[tuple[Spectrum, Spectrum] | None] = [None] * len(groups)
    if all(group.moments is not None for group in groups):
        groups = [_averaged(settings, group, x) for group, x in zip(groups, noised, strict=True)]
        known = spectra_of([group.moments for group in groups if group.moments is not None])
    else:
        groups = [
            replace(group, momentum=_heavy_ball(mechanism, group, x))
            for group, x in zip(groups, noised, strict=True)
        ]
    directions = []
    for group, x, found in zip(groups, noised, known, strict=True):
        direction = x if group.momentum is None else group.momentum
        if group.moments is not None:
            direction = precondition(
                group.moments,
                group.frames,
                beta1=settings.beta1,
                beta2=settings.beta2,
                noise_variance=variance,
                known=found,
            )
        pull = _pull(mechanism, group, x)
        directions.append(direction if pull is None else direction.plus(pull))
    frames = retract_many([group.frames for group in groups], directions, -lr)
    return [
        replace(
            _moved_to(settings, group, new, variance, found),
            update=direction.scaled(-lr) if own.steps == 0 else None,
        )
        for group, new, direction, found in zip(groups, frames, directions, known, strict=True)
    ]


def _averaged(settings: PrismMechanism, group: PrismGroup, noised: Tangent) -> PrismGroup:
    if group.moments is None:
        return group
    new = update_moments(group.moments, group.frames, noised, beta1=settings.beta1, beta2=settings.beta2)
    return replace(group, moments=new)


def _moved_to(
    settings: PrismMechanism,
    group: PrismGroup,
    new: Frames,
    variance: float,
    known: tuple[Spectrum, Spectrum] | None,
) -> PrismGroup:
    """Return the group at its new frames, with moments and momentum carried along."""
    moments, momentum = group.moments, group.momentum
    if moments is not None:
        moments = transport_moments(
            moments, group.frames, new, beta2=settings.beta2, noise_variance=variance, known=known
        )
    if momentum is not None:
        momentum = transport_tangent(group.frames, new, momentum)
    return replace(group, frames=new, moments=moments, momentum=momentum)


def _heavy_ball(mechanism: Mechanism, group: PrismGroup, noised: Tangent) -> Tangent | None:
    optimizer = mechanism.optimizer
    if isinstance(optimizer, AdamConfig) or optimizer.momentum == 0.0:
        return None
    return noised if group.momentum is None else group.momentum.scaled(optimizer.momentum).plus(noised)


def _step_paper(
    settings: PrismMechanism, group: PrismGroup, noised: Tangent, variance: float, lr: float
) -> PrismGroup:
    """The paper's direction: lifts of Eq. 14 from the noised tangent, then Eqs. 24-26 and 22."""
    state = group.paper
    if state is None:
        return group
    f = group.frames
    grad_a, grad_b = noised.x_out @ (f.q_in.mT @ state.b), noised.x_in @ (f.q_out.mT @ state.a)
    lift_a, lift_b = paper_lift(state.a, state.b, grad_a, grad_b)
    new = paper_step(
        state, lift_a, lift_b, noise_variance=variance, beta1=settings.beta1, beta2=settings.beta2, lr=lr
    )
    q_out, r_out = torch.linalg.qr(new.a)
    q_in, r_in = torch.linalg.qr(new.b)
    return replace(group, frames=Frames(q_out, r_out @ r_in.mT, q_in), paper=new)


def _step_extras(
    mechanism: Mechanism, state: LocalState, update: NoisyUpdate, lr: float
) -> tuple[FlatBlocks, dict[str, torch.Tensor]]:
    """Head and other trained parameters: the configured optimiser in plain coordinates."""
    table = state.values.table
    tail = update.blocks.flat[:, update.blocks.flat.shape[1] - table.size :]
    own = replace(update, blocks=FlatBlocks(table, tail))
    direction, slots = direct(mechanism.optimizer, state.slots, own, mechanism.privacy.divisor)
    decay, mu = mechanism.optimizer.weight_decay, mechanism.config.training.proximal_mu
    return euclidean_step(state.values, direction, lr, decay, state.start, mu), slots


def _close(mechanism: Mechanism, state: LocalState) -> list[AdapterPayload]:
    """Each client's update as tangent blocks at the frames that came down, and the extras' change.

    One local step: the exact step, without a retraction. More: the projection of Z_new - Z_base; the norm of what it
    dropped is reported only where the client's points are private releases themselves.
    """
    own: PrismState = state.own
    tangents: dict[tuple[str, ...], Tangent] = {}
    dropped = state.values.flat.new_zeros(state.values.flat.shape[0])
    for group in own.groups:
        lead = group.frames.core.shape[0]
        if own.steps == 0:
            zero = torch.zeros_like
            tangents[group.modules] = Tangent(zero(group.frames.q_out), zero(group.frames.q_in))
        elif group.update is not None:
            tangents[group.modules] = group.update
        else:
            base = Frames(
                *(t.expand(lead, -1, -1, -1) for t in (group.base.q_out, group.base.core, group.base.q_in))
            )
            tangents[group.modules], lost = project_change(base, group.frames)
            dropped = dropped + lost.square().sum(-1)
    change = (state.values.flat - state.start).to(torch.float32).cpu().numpy()
    norms = dropped.sqrt().cpu().tolist()
    layout, table = mechanism.layout, state.values.table
    payloads = []
    for client, row in enumerate(change):
        blocks = tangent_arrays(tangents, client)
        for name, shape in table.shapes.items():
            begin, end = table.span(name)
            blocks[name] = row[begin:end].reshape(shape)
        notes = {"dropped_norm": norms[client]} if mechanism.privacy.record_level else {}
        payloads.append(
            AdapterPayload("tangent", blocks, dict(layout.modules), None, layout.base_fingerprint, notes)
        )
    return payloads


_STAGES = Stages(
    initial=_initial,
    open=_open,
    views=_views,
    update=_update,
    close=_close,
    prepare=usual_prepare,
    clip=_clip,
    noise=_noise,
    event=usual_event,
)


def build(config: FedLoraConfig, layout: AdapterLayout) -> Mechanism:
    """Build PRISM."""
    coordinates = Coordinates.of(layout, "tangent")
    metric = build_metric(config, coordinates, "tangent")
    privacy, schedule = StepPrivacy.of(config), build_schedule(config)
    return Mechanism(
        "prism", config, layout, coordinates, metric, privacy, schedule, "frames", "tangent", _STAGES
    )
