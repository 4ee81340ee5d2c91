"""The PLD code is imported without most of SciPy, and every number keeps its bits."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy import signal, stats

from fedlora.accounting.lean_import import Normal, fftconvolve

EPSILONS = """
import sys
if sys.argv[1] == "whole":
    import scipy.stats, scipy.signal, scipy.optimize
from fedlora.accounting import *
group = ProjectionGroup("adapters", 64, 8, 1.0)
events = [
    PoissonGaussianEvent(1.0, 0.1).times(7),
    compose([(PoissonGaussianEvent(0.8, 0.05), 3), (PoissonGaussianEvent(2.0, 0.3), 5), (GaussianEvent(4.0), 1)]),
    NoisyProjectionEvent((group,), sample_rate=0.1).times(4),
]
for event in events:
    for adjacency in ("add_or_remove", "replace_one"):
        print(repr(epsilon_of(event, 1e-6, adjacency=adjacency).epsilon))
print("scipy.stats" in sys.modules, "scipy.signal" in sys.modules)
import scipy
print(scipy.stats.norm.cdf(0.0), scipy.signal.fftconvolve([1.0], [2.0]), scipy.stats.__file__ is not None)
from dp_accounting.pld import privacy_loss_mechanism
print(privacy_loss_mechanism.stats.binom.sf(1, 4, 0.5) == scipy.stats.binom.sf(1, 4, 0.5))
"""


@pytest.mark.parametrize("scale", [0.01, 0.3, 1.0, 7.7, 1e6])
def test_the_normal_law_has_the_bits_of_scipy(scale: float) -> None:
    x = np.concatenate([np.linspace(-45.0, 45.0, 20_001) * scale, [0.0, -np.inf, np.inf]])
    theirs = stats.norm(scale=scale)
    np.testing.assert_array_equal(Normal(scale).cdf(x), theirs.cdf(x))
    np.testing.assert_array_equal(Normal(scale).logcdf(x), theirs.logcdf(x))
    half = np.geomspace(1e-300, 0.5, 3000)
    quantiles = np.concatenate([half, 1.0 - half[half > 1e-16]])
    np.testing.assert_array_equal(Normal(scale).ppf(quantiles), theirs.ppf(quantiles))
    assert float(Normal(scale).ppf(1e-12)) == float(theirs.ppf(1e-12))


@pytest.mark.parametrize(("first", "second"), [(1, 1), (5, 9), (1000, 77), (4097, 4097), (30_000, 3)])
def test_the_convolution_has_the_bits_of_scipy(first: int, second: int) -> None:
    rng = np.random.default_rng(first)
    one, two = rng.random(first), rng.random(second)
    np.testing.assert_array_equal(fftconvolve(one, two), signal.fftconvolve(one, two))


def test_epsilons_are_the_same_with_all_of_scipy_loaded_and_scipy_stays_whole() -> None:
    lean, whole = (
        subprocess.run([sys.executable, "-c", EPSILONS, how], check=True, capture_output=True, text=True)
        .stdout.strip()
        .splitlines()
        for how in ("lean", "whole")
    )
    assert lean[:6] == whole[:6]
    assert lean[6] == "False False"
    assert lean[7:] == whole[7:]
    assert lean[8] == "True"


def test_the_rest_of_scipy_stays_out_where_a_part_of_it_is_loaded_already() -> None:
    """Transformers brings scipy.optimize."""
    script = """
import sys
import scipy.optimize
from fedlora.accounting.lean_import import load_pld
load_pld()
print("scipy.stats" in sys.modules, "scipy.signal" in sys.modules, scipy.optimize.brentq.__name__)
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False", "brentq"]


def test_a_stand_in_asked_before_the_import_has_ended_gives_the_real_module() -> None:
    script = """
import sys
from fedlora.accounting.lean_import import _StandIn
assert "scipy.signal" not in sys.modules
sys.modules["scipy.signal"] = _StandIn("scipy.signal")
from scipy.signal import hilbert
import scipy.signal
print(scipy.signal.__file__ is not None, hilbert.__module__.startswith("scipy."))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True"]
