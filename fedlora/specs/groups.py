"""Groups of clients that help each other, from their specifications alone (post-processing of private releases)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from fedlora.errors import DataError
from fedlora.specs.types import PrivacyStatement, Specification
from fedlora.specs.vectors import unit_vector

_RESTARTS: Final = 20
_ROUNDS: Final = 100
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """PUBLIC. Clients with similar specifications.

    Attributes:
        name: "group-1", ...; largest first.
        members: names of their specifications, sorted.
        cohesion: mean cosine of a member with the group's direction, in [-1, 1].
    """

    name: str
    members: tuple[str, ...]
    cohesion: float


def cluster(specifications: Sequence[Specification], groups: int, *, seed: int = 0) -> tuple[Group, ...]:
    """Cluster specifications by direction: spherical k-means, best of several deterministic starts.

    What all clients share (the mean direction) says nothing about who fits whom and is taken off first where there
    are more than two specifications.

    Args:
        specifications: comparable with each other (one base model, recipe and projection).
        groups: how many, between 1 and the number of specifications.
        seed: public seed of the starts.

    Returns:
        Non-empty groups; every specification is in one.

    Raises:
        DataError: if they are not comparable, a name occurs twice, or the number of groups does not fit.
    """
    _check(specifications, groups)
    ordered = sorted(specifications, key=lambda one: one.name)
    points = _centred(np.stack([one.vector.astype(np.float64) for one in ordered]))
    best: tuple[float, npt.NDArray[np.int64], Matrix] | None = None
    for attempt in range(_RESTARTS):
        found = _one_start(points, groups, np.random.default_rng([seed, attempt]))
        if best is None or found[0] > best[0] + 1e-12:
            best = found
    if best is None:
        raise DataError("clustering gave no groups")
    _, owner, centres = best
    scores = np.einsum("ij,ij->i", points, centres[owner])
    named = [(np.flatnonzero(owner == number), number) for number in range(groups)]
    named.sort(key=lambda one: (-len(one[0]), ordered[int(one[0][0])].name))
    return tuple(
        Group(f"group-{place}", tuple(ordered[int(i)].name for i in index), float(scores[index].mean()))
        for place, (index, _) in enumerate(named, 1)
    )


def _check(specifications: Sequence[Specification], groups: int) -> None:
    if not 1 <= groups <= len(specifications):
        raise DataError(
            f"groups: got {groups} for {len(specifications)} specifications; allowed 1 to that number"
        )
    kinds = {(one.base_fingerprint, one.recipe, one.projection, one.vector.size) for one in specifications}
    if len(kinds) > 1:
        raise DataError(
            "specifications of other base models, lora_A recipes or projections cannot be grouped"
        )
    if len({one.name for one in specifications}) != len(specifications):
        raise DataError("two specifications have one name; name each client once")


def _unit(rows: Matrix) -> Matrix:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Matrix = rows / np.where(norms > 0, norms, 1.0)
    return scaled


def _centred(rows: Matrix) -> Matrix:
    return _unit(rows - rows.mean(axis=0)) if len(rows) > 2 else rows


def _one_start(
    points: Matrix, groups: int, generator: np.random.Generator
) -> tuple[float, npt.NDArray[np.int64], Matrix]:
    centres = _spread_start(points, groups, generator)
    owner = np.full(len(points), -1, dtype=np.int64)
    for _ in range(_ROUNDS):
        scores = points @ centres.T
        new = scores.argmax(axis=1)
        for empty in sorted(
            set(range(groups)) - set(new.tolist())
        ):  # the worst placed point opens an empty group
            counts = np.bincount(new, minlength=groups)
            movable = counts[new] > 1
            worst = int(np.where(movable, scores[np.arange(len(points)), new], np.inf).argmin())
            new[worst] = empty
        if np.array_equal(new, owner):
            break
        owner = new
        centres = _unit(np.stack([points[owner == number].sum(axis=0) for number in range(groups)]))
    return float(np.einsum("ij,ij->", points, centres[owner])), owner, centres


def _spread_start(points: Matrix, groups: int, generator: np.random.Generator) -> Matrix:
    """Choose starts far apart, each with probability by its distance from those chosen before."""
    chosen = [int(generator.integers(len(points)))]
    while len(chosen) < groups:
        far = 1.0 - (points @ points[chosen].T).max(axis=1)
        far[chosen] = 0.0
        far = np.clip(far, 0.0, None)
        rest = [i for i in range(len(points)) if i not in chosen]
        weights = far[rest]
        total = float(weights.sum())
        chances = weights / total if total > 0 else np.full(len(rest), 1.0 / len(rest))
        chosen.append(rest[int(generator.choice(len(rest), p=chances))])
    return points[chosen]


def group_specification(group: Group, specifications: Sequence[Specification]) -> Specification:
    """Return a query for a whole group: the mean direction of its members (never stored, no statement of its own)."""
    members = [one for one in specifications if one.name in set(group.members)]
    total = np.sum([one.vector.astype(np.float64) for one in members], axis=0)
    return replace(
        members[0],
        name=group.name,
        vector=unit_vector(total.astype(np.float32)),
        privacy=PrivacyStatement("none", conditions=("mean of the members' released specifications",)),
        metadata={},
    )


def write_overlays(
    folder: Path, groups: Sequence[Group], run_name: str, starts: Mapping[str, str] | None = None
) -> list[Path]:
    """Write one overlay per group: `fedlora simulate CONFIG -o FILE` then trains that group's own global adapter.

    Args:
        folder: where to write.
        groups: whose members are client ids.
        run_name: each run's name is this and the group's.
        starts: group name to the adapter that it starts from (`adapter.init_from`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for group in groups:
        content: dict[str, object] = {
            "run": {"name": f"{run_name}-{group.name}"},
            "federation": {"members": list(group.members)},
        }
        start = (starts or {}).get(group.name)
        if start is not None:
            content["adapter"] = {"init_from": start}
        path = folder / f"{group.name}.yaml"
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")  # JSON is YAML
        written.append(path)
    return written
