"""Has a release as much noise as it claims, for every client, in every step and round, in every block?

Audits judge the noise stage alone. What the engine makes of it, a client that is not the first of its cohort, a later
step and an empty draw beside others' records are seen here, on releases of noise alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from fedlora.errors import PrivacyError
from fedlora.mechanisms.base import LocalState, Mechanism
from fedlora.mechanisms.noise import noise_stddevs
from fedlora.mechanisms.stages import NoisyUpdate
from fedlora.names import split_block_name

Rows = npt.NDArray[np.floating[Any]]
_FEW: Final = 400
"""Blocks with fewer numbers than this, over the releases that are judged, are judged together."""
_CHANCE: Final = 1e-15
"""Probability of a false alarm for each block of each group of releases."""


@dataclass(frozen=True)
class Energies:
    """PUBLIC. Squared lengths of pure noise, in units of what is claimed.

    Attributes:
        found: (releases, blocks) squared lengths; chi-squared with `free` degrees of freedom if all is as claimed.
        free: (blocks,) directions of each block that are released.
        names: of the blocks.
    """

    found: npt.NDArray[np.float64]
    free: npt.NDArray[np.int64]
    names: tuple[str, ...]


def energies_of(mechanism: Mechanism, state: LocalState, update: NoisyUpdate) -> Energies:
    """Measure one release of a cohort, one row for each client.

    Noise behind a projection A is sigma C Xi A^T: it is measured along orthonormal directions of A's rows, where it is
    independent. A projection's deviations are those that the stage states, all others those of metric and claim.
    """
    privacy = mechanism.privacy
    claimed = noise_stddevs(mechanism.metric, privacy.max_grad_norm, privacy.sigma())
    deviations = update.noise_stddev if mechanism.coordinates.kind == "projected" else claimed
    projections: Mapping[str, torch.Tensor] = getattr(state.own, "projections", None) or {}
    names = tuple(update.blocks.table.shapes)
    found, free = [], []
    for name in names:
        block = update.blocks[name].double()
        seen = projections.get(split_block_name(name)[0])
        if seen is not None:
            upper = torch.linalg.qr(seen.to(block).mT, mode="r").R
            block = torch.linalg.solve_triangular(upper, block, upper=True, left=False)
        energy = block.square().flatten(1).sum(1) / deviations[mechanism.metric.group_of[name]] ** 2
        found.append(energy.cpu().numpy())
        numbers = block[0].numel()
        free.append(numbers - block.shape[1] if name in mechanism.left_out else numbers)
    return Energies(np.stack(found, axis=1), np.array(free), names)


def joined(parts: list[Energies]) -> Energies:
    """Return releases one after the other."""
    return Energies(np.concatenate([one.found for one in parts]), parts[0].free, parts[0].names)


def went_through(
    heard: Sequence[tuple[Rows, Energies]], steps: int, clients: int
) -> list[tuple[Rows, Energies]]:
    """Return a round's releases step by step, each with all clients.

    Where memory ran out, clients started again in smaller cohorts, one after the other, which end what was heard. What
    failed attempts drew was not released.
    """
    parts: list[Sequence[tuple[Rows, Energies]]] = []
    seen, end = 0, len(heard)
    while seen < clients:
        if end < steps:
            raise PrivacyError("self-check: fewer releases were seen than steps were taken")
        parts.insert(0, heard[end - steps : end])
        seen, end = seen + len(parts[0][0][0]), end - steps
    return [
        (
            np.concatenate([part[step][0] for part in parts]),
            joined([part[step][1] for part in parts]),
        )
        for step in range(steps)
    ]


def groups_of(releases: int, rounds: int, clients: int) -> dict[str, npt.NDArray[np.int64]]:
    """Return the releases of each client, step and round; a round's stand step by step, each step's by client."""
    place = np.arange(releases).reshape(rounds, -1, clients)
    found = {f"client {at + 1}": place[:, :, at].ravel() for at in range(clients)}
    found |= {f"step {at + 1}": place[:, at].ravel() for at in range(place.shape[1])}
    return found | {f"round {at + 1}": place[at].ravel() for at in range(rounds)}


def too_quiet(energies: Energies, groups: Mapping[str, npt.NDArray[np.int64]]) -> list[str]:
    """Return which groups of releases have too little noise, and in which block.

    Args:
        energies: of all releases.
        groups: name of a group ("client 2", "step 1") to its rows.
    """
    return [said for name, rows in groups.items() for said in _quiet(energies, name, rows)]


def _quiet(energies: Energies, group: str, rows: npt.NDArray[np.int64]) -> list[str]:
    found, free = energies.found[rows].sum(0), energies.free * len(rows)
    small = free < _FEW
    named = {energies.names[at]: (found[at], free[at]) for at in np.flatnonzero(~small)}
    if small.any():
        named["small blocks"] = (found[small].sum(), free[small].sum())
    return [
        f"{group} has {np.sqrt(energy / numbers):.3f} of the claimed noise in {name}"
        for name, (energy, numbers) in named.items()
        if numbers > 0 and not energy >= stats.chi2.ppf(_CHANCE, numbers)
    ]


__all__ = ["Energies", "energies_of", "groups_of", "joined", "too_quiet", "went_through"]
