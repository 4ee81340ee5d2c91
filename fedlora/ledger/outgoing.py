"""What may leave a client beside its noised update: metrics are withheld, noised and charged, or declared.

Under record-level DP the exact loss, accuracy or number of records is a release of its own. The
three modes:

- "off" (default): nothing private leaves; the names of what was withheld stay on the client.
- "noised": a bounded sum over records gets Gaussian noise, and its event is charged to the ledger
  like any other release (reserve first).
- "outside": values leave as they are and every report lists them as outside the guarantee.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fedlora.accounting import Event, GaussianEvent, PoissonGaussianEvent
from fedlora.errors import PrivacyParameterError, UnsupportedCombinationError

MODES: Final = ("off", "noised", "outside")

PUBLIC_METRICS: Final = frozenset(
    {
        "steps",
        "epsilon",
        "delta",
        "noise_multiplier",
        "sample_rate",
        "ledger_head",
        "num_events",
        "server_round",
        "projection_seed",
        "dropped_norm",
    }
)
"""Values that may leave: from the config, the ledger and the server's own message, or worked out from noised updates
alone (`dropped_norm`, which mechanisms send under record-level noise only)."""


@dataclass(frozen=True)
class OutgoingMetrics:
    """What leaves, what stays, and what the report must say.

    Attributes:
        sent: PUBLIC values (and, in mode "outside", private ones).
        withheld: names that stay on the client.
        conditions: sentences for the report and the reservation's `assumptions`.
    """

    sent: Mapping[str, float | int | str]
    withheld: tuple[str, ...]
    conditions: tuple[str, ...]


def filter_metrics(
    metrics: Mapping[str, float | int | str], *, mode: str = "off", private: bool = True
) -> OutgoingMetrics:
    """Return what may be sent.

    Args:
        metrics: name to value, SENSITIVE unless the name is in PUBLIC_METRICS.
        mode: "off" or "outside" ("noised" values come from `noise_metric`, not from here).
        private: whether the run claims record-level privacy; without it everything is sent.

    Raises:
        UnsupportedCombinationError: for another mode.
    """
    if mode not in MODES or mode == "noised":
        raise UnsupportedCombinationError(
            f"outgoing metrics: got mode {mode!r}; allowed: off, outside; noised values come from noise_metric"
        )
    if not private:
        return OutgoingMetrics(dict(metrics), (), ())
    names = sorted(name for name in metrics if name not in PUBLIC_METRICS)
    if mode == "outside":
        notes = (f"outside the guarantee: {', '.join(names)} leave the client exact",) if names else ()
        return OutgoingMetrics(dict(metrics), (), notes)
    sent = {name: value for name, value in metrics.items() if name in PUBLIC_METRICS}
    return OutgoingMetrics(sent, tuple(names), ())


def metric_event(noise_multiplier: float, sample_rate: float | None = None) -> Event:
    """Return the event of one noised metric: reserve it before `noise_metric` runs.

    Raises:
        PrivacyParameterError: if a parameter is out of range.
    """
    if not noise_multiplier > 0:
        raise PrivacyParameterError(
            f"metric noise_multiplier: got {noise_multiplier!r}; allowed: > 0; without noise use mode outside"
        )
    if sample_rate is None:
        return GaussianEvent(noise_multiplier)
    return PoissonGaussianEvent(noise_multiplier, sample_rate)


def noise_metric(
    values: Sequence[float],
    *,
    bound: float,
    noise_multiplier: float,
    divisor: float,
    normal: Callable[[], float] | None = None,
) -> float:
    """Return a noised mean of bounded per-record values over a public divisor (PUBLIC).

    Formal guarantee: each value is moved into [0, bound] (a non-finite one to 0), so one record
    moves the sum by at most `bound`; noise of standard deviation noise_multiplier * bound is added
    before the division, which is post-processing. The sum over no records gets the same noise.

    Args:
        values: one per record, SENSITIVE.
        bound: > 0, finite, PUBLIC.
        noise_multiplier: > 0, finite, PUBLIC; `metric_event` is its event.
        divisor: > 0, finite, PUBLIC (nominal records, never the realised number).
        normal: standard normal draws; default: the operating system's entropy. Others are for tests.

    Raises:
        PrivacyParameterError: if a parameter is out of range.
    """
    for name, value in (("bound", bound), ("noise_multiplier", noise_multiplier), ("divisor", divisor)):
        if not (value > 0 and math.isfinite(value)):
            raise PrivacyParameterError(
                f"metric {name}: got {value!r}; allowed: finite and > 0; choose a public one"
            )
    draw = normal if normal is not None else _system_normal
    total = math.fsum(min(max(value, 0.0), bound) if math.isfinite(value) else 0.0 for value in values)
    return (total + noise_multiplier * bound * draw()) / divisor


def _system_normal() -> float:
    """Return one standard normal draw from the operating system's entropy (Box-Muller)."""
    radius = math.sqrt(-2.0 * math.log((secrets.randbits(53) + 1) / (1 << 53)))
    return radius * math.cos(2.0 * math.pi * secrets.randbits(53) / (1 << 53))
