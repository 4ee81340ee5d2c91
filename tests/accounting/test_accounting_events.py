"""Events: meaning, JSON, validation, composition, parallel composition."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlora.accounting as acct
from fedlora.errors import PrivacyParameterError, UnsupportedEventError

_sigma = st.floats(0.01, 100.0)
_rate = st.floats(1e-6, 1.0)
_gaussian = st.builds(acct.GaussianEvent, _sigma)
_poisson = st.builds(acct.PoissonGaussianEvent, _sigma, _rate)


@st.composite
def _projection(draw: st.DrawFn) -> acct.NoisyProjectionEvent:
    groups = []
    for index in range(draw(st.integers(1, 3))):
        width = draw(st.one_of(st.none(), st.integers(1, 5000)))
        rank = None if width is None else draw(st.integers(1, width))
        out = draw(st.one_of(st.none(), st.integers(1, 100)))
        groups.append(acct.ProjectionGroup(f"g{index}", width, rank, draw(st.floats(0.1, 50.0)), out))
    rate = draw(st.one_of(st.none(), _rate))
    clip, source = draw(st.sampled_from(["shared", "separate"])), draw(st.sampled_from(["client", "shared"]))
    return acct.NoisyProjectionEvent(tuple(groups), rate, clip, source)


_basic = st.one_of(
    _gaussian,
    _poisson,
    _projection(),
    st.just(acct.NonPrivateEvent()),
    st.builds(acct.VectorProjectionEvent, st.integers(5, 50), st.integers(1, 5), st.floats(-0.9, 1.0)),
    st.builds(
        acct.SketchEvent, st.integers(1, 9), st.integers(1, 9), st.floats(1.1, 50.0), st.integers(1, 4)
    ),
    st.builds(
        lambda r, k, g: acct.PaveEvent((acct.PaveLayer(r, k, g),)),
        st.integers(1, 9),
        st.integers(1, 9),
        st.floats(0, 0.9),
    ),
    st.builds(
        acct.M1Event,
        st.just(40),
        st.integers(1, 40),
        st.integers(0, 39),
        st.floats(0.1, 1.0),
        st.floats(0, 1.0),
        st.floats(0.1, 2.0),
        st.floats(0, 5.0),
        st.integers(1, 3),
    ),
)
_event = st.recursive(
    _basic,
    lambda inner: st.one_of(
        st.builds(acct.SelfComposedEvent, inner, st.integers(1, 1000)),
        st.builds(lambda parts: acct.ComposedEvent(tuple(parts)), st.lists(inner, max_size=3)),
    ),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(_event)
def test_events_survive_json(event: acct.Event) -> None:
    text = json.dumps(event.to_json(), allow_nan=False)
    again = acct.Event.from_json(json.loads(text))
    assert again == event
    assert again.key() == event.key()
    assert hash(again) == hash(event)
    assert again.chargeable == event.chargeable


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(_event, st.integers(1, 50)), max_size=4), st.randoms())
def test_composition_depends_on_the_multiset_only(parts: list[tuple[acct.Event, int]], rng: object) -> None:
    shuffled = list(parts)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    split = [(event, half) for event, count in shuffled for half in (1, count - 1)]
    assert acct.compose(parts).key() == acct.compose(split).key()


_BAD = [
    math.nan,
    math.inf,
    -math.inf,
    -1.0,
    True,
    np.bool_(True),
    "1.0",
    None,
    1j,
    np.float64("nan"),
    10**400,
]


@pytest.mark.parametrize("bad", _BAD)
def test_bad_numbers_are_refused_everywhere(bad: object) -> None:
    for build in (
        lambda: acct.GaussianEvent(bad),  # type: ignore[arg-type]
        lambda: acct.PoissonGaussianEvent(bad, 0.1),  # type: ignore[arg-type]
        lambda: acct.PoissonGaussianEvent(1.0, bad),  # type: ignore[arg-type]
        lambda: acct.ProjectionGroup("g", 8, 2, bad),  # type: ignore[arg-type]
        lambda: acct.NoisyProjectionEvent.single(8, 2, bad),  # type: ignore[arg-type]
        lambda: acct.SketchEvent(1, 1, bad),  # type: ignore[arg-type]
        lambda: acct.PaveLayer(1, 1, bad),  # type: ignore[arg-type]
        lambda: acct.epsilon_of(acct.GaussianEvent(1.0), bad),  # type: ignore[arg-type]
        lambda: acct.calibrate_noise_multiplier(acct.GaussianEvent, bad, 1e-5),  # type: ignore[arg-type]
    ):
        with pytest.raises(PrivacyParameterError):
            build()


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "3", None, math.nan, 10**13])
def test_bad_counts_are_refused(bad: object) -> None:
    with pytest.raises(PrivacyParameterError):
        acct.GaussianEvent(1.0).times(bad)  # type: ignore[arg-type]


def test_numpy_scalars_become_plain_numbers() -> None:
    event = acct.PoissonGaussianEvent(np.float32(0.5), np.float64(0.25)).times(np.int64(7))  # type: ignore[arg-type]
    assert event == acct.PoissonGaussianEvent(0.5, 0.25).times(7)
    assert type(event.to_json()["count"]) is int
    assert type(event.to_json()["event"]["noise_multiplier"]) is float


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"kind": "laplace"},
        {"kind": 3},
        {"kind": "gaussian"},
        {"kind": "gaussian", "noise_multiplier": 1.0, "extra": 2},
        {"kind": "gaussian", "noise_multiplier": "1.0"},
        {"kind": "self_composed", "event": {"kind": "gaussian", "noise_multiplier": 1.0}, "count": 0},
        {"kind": "noisy_projection", "groups": [3]},
        {"kind": "pave", "layers": 3},
    ],
)
def test_unknown_or_broken_json_is_refused(data: dict[str, object]) -> None:
    with pytest.raises((PrivacyParameterError, UnsupportedEventError)):
        acct.Event.from_json(data)


@pytest.mark.parametrize(("width", "rank"), [(8, 9), (8, 0), (8, None), (None, 3), (0, 1), (8.0, 2)])
def test_impossible_projections_are_refused(width: object, rank: object) -> None:
    with pytest.raises(PrivacyParameterError):
        acct.ProjectionGroup("g", width, rank, 1.0)  # type: ignore[arg-type]


def test_no_noise_and_known_projection_cost_infinity() -> None:
    for event in (acct.NonPrivateEvent(), acct.GaussianEvent(0.0), acct.PoissonGaussianEvent(0.0, 0.01)):
        for name in ("best", "rdp"):
            assert math.isinf(acct.epsilon_of(event, 1e-5, accountant=name).epsilon)
        mixed = [(acct.GaussianEvent(10.0), 5), (event, 1)]
        assert math.isinf(acct.epsilon_of(mixed, 0.5).epsilon)
        assert acct.delta_of(mixed, 100.0) == 1.0
        assert not acct.within_budget(mixed, 1e6, 1e-5)


def test_releasing_a_known_projection_without_noise_separates_neighbours() -> None:
    """ "LoRA and Privacy", Proposition 2, and "PAVE Specifications ...", Proposition 3.7, by simulation."""
    rng = np.random.default_rng(0)
    v, w = rng.normal(size=(3, 12)), rng.normal(size=(3, 12))
    for _ in range(50):
        a = rng.normal(size=(4, 12))
        released = v @ a.T
        assert np.allclose(released, v @ a.T)
        assert not np.allclose(released, w @ a.T)  # (A, B): exact test
        m = a.T @ a
        assert np.linalg.matrix_rank(v @ m - w @ m) > 0  # BA: images under V and V' are disjoint


def test_conditional_events_never_pay() -> None:
    events = (
        acct.VectorProjectionEvent(40, 8, 0.999),
        acct.M1Event(40, 20, 5, 0.999, 0.5, 0.1, 1.0),
        acct.SketchEvent(4, 8, 100.0),
        acct.PaveEvent((acct.PaveLayer(8, 8, 0.01),)),
    )
    for event in events:
        for wrapped in (event, event.times(3), acct.ComposedEvent((acct.GaussianEvent(1.0), event))):
            assert wrapped.chargeable is False
            with pytest.raises(UnsupportedEventError):
                acct.within_budget(wrapped, 100.0, 1e-5)
        report = acct.epsilon_of(event, 1e-2)
        assert any("never pays" in text for text in report.conditions)
        assert any("secret" in text for text in report.conditions)
        assert report.adjacency is acct.Adjacency.REPLACE_ONE
    with pytest.raises(UnsupportedEventError):
        acct.epsilon_of(events[0].times(2), 1e-2)


def test_nothing_released_costs_nothing() -> None:
    empty = acct.compose([])
    assert acct.epsilon_of(empty, 1e-5).epsilon == 0.0
    assert acct.delta_of(empty, 0.0) == 0.0
    assert acct.within_budget([], 0.0, 1e-5)


def test_parallel_takes_the_maximum_and_says_what_it_assumes() -> None:
    reports = [acct.epsilon_of(acct.GaussianEvent(s), 1e-5, unit="record") for s in (1.0, 3.0, 2.0)]
    run = acct.parallel(reports)
    assert run.epsilon == max(report.epsilon for report in reports)
    assert any("every record belongs to one client" in text for text in run.conditions)
    with pytest.raises(PrivacyParameterError):
        acct.parallel([])
    with pytest.raises(PrivacyParameterError):
        acct.parallel([*reports, acct.epsilon_of(acct.GaussianEvent(1.0), 1e-6, unit="record")])
    replaced = acct.epsilon_of(acct.GaussianEvent(1.0), 1e-5, adjacency="replace-one", unit="record")
    with pytest.raises(PrivacyParameterError):
        acct.parallel([*reports, replaced])


def test_import_is_light() -> None:
    heavy = "('torch', 'flwr', 'dp_accounting', 'opacus')"
    code = f"import sys, fedlora.accounting; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "event",
    [
        lambda: acct.PoissonGaussianEvent(1e300, 0.1),
        lambda: acct.PoissonGaussianEvent(1e-300, 1e-300),
        lambda: acct.SketchEvent(1, 1, 1e300),
    ],
)
def test_numbers_beyond_double_precision_are_refused_or_bounded(event) -> None:
    try:
        report = acct.epsilon_of(event(), 1e-5)
    except PrivacyParameterError:
        return
    assert report.epsilon >= 0.0
