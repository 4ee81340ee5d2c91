"""Records and protocols of the aggregation: what goes in, what comes out, what a mode must offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedlora.accounting import Event
from fedlora.wire.payload import AdapterPayload, ModuleSpec, PayloadKind

Float64 = npt.NDArray[np.float64]
Blocks = Mapping[str, npt.NDArray[np.float32]]
State = dict[str, Any]
"""Flat: name to numpy array or JSON scalar; everything an aggregator carries between rounds."""

Charge = Callable[[Event], None]
"""Writes one round's event to a durable ledger; raising stops the release."""


@runtime_checkable
class NormalSource(Protocol):
    """Standard normal numbers for a private release."""

    @property
    def private(self) -> bool:
        """Return whether nobody can repeat the draws (cryptographic, unseeded)."""

    def normal(self, shape: tuple[int, ...]) -> Float64:
        """Return i.i.d. N(0, 1) numbers of the given shape."""


@dataclass(frozen=True)
class AggregateResult:
    """One round's global adapter and how it came about.

    Attributes:
        payload: the new global adapter in the layout's ranks, in downlink coordinates.
        residual: ||mean of products - payload|| / ||mean of products|| over all modules (before the
            server optimiser), from factors; 0.0 in exact modes. An upper bound where `bounded`.
        bounded: the residual holds the error bound of a truncated running sum.
        accepted: clients whose update was used, in id order.
        rejected: client to reason (with layer), for every update that was not used.
        weight: sum of the weights used.
        uplink_bytes: bytes of accepted blocks in memory (float32).
        event: client-level event of this round, if the server released under client-level privacy.
        full: the mean before truncation to the layout's ranks (`product`, `stack`), for export and
            for clients of other ranks.
        notes: public remarks for the report.
    """

    payload: AdapterPayload
    residual: float
    bounded: bool
    accepted: tuple[str, ...]
    rejected: Mapping[str, str]
    weight: float
    uplink_bytes: int
    event: Event | None = None
    full: AdapterPayload | None = None
    notes: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What a mode hands back: the new global adapter, its residual and, where kept, the whole mean."""

    payload: AdapterPayload
    residual: float
    bounded: bool = False
    full: AdapterPayload | None = None


class Mode(Protocol):
    """One way to combine updates; a fresh sum begins with every round.

    Attributes:
        kind: name in the YAML.
        uplink: coordinates that clients send.
        downlink: coordinates that clients get.
        linear: sums of updates may be formed anywhere (nodes, secure aggregation).
        mixed: clients may differ in rank, scaling and target modules.
        exact: the mean of the products is represented exactly (up to the stated truncation).
    """

    kind: str
    uplink: PayloadKind
    downlink: PayloadKind
    linear: bool
    mixed: bool
    exact: bool

    def begin(self, current: AdapterPayload) -> None:
        """Start a round at the global adapter that the clients got."""

    def add(self, payload: AdapterPayload, weight: float) -> None:
        """Add one checked update."""

    def finish(self) -> Outcome:
        """Return the new global adapter; called once a round, with at least one update in it."""

    def downlink_for(self, current: AdapterPayload, modules: Mapping[str, ModuleSpec]) -> AdapterPayload:
        """Return the global adapter in a client's own ranks and scalings."""

    def state(self) -> State:
        """Return what is carried between rounds."""

    def restore(self, state: State) -> None:
        """Take back what `state` returned."""
