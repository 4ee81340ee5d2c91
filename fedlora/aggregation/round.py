"""One aggregator for every mode: checks each update, sums the good ones, and finishes the round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fedlora.accounting import Event
from fedlora.aggregation.client_privacy import ClientPlan, ClientRelease
from fedlora.aggregation.linear import LinearMode
from fedlora.aggregation.packed import LARGEST, PackedUpdates
from fedlora.aggregation.robust import Robust, RobustRound
from fedlora.aggregation.types import AggregateResult, Charge, Float64, Mode, NormalSource, Outcome, State
from fedlora.errors import (
    AggregationError,
    InconsistentRepliesError,
    PrivacyError,
    StaleRoundError,
    TooFewRepliesError,
    UnsupportedEventError,
    WireError,
)
from fedlora.wire.checks import check_payload
from fedlora.wire.layout import expected_blocks, payload_bytes
from fedlora.wire.payload import AdapterLayout, AdapterPayload, ModuleSpec

_MALFORMED: Final = (AttributeError, LookupError, OverflowError, TypeError, ValueError)
"""What the checks meet where a field of an update is of another type altogether."""


@dataclass(frozen=True)
class RoundRules:
    """PUBLIC limits of a round.

    Attributes:
        min_replies: fewest usable updates; not applied under client-level privacy, where an empty
            round releases noise.
        weighted: weights follow notes["num_examples"] (never with privacy).
        max_bytes: largest update in bytes.
        max_norm: largest norm of what is sent, or None.
        robust: robust mean, or None.
        trim_fraction: trimmed on either side.
    """

    min_replies: int
    weighted: bool = False
    max_bytes: int | None = None
    max_norm: float | None = None
    robust: Robust | None = None
    trim_fraction: float = 0.1


class Aggregator:
    """Combines one round's updates; `begin`, `add`..., `finish`, and again.

    Args:
        mode: how updates are combined.
        layout: PUBLIC shapes.
        recipe: sha256 of the shared lora_A recipe, if one is shared.
        rules: PUBLIC limits.
        plan: client-level privacy, or None.
        noise: source of the server's noise; needed with `plan`.
        charge: durable ledger write of the client-level event; needed with `plan`.
    """

    def __init__(
        self,
        mode: Mode,
        layout: AdapterLayout,
        recipe: str | None,
        rules: RoundRules,
        *,
        plan: ClientPlan | None = None,
        noise: NormalSource | None = None,
        charge: Charge | None = None,
    ) -> None:
        """Bind the parts; see `fedlora.aggregation.build_aggregator` for the checked way."""
        if plan is not None and (noise is None or charge is None):
            raise UnsupportedEventError(
                "client-level privacy needs a noise source and a ledger to charge: pass noise and charge"
            )
        self.mode, self.layout, self.rules = mode, layout, rules
        self._recipe, self._plan, self._noise, self._charge = recipe, plan, noise, charge
        self._clip = None if plan is None else plan.clipping_norm
        self._open = False
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._reset()

    def _reset(self) -> None:
        self._accepted: dict[str, float] = {}
        self._rejected: dict[str, str] = {}
        self._bytes = 0
        self._charged = False
        self._release: ClientRelease | None = None
        self._robust: RobustRound | None = None
        self._packed: PackedUpdates | None = None

    @property
    def plan(self) -> ClientPlan | None:
        """Client-level privacy with the present clipping norm, or None."""
        if self._plan is None or self._clip is None:
            return None
        return replace(self._plan, clipping_norm=self._clip)

    @property
    def rejected(self) -> Mapping[str, str]:
        """Client to reason of this round's updates that are not used; also after `finish` failed."""
        return dict(sorted(self._rejected.items()))

    @property
    def can_reduce(self) -> bool:
        """Whether nodes may send sums of their clients' updates."""
        plain = self._plan is None and self.rules.robust is None and not self.rules.weighted
        return self.mode.linear and plain and self.rules.max_norm is None

    def begin(self, current: AdapterPayload, *, recipe: str | None = None) -> None:
        """Start a round at the global adapter that the clients get; an unfinished round is dropped.

        Args:
            current: the global adapter, in downlink coordinates.
            recipe: this round's shared recipe, where it changes by round; the run's otherwise.
        """
        self._reset()
        projected = self.mode.uplink == "projected"
        if projected:  # its recipe changes by round, its sum travels at its own rank
            recipe = current.recipe
        self._recipe = self._recipe if recipe is None else recipe
        check_payload(
            current,
            self.layout,
            self._recipe,
            kind=self.mode.downlink,
            client="server",
            mixed=self.mode.mixed or projected,
        )
        self.mode.begin(current)
        self._shapes = None
        if not self.mode.mixed:
            self._shapes = expected_blocks(self.layout.modules, self.layout.extra, self.mode.uplink)
        if self.plan is not None:
            update_shapes = expected_blocks(current.modules, self.layout.extra, self.mode.uplink)
            self._release = ClientRelease(self.plan, current, update_shapes)
        if self.rules.robust is not None:
            self._robust = RobustRound(
                self.rules.robust, current, self.rules.trim_fraction, self.rules.max_norm
            )
        self._packed = self._pack()
        self._open = True

    def _pack(self) -> PackedUpdates | None:
        """Return the quick way for small updates of equal shapes that are only summed."""
        plain = self._release is None and self._robust is None and isinstance(self.mode, LinearMode)
        if not plain or not self._shapes:
            return None
        size = 4 * sum(math.prod(shape) for shape in self._shapes.values())
        if size > min(LARGEST, LARGEST if self.rules.max_bytes is None else self.rules.max_bytes):
            return None
        return PackedUpdates(self.layout, self._recipe, self.mode.uplink, self._shapes, self.rules.max_norm)

    def reject(self, client: str, reason: str) -> None:
        """Record why a client's answer is not used."""
        self._rejected[client] = reason

    def add(self, client: str, payload: AdapterPayload, weight: float = 1.0) -> bool:
        """Check one client's update and add it; a bad one is recorded, not raised.

        Add clients in sorted order where sums must repeat bit for bit. The payload must not be changed
        before `finish`.

        Args:
            client: logical client id.
            payload: untrusted.
            weight: public weight; with `rules.weighted` the payload's own num_examples is used.

        Returns: whether it is used.
        """
        self._need_open()
        packed = self._packed
        try:
            if client in self._accepted:
                raise StaleRoundError(f"client {client!r} answered twice in this round")
            quick = packed is not None and packed.takes(payload)
            if not quick:
                self._check(client, payload)
            used = self._weight(client, payload, weight)
        except (WireError, AggregationError, *_MALFORMED) as error:
            if client not in self._accepted:
                self.reject(client, f"{type(error).__name__}: {error}")
            return False
        if quick and packed is not None:
            packed.keep(used)
        elif self._release is not None and self.plan is not None:
            share = self.plan.noise_at == "clients"
            (self._release.add_share if share else self._release.add)(payload.blocks)
        elif self._robust is not None:
            self._robust.add(payload.blocks)
        else:
            self.mode.add(payload, used)
        self._accepted[client] = used
        self._bytes += packed.nbytes if quick and packed is not None else payload_bytes(payload)
        return True

    def _check(self, client: str, payload: AdapterPayload) -> None:
        bounded = self.rules.robust == "norm_bounded"
        check_payload(
            payload,
            self.layout,
            self._recipe,
            kind=self.mode.uplink,
            client=client,
            mixed=self.mode.mixed,
            max_bytes=self.rules.max_bytes,
            max_norm=None if bounded else self.rules.max_norm,
            shapes=self._shapes,
        )

    def _weight(self, client: str, payload: AdapterPayload, weight: float) -> float:
        examples = payload.notes.get("num_examples")
        if examples == 0:
            raise InconsistentRepliesError(f"client {client!r} has no examples; its update is skipped")
        if self.rules.weighted:
            if type(examples) is not int or not 0 < examples < 2**40:
                raise InconsistentRepliesError(
                    f"client {client!r} sent no usable num_examples; federation.aggregation.weights num_examples "
                    "needs a positive whole number"
                )
            return float(examples)
        if not 2.0**-40 <= weight <= 2.0**40:  # groups are weighted in float32, where smaller ones vanish
            raise InconsistentRepliesError(f"client {client!r} has weight {weight}; allowed: 2^-40 to 2^40")
        return weight

    def add_reduced(self, clients: Iterable[str], payload: AdapterPayload) -> bool:
        """Add a node's sum over `clients` (equal weights); checked like one update.

        Returns: whether it is used; if not, every client of it is recorded as rejected.

        Raises:
            InconsistentRepliesError: if this aggregator needs every client's own update.
        """
        self._need_open()
        names = sorted(clients)
        if not self.can_reduce or not isinstance(self.mode, LinearMode):
            raise InconsistentRepliesError(
                f"{self.mode.kind} with these settings needs each client's own update, not a node's sum"
            )
        who = ",".join(names[:3])
        try:
            repeated = [name for name in names if name in self._accepted]
            if not names or repeated or len(set(names)) != len(names):
                raise StaleRoundError(f"a node's sum is empty or repeats clients {repeated[:3]}")
            check_payload(
                payload,
                self.layout,
                self._recipe,
                kind=self.mode.uplink,
                client=who,
                max_bytes=self.rules.max_bytes,
            )
        except (WireError, *_MALFORMED) as error:
            for name in names:
                if name not in self._accepted:
                    self.reject(name, f"{type(error).__name__}: {error}")
            return False
        self.mode.add_reduced(payload, float(len(names)))
        self._accepted.update(dict.fromkeys(names, 1.0))
        self._bytes += payload_bytes(payload)
        return True

    def _need_open(self) -> None:
        if not self._open:
            raise InconsistentRepliesError("no round has begun: call begin(global payload) first")

    def finish(self) -> AggregateResult:
        """End the round; on an error the global adapter stays what it was.

        Raises:
            TooFewRepliesError: fewer usable updates than `min_replies` (client, layer and reason of every
                rejected one are in the message's first lines and in `rejected`).
            PrivacyError: if the event cannot be charged; nothing is released.
        """
        self._need_open()
        self._open = False
        event = None
        if self._release is not None and self.plan is not None:
            outcome, event = self._finish_private(self._release, self.plan)
        else:
            self._need_replies()
            outcome = self._finish_plain()
        return self._result(outcome, event)

    def _result(self, outcome: Outcome, event: Event | None) -> AggregateResult:
        accepted = tuple(sorted(self._accepted))
        result = AggregateResult(
            payload=outcome.payload,
            residual=outcome.residual,
            bounded=outcome.bounded,
            accepted=accepted,
            rejected=dict(sorted(self._rejected.items())),
            weight=sum(self._accepted[name] for name in accepted),
            uplink_bytes=self._bytes,
            event=event,
            full=outcome.full,
            notes={} if self.mode.exact else {"inexact": f"{self.mode.kind} is not the mean of the changes"},
        )
        self._reset()
        return result

    def authorize_sum(self, clients: Sequence[str]) -> None:
        """Check and charge before a secure sum is opened; pass it as `before_open`.

        Raises:
            TooFewRepliesError: fewer answers than `min_replies`, or than the honest ones that shares of noise assume.
            PrivacyError: if the event cannot be charged; the sum stays hidden.
        """
        self._need_open()
        if self._plan is None:
            self._accepted = dict.fromkeys(clients, 1.0)
            self._need_replies()
            return
        if self._plan.noise_at != "clients" or len(clients) < (self._plan.honest_clients or 0):
            raise TooFewRepliesError(
                f"{len(clients)} answers; shares of noise assume {self._plan.honest_clients} honest ones "
                "(privacy.noise_at: clients, privacy.honest_clients): the sum stays hidden"
            )
        if self._charge is None:
            raise PrivacyError("client-level privacy without a ledger: the sum stays hidden")
        self._charge(self._plan.event)
        self._charged = True

    def finish_sum(self, clients: Sequence[str], updates: Mapping[str, Float64]) -> AggregateResult:
        """End a round whose updates came as one opened secure sum (new - old, equal weights).

        Args:
            clients: clients in the sum, as `authorize_sum` saw them.
            updates: update block to sum.

        Raises:
            PrivacyError: if the release was not charged before.
            InconsistentRepliesError: if the mode is not linear.
        """
        self._need_open()
        self._open = False
        if not isinstance(self.mode, LinearMode):
            raise InconsistentRepliesError(
                f"{self.mode.kind} cannot use a sum of updates; use mean_b or tangent"
            )
        if self._plan is not None and not self._charged:
            raise PrivacyError("a secure sum under client-level privacy was opened without a charge")
        divisor = float(len(clients)) if self._plan is None else self._plan.expected_clients
        outcome = self.mode.apply({name: block / divisor for name, block in updates.items()})
        self._accepted = dict.fromkeys(clients, 1.0)
        return self._result(outcome, None if self._plan is None else self._plan.event)

    def _need_replies(self) -> None:
        if len(self._accepted) >= max(self.rules.min_replies, 1):
            return
        reasons = [f"{client}: {reason}" for client, reason in sorted(self._rejected.items())[:5]]
        came = "No other update came in." if self._accepted else "No update came in."
        raise TooFewRepliesError(
            f"{len(self._accepted)} usable updates; federation.min_replies is {self.rules.min_replies}; the global "
            "adapter is unchanged. " + ("Rejected: " + "; ".join(reasons) if reasons else came)
        )

    def _finish_plain(self) -> Outcome:
        if self._robust is not None and isinstance(self.mode, LinearMode):
            return self.mode.apply(self._robust.mean())
        if self._packed is not None and self._packed.weight > 0 and isinstance(self.mode, LinearMode):
            self.mode.add_sums(self._packed.blocks(), self._packed.weight)
        return self.mode.finish()

    def _finish_private(self, release: ClientRelease, plan: ClientPlan) -> tuple[Outcome, Event]:
        if self._charge is None or self._noise is None or not isinstance(self.mode, LinearMode):
            raise PrivacyError("client-level privacy without a ledger, a noise source or a linear mode")
        event = plan.event
        self._charge(event)
        mean, self._clip = release.release(self._noise)
        return self.mode.apply(mean), event

    def downlink(self, current: AdapterPayload, modules: Mapping[str, ModuleSpec]) -> AdapterPayload:
        """Return the global adapter as a client with its own ranks, scalings and modules loads it."""
        return self.mode.downlink_for(current, modules)

    def state(self) -> State:
        """Return what is carried between rounds (moments, adaptive clip); a round in progress is not part of it."""
        extra: State = {} if self._clip is None else {"clipping_norm": self._clip}
        return {**self.mode.state(), **extra}

    def restore(self, state: State) -> None:
        """Take back what `state` returned; the next call is `begin`."""
        rest = dict(state)
        clip = rest.pop("clipping_norm", None)
        if self._plan is not None and clip is not None:
            self._clip = float(clip)
        self.mode.restore(rest)
        self._open = False
        self._reset()
