"""The shared lora_A: drawn by every party from a recipe and checked by its hash.

"LoRA and Privacy: When Random Projections Help (and When They Don't)", Algorithm 2: lora_A ~ N(0, 1/r), frozen and
common to all parties. The hash covers the recipe and the numbers it gave here, so a party that draws others
is found before its lora_B is used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from fedlora.adapters.philox_normal import GENERATOR, normals, uniforms
from fedlora.errors import UnsupportedCombinationError
from fedlora.wire.payload import AdapterLayout

_VERSION: Final = 1
Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class ARecipe:
    """PUBLIC. How every party draws the common lora_A.

    Attributes:
        seed: the experiment's public seed.
        shapes: module path to (rank, in_features).
        init: "gaussian" (N(0, 1/r)), "kaiming" (uniform with variance 1/(3 in), PEFT's default) or
            "orthonormal" (rows orthonormal).
    """

    seed: int
    shapes: Mapping[str, tuple[int, int]]
    init: str = "gaussian"

    @classmethod
    def of(cls, layout: AdapterLayout, seed: int, init: str = "gaussian") -> ARecipe:
        """Return the recipe for a layout's modules."""
        return cls(seed, {name: (spec.rank, spec.in_features) for name, spec in layout.modules.items()}, init)

    def draw(self, module: str) -> Matrix:
        """Draw one module's lora_A, (rank, in_features) float32.

        Raises:
            UnsupportedCombinationError: if `init` depends on the base weights (then lora_A has to travel).
        """
        rank, width = self.shapes[module]
        name = f"fedlora lora_A|{_VERSION}|{self.seed}|{module}|{rank}|{width}|{self.init}"
        if self.init == "gaussian":
            return (
                (normals(name, rank * width) * math.sqrt(1.0 / rank)).reshape(rank, width).astype(np.float32)
            )
        if self.init == "kaiming":
            bound = math.sqrt(1.0 / width)
            return (
                ((uniforms(name, rank * width) * 2.0 - 1.0) * bound).reshape(rank, width).astype(np.float32)
            )
        if self.init == "orthonormal":
            return _orthonormal(normals(name, rank * width).reshape(rank, width)).astype(np.float32)
        raise UnsupportedCombinationError(
            f"adapter.init: got {self.init!r} where lora_A is drawn from a recipe; allowed are gaussian, kaiming, "
            "orthonormal; choose a mechanism whose factors travel (factor, prism)"
        )

    def draw_all(self) -> dict[str, Matrix]:
        """Draw every module's lora_A."""
        return {module: self.draw(module) for module in self.shapes}

    @cached_property
    def sha256(self) -> str:
        """Hash over the recipe and over the drawn numbers (little-endian float32)."""
        header = {
            "version": _VERSION,
            "generator": GENERATOR,
            "seed": self.seed,
            "init": self.init,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        if self.init != "spectral":
            for module in sorted(self.shapes):
                digest.update(self.draw(module).astype("<f4").tobytes())
        return digest.hexdigest()


def _orthonormal(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Gram-Schmidt, twice, with exactly rounded sums: the same bits everywhere."""
    done: list[npt.NDArray[np.float64]] = []
    for row in rows:
        current = row
        for _ in range(2):
            for other in done:
                current = current - math.fsum((current * other).tolist()) * other
        done.append(current / math.sqrt(math.fsum((current * current).tolist())))
    return np.stack(done)
