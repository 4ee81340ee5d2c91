"""Specifications from adapters: compact vectors, matching and distortion against the product space."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedlora.errors import DataError, LayoutMismatchError
from fedlora.names import LORA_B, block_name
from fedlora.specs.types import MAX_DIMENSION, Vector
from fedlora.wire.payload import AdapterPayload

Matrix = npt.NDArray[np.float64]

_CHUNK = 4096


@dataclass(frozen=True)
class PublicProjection:
    """A public Gaussian projection R^input_dim -> R^output_dim that preserves cosines (Johnson-Lindenstrauss).

    The matrix is drawn from Philox with a public seed, in chunks of rows, and is never stored: equal
    parameters give equal coordinates everywhere. It sees no data, so projecting is post-processing.

    Example:
        >>> projection = PublicProjection(input_dim=10, output_dim=4)
        >>> projection.name
        'gaussian-10-4-0'
    """

    input_dim: int
    output_dim: int = MAX_DIMENSION
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the dimensions."""
        if not 1 <= self.output_dim <= MAX_DIMENSION or not self.input_dim >= 1:
            raise DataError(
                f"a projection needs input_dim >= 1 and 1 <= output_dim <= {MAX_DIMENSION}; "
                f"got {self.input_dim} -> {self.output_dim}"
            )

    @property
    def name(self) -> str:
        """Public name; two vectors are comparable only under one name."""
        return f"gaussian-{self.input_dim}-{self.output_dim}-{self.seed}"

    def apply(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Project rows: (n, input_dim) -> (n, output_dim)."""
        if vectors.ndim != 2 or vectors.shape[1] != self.input_dim:
            raise DataError(f"expected rows of {self.input_dim} numbers; got shape {vectors.shape}")
        total = np.zeros((vectors.shape[0], self.output_dim), dtype=np.float32)
        for start in range(0, self.input_dim, _CHUNK):
            stop = min(start + _CHUNK, self.input_dim)
            key = int.from_bytes(hashlib.sha256(f"{self.name}/{start}".encode()).digest()[:16], "little")
            generator = np.random.Generator(np.random.Philox(key=key))
            rows = generator.standard_normal((stop - start, self.output_dim), dtype=np.float32)
            total += vectors[:, start:stop] @ rows
        return total / np.float32(np.sqrt(self.output_dim))


def compact_vector(payload: AdapterPayload, layers: Sequence[str] | None = None) -> npt.NDArray[np.float32]:
    """Concatenate lora_B over layers: the compact specification (Eq. 6), not normalised.

    Args:
        payload: of kind `lora_b` (lora_A frozen and given by its recipe).
        layers: fixed, public choice of modules; every adapted module if None.

    Returns:
        (sum_l out_l * r_l,) float32.

    Raises:
        LayoutMismatchError: if the payload is of another kind or lacks a layer.

    Source: "PAVE Specifications of Learnwares Yield Intrinsic Privacy-Preserving Capabilities", Eq. 6.
    """
    if payload.kind != "lora_b":
        raise LayoutMismatchError(
            f"a specification needs a payload of kind lora_b (frozen lora_A); got {payload.kind!r}. "
            "Train it with mechanism.kind: lora_fa"
        )
    chosen = list(payload.modules) if layers is None else list(layers)
    missing = [layer for layer in chosen if block_name(layer, LORA_B) not in payload.blocks]
    if missing or not chosen:
        raise LayoutMismatchError(
            f"layers {missing[:3] or chosen} are not in the payload; it has {list(payload.modules)[:3]} ..."
        )
    return np.concatenate(
        [np.asarray(payload.blocks[block_name(layer, LORA_B)], np.float32).ravel() for layer in chosen]
    )


def specification_vector(payload: AdapterPayload, layers: Sequence[str] | None = None) -> tuple[Vector, str]:
    """Compact, projected and normalised vector with the name of its public projection.

    Raises:
        DataError: if the adapter is zero (an untrained lora_B has no direction).
    """
    vector = compact_vector(payload, layers)
    name = "none"
    if vector.size > MAX_DIMENSION:
        projection = PublicProjection(input_dim=vector.size)
        vector, name = projection.apply(vector[None])[0], projection.name
    return unit_vector(vector), name


def unit_vector(vector: npt.NDArray[np.float32]) -> Vector:
    """Scale to unit norm.

    Raises:
        DataError: if the vector is zero or not finite.
    """
    norm = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(norm) or not norm > 0:
        raise DataError("a specification vector must be finite and not zero: train the adapter first")
    return np.asarray(vector / norm, dtype=np.float32)


def cosine(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> float:
    """Cosine of two vectors (Eq. 3).

    Raises:
        DataError: if their sizes differ or one is zero.
    """
    if left.shape != right.shape:
        raise DataError(f"vectors of {left.shape} and {right.shape} cannot be compared")
    return float(unit_vector(left).astype(np.float64) @ unit_vector(right).astype(np.float64))


def expanded_cosine(
    left: Mapping[str, Matrix], right: Mapping[str, Matrix], lora_a: Mapping[str, Matrix]
) -> float:
    """Cosine of the products lora_B lora_A, from factors: <B A, B' A> = tr(B^T B' A A^T).

    Args:
        left: layer to lora_B, (out, r).
        right: the same for the other adapter.
        lora_a: layer to the common lora_A, (r, in); no (out, in) matrix is formed.
    """
    dot = left_norm = right_norm = 0.0
    for layer, factor in lora_a.items():
        gram = factor @ factor.T
        dot += float(np.sum((left[layer].T @ right[layer]) * gram.T))
        left_norm += float(np.sum((left[layer].T @ left[layer]) * gram.T))
        right_norm += float(np.sum((right[layer].T @ right[layer]) * gram.T))
    if not left_norm > 0 or not right_norm > 0:
        raise DataError("an untrained adapter has no direction to compare")
    return dot / float(np.sqrt(left_norm * right_norm))


def distortion(
    left: Mapping[str, Matrix], right: Mapping[str, Matrix], lora_a: Mapping[str, Matrix]
) -> float:
    """|cos(B, B') - cos(B A, B' A)|: what comparing compact forms costs (Section 2.1)."""
    flat_left = np.concatenate([left[layer].ravel() for layer in lora_a]).astype(np.float32)
    flat_right = np.concatenate([right[layer].ravel() for layer in lora_a]).astype(np.float32)
    return abs(cosine(flat_left, flat_right) - expanded_cosine(left, right, lora_a))
