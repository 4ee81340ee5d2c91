"""Check of every block's noise: releases without any record are read along canary directions, block by block.

Canary attacks look at all directions together: half the noise in one small block of many would hardly move their bound.
Here nobody is in, so that the statistic of a direction is pure noise, of variance 1 if its scale is as claimed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import stats

from fedlora.audit.client import ClientAudit
from fedlora.audit.gradient import GradientAudit
from fedlora.config.schema import ClientPrivacy, RecordPrivacy
from fedlora.training.checked import SelfCheck
from fedlora.training.session import Workbench

_NAME: Final = "every block is noised as claimed"
_DIRECTIONS: Final = 40_000
_ENTRIES: Final = 2_000
"""Draws per block that are asked for: half the noise, and nine tenths of it, is then out of the question."""
_FEW: Final = 400
"""Blocks with fewer draws than this are judged together."""
_CHANCE: Final = 1e-9
"""Probability of a false alarm for each block, and for each release."""


def check_noise_scale(bench: Workbench) -> list[SelfCheck]:
    """Return whether no block has less noise than its claim; nothing without privacy.

    Args:
        bench: the run's model and mechanism; no record is read, and nothing of it is changed.
    """
    privacy = bench.config.privacy
    if isinstance(privacy, RecordPrivacy):
        found, labels = GradientAudit(bench, canaries=_DIRECTIONS).quiet(_ENTRIES)
    elif isinstance(privacy, ClientPrivacy):
        found, labels = ClientAudit(bench, canaries=_DIRECTIONS).quiet(_ENTRIES)
    else:
        return []
    return [judge_scales(found, labels)]


def judge_scales(found: npt.NDArray[np.float64], labels: npt.NDArray[np.str_]) -> SelfCheck:
    """Judge pure noise by its variance in every block, and in every release (a client of a cohort, or a round).

    Args:
        found: (releases, directions) statistics, independent, of variance 1 if the noise is as claimed.
        labels: (directions,) block of each.
    """
    names, counts = np.unique(labels, return_counts=True)
    few = [str(name) for name, count in zip(names, counts, strict=True) if count * len(found) < _FEW]
    merged = dict.fromkeys(few, "small blocks")
    blocks = np.array([merged.get(str(one), str(one)) for one in labels])
    parts = {str(block): found[:, blocks == block] for block in np.unique(blocks)}
    if found.shape[1] >= _FEW:
        parts |= {f"release {number + 1}": row for number, row in enumerate(found)}
    least = {name: float(np.square(values).mean()) for name, values in parts.items()}
    low = [
        name
        for name, values in parts.items()
        if least[name] * values.size < float(stats.chi2.ppf(_CHANCE, values.size))
    ]
    where = min(least, key=lambda name: least[name])
    ratio = float(np.sqrt(least[where]))
    detail = f"least {ratio:.3f} of the claimed scale ({where}), {len(np.unique(blocks))} parts"
    return SelfCheck(_NAME, not low, detail if not low else f"{detail}; too little in {', '.join(low[:3])}")


__all__ = ["check_noise_scale", "judge_scales"]
