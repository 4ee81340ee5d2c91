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
from functools import partial

import torch

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import BlockTable, FlatBlocks
from fedlora.adapters.layout import check_payload_fits
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.views import LayerView
from fedlora.config.schema import FedLoraConfig, PrismMechanism
from fedlora.errors import UnsupportedCombinationError
from fedlora.geometry import (
    Frames,
    Tangent,
    project_change,
)
from fedlora.mechanisms.base import (
    LocalState,
    Mechanism,
    Stages,
    StepPrivacy,
    usual_clip,
    usual_event,
    usual_prepare,
)
from fedlora.mechanisms.build import build_metric, build_schedule
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.direction import direct, empty_slots, euclidean_step
from fedlora.mechanisms.noise import NoiseSource, add_noise
from fedlora.mechanisms.prism_direction import PrismMoments
from fedlora.mechanisms.prism_graph import StepGraphs
from fedlora.mechanisms.prism_paper import PaperState, paper_lift, paper_step
from fedlora.mechanisms.prism_state import (
    PrismGroup,
    PrismState,
    initial_frames,
    open_groups,
    share_core,
    squared_cores,
    take_tangent,
    tangent_arrays,
)
from fedlora.mechanisms.prism_step import StepRule, mean_tangents
from fedlora.mechanisms.stages import ClippedSum, NoisyUpdate, PerRecordGradients
from fedlora.names import GROUP_ADAPTERS
from fedlora.wire.payload import AdapterLayout, AdapterPayload

_EXACT_MARGIN = 16.0
"""Rounding units of the accumulation dtype by which a record's core counts more, on the private side."""


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


def _measure(mechanism: Mechanism, state: LocalState, gradients: PerRecordGradients) -> PerRecordGradients:
    """Count each record's core, which stands in both of its blocks, once.

    The core is Q_in^T X_in of the block that is released, not a product of rounded activations: where tokens cancel
    in a sum, rounding of the single tokens does not, and the norm would fall far below that of what is released.
    """
    own: PrismState = state.own
    cores = squared_cores(own.groups, gradients)
    squared = dict(gradients.squared_norms)
    squared[GROUP_ADAPTERS] = (squared[GROUP_ADAPTERS] - cores).clamp_min(0.0)
    squared[GROUP_ADAPTERS] += _EXACT_MARGIN * torch.finfo(cores.dtype).eps * cores
    return replace(gradients, squared_norms=squared)


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


def _update(
    graphs: StepGraphs, mechanism: Mechanism, state: LocalState, update: NoisyUpdate, lr: float
) -> LocalState:
    own: PrismState = state.own
    privacy, settings = mechanism.privacy, _settings(mechanism)
    rule = StepRule.of(mechanism, settings)
    deviation = update.noise_stddev.get(GROUP_ADAPTERS, 0.0) / privacy.divisor
    noised = [take_tangent(update.blocks, group) for group in own.groups]
    if settings.adaptivity == "paper":
        parts = zip(own.groups, mean_tangents(rule, own.groups, noised), strict=True)
        groups = [_step_paper(settings, group, x, deviation**2, lr) for group, x in parts]
    else:
        groups = graphs.step(rule, own, noised, deviation**2, lr)
    values, slots = _step_extras(mechanism, state, update, lr)
    return replace(state, values=values, slots=slots, own=PrismState(tuple(groups), own.steps + 1))


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


def _stages() -> Stages:
    return Stages(
        initial=_initial,
        open=_open,
        views=_views,
        update=partial(_update, StepGraphs()),
        close=_close,
        prepare=usual_prepare,
        clip=usual_clip,
        noise=_noise,
        event=usual_event,
        measure=_measure,
    )


def build(config: FedLoraConfig, layout: AdapterLayout) -> Mechanism:
    """Build PRISM."""
    coordinates = Coordinates.of(layout, "tangent")
    metric = build_metric(config, coordinates, "tangent")
    privacy, schedule = StepPrivacy.of(config), build_schedule(config)
    return Mechanism(
        "prism", config, layout, coordinates, metric, privacy, schedule, "frames", "tangent", _stages()
    )
