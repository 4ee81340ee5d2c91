"""A thin Flower strategy: sample logical clients, one message a node, check, aggregate.

All arithmetic is in `fedlora.aggregation`; this class moves messages. It works under Flower's own
`Strategy.start` and under a round loop that checkpoints.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedlora.adapters.projection_recipe import with_projection
from fedlora.aggregation import AggregateResult, Aggregator
from fedlora.aggregation.folded import FoldedMean
from fedlora.errors import FedLoraError, TooFewRepliesError, WireError
from fedlora.simulation.messages import from_record, to_record
from fedlora.training.fields import BROKEN
from fedlora.training.packets import packet_bytes
from fedlora.training.port import pack_request, unpack_reply
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.wire import (
    AdapterPayload,
    Compression,
    ModuleSpec,
    ReplyGuard,
    from_arrays,
    predict_size,
    to_arrays,
)
from strategies.records import RoundRecord, is_late, plain_specs, record_of, round_metrics
from strategies.sampling import ClientSampler
from strategies.secure import secure_result

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """PUBLIC constants that every request repeats.

    Attributes:
        run_id: unique name of the run.
        config: resolved configuration as plain JSON values.
        config_hash: its hash.
        steps: optimiser steps per client and round.
        timeout_seconds: how long a message may live.
        compression: encoding of the numbers.
    """

    run_id: str
    config: Mapping[str, Any]
    config_hash: str
    steps: int
    timeout_seconds: float
    compression: Compression = "none"

    @property
    def secure(self) -> bool:
        """Whether the server sees only sums (`federation.secure_aggregation`)."""
        return self.config.get("federation", {}).get("secure_aggregation", False) is True


class FedLoraStrategy(Strategy):
    """Samples clients, sends `RoundRequest`s, aggregates `RoundReply`s.

    Args:
        facts: PUBLIC constants of the run.
        aggregator: from `fedlora.aggregation.build_aggregator`.
        sampler: which clients take part.
        payload: the global adapter that the run starts (or resumes) from.
        roster: node id to the logical clients that live there.
        on_reply: called with every client's answer, used or not (ledger mirror): what was released is spent.
        specs: client to its own ranks and scalings, where they differ from the layout (mixed modes).
        on_ask: called with round and clients before they are asked; returns what each is told of its own ledger.
    """

    def __init__(
        self,
        facts: RunFacts,
        aggregator: Aggregator,
        sampler: ClientSampler,
        payload: AdapterPayload,
        roster: Mapping[int, Sequence[str]],
        *,
        on_reply: Callable[[ClientReply], None] | None = None,
        specs: Mapping[str, Mapping[str, ModuleSpec]] | None = None,
        on_ask: Callable[[int, Sequence[str]], Mapping[str, Mapping[str, Any]]] | None = None,
    ) -> None:
        """Bind the parts; nothing is sent yet."""
        self.facts, self.aggregator, self.sampler = facts, aggregator, sampler
        self.payload = payload
        self.full: AdapterPayload | None = None
        self.recipe: str | None = None
        self.rounds: list[RoundRecord] = []
        self._on_reply, self._on_ask = on_reply, on_ask
        self._told: Mapping[str, Mapping[str, Any]] = {}
        self._specs = {client: dict(own) for client, own in (specs or {}).items()}
        self._home: dict[str, int] = {}
        self._sent: list[tuple[Message, tuple[str, ...]]] = []
        self._record: RoundRecord | None = None
        self._grid: Grid | None = None
        self.set_roster(roster)

    def set_roster(self, roster: Mapping[int, Sequence[str]]) -> None:
        """Replace who lives where (nodes come and go between rounds)."""
        home: dict[str, int] = {}
        for node, clients in sorted(roster.items()):
            for client in clients:
                if client in home:
                    raise WireError(
                        f"client {client!r} is announced by nodes {home[client]} and {node}; one identity lives at "
                        "one node"
                    )
                home[client] = node
        self._home = home

    @property
    def initial_arrays(self) -> ArrayRecord:
        """The present global adapter as Flower's arrays."""
        return record_of(self.payload)

    # -- training ------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample clients and build one message a node (more where its clients' ranks differ)."""
        del config
        self._take_arrays(arrays)
        mode = self.aggregator.mode
        if isinstance(mode, FoldedMean):  # a projection serves one round, a repeated one too
            self.payload = with_projection(self.payload, mode.test_seed)
        self.aggregator.begin(self.payload, recipe=self.recipe)
        self._grid = grid
        asked, groups = self.choose(server_round, set(grid.get_node_ids()))
        self._record = RoundRecord(server_round, asked)
        self._sent = []
        reached = sorted(client for clients in groups.values() for client in clients)
        self._told = {} if self._on_ask is None else self._on_ask(server_round, reached)
        for (node, _), clients in sorted(groups.items()):
            request = self._request(server_round, clients)
            packet = pack_request(request)
            self._record.wire_bytes_down += packet_bytes(packet)
            message = Message(to_record(packet), node, MessageType.TRAIN, ttl=self.facts.timeout_seconds)
            self._sent.append((message, tuple(clients)))
        return [message for message, _ in self._sent]

    def choose(
        self, server_round: int, online: Container[int]
    ) -> tuple[tuple[str, ...], dict[tuple[int, str], list[str]]]:
        """Draw a round's clients and group those that can be reached by node and ranks.

        Nobody takes the place of a client that is away: the amplification that is claimed is that of the draw.
        """
        asked = self.sampler.draw(server_round, tuple(self._home))
        groups: dict[tuple[int, str], list[str]] = {}
        for client in asked:
            if self._home[client] in online:
                groups.setdefault((self._home[client], repr(self._specs.get(client))), []).append(client)
        return asked, groups

    def _take_arrays(self, arrays: ArrayRecord) -> None:
        if len(arrays) == 0:
            return
        header, _ = to_arrays(self.payload)
        self.payload = from_arrays(header, {name: array.numpy() for name, array in arrays.items()})

    def _request(self, server_round: int, clients: Sequence[str]) -> RoundRequest:
        specs = self._specs.get(clients[0])
        payload = self.payload
        if specs is not None:
            payload = self.aggregator.downlink(self.payload if self.full is None else self.full, specs)
        return RoundRequest(
            run_id=self.facts.run_id,
            server_round=server_round,
            config=self.facts.config,
            config_hash=self.facts.config_hash,
            payload=payload,
            clients=tuple(clients),
            steps=self.facts.steps,
            reduce=self.aggregator.can_reduce and len(clients) > 1 and not self.facts.secure,
            withhold=self.facts.secure,
            known={client: self._told[client] for client in clients if client in self._told},
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every answer, aggregate the good ones in client-id order, keep the record.

        Raises:
            TooFewRepliesError: fewer usable updates than `federation.min_replies`; the global adapter
                is unchanged and the record tells why. Under client-level privacy with noise at the server never:
                what is released must not hang on who answers.
        """
        record = self._record
        if record is None or record.server_round != server_round:
            raise WireError(f"round {server_round} was not configured; answers without questions are dropped")
        self._record = None
        self.rounds.append(record)
        guard = ReplyGuard(self.facts.run_id, server_round, record.asked)
        found = [reply for message in replies if (reply := self._open(message, guard, record)) is not None]
        ready = self._use(found, guard, record)
        record.missing = tuple(client for client in guard.missing if client not in record.rejected)
        private = self.aggregator.plan is not None
        if private and self._sent and not found:
            record.silent = f"round {server_round}: no node answered ({len(self._sent)} were asked)"
            if self.facts.secure:
                raise TooFewRepliesError(f"{record.silent}; nothing was released")
            record.silent += (
                "; noise alone was released and charged, since whether a client answers is no public fact"
            )
        record.rejected.update(self.aggregator.rejected)  # named also where the round fails
        result = self._secure(ready) if self.facts.secure else self.aggregator.finish()
        record.result, record.accepted = result, result.accepted
        self.payload, self.full = result.payload, result.full
        return record_of(self.payload), round_metrics(record, result, private)

    def _open(self, message: Message, guard: ReplyGuard, record: RoundRecord) -> RoundReply | None:
        node, clients = self._sender(message)
        if message.has_error() and is_late(message, self._question(message), time.time()):
            _LOG.warning("round %s: %s: no answer in time", record.server_round, node)
            return None
        if message.has_error():
            reason = f"{node}: {message.error.reason or f'error code {message.error.code}'}"
            record.rejected.update(dict.fromkeys(clients, reason))
            _LOG.warning("round %s: %s", record.server_round, reason)
            return None
        try:
            packet = from_record(message.content)
            record.wire_bytes_up += packet_bytes(packet)
            reply = unpack_reply(packet)
            guard.check_round(reply.run_id, reply.server_round, node)
        except (FedLoraError, *BROKEN) as error:
            reason = f"{node}: {type(error).__name__}: {error}"
            record.rejected.update(dict.fromkeys(clients, reason))
            _LOG.warning("round %s: %s", record.server_round, reason)
            return None
        return self._own(reply, clients, node, record)

    @staticmethod
    def _own(reply: RoundReply, clients: tuple[str, ...], node: str, record: RoundRecord) -> RoundReply:
        """Drop answers in the name of clients that this node was not asked for."""
        strangers = [r.client for r in reply.replies if r.client not in clients]
        strangers += [client for client in reply.reduced_clients if client not in clients]
        if not strangers:
            return reply
        reason = (
            f"{node} answered for clients it was not asked for: {sorted(strangers)[:3]}; all of it is dropped"
        )
        _LOG.warning("round %s: %s", record.server_round, reason)
        record.rejected.update(dict.fromkeys(clients, reason))
        return RoundReply(reply.run_id, reply.server_round, ())

    def _sender(self, message: Message) -> tuple[str, tuple[str, ...]]:
        source, question = message.metadata.src_node_id, self._question(message)
        for sent, clients in self._sent:
            if sent is question:
                return f"node {sent.metadata.dst_node_id}", clients
        here = [c for sent, clients in self._sent if sent.metadata.dst_node_id == source for c in clients]
        return f"node {source}", tuple(here)

    def _question(self, message: Message) -> Message | None:
        """Return the message that a node or the SuperLink answers, if it is one of this round's."""
        asked = message.metadata.reply_to_message_id
        return next((sent for sent, _ in self._sent if asked and sent.metadata.message_id == asked), None)

    def _secure(self, clients: Sequence[str]) -> AggregateResult:
        if self._grid is None:
            raise WireError("secure aggregation needs the grid that the round was configured with")
        return secure_result(
            self.aggregator,
            self._grid,
            self._home,
            clients,
            run_id=self.facts.run_id,
            server_round=self.rounds[-1].server_round,
            timeout_seconds=self.facts.timeout_seconds,
            record=self.rounds[-1],
        )

    def _use(self, found: Sequence[RoundReply], guard: ReplyGuard, record: RoundRecord) -> list[str]:
        """Give good updates to the aggregator; return the clients that trained and withhold theirs."""
        ones = sorted((one for reply in found for one in reply.replies), key=lambda one: one.client)
        summed = {client for reply in found for client in reply.reduced_clients}
        for one in ones:
            try:
                guard.accept(one.client)
            except WireError as error:
                _LOG.warning("round %s: %s", record.server_round, error)
                continue
            self._use_one(one, one.client in summed or self.facts.secure, record)
        for reply in sorted(found, key=lambda reply: min(reply.reduced_clients, default="")):
            if reply.reduced is not None:
                self._use_sum(reply, ones, record)
        return [one.client for one in ones if one.status == "ok" and one.client not in record.rejected]

    def _use_one(self, one: ClientReply, summed: bool, record: RoundRecord) -> None:
        if self._on_reply is not None:
            self._on_reply(one)
        if one.epsilon is not None:
            record.epsilon[one.client] = one.epsilon
        if one.status != "ok":
            reasons = record.refused if one.status == "refused" else record.rejected
            reasons[one.client] = str((one.error or {}).get("message", one.status))
        elif self.facts.secure:
            if one.payload is not None:
                record.rejected[one.client] = "sent its own update although only sums were agreed; not used"
        elif one.payload is not None:
            if self.aggregator.add(one.client, one.payload) and self.aggregator.mode.mixed:
                self._specs[one.client] = dict(
                    one.payload.modules
                )  # checked: it decides what the server builds
        elif not summed:
            record.rejected[one.client] = "answered ok without an update"

    def _use_sum(self, reply: RoundReply, ones: Sequence[ClientReply], record: RoundRecord) -> None:
        good = {one.client for one in ones if one.status == "ok" and one.payload is None}
        if set(reply.reduced_clients) <= good and reply.reduced is not None and self.aggregator.can_reduce:
            self.aggregator.add_reduced(reply.reduced_clients, reply.reduced)
            return
        reason = "a node's sum names clients without a good answer of their own, or was not asked for"
        record.rejected.update(dict.fromkeys(reply.reduced_clients, reason))

    # -- evaluation ----------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody: evaluation on private records is a release; public records are evaluated at the server."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None; see `configure_evaluate`."""
        del server_round, replies
        return None

    def summary(self) -> None:
        """Log mode, sampling and the predicted bytes of one update."""
        mode = self.aggregator.mode
        size = predict_size(self.aggregator.layout, mode.uplink, self.facts.compression)
        _LOG.info(
            "aggregation %s (%s), clients per round %s, one update %d bytes up (%s)",
            mode.kind,
            "exact" if mode.exact else "inexact, residual reported",
            self.sampler.asked,
            size.total,
            self.facts.compression,
        )

    # -- resume --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what is carried between rounds besides `payload` (flat: arrays and JSON scalars)."""
        own: dict[str, Any] = {
            "specs": json.dumps({c: plain_specs(s) for c, s in sorted(self._specs.items())})
        }
        if self.full is not None:
            own["full"], arrays = to_arrays(self.full)
            own |= {f"full/{name}": array for name, array in arrays.items()}
        return {**{f"aggregator/{key}": value for key, value in self.aggregator.state().items()}, **own}

    def restore(self, payload: AdapterPayload, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.payload, self.full = payload, None
        if "full" in state:
            arrays = {key[5:]: value for key, value in state.items() if key.startswith("full/")}
            self.full = from_arrays(str(state["full"]), arrays)
        specs = json.loads(state.get("specs", "{}"))
        self._specs = {c: {m: ModuleSpec(*spec) for m, spec in own.items()} for c, own in specs.items()}
        parts = {key[11:]: value for key, value in state.items() if key.startswith("aggregator/")}
        self.aggregator.restore(parts)
        self._record, self._sent = None, []
