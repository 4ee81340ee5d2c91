"""Start-up self-checks: does this very set-up keep records apart, clip, draw unseeded noise, and noise empty draws?

They run on public random records, so that nothing private is touched. Audits call them, and a trainer runs them
before its first round: a model or task that couples records would void the sensitivity bound, and no attack on
releases can see seeded noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch

from fedlora.adapters.records import batch_to_device
from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.data import Encoded, Task
from fedlora.geometry import complement
from fedlora.mechanisms.base import LocalState
from fedlora.mechanisms.noise import NoiseSource, OsNoise
from fedlora.mechanisms.prism_state import PrismState
from fedlora.mechanisms.stages import ClippedSum
from fedlora.names import LORA_A, TANGENT_IN, block_name, split_block_name
from fedlora.training.checked import SelfCheck, require_passed
from fedlora.training.cohort import ClientJob, ClientUpdate, CohortEngine
from fedlora.training.cohort_passes import PassRunner
from fedlora.training.drawing import coin_source, noise_source
from fedlora.training.groups import public_records
from fedlora.training.lawcheck import check_added, check_law
from fedlora.training.releasecheck import check_release, same_seeds
from fedlora.training.session import Workbench

_RECORDS: Final = 6
_TOKENS: Final = (24, 9)
_PAIR: Final = 2
"""Records with which blocks are judged one by one: passes over a large model are what a start waits for."""
_TOLERANCE: Final = 1e-3
"""Relative; padding to another length changes float32 sums a little."""
_LOW_PRECISION_TOLERANCE: Final = 0.1
"""The same for 16-bit and quantised models; coupled records differ by whole factors."""
_OVER_THE_BOUND: Final = 4.0
"""Length that the longest public gradient is given, in units of the clip bound."""
_LOUDEST: Final = 1e5
"""Scale of losses at most: a block whose public gradients are shorter than 4 / 10^5 of the bound is not seen alone."""
_CLIENT: Final = "self-check"
_EMPTY_DRAWS: Final = 64
"""Tries until every block differs: Adam's first step keeps signs only, so a block of two numbers may coincide."""


def _tolerance(config: FedLoraConfig) -> float:
    exact = config.model.dtype == "float32" and config.model.quantization is None
    return _TOLERANCE if exact else _LOW_PRECISION_TOLERANCE


def check_uncoupled(bench: Workbench, records: Sequence[Encoded]) -> SelfCheck:
    """Compare each record's loss in a batch with its loss alone.

    A loss that is normalised over the batch, a batch norm, or a model that mixes rows fails here.
    """
    bench.adapted.model.eval()
    with torch.no_grad(), _stirred(bench):
        together = _losses(bench, records)
        alone = torch.cat([_losses(bench, [one]) for one in records])
        half = torch.cat([_losses(bench, records[:2]), _losses(bench, records[2:])])
    scale = float(alone.abs().max().clamp(min=1e-6))
    worst = max(float((together - alone).abs().max()), float((together - half).abs().max())) / scale
    return SelfCheck(
        "per-record loss is uncoupled",
        worst <= _tolerance(bench.config),
        f"largest relative change {worst:.2e}",
    )


@contextmanager
def _stirred(bench: Workbench) -> Iterator[None]:
    """Move the trained extra parameters off their start for a moment: a head of zeros would hide mixed rows."""
    generator = torch.Generator().manual_seed(0)
    leaves = bench.adapted.leaves.values()
    parameters = [value for leaf in leaves for value in leaf.parameters(recurse=False)]
    saved = [value.detach().clone() for value in parameters]
    try:
        for value in parameters:
            value.add_((0.05 * torch.randn(value.shape, generator=generator)).to(value))
        yield
    finally:
        for value, old in zip(parameters, saved, strict=True):
            value.copy_(old)


@contextmanager
def _without_dropout(bench: Workbench) -> Iterator[None]:
    """Set every rate of dropout to 0 for a moment, in the training mode that it asks for.

    Sums with and without a record are compared. Their masks would differ, each of them allowed: a record's clipped
    gradient is bounded whatever its own mask is.
    """
    rates = [
        (module, name, rate)
        for module in bench.adapted.model.modules()
        for name, rate in vars(module).items()
        if isinstance(rate, float)
        and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__))
    ]
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)


def check_clip(bench: Workbench, records: Sequence[Encoded]) -> SelfCheck:
    """Check that leaving out any one record moves the clipped sum by at most the bound, and each by its own part only.

    The moves must add up to the whole sum: a clip of a batch's sum or mean in the place of each record's, or a sum that
    is divided by the records that are there, moves by less, and yet one record can change all of it.
    Public records whose gradients are shorter than the bound would hide a clip that does nothing: their losses are
    scaled until it has to act, and again until every block alone would pass the bound: a clip that leaves one out shows
    only where that block is long.
    """
    privacy = bench.config.privacy
    if not isinstance(privacy, RecordPrivacy):  # whole updates are clipped where they are summed, not here
        return SelfCheck("clip is active", True, "no record-level privacy configured")
    if not getattr(bench.config.mechanism, "clipping", True):
        return SelfCheck("clip is active", True, "a stated bound replaces clipping; it cannot be checked")
    state = bench.mechanism.first_state(bench.adapted)  # one projection for all: their sums are compared
    whole, worst, apart, least = _largest_move(bench, state, records)
    parts = len(set(whole.metric.group_of.values())) if whole.metric.per_layer else 1
    bound, louder = privacy.max_grad_norm, 1.0
    allowed = bound * parts**0.5
    if 0.0 < worst < allowed * (1 - _tolerance(bench.config)):  # else the clip has acted already
        louder = _OVER_THE_BOUND * allowed / worst
        _, loud_worst, loud_apart, _ = _largest_move(_made_louder(bench, louder), state, records)
        worst, apart = max(worst, loud_worst), max(apart, loud_apart)
    if 0.0 < least < _OVER_THE_BOUND * allowed:
        loudest = min(_OVER_THE_BOUND * allowed / least, _LOUDEST)
        if loudest > louder:
            louder = loudest
            worst = max(worst, _largest_move(_made_louder(bench, louder), state, records[:_PAIR])[1])
    tolerance = _tolerance(bench.config)
    passed = whole.bound == bound and worst <= allowed * (1 + tolerance) and apart <= len(records) * tolerance
    said = "" if louder == 1.0 else f", losses scaled by {louder:.3g}"
    detail = f"largest move {worst:.4g}, bound {allowed:.4g}, moves miss the sum by {apart:.2e} of one{said}"
    return SelfCheck("clip is active", passed, detail)


def _made_louder(bench: Workbench, factor: float) -> Workbench:
    return replace(bench, task=cast("Task", _Louder(bench.task, factor)))


def _largest_move(
    bench: Workbench, state: LocalState, records: Sequence[Encoded]
) -> tuple[ClippedSum, float, float, float]:
    """Return what leaving one record out does to the clipped sum of all.

    Returns: the sum, the farthest that it moves, how far all moves miss it (in units of the farthest), and the farthest
        that one of the first two moves the block that they move least, of those that move at all.
    """
    whole = _clipped(bench, state, records)
    flat = whole.blocks.flat
    worst, moves = 0.0, torch.zeros_like(flat)
    blocks: dict[str, float] = {}
    for k in range(len(records)):
        rest = _clipped(bench, state, [*records[:k], *records[k + 1 :]])
        parts = _squared_parts(state, whole, rest)
        worst = max(worst, sum(parts.values()) ** 0.5)
        if k < _PAIR:
            blocks = {name: max(blocks.get(name, 0.0), part) for name, part in parts.items()}
        moves += flat - rest.blocks.flat
    missed = replace(whole, blocks=whole.blocks.like(flat - moves))
    nothing = replace(whole, blocks=whole.blocks.like(torch.zeros_like(flat)))
    least = min((part for part in blocks.values() if part > 0.0), default=0.0) ** 0.5
    return whole, worst, _distance(state, missed, nothing) / worst if worst > 0.0 else 0.0, least


def check_passes(bench: Workbench, records: Sequence[Encoded]) -> SelfCheck:
    """Check that a batch that is cut into passes gives one sum: no record counts twice, none is left out."""
    name = "passes add up to one sum"
    if not isinstance(bench.config.privacy, RecordPrivacy):
        return SelfCheck(name, True, "no record-level privacy configured")
    state = bench.mechanism.first_state(bench.adapted)
    whole, cut = (_clipped(bench, state, records, most) for most in (None, _PAIR))
    nothing = replace(whole, blocks=whole.blocks.like(torch.zeros_like(whole.blocks.flat)))
    gap, length = _distance(state, whole, cut), _distance(state, whole, nothing)
    passed = gap <= _tolerance(bench.config) * length
    return SelfCheck(name, passed, f"sums differ by {gap / max(length, 1e-30):.2e} of their length")


class _Louder:
    """A task whose losses, and so gradients, are larger by a factor."""

    def __init__(self, task: Any, factor: float) -> None:
        self._task, self._factor = task, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def per_record_loss(self, model: Any, batch: Any) -> torch.Tensor:
        losses: torch.Tensor = self._task.per_record_loss(model, batch) * self._factor
        return losses


def check_noise(source: NoiseSource | None = None) -> SelfCheck:
    """Check that the noise source is unseeded: two sources differ although every public seed is the same."""
    device = torch.device("cpu")
    draws = []
    for _ in range(2):
        with same_seeds():
            draws.append((source or OsNoise()).gaussians(256, device, torch.float64))
    private = (source or OsNoise()).private
    spread = float(torch.cat(draws).std())
    differ = not torch.equal(draws[0], draws[1])
    passed = private and differ and 0.8 < spread < 1.2
    return SelfCheck(
        "noise is unseeded", passed, f"private {private}, draws differ {differ}, std {spread:.3f}"
    )


def check_sources(config: FedLoraConfig) -> SelfCheck:
    """Check that the noise and the coins that clients would get come from the operating system.

    A run that is configured with the seeded test source passes: it is marked "no privacy" everywhere.
    """
    if config.repeatable:
        return SelfCheck("noise is unseeded", True, "repeatable by configuration: this run has no privacy")
    coins = [coin_source(config, _CLIENT, 1).words(64) for _ in range(2)]
    fresh = coin_source(config, _CLIENT, 1).private and not np.array_equal(coins[0], coins[1])
    noise = check_noise(noise_source(config, _CLIENT, 1))
    again = noise_source(config, _CLIENT, 1).gaussians(64, torch.device("cpu"), torch.float64)
    once = noise_source(config, _CLIENT, 1).gaussians(64, torch.device("cpu"), torch.float64)
    passed = noise.passed and fresh and not torch.equal(once, again)
    return SelfCheck("noise is unseeded", passed, f"{noise.detail}, coins differ {fresh}")


def check_empty_draws(bench: Workbench) -> SelfCheck:
    """Train on draws without records: each must be a counted step with noise of its own in every block."""
    name = "empty draws are noised"
    if not isinstance(bench.config.privacy, RecordPrivacy):
        return SelfCheck(name, True, "no record-level privacy configured")
    first = _train_on_nothing(bench, 1)
    bare, counted = _noised_blocks(bench, first), first.steps == 1
    for turn in range(2, _EMPTY_DRAWS + 1):
        again = _train_on_nothing(bench, turn)
        counted = counted and again.steps == 1
        bare = [one for one in bare if np.array_equal(first.payload.blocks[one], again.payload.blocks[one])]
        if not bare:
            break
    return SelfCheck(
        name, counted and not bare, f"steps counted {counted}, blocks without own noise {len(bare)}"
    )


def _noised_blocks(bench: Workbench, update: ClientUpdate) -> list[str]:
    """Return the blocks that must differ: a test run's seeded projection, sent as lora_A, is the same each time."""
    same = bench.config.seeded_noise and bench.mechanism.coordinates.kind == "projected"
    return [name for name in update.payload.blocks if not (same and split_block_name(name)[-1] == LORA_A)]


def _train_on_nothing(bench: Workbench, turn: int) -> ClientUpdate:
    source = noise_source(bench.config, _CLIENT, turn if bench.config.seeded_noise else 1)
    engine = CohortEngine(bench.adapted, bench.mechanism, bench.task, bench.config)
    with same_seeds():
        payload = bench.initial_payload()
        return engine.train(payload, [ClientJob(_CLIENT, lambda: [], source)], 1)[0]


def uneven_records(bench: Workbench) -> list[Encoded]:
    """Return public records of two lengths by turns: equal ones hide a loss that the batch's mean length scales."""
    long, short = (public_records(bench.task, _RECORDS, tokens) for tokens in _TOKENS)
    return [(short if number % 2 else long)[number] for number in range(_RECORDS)]


def run_selfchecks(bench: Workbench) -> list[SelfCheck]:
    """Run every check on public random records."""
    records = uneven_records(bench)
    with _without_dropout(bench):
        return [
            check_uncoupled(bench, records),
            check_clip(bench, records),
            check_passes(bench, records),
            check_sources(bench.config),
            check_law(bench),
            check_added(bench),
            check_empty_draws(bench),
            *check_release(bench, records),
        ]


def require_selfchecks(bench: Workbench) -> list[SelfCheck]:
    """Run every check and refuse to go on if one fails.

    Raises:
        SensitivityMismatchError: naming the failed checks.
    """
    checks = run_selfchecks(bench)
    require_passed(checks)
    return checks


def _losses(bench: Workbench, records: Sequence[Encoded]) -> torch.Tensor:
    task, adapted = bench.task, bench.adapted
    batch = batch_to_device(task.collate(list(records)), adapted.device)
    losses: torch.Tensor = task.per_record_loss(adapted.model, batch)
    return losses.detach().to(torch.float64).cpu()


def _clipped(
    bench: Workbench, state: LocalState, records: Sequence[Encoded], most: int | None = None
) -> ClippedSum:
    """Return one client's clipped sum, with so many records in one pass at most."""
    return PassRunner(bench.adapted, bench.task, most).clipped_sums(bench.mechanism, state, [list(records)])


def _distance(state: LocalState, left: ClippedSum, right: ClippedSum) -> float:
    """Return the distance of two sums in the metric."""
    return float(sum(_squared_parts(state, left, right).values()) ** 0.5)


def _squared_parts(state: LocalState, left: ClippedSum, right: ClippedSum) -> dict[str, float]:
    """Return the squared distance of two sums in the metric, block by block.

    A projected block is D A^T with ||D|| bounded: the part of D in A's row space is what can be measured. A tangent
    vector's core stands in both of its blocks and counts in the out-side one.
    """
    parts: dict[str, float] = {}
    metric, frames = left.metric, _inner_frames(state)
    projections: Mapping[str, torch.Tensor] = getattr(state.own, "projections", {})
    for group in dict.fromkeys(metric.group_of.values()):
        for name in metric.blocks_of(group):
            moved = (left.blocks[name] - right.blocks[name]).double()
            seen = projections.get(split_block_name(name)[0])
            if seen is not None:
                factor = torch.linalg.qr(seen.double().mT, mode="r").R
                moved = torch.linalg.solve_triangular(factor, moved, upper=True, left=False)
            if name in frames:
                moved = complement(frames[name].to(moved), moved)
            parts[name] = metric.weight(group) ** 2 * float(moved.square().sum())
    return parts


def _inner_frames(state: LocalState) -> dict[str, torch.Tensor]:
    """Return PRISM's in-side tangent blocks and the frame (clients, in, r) at which each is taken."""
    groups = state.own.groups if isinstance(state.own, PrismState) else ()
    return {
        block_name(module, TANGENT_IN): group.frames.q_in[:, at]
        for group in groups
        for at, module in enumerate(group.modules)
    }
