"""Secure aggregation over Flower's Message API: question-and-answer steps after the training round."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedlora.aggregation import AggregateResult, Aggregator
from fedlora.aggregation.secagg_blocks import (
    COMPLETE_GRAPH_UP_TO,
    encoding_for,
    share_limit,
    update_shapes,
    vector_blocks,
)
from fedlora.aggregation.secagg_client import SecAggPlan
from fedlora.aggregation.secagg_round import REFUSED, Body, secure_sum
from fedlora.errors import FedLoraError, WireError
from fedlora.simulation.messages import from_record, to_record
from fedlora.training.fields import BROKEN
from fedlora.training.packets import packet_bytes
from fedlora.training.port import FAILURE
from fedlora.training.secure import pack_step, unpack_step
from strategies.records import RoundRecord

_LOG = logging.getLogger(__name__)
DEFAULT_LIMIT = 8.0
"""Largest magnitude of one number of an update where no clipping norm bounds it."""


def secure_plan(aggregator: Aggregator, run_id: str, server_round: int, clients: int) -> SecAggPlan:
    """Return a round's public constants: encoding, thresholds, fewest clients in a sum."""
    plan = aggregator.plan
    limit = DEFAULT_LIMIT if aggregator.rules.max_norm is None else aggregator.rules.max_norm
    least = max(2, aggregator.rules.min_replies)
    if plan is not None:
        limit, least = share_limit(plan), max(least, plan.honest_clients or 0)
    return SecAggPlan(run_id, server_round, encoding_for(limit, max(clients, 2)), least_clients=least)


class GridExchange:
    """Carries one step to the nodes and back.

    Args:
        grid: Flower's grid.
        home: client to node.
        plan: PUBLIC constants of the round.
        timeout_seconds: bound of one step.
    """

    def __init__(self, grid: Grid, home: Mapping[str, int], plan: SecAggPlan, timeout_seconds: float) -> None:
        """Bind the parts."""
        self._grid, self._home, self._plan, self._timeout = grid, home, plan, timeout_seconds
        self.bytes_up = self.bytes_down = 0
        """Bytes of all steps so far, as `packet_bytes` counts them."""

    def __call__(self, step: str, questions: Mapping[str, Body]) -> dict[str, Body]:
        """Ask each node for its clients; whoever does not answer in time is a dropout."""
        by_node: dict[int, dict[str, Body]] = {}
        for client, body in questions.items():
            by_node.setdefault(self._home[client], {})[client] = body
        messages = []
        for node, bodies in sorted(by_node.items()):
            packet = pack_step(self._plan, step, bodies)
            self.bytes_down += packet_bytes(packet)
            messages.append(Message(to_record(packet), node, MessageType.QUERY, ttl=self._timeout))
        answers: dict[str, Body] = {}
        for reply in self._grid.send_and_receive(messages, timeout=self._timeout):
            own = by_node.get(reply.metadata.src_node_id, {})
            answers.update({c: body for c, body in self._read(reply, step, tuple(own)).items() if c in own})
        return answers

    def _read(self, reply: Message, step: str, own: Sequence[str]) -> dict[str, Body]:
        try:
            if reply.has_error():
                raise WireError(reply.error.reason or f"error code {reply.error.code}")
            packet = from_record(reply.content)
            self.bytes_up += packet_bytes(packet)
            if packet.header.get("op") == FAILURE:
                raise WireError(f"{packet.header.get('error')}: {packet.header.get('message')}")
            plan, answered, bodies = unpack_step(packet)
            if plan != self._plan or answered != step:
                raise WireError("the answer belongs to another step or plan")
        except (FedLoraError, *BROKEN) as error:
            _LOG.warning("secure aggregation: step %s: %s", step, error)
            return {client: {REFUSED: f"step {step}: {error}"} for client in own}
        return bodies


def secure_result(
    aggregator: Aggregator,
    grid: Grid,
    home: Mapping[str, int],
    clients: Sequence[str],
    *,
    run_id: str,
    server_round: int,
    timeout_seconds: float,
    record: RoundRecord | None = None,
) -> AggregateResult:
    """Open the sum of the clients' withheld updates and finish the round with it.

    Args:
        aggregator: begun for this round.
        grid: Flower's grid.
        home: client to node.
        clients: who trained and withholds an update.
        run_id: unique name of the run.
        server_round: round number.
        timeout_seconds: bound of each step.
        record: gets the steps' bytes, and the reason of every client that refuses one, also if the round fails.

    Raises:
        TooFewRepliesError: too many dropouts; nothing was opened.
        PrivacyError: the event could not be charged; nothing was opened.
    """
    plan = secure_plan(aggregator, run_id, server_round, len(clients))
    shapes = update_shapes(aggregator.layout, aggregator.mode.uplink)
    count = sum(math.prod(shape) for shape in shapes.values())
    degree = None if len(clients) <= COMPLETE_GRAPH_UP_TO else COMPLETE_GRAPH_UP_TO
    exchange = GridExchange(grid, home, plan, timeout_seconds)
    refused: dict[str, str] = {}
    try:
        total, used = secure_sum(
            exchange,
            plan,
            sorted(clients),
            count,
            degree,
            before_open=aggregator.authorize_sum,
            on_refused=refused.__setitem__,
        )
    finally:
        if record is not None:
            record.wire_bytes_up += exchange.bytes_up
            record.wire_bytes_down += exchange.bytes_down
            record.rejected.update(refused)
    if record is not None:
        for client in set(used) & set(refused):  # it refused the last step; its update is in the sum
            record.rejected.pop(client)
    return aggregator.finish_sum(used, vector_blocks(total, shapes))
