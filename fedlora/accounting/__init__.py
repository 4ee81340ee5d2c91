"""Privacy accounting: events, tight upper bounds on epsilon, composition, calibration; without torch and flwr."""

from __future__ import annotations

from fedlora.accounting.accountant import clear_caches, delta_of, epsilon_of, within_budget
from fedlora.accounting.calibrate import (
    calibrate_noise_multiplier,
    max_sample_rate,
    max_steps_within,
    solve_parameter,
)
from fedlora.accounting.conditional import M1Event, PaveEvent, PaveLayer, SketchEvent, VectorProjectionEvent
from fedlora.accounting.events import (
    ComposedEvent,
    Event,
    GaussianEvent,
    NoisyProjectionEvent,
    NonPrivateEvent,
    PoissonGaussianEvent,
    ProjectionGroup,
    SelfComposedEvent,
)
from fedlora.accounting.reports import Adjacency, EpsilonReport, compose, parallel

__all__ = [
    "Adjacency",
    "ComposedEvent",
    "EpsilonReport",
    "Event",
    "GaussianEvent",
    "M1Event",
    "NoisyProjectionEvent",
    "NonPrivateEvent",
    "PaveEvent",
    "PaveLayer",
    "PoissonGaussianEvent",
    "ProjectionGroup",
    "SelfComposedEvent",
    "SketchEvent",
    "VectorProjectionEvent",
    "calibrate_noise_multiplier",
    "clear_caches",
    "compose",
    "delta_of",
    "epsilon_of",
    "max_sample_rate",
    "max_steps_within",
    "parallel",
    "solve_parameter",
    "within_budget",
]
