"""Gaussian numbers that are the same bits on every machine.

Raw words of NumPy's Philox4x64-10 counter generator (their stream is part of NumPy's stability promise) are
turned into normal numbers by the inverse distribution function of Wichura (1988), "Algorithm AS 241: The
Percentage Points of the Normal Distribution", PPND16, with a logarithm from the same operations: only IEEE-754
addition, multiplication, division and square root, each rounded once, so no library or processor can differ.
For public starting points only; never for privacy noise.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

GENERATOR: Final = "philox4x64-10/as241/1"
"""Name and version of the generator; another one gets another name."""

Floats = npt.NDArray[np.float64]

_A = (
    3.3871328727963666080, 133.14166789178437745, 1971.5909503065514427, 13731.693765509461125,
    45921.953931549871457, 67265.770927008700853, 33430.575583588128105, 2509.0809287301226727,
)  # fmt: skip
_B = (
    1.0, 42.313330701600911252, 687.18700749205790830, 5394.1960214247511077, 21213.794301586595867,
    39307.895800092710610, 28729.085735721942674, 5226.4952788528545610,
)  # fmt: skip
_C = (
    1.42343711074968357734, 4.63033784615654529590, 5.76949722146069140550, 3.64784832476320460504,
    1.27045825245236838258, 0.241780725177450611770, 0.0227238449892691845833, 7.74545014278341407640e-4,
)  # fmt: skip
_D = (
    1.0, 2.05319162663775882187, 1.67638483018380384940, 0.689767334985100004550, 0.148103976427480074590,
    0.0151986665636164571966, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
)  # fmt: skip
_E = (
    6.65790464350110377720, 5.46378491116411436990, 1.78482653991729133580, 0.296560571828504891230,
    0.0265321895265761230930, 0.00124266094738807843860, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
)  # fmt: skip
_F = (
    1.0, 0.599832206555887937690, 0.136929880922735805310, 0.0148753612908506148525, 7.86869131145613259100e-4,
    1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
)  # fmt: skip
_LN2: Final = 0.6931471805599453


def _poly(coefficients: tuple[float, ...], x: Floats) -> Floats:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _log(x: Floats) -> Floats:
    """Natural logarithm of positive numbers from basic operations (relative error below 1e-15)."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = exponent.astype(np.float64) - small
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = _poly(tuple(2.0 / (2 * k + 1) for k in range(12)), ratio * ratio) * ratio
    return exponent * _LN2 + series


def normal_quantile(p: Floats) -> Floats:
    """Return the standard normal quantile of p in (0, 1).

    Example:
        >>> round(float(normal_quantile(np.array([0.975]))[0]), 12)
        1.95996398454
    """
    q = p - 0.5
    centre = np.abs(q) <= 0.425
    r = 0.180625 - np.where(centre, q * q, 0.0)
    inner = q * _poly(_A, r) / _poly(_B, r)
    tail = np.sqrt(-_log(np.where(centre, 0.25, np.minimum(p, 1.0 - p))))
    near = tail <= 5.0
    low, high = tail - 1.6, tail - 5.0
    outer = np.where(near, _poly(_C, low) / _poly(_D, low), _poly(_E, high) / _poly(_F, high))
    return np.where(centre, inner, np.where(q < 0.0, -outer, outer))


def uniforms(name: str, count: int) -> Floats:
    """Return `count` uniform numbers in (0, 1), odd multiples of 2^-53, for a stream named by a text."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.asarray(np.random.Philox(key=key).random_raw(count), dtype=np.uint64)
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def normals(name: str, count: int) -> Floats:
    """Return `count` standard normal numbers for a stream named by a text; the same on every platform.

    Example:
        >>> normals("fedlora", 3).shape
        (3,)
    """
    return normal_quantile(uniforms(name, count))
