"""The bounds on a noisy projection that `fedlora account` shows: one by name, or several for a chart."""

from __future__ import annotations

from fedlora.accounting import NoisyProjectionEvent, epsilon_of, pld, theorem5, truncation
from fedlora.accounting.bounds import TOOLS
from fedlora.accounting.reports import Adjacency, EpsilonReport
from fedlora.cli.account_options import CHART
from fedlora.errors import PrivacyParameterError, UnsupportedEventError

_BOUNDS = ("moment", "profile", "theorem5")
_KINDS = (
    (TOOLS["rdp"], "moment"),
    (TOOLS["profile"], "profile"),
    (TOOLS["envelope"], "gaussian"),
    (TOOLS["truncated"], "rare_projections"),
    ("Theorem 5,", "theorem5"),
)
_DIRECTIONS = 3
"""From three directions on the union-free bound is never above Theorem 5's union."""


def kind_of_bound(accountant: str) -> str:
    """Return which bound gave a figure, from the report's accountant."""
    return next((kind for text, kind in _KINDS if accountant.startswith(text)), "gaussian")


def projection_report(
    event: NoisyProjectionEvent,
    steps: int,
    delta: float,
    adjacency: Adjacency,
    bound: str,
    accountant: str = "best",
    coarse: float = 1.0,
) -> EpsilonReport:
    """Return one of the bounds for `steps` steps of a noisy projection.

    "moment" and "profile" are never above the plain Gaussian and the published bound: both are candidates too.

    Raises:
      PrivacyParameterError: if `bound` is unknown, or contradicts the accountant.
      UnsupportedEventError: if the profile does not apply.
    """
    if bound not in _BOUNDS:
        raise PrivacyParameterError(f"bound: got {bound!r}, allowed is moment | profile | theorem5")
    if bound == "theorem5":
        return _published(event, steps, delta, adjacency, accountant, coarse)
    if bound == "profile" and accountant != "best":
        raise PrivacyParameterError(
            f"--bound profile: needs --accountant best, got {accountant}; leave one of the two out"
        )
    name = "moment" if bound == "moment" and accountant == "best" else accountant
    run = event.times(steps)
    report = epsilon_of(run, delta, adjacency=adjacency, accountant=name, coarse=coarse)
    known = {report.accountant, *report.alternatives}
    if bound == "profile" and TOOLS["profile"] not in known and not pld.is_exact(((event, 1),)):
        raise UnsupportedEventError(
            f"--bound profile: delta {delta:g} or the noise is out of its range; use --bound moment"
        )
    if name in ("best", "moment") and _few_directions(event):
        return _with(report, _published(event, steps, delta, adjacency, "best", coarse))
    return report


def _few_directions(event: NoisyProjectionEvent) -> bool:
    counts = [theorem5.directions(group) for group in theorem5.one_layer(event).groups]
    return truncation.applies(((event, 1),)) and any(0 < count < _DIRECTIONS for count in counts)


def _with(report: EpsilonReport, other: EpsilonReport) -> EpsilonReport:
    """The smaller report, with the other figure among its alternatives."""
    small, large = (other, report) if other.epsilon < report.epsilon else (report, other)
    rest = {**small.alternatives, **large.alternatives, large.accountant: large.epsilon}
    return EpsilonReport(
        small.epsilon,
        small.delta,
        small.accountant,
        small.adjacency,
        small.conditions,
        small.num_events,
        None,
        rest,
    )


def _published(
    event: NoisyProjectionEvent,
    steps: int,
    delta: float,
    adjacency: Adjacency,
    accountant: str,
    coarse: float,
) -> EpsilonReport:
    event = theorem5.one_layer(event)  # on the command line every group is one layer
    single = steps == 1 and len(event.groups) == 1 and event.sample_rate in (None, 1.0)
    if single:
        value = theorem5.one_shot(event, delta, adjacency=adjacency)
    else:
        value = theorem5.composed(
            event, steps, delta, adjacency=adjacency, accountant=accountant, coarse=coarse
        )
    name = "Theorem 5, alpha optimised" if single else "Theorem 5, composition recipe"
    return EpsilonReport(value, delta, name, adjacency, event.conditions, steps)


def projection_curves(
    event: NoisyProjectionEvent, steps: int, delta: float, adjacency: Adjacency
) -> dict[str, float]:
    """Return the bounds of a chart, on a coarse grid: still upper bounds, a little higher."""
    run = event.times(steps)
    plain = truncation.envelopes(((event, steps),))
    moments = epsilon_of(run, delta, adjacency=adjacency, accountant="rdp")
    best = epsilon_of(run, delta, adjacency=adjacency, coarse=CHART)
    published = _published(event, steps, delta, adjacency, "best", CHART)
    return {
        "smallest bound": min(best.epsilon, published.epsilon),
        "moment bound": moments.epsilon,
        "Theorem 5": published.epsilon,
        "Gaussian, no projection": epsilon_of(plain, delta, adjacency=adjacency, coarse=CHART).epsilon,
    }


__all__ = ["kind_of_bound", "projection_curves", "projection_report"]
