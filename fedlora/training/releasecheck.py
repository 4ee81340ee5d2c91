"""Self-checks of the engine around the noise: fresh noise in every place, nothing else that depends on records, coins.

An attack reads one client's releases one after the other: noise that two clients share, or that a second step
repeats, looks to it like any other. What a step does beside the noised sum (a divisor that counts the drawn records, a
block that is trained past the noise) and batches that are no Poisson draws do not stand in the attacked stages at all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import chain, cycle
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.data import Encoded
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.noise import NoiseSource
from fedlora.mechanisms.stages import ClippedSum, NoisyUpdate
from fedlora.names import split_block_name
from fedlora.training.batchcheck import check_draws
from fedlora.training.checked import SelfCheck
from fedlora.training.cohort import ClientJob, ClientUpdate, CohortEngine
from fedlora.training.drawing import noise_source
from fedlora.training.scalecheck import Energies, energies_of, groups_of, joined, too_quiet, went_through
from fedlora.training.session import Workbench
from fedlora.wire.payload import ModuleSpec

Rows = npt.NDArray[np.floating[Any]]
Draw = Callable[[], Sequence[Any]]

_CLIENT: Final = "self-check"
_CLIENTS: Final = 2
_ROUNDS: Final = 2
_MOST_ROUNDS: Final = 8
_KEPT: Final = 8_000_000
"""Numbers of noise that are kept at most where more than the fewest rounds run: noise that repeats later is seen."""
_STEPS: Final = 2
"""Steps of a checked round at most: as many as tell whether a second step repeats the first one's noise."""
_LARGE: Final = 400
"""Blocks of so many numbers are compared by correlation: independent Gaussians reach .5 with probability 1e-25."""
_ALIKE: Final = 0.5
_FEWEST: Final = 4
"""Numbers that must agree exactly to call noise repeated: float32 Gaussians do by chance with probability 1e-28."""
_SAME: Final = 1e-5
_SAME_ON_DEVICES: Final = 1e-3
"""The same where kernels may sum in another order each time; a divisor that counts records changes all by far more."""


@contextmanager
def same_seeds() -> Iterator[None]:
    """Put every seedable generator of the process into one state for a moment: what still differs is not seeded."""
    kept, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is what is tested
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002
            random.seed(0)
            yield
        finally:
            random.setstate(kept)
            np.random.set_state(numbers)  # noqa: NPY002


@dataclass
class SilentNoise:
    """No noise at all: whatever is still random in a release comes from somewhere else."""

    private: bool = True

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return (count,) zeros."""
        return torch.zeros(count, device=device, dtype=dtype)


def _as_it_is(mechanism: Mechanism) -> Mechanism:
    return mechanism


@dataclass(frozen=True)
class _Watched(Mechanism):
    """The same mechanism, whose noise stage is seen (`after`) under any layout that a payload brings.

    Attributes:
        after: takes every noised update and returns what goes on.
        around: changes further stages, of each layout's mechanism again.
    """

    after: Callable[[Mechanism, LocalState, NoisyUpdate], NoisyUpdate] = field(kw_only=True)
    around: Callable[[Mechanism], Mechanism] = field(kw_only=True, default=_as_it_is)

    @classmethod
    def of(
        cls,
        plain: Mechanism,
        after: Callable[[Mechanism, LocalState, NoisyUpdate], NoisyUpdate],
        around: Callable[[Mechanism], Mechanism] = _as_it_is,
    ) -> _Watched:
        changed = around(plain)
        own = {one.name: getattr(changed, one.name) for one in fields(Mechanism)}
        return cls(**own, after=after, around=around)

    def noise(self, state: LocalState, clipped: ClippedSum, sources: Sequence[NoiseSource]) -> NoisyUpdate:
        return self.after(self, state, super().noise(state, clipped, sources))

    def for_modules(self, modules: Mapping[str, ModuleSpec]) -> Mechanism:
        plain = super().for_modules(modules)
        return plain if plain is self else _Watched.of(plain, self.after, self.around)


def check_fresh_noise(bench: Workbench) -> SelfCheck:
    """Check that every client's every step has noise of its own in every coordinate, from its own source alone.

    Two clients train on draws without records for some rounds: a step releases noise and nothing else. Noise that is
    kept for a later step, shared by a cohort, repeated in another layer or drawn from another source, coordinates that
    get none, and less noise than is claimed for a client, a step or a round are seen.
    """
    name = "noise is fresh everywhere"
    if not isinstance(bench.config.privacy, RecordPrivacy):
        return SelfCheck(name, True, "no record-level privacy configured")
    nobody: list[Draw] = [list] * _CLIENTS
    silent = _released(bench, lambda client, turn: SilentNoise(), nobody, _ROUNDS)
    rounds = int(
        np.clip(_KEPT // max(1, silent.rows[: len(silent.rows) // _ROUNDS].size), _ROUNDS, _MOST_ROUNDS)
    )
    noised = _released(bench, _own_source(bench), nobody, rounds)
    passed, said = judge_fresh(noised.rows, noised.spans, silent.rows)
    quiet = too_quiet(noised.energies, groups_of(len(noised.rows), rounds, _CLIENTS))
    return SelfCheck(
        name, passed and not quiet, "; ".join([f"{len(noised.rows)} releases, {said}", *quiet[:3]])
    )


def check_empty_beside(bench: Workbench, records: Sequence[Encoded]) -> SelfCheck:
    """Check that a client without drawn records has all its noise, and nothing else, beside one that has some."""
    name = "empty draws are noised beside others"
    if not isinstance(bench.config.privacy, RecordPrivacy):
        return SelfCheck(name, True, "no record-level privacy configured")
    draws: list[Draw] = [list, lambda: records[:1]]
    silent = _released(bench, lambda client, turn: SilentNoise(), draws, 1).rows[:: len(draws)]
    noised = _released(bench, _own_source(bench), draws, _ROUNDS)
    passed, said = judge_fresh(noised.rows[:: len(draws)], noised.spans, silent)
    quiet = too_quiet(noised.energies, {"an empty draw": np.arange(0, len(noised.rows), len(draws))})
    return SelfCheck(name, passed and not quiet, "; ".join([said, *quiet]))


def _own_source(bench: Workbench) -> Callable[[str, int], NoiseSource]:
    return lambda client, turn: noise_source(bench.config, client, turn)


def judge_fresh(
    rows: Rows, spans: Mapping[str, tuple[int, int]], silent: Rows, each: str = "coordinates"
) -> tuple[bool, str]:
    """Judge releases of noise alone: own noise in every place, never again, and from the asked source alone.

    Args:
        rows: (releases, coordinates).
        spans: each block's first and end coordinate.
        silent: releases under a source that draws zeros.
        each: what a place is called.
    """
    elsewhere, still = int(np.count_nonzero(silent)), int((rows == rows[0]).all(0).sum())
    repeated = repeated_noise(rows, spans)
    said = f"{still} {each} without own noise, {elsewhere} with noise of another source"
    said = said if not repeated else f"{said}; repeated in {', '.join(repeated[:3])}"
    return elsewhere == 0 and still == 0 and not repeated, said


@dataclass(frozen=True)
class _Releases:
    """What clients released, (releases, coordinates): round by round, step by step, client by client."""

    rows: Rows
    spans: Mapping[str, tuple[int, int]]
    energies: Energies


def _released(
    bench: Workbench, source: Callable[[str, int], NoiseSource], draws: Sequence[Draw], rounds: int
) -> _Releases:
    """Train clients on these draws and return every release."""
    heard: list[tuple[Rows, Energies]] = []
    kept: list[tuple[Rows, Energies]] = []
    steps = _steps(bench.config)
    spans: dict[str, tuple[int, int]] = {}

    def keep(mechanism: Mechanism, state: LocalState, update: NoisyUpdate) -> NoisyUpdate:
        heard.append((update.blocks.flat.cpu().numpy().copy(), energies_of(mechanism, state, update)))
        spans.update({name: update.blocks.table.span(name) for name in update.blocks.table.shapes})
        return update

    engine = _engine(bench, _Watched.of(bench.mechanism, keep))
    clients = [f"{_CLIENT}-{number}" for number in range(len(draws))]
    for turn in range(1, rounds + 1):
        jobs = [ClientJob(one, draw, source(one, turn)) for one, draw in zip(clients, draws, strict=True)]
        heard.clear()
        with same_seeds():
            engine.train(bench.initial_payload(), jobs, steps)
        kept += went_through(heard, steps, len(clients))
    energies = joined([one for _, one in kept])
    return _Releases(np.concatenate([rows for rows, _ in kept]), spans, energies)


def _steps(config: FedLoraConfig) -> int:
    return min(_STEPS, config.training.steps_per_round or _STEPS)


def repeated_noise(rows: Rows, spans: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the blocks whose noise stands in two releases, or in two layers of one release.

    Args:
        rows: (releases, coordinates) of noise alone.
        spans: each block's first and end coordinate.
    """
    large = {name: rows[:, first:end] for name, (first, end) in spans.items() if end - first >= _LARGE}
    rest = [rows[:, first:end] for name, (first, end) in spans.items() if name not in large]
    small = np.concatenate([*rest, rows[:, :0]], axis=1)
    found = [name for name, block in large.items() if _alike(block)]
    if _alike(small):
        found.append("small blocks")
    same: dict[tuple[str, int], list[str]] = {}
    for name, block in large.items():
        same.setdefault((split_block_name(name)[-1], block.shape[1]), []).append(name)
    layers = [names for names in same.values() if len(names) > 1]
    return found + [names[0] for names in layers if _alike(np.stack([large[name][0] for name in names]))]


def _alike(rows: Rows) -> bool:
    """Return whether any two rows are correlated, or (few numbers) equal up to their sign."""
    if rows.shape[1] >= _LARGE:
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        unit = rows / np.where(lengths > 0.0, lengths, 1.0)
        cosines = np.abs(unit @ unit.T)
        return bool((cosines[np.triu_indices(len(rows), 1)] > _ALIKE).any())
    if rows.shape[1] < _FEWEST:
        return False
    magnitudes = {row.tobytes() for row in np.abs(rows)}
    return len(magnitudes) < len(rows)


def check_after_noise(bench: Workbench, records: Sequence[Encoded]) -> SelfCheck:
    """Check that an update depends on the records through the noised sums alone.

    The noised sums are put in by the check, the same ones for draws of other records and sizes, alone and beside a
    client that has records: what leaves must be the same. A divisor that counts the drawn records, a step that an empty
    draw skips and a block that is trained past the noise are seen, whatever the optimiser.
    """
    name = "updates depend on noised sums alone"
    if not isinstance(bench.config.privacy, RecordPrivacy):
        return SelfCheck(name, True, "no record-level privacy configured")
    steps = _steps(bench.config)
    empty: list[Sequence[Encoded]] = [[]] * steps
    drawn = [records[: 2 + 3 * step] for step in range(steps)]
    gap, counted = 0.0, True
    for others in (0, 1):
        engine = _engine(bench, _Watched.of(bench.mechanism, _put_in, _one_projection({})))
        found = [_trained(bench, engine, records, batches, others) for batches in (empty, drawn)]
        moved, other = _values(found[0]), _values(found[1])
        if moved.shape != other.shape:
            return SelfCheck(name, False, "shapes differ")
        change = float(np.abs(moved - other).max(initial=0.0))
        gap = max(gap, change / max(float(np.abs(moved).max(initial=0.0)), 1e-30))
        counted = counted and found[0].steps == found[1].steps == steps
    passed = gap <= (_SAME if bench.adapted.device.type == "cpu" else _SAME_ON_DEVICES) and counted
    return SelfCheck(name, passed, f"largest relative change {gap:.2e}, steps counted {counted}")


def _trained(
    bench: Workbench, engine: CohortEngine, records: Sequence[Encoded], batches: Sequence[Any], others: int
) -> ClientUpdate:
    """Train a client on these batches, beside others that have a record, and return its update."""
    further = chain(batches, cycle([records]))  # for an engine that draws again where nobody was drawn
    draws: list[Draw] = [further.__next__, *[lambda: records[:1]] * others]
    jobs = [
        ClientJob(f"{_CLIENT}-{number}", draw, noise_source(bench.config, _CLIENT, 1))
        for number, draw in enumerate(draws)
    ]
    with same_seeds():
        return engine.train(bench.initial_payload(), jobs, len(batches))[0]


def _put_in(mechanism: Mechanism, state: LocalState, update: NoisyUpdate) -> NoisyUpdate:
    """Return the same numbers in the place of any noised sums."""
    flat = update.blocks.flat
    fixed = torch.randn(flat.shape, generator=torch.Generator().manual_seed(1))
    scale = mechanism.privacy.sigma() * mechanism.privacy.max_grad_norm
    return replace(update, blocks=update.blocks.like((scale * fixed).to(flat)))


def _one_projection(drawn: dict[str, Any]) -> Callable[[Mechanism], Mechanism]:
    """Keep the first projections that are drawn for every step; they are independent of records."""

    def around(mechanism: Mechanism) -> Mechanism:
        prepare = mechanism.stages.prepare

        def again(inner: Mechanism, state: LocalState) -> LocalState:
            ready = prepare(inner, state)
            if not hasattr(ready.own, "projections"):
                return ready
            kept = drawn.setdefault("projections", ready.own.projections)
            return replace(ready, own=replace(ready.own, projections=kept))

        return replace(mechanism, stages=replace(mechanism.stages, prepare=again))

    return around


def _values(update: ClientUpdate) -> Rows:
    """Return everything that one client's training gave as one row: what is sent, and the optimiser's state."""
    parts = [
        np.asarray(block, dtype=np.float64).ravel() for _, block in sorted(update.payload.blocks.items())
    ]
    parts += [slot.double().cpu().numpy().ravel() for _, slot in sorted(update.slots.items())]
    return np.concatenate(parts)


def _engine(bench: Workbench, mechanism: Mechanism) -> CohortEngine:
    return CohortEngine(bench.adapted, mechanism, bench.task, bench.config)


def check_release(bench: Workbench, records: Sequence[Encoded]) -> list[SelfCheck]:
    """Run every check of this module on public records."""
    return [
        check_fresh_noise(bench),
        check_empty_beside(bench, records),
        check_after_noise(bench, records),
        check_draws(bench.config),
    ]


__all__ = [
    "SilentNoise",
    "check_after_noise",
    "check_draws",
    "check_empty_beside",
    "check_fresh_noise",
    "check_release",
    "judge_fresh",
    "same_seeds",
]
