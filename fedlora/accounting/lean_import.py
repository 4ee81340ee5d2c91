"""Import dp_accounting's PLD code without the parts of SciPy that it only names.

`dp_accounting.pld` imports `scipy.stats`, `scipy.signal` and `scipy.optimize`, more than half of the start-up time of
every command that prints an epsilon. Of them a Gaussian's privacy loss needs three functions of the normal law
and one FFT convolution, which `scipy.special` and `scipy.fft` have. During the import stand-ins take
the places of the three modules; whatever they do not have is looked up in the real one. A test checks that
each function returns the same bits as SciPy's.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import scipy
from scipy.special import log_ndtr, ndtr, ndtri

_NAMES: Final = ("stats", "signal", "optimize")
_LOCK: Final = threading.Lock()


class Normal:
    """A centred normal law of standard deviation `scale`, by the formulas of `scipy.stats.norm`."""

    def __init__(self, scale: float = 1.0) -> None:
        """Keep the standard deviation, > 0."""
        self._scale = scale

    def cdf(self, x: Any) -> Any:
        """Return P(X <= x)."""
        return ndtr(np.asarray(x) / self._scale)

    def logcdf(self, x: Any) -> Any:
        """Return log P(X <= x)."""
        return log_ndtr(np.asarray(x) / self._scale)

    def ppf(self, q: Any) -> Any:
        """Return the x with P(X <= x) = q."""
        return ndtri(np.asarray(q)) * self._scale


def fftconvolve(first: npt.ArrayLike, second: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the full convolution of two real vectors, by the steps of `scipy.signal.fftconvolve`."""
    from scipy import fft

    one, two = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    size = one.size + two.size - 1
    length = fft.next_fast_len(size, True)
    product = fft.rfftn(one, [length], axes=[0]) * fft.rfftn(two, [length], axes=[0])
    found: npt.NDArray[np.float64] = fft.irfftn(product, [length], axes=[0])[:size]
    return found


class _StandIn(ModuleType):
    """Serves what it was given, and everything else from the real module (imported then)."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the real module."""
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:  # another thread asks before the import has ended
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def load_pld() -> ModuleType:
    """Import and return `dp_accounting.pld.privacy_loss_distribution` (with `pld_pmf` and `common` beside it)."""
    wanted = "dp_accounting.pld.privacy_loss_distribution"
    with _LOCK:
        if wanted in sys.modules:
            return importlib.import_module(wanted)
        # what is there already costs nothing (transformers brings scipy.optimize)
        names = [name for name in (f"scipy.{name}" for name in _NAMES) if name not in sys.modules]
        stand_ins = {name: _StandIn(name) for name in names}
        if "scipy.stats" in stand_ins:
            stand_ins["scipy.stats"].norm = Normal  # type: ignore[attr-defined]
        if "scipy.signal" in stand_ins:
            stand_ins["scipy.signal"].fftconvolve = fftconvolve  # type: ignore[attr-defined]
        sys.modules.update(stand_ins)
        try:
            return importlib.import_module(wanted)
        finally:
            for name, stand_in in stand_ins.items():
                if sys.modules.get(name) is stand_in:
                    del sys.modules[name]
                if vars(scipy).get(name.removeprefix("scipy.")) is stand_in:
                    delattr(scipy, name.removeprefix("scipy."))
