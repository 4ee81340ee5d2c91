"""Gaussian noise from a cryptographic generator, and the noise stage.

The keystream is AES-256 in counter mode under a key from the operating system's entropy, replaced after
2^30 bytes; on a GPU with Triton it is ChaCha20 on the device under a fresh key for each draw. Box-Muller turns
53-bit uniform numbers into Gaussians in float64. Assumption: attacks on floating-point Gaussian sampling
(Mironov 2012; Holohan & Braghin 2021) are out of scope.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from fedlora.accounting import Event, NonPrivateEvent, PoissonGaussianEvent
from fedlora.errors import PrivacyParameterError, SensitivityMismatchError
from fedlora.mechanisms.stages import ClippedSum, Metric, NoisyUpdate

_REKEY_BYTES: Final = 2**30
_ZEROS: Final = memoryview(bytes(2**22))
_CHUNK: Final = 2**14


@runtime_checkable
class NoiseSource(Protocol):
    """Where Gaussian numbers come from."""

    private: bool
    """True if nobody can repeat the draws (cryptographic, seeded by the operating system)."""

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return (count,) independent standard Gaussians. SENSITIVE until added to a sum."""
        ...


class _Keystream:
    """AES-256-CTR under fresh operating-system keys; one per process, safe for threads and forks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = -1
        self._left = 0
        self._context: CipherContext | None = None

    def words(self, count: int) -> npt.NDArray[np.uint64]:
        """Return `count` uniform 64-bit words."""
        out = np.empty(count, dtype=np.uint64)
        self.fill(out)
        return out

    def fill(self, out: npt.NDArray[Any]) -> None:
        """Overwrite a contiguous array with uniform bytes."""
        view = out.view(np.uint8).data
        with self._lock:
            done = 0
            while done < len(view):
                size = min(len(view) - done, len(_ZEROS))
                self._ready(size).update_into(_ZEROS[:size], view[done : done + size])
                self._left -= size
                done += size

    def _ready(self, size: int) -> CipherContext:
        if self._context is None or self._left < size or self._pid != os.getpid():
            cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16)))
            self._context, self._left, self._pid = cipher.encryptor(), _REKEY_BYTES, os.getpid()
        return self._context


_STREAM: Final = _Keystream()


class OsNoise:
    """Noise from operating-system entropy; nothing of it can be configured, logged or repeated."""

    private = True

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return (count,) standard Gaussians."""
        if device.type == "cpu":
            out = torch.empty(count, dtype=dtype)
            for part in torch.split(out, _CHUNK):  # small enough for the processor's cache
                part.copy_(box_muller(torch.from_numpy(_even_words(part.shape[0])))[: part.shape[0]])
            return out
        return box_muller(_device_words(count + count % 2, device))[:count].to(dtype)


def _device_words(count: int, device: torch.device) -> torch.Tensor:
    """ChaCha20 on the device where Triton is there, else the processor's keystream, copied."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from fedlora.mechanisms.chacha_cuda import random_words

        made: torch.Tensor = random_words(count, device)
        return made
    words = torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")
    _STREAM.fill(words.numpy())
    return words.to(device, non_blocking=True)


def _even_words(count: int) -> npt.NDArray[np.int64]:
    return _STREAM.words(count + count % 2).view(np.int64)


def box_muller(words: torch.Tensor) -> torch.Tensor:
    """Turn uniform 64-bit words into as many float64 standard Gaussians.

    Args:
        words: (2 n,) int64, uniform.

    Returns: (2 n,) float64.
    """
    uniform = torch.bitwise_right_shift(words, 11).bitwise_and_(2**53 - 1).to(torch.float64)
    half = words.shape[0] // 2
    radius = (uniform[:half] + 0.5).mul_(2.0**-53).log_().mul_(-2.0).sqrt_()
    angle = uniform[half:].mul_(2.0**-53 * 2.0 * math.pi)
    return torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])


class SeededNoise:
    """TEST ONLY. Repeatable noise per (seed, client, round); a run that uses it has no privacy."""

    private = False

    def __init__(self, seed: int, client: str, server_round: int) -> None:
        """Derive an own Philox stream from the three names."""
        digest = hashlib.sha256(f"fedlora-test-noise|{seed}|{client}|{server_round}".encode()).digest()
        self._generator = np.random.Generator(np.random.Philox(int.from_bytes(digest[:16], "little")))

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return the next `count` numbers of the stream."""
        return torch.from_numpy(self._generator.standard_normal(count)).to(device=device, dtype=dtype)


def draw_gaussians(
    sources: Sequence[NoiseSource], size: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return (len(sources), size) standard Gaussians, row k from source k; one bulk draw where all are `OsNoise`."""
    if all(type(source) is OsNoise for source in sources):
        return sources[0].gaussians(len(sources) * size, device, dtype).view(len(sources), size)
    return torch.stack([source.gaussians(size, device, dtype) for source in sources])


def noise_stddevs(metric: Metric, bound: float, noise_multiplier: float) -> dict[str, float]:
    """Return group to sigma C / w_g. PUBLIC."""
    groups = dict.fromkeys(metric.group_of.values())
    return {group: noise_multiplier * bound / metric.weight(group) for group in groups}


def gaussian_event(metric: Metric, noise_multiplier: float, sample_rate: float) -> Event:
    """Return the event of one step: per-layer clipping of L groups has sensitivity sqrt(L) C.

    Reference: one subsampled Gaussian covers all layers, because they share one batch; summing subsampled
    per-layer terms is not a bound.
    """
    parts = len(dict.fromkeys(metric.group_of.values())) if metric.per_layer else 1
    return PoissonGaussianEvent(noise_multiplier / math.sqrt(parts), sample_rate)


def add_noise(
    clipped: ClippedSum,
    metric: Metric,
    sources: Sequence[NoiseSource],
    noise_multiplier: float,
    sample_rate: float,
) -> NoisyUpdate:
    """Add isotropic Gaussian noise of sigma C / w_g per group to each client's sum.

    Formal guarantee: with adjacency add-or-remove and Poisson sampling, the result of one client is the
    event's mechanism; the standard deviation is read from the sum's own bound.

    Args:
        clipped: SENSITIVE.
        metric: the mechanism's metric; must be the one that was clipped.
        sources: one for each client.
        noise_multiplier: sigma > 0, finite. PUBLIC.
        sample_rate: q in (0, 1]. PUBLIC.

    Raises:
        PrivacyParameterError: if sigma is not finite and positive or a source is missing.
        SensitivityMismatchError: if the sum was clipped in another metric or not at all.
    """
    check_noise(clipped, metric, sources, noise_multiplier)
    stddevs = noise_stddevs(metric, clipped.bound, noise_multiplier)
    event = gaussian_event(metric, noise_multiplier, sample_rate)
    flat = clipped.blocks.flat
    noise = draw_gaussians(sources, flat.shape[1], flat.device, flat.dtype)
    for group, stddev in stddevs.items():
        for first, end in clipped.blocks.table.spans(metric.blocks_of(group)):
            noise[:, first:end].mul_(stddev)
    return NoisyUpdate(clipped.blocks.like(flat + noise), stddevs, event)


def check_noise(
    clipped: ClippedSum, metric: Metric, sources: Sequence[NoiseSource], noise_multiplier: float
) -> None:
    """Refuse a sum or a parameter that noise cannot make private.

    Raises:
        PrivacyParameterError: if sigma is not finite and positive, or sources and clients differ in number.
        SensitivityMismatchError: if metric or blocks differ, or nothing was clipped.
    """
    if not math.isfinite(noise_multiplier) or not (noise_multiplier > 0.0):
        raise PrivacyParameterError(f"noise_multiplier: got {noise_multiplier}; allowed finite and above 0")
    if len(sources) != clipped.blocks.flat.shape[0]:
        raise PrivacyParameterError(
            "noise: the number of sources and of clients differ; give each client its own"
        )
    if clipped.metric is not metric and clipped.metric != metric:
        raise SensitivityMismatchError(
            "noise: the sum was clipped in another metric; use the mechanism's own clip"
        )
    if not math.isfinite(clipped.bound):
        raise SensitivityMismatchError("noise: the sum was not clipped; clip it first")
    if set(metric.group_of) != set(clipped.blocks.table.shapes):
        raise SensitivityMismatchError(
            "noise: some blocks belong to no group; every released block needs noise"
        )


def pass_through(clipped: ClippedSum) -> NoisyUpdate:
    """Release a sum as it is, for runs without record-level privacy; its event says so."""
    groups = dict.fromkeys(clipped.metric.group_of.values(), 0.0)
    return NoisyUpdate(clipped.blocks, groups, NonPrivateEvent())
