"""Noisy projection M2: each step sees the full gradients through a fresh random projection.

LoRA and Privacy: When Random Projections Help (and When They Don't), Def. 3, Thm 5, Algs. 3 and 4. Per step: draw A
(r x in, N(0, 1/r)) afresh; clip records in the full matrices' norm (token Gram matrices, no out x in gradient);
release sum A^T + sigma C Omega R with R^T R = A A^T; change W by -lr / b (release) A. The change is kept as factors of
bounded rank (`rank_cap`), which travel as an ordinary `factors` adapter.

Who draws A matters. `projection_source: client`: each client, from its own operating-system entropy; the bound holds
against any server. `shared`: one published seed a round, drawn after the weights were fixed; the bound holds against a
server that draws honestly and late. Parameters that are not projected (a head) have a clip and a noise of their
own: under a common clip they would void the amplification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedlora.accounting import Event, NoisyProjectionEvent, ProjectionGroup
from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.layout import check_payload_fits
from fedlora.adapters.projection_recipe import (
    SEED_NOTE,
    check_projection,
    projection_from_seed,
    projection_recipe,
    seed_of_test_run,
    with_projection,
)
from fedlora.adapters.records import RecordAxis
from fedlora.adapters.views import LayerView
from fedlora.config.schema import FedLoraConfig, NoisyProjectionMechanism
from fedlora.errors import LayoutMismatchError, PrivacyParameterError, UnsupportedCombinationError
from fedlora.geometry import truncate_product
from fedlora.mechanisms.base import LocalState, Mechanism, Stages
from fedlora.mechanisms.build import build_schedule
from fedlora.mechanisms.clip import clip_and_sum
from fedlora.mechanisms.coordinates import Coordinates
from fedlora.mechanisms.direction import direct, empty_slots, euclidean_step
from fedlora.mechanisms.noise import NoiseSource, OsNoise, SeededNoise, check_noise, draw_gaussians
from fedlora.mechanisms.projection_math import projected_noise
from fedlora.mechanisms.projection_rules import (
    head_figures,
    metric_and_privacy,
    projected_specs,
    rank_cap,
    refuse_unfit,
)
from fedlora.mechanisms.stages import ClippedSum, NoisyUpdate, PerRecordGradients
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD, LORA_A, LORA_B, block_name
from fedlora.wire.payload import AdapterLayout, AdapterPayload, Array, ModuleSpec, PayloadKind

Tensor = torch.Tensor
Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""Module to (up (K, out, R), down (K, R, in)): scaling * up @ down is W - W0."""

_MOST_PENDING = 8
"""Local steps after which a client truncates its own sum to the rank cap."""


@dataclass(frozen=True)
class ProjectionState:
    """PUBLIC after noise. Folded weights and the present step's projections.

    Attributes:
        folded: W - W0 of each client.
        ranks: module to the rank that came down.
        projections: module to A (K, r, in) of this step; empty before `prepare`.
        releases: module to the last step's change in factor form, (K, out, r).
        seed: the shared round's seed, or None where clients draw.
        steps: steps taken since the payload came down.
    """

    folded: Pairs
    ranks: Mapping[str, int]
    projections: Mapping[str, Tensor]
    releases: Mapping[str, Tensor]
    seed: str | None
    steps: int = 0


def _settings(mechanism: Mechanism) -> NoisyProjectionMechanism:
    settings = mechanism.config.mechanism
    if not isinstance(settings, NoisyProjectionMechanism):
        raise UnsupportedCombinationError(f"mechanism.kind: got {settings.kind}, expected noisy_projection")
    return settings


def _initial(mechanism: Mechanism, adapted: AdaptedModel) -> AdapterPayload:
    settings = _settings(mechanism)
    blocks: dict[str, Array] = {}
    modules: dict[str, ModuleSpec] = {}
    for module, spec in mechanism.layout.modules.items():
        cap = rank_cap(settings, spec)
        modules[module] = replace(spec, rank=cap)
        blocks[block_name(module, LORA_A)] = np.zeros((cap, spec.in_features), dtype=np.float32)
        blocks[block_name(module, LORA_B)] = np.zeros((spec.out_features, cap), dtype=np.float32)
    payload = AdapterPayload(
        "factors", blocks | adapted.extra_values(), modules, None, adapted.layout.base_fingerprint
    )
    if settings.projection_source == "client":
        return payload
    return with_projection(payload, seed_of_test_run(mechanism.config))


def _open(
    mechanism: Mechanism, adapted: AdaptedModel, payload: AdapterPayload, num_clients: int
) -> LocalState:
    if payload.kind != "factors":
        raise LayoutMismatchError(
            f"adapter payload: got kind {payload.kind!r}; noisy_projection takes 'factors'"
        )
    check_payload_fits(payload, mechanism.layout)
    seed = _seed_of(mechanism, payload)

    def stacked(name: str) -> Tensor:
        value = torch.from_numpy(np.asarray(payload.blocks[name], dtype=np.float32))
        return value.to(device=adapted.device, dtype=adapted.accumulate_dtype).repeat(num_clients, 1, 1)

    folded = {
        m: (stacked(block_name(m, LORA_B)), stacked(block_name(m, LORA_A))) for m in mechanism.layout.modules
    }
    table = mechanism.coordinates.table.only(mechanism.coordinates.extras)
    parts = [torch.from_numpy(payload.blocks[name].reshape(-1).copy()) for name in table.shapes]
    row = torch.cat([*parts, torch.zeros(0)]).to(device=adapted.device, dtype=adapted.accumulate_dtype)
    values = FlatBlocks(table, row.repeat(num_clients, 1))
    ranks = {m: payload.modules[m].rank for m in mechanism.layout.modules}
    own = ProjectionState(folded, ranks, {}, {}, seed)
    return LocalState(values, empty_slots(mechanism.optimizer, values), values.flat, payload, {}, own)


def _seed_of(mechanism: Mechanism, payload: AdapterPayload) -> str | None:
    if _settings(mechanism).projection_source == "client":
        return None
    seed = payload.notes.get(SEED_NOTE)
    if not isinstance(seed, str) or payload.recipe != projection_recipe(seed):
        raise LayoutMismatchError(
            "shared projection: the payload carries no seed that fits its recipe; the server draws one each round "
            "after the weights are fixed"
        )
    return seed


def _prepare(mechanism: Mechanism, state: LocalState) -> LocalState:
    """Draw this step's projections: from the client's own entropy, or from the round's published seed.

    They are rounded to the compute dtype first, so that signal, noise and weights see the very same numbers.

    Raises:
        PrivacyParameterError: for a second step under one shared projection, which no bound covers.
    """
    own: ProjectionState = state.own
    like = state.values.flat
    clients = like.shape[0]
    computed: torch.dtype = getattr(torch, mechanism.config.model.dtype)
    drawn: dict[str, Tensor] = {}
    if own.seed is not None:
        if own.steps > 0:
            raise PrivacyParameterError(
                "noisy_projection: a second step under one shared projection is not covered; set "
                "training.steps_per_round: 1, or mechanism.projection_source: client"
            )
        for module, spec in mechanism.layout.modules.items():
            one = projection_from_seed(own.seed, module, spec.rank, spec.in_features)
            drawn[module] = one.to(like.device, computed).to(like).expand(clients, -1, -1)
    else:
        source = _projection_source(mechanism, state)
        shared = not source.private
        for module, spec in mechanism.layout.modules.items():
            shape = (1 if shared else clients, spec.rank, spec.in_features)
            normal = source.gaussians(math.prod(shape), like.device, like.dtype).view(shape)
            drawn[module] = (normal / math.sqrt(spec.rank)).to(computed).to(like).expand(clients, -1, -1)
    return replace(state, own=replace(own, projections=drawn))


def _projection_source(mechanism: Mechanism, state: LocalState) -> NoiseSource:
    """Operating-system entropy; in test runs a stream of its own, the same for all clients of a cohort."""
    seed = seed_of_test_run(mechanism.config)
    return OsNoise() if seed is None else SeededNoise(seed, "|projection", state.first_step + state.own.steps)


def _views(
    mechanism: Mechanism, state: LocalState, low: FlatBlocks, records: RecordAxis
) -> Mapping[str, LayerView]:
    own: ProjectionState = state.own
    dtype = low.flat.dtype
    views = {}
    for module, spec in mechanism.layout.modules.items():
        up, down = own.folded[module]
        views[module] = LayerView(
            "projected",
            spec.scaling,
            down=records.gather(down.to(dtype)),
            up=records.gather(up.to(dtype)),
            probe=records.gather(own.projections[module].to(dtype)),
        )
    return views


def _clip(mechanism: Mechanism, gradients: PerRecordGradients) -> ClippedSum:
    """Clip adapters and head each to their own norm; without clipping, adapters pass under the stated bound."""
    bound = mechanism.privacy.max_grad_norm
    if not _settings(mechanism).clipping:
        squared = dict(gradients.squared_norms)
        squared[GROUP_ADAPTERS] = torch.zeros_like(squared[GROUP_ADAPTERS])
        gradients = replace(gradients, squared_norms=squared)
    return clip_and_sum(gradients, mechanism.coordinates.table, mechanism.metric, bound)


def _noise(
    mechanism: Mechanism, state: LocalState, clipped: ClippedSum, sources: Sequence[NoiseSource]
) -> NoisyUpdate:
    """Rows N(0, (sigma C)^2 A A^T) for projected blocks, i.i.d. sigma_h C_h for the head."""
    sigma = mechanism.privacy.sigma()
    check_noise(clipped, mechanism.metric, sources, sigma)
    flat = clipped.blocks.flat
    noise = clipped.blocks.like(draw_gaussians(sources, flat.shape[1], flat.device, flat.dtype))
    deviations = {GROUP_ADAPTERS: sigma * clipped.bound} | _head_deviation(mechanism)
    own: ProjectionState = state.own
    for module in mechanism.layout.modules:
        block = noise[block_name(module, LORA_B)]
        block.copy_(projected_noise(block.clone(), own.projections[module], deviations[GROUP_ADAPTERS]))
    for name in mechanism.coordinates.extras:
        noise[name].mul_(deviations[GROUP_HEAD])
    return NoisyUpdate(
        clipped.blocks.like(flat + noise.flat), deviations, mechanism.stages.event(mechanism, sigma)
    )


def _head_deviation(mechanism: Mechanism) -> dict[str, float]:
    if not mechanism.coordinates.extras:
        return {}
    clip, sigma = head_figures(_settings(mechanism))
    return {GROUP_HEAD: clip * sigma}


def _event(mechanism: Mechanism, noise_multiplier: float) -> Event:
    """Every released group enters: one clip over the projected modules, a separate one for the head.

    A group that stands for several layers states no out-width, so that no bound counts its directions as one layer's.
    """
    settings, rate = _settings(mechanism), mechanism.privacy.sample_rate
    specs = tuple(mechanism.layout.modules.values())
    kappa = 1.0 / noise_multiplier
    if not mechanism.coordinates.extras:
        outs: dict[tuple[int, int], list[int]] = {}
        for s in specs:
            outs.setdefault((s.in_features, s.rank), []).append(s.out_features)
        groups = [
            ProjectionGroup(f"width {d} rank {r}", d, r, kappa, out[0] if len(out) == 1 else None)
            for (d, r), out in outs.items()
        ]
        return NoisyProjectionEvent(tuple(groups), rate, "shared", settings.projection_source)
    width, rank = min(s.in_features for s in specs), max(s.rank for s in specs)
    out = specs[0].out_features if len(specs) == 1 else None
    # X grows with the rank and falls with the width (in stochastic order), so this group covers every module
    worst = ProjectionGroup("adapters", width, min(rank, width), kappa, out)
    head = ProjectionGroup("head", None, None, 1.0 / head_figures(settings)[1])
    return NoisyProjectionEvent((worst, head), rate, "separate", settings.projection_source)


def _update(mechanism: Mechanism, state: LocalState, update: NoisyUpdate, lr: float) -> LocalState:
    """W <- W - lr / b (release) A, kept as factors; the head takes a plain step."""
    own: ProjectionState = state.own
    divisor, decay = mechanism.privacy.divisor, mechanism.optimizer.weight_decay
    folded, releases = {}, {}
    for module, spec in mechanism.layout.modules.items():
        up, down = own.folded[module]
        change = update.blocks[block_name(module, LORA_B)] * (-lr / (divisor * spec.scaling))
        if decay > 0.0:
            up = up * (1.0 - lr * decay)
        pair = (torch.cat([up, change], -1), torch.cat([down, own.projections[module].to(down)], -2))
        cap = rank_cap(_settings(mechanism), spec)
        most = min(cap + _MOST_PENDING * spec.rank, own.ranks[module] + _MOST_PENDING * spec.rank)
        folded[module] = _capped(pair, cap) if pair[0].shape[-1] > most else pair
        releases[module] = change
    table = state.values.table
    tail = update.blocks.flat[:, update.blocks.flat.shape[1] - table.size :]
    head = replace(update, blocks=FlatBlocks(table, tail))
    direction, slots = direct(mechanism.optimizer, state.slots, head, divisor)
    values = euclidean_step(state.values, direction, lr, decay, state.start, 0.0)
    own = replace(own, folded=folded, projections={}, releases=releases, steps=own.steps + 1)
    return replace(state, values=values, slots=slots, own=own)


def _within_sides(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same product with no more columns than the matrix has rank (exact)."""
    most = min(up.shape[-2], down.shape[-1])
    return _capped((up, down), most) if up.shape[-1] > most else (up, down)


def _capped(pair: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    frames, _ = truncate_product(pair[0], pair[1], rank)
    return frames.q_out @ frames.core, frames.q_in.mT.contiguous()


def _close(mechanism: Mechanism, state: LocalState) -> list[AdapterPayload]:
    """`shared`: the step as lora_B under the round's A. `client`: the whole folded change as factors."""
    own: ProjectionState = state.own
    shared = own.seed is not None
    rows = state.values.flat.to(torch.float32).cpu().numpy()
    blocks: list[dict[str, Array]] = [{} for _ in rows]
    modules: dict[str, ModuleSpec] = {}
    for module, spec in mechanism.layout.modules.items():
        up, down = own.folded[module]
        if not shared:
            up, down = _within_sides(up, down)
        modules[module] = spec if shared else replace(spec, rank=int(up.shape[-1]))
        empty = up.new_zeros(up.shape[0], spec.out_features, spec.rank)
        sent = {LORA_B: own.releases.get(module, empty)} if shared else {LORA_B: up, LORA_A: down}
        for key, value in sent.items():
            arrays = value.to(torch.float32).cpu().numpy()
            for client, target in enumerate(blocks):
                target[block_name(module, key)] = np.ascontiguousarray(arrays[client])
    table = state.values.table
    for client, target in enumerate(blocks):
        for name, shape in table.shapes.items():
            first, end = table.span(name)
            target[name] = rows[client, first:end].reshape(shape)
    recipe = state.base.recipe if shared else None
    kind = mechanism.uplink
    fingerprint = mechanism.layout.base_fingerprint
    return [AdapterPayload(kind, own_blocks, modules, recipe, fingerprint) for own_blocks in blocks]


def truncated_export(payload: AdapterPayload, rank: int) -> tuple[AdapterPayload, dict[str, float]]:
    """Return a folded `factors` adapter at one rank, and each module's relative truncation error.

    Args:
        payload: kind `factors`. PUBLIC.
        rank: of the exported adapter (`mechanism.export_rank`); never above a module's sides.
    """
    blocks, modules, errors = dict(payload.blocks), {}, {}
    for module, spec in payload.modules.items():
        up, down = (
            torch.from_numpy(payload.blocks[block_name(module, k)]).double() for k in (LORA_B, LORA_A)
        )
        chosen = min(rank, spec.out_features, spec.in_features)
        frames, dropped = truncate_product(up, down, chosen)
        total = math.hypot(float(dropped), float(torch.linalg.matrix_norm(frames.core)))
        errors[module] = float(dropped) / total if total > 0 else 0.0
        blocks[block_name(module, LORA_B)] = (frames.q_out @ frames.core).float().numpy()
        blocks[block_name(module, LORA_A)] = np.ascontiguousarray(frames.q_in.mT.float().numpy())
        modules[module] = replace(spec, rank=chosen)
    return replace(payload, blocks=blocks, modules=modules, recipe=None, notes={}), errors


_STAGES = Stages(
    initial=_initial,
    open=_open,
    views=_views,
    update=_update,
    close=_close,
    prepare=_prepare,
    clip=_clip,
    noise=_noise,
    event=_event,
)


def build(config: FedLoraConfig, layout: AdapterLayout) -> Mechanism:
    """Build the noisy projection; the projection's ranks are the configuration's, whatever the payload's are.

    Raises:
        UnsupportedCombinationError: if an optimiser mixes steps of different projections, steps or weights do not
            fit, or a head has no clip and noise of its own.
        PrivacyParameterError: if clipping is off without a stated bound.
        RankMismatchError: if a rank is above its in-width.
    """
    refuse_unfit(config)
    layout = replace(layout, modules=projected_specs(config, layout))
    for spec in layout.modules.values():
        check_projection(spec.rank, spec.in_features)
    coordinates = Coordinates.of(layout, "projected")
    metric, privacy = metric_and_privacy(config, coordinates)
    shared = getattr(config.mechanism, "projection_source", "client") == "shared"
    uplink: PayloadKind = "projected" if shared else "factors"
    schedule = build_schedule(config)
    return Mechanism(
        "noisy_projection", config, layout, coordinates, metric, privacy, schedule, "factors", uplink, _STAGES
    )  # fmt: skip
