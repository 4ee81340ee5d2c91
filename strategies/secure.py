"""Secure aggregation over Flower's Message API: four question-and-answer steps after the training round."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedlora.aggregation import AggregateResult, Aggregator
from fedlora.aggregation.secagg_blocks import encoding_for, update_shapes, vector_blocks
from fedlora.aggregation.secagg_client import SecAggPlan
from fedlora.aggregation.secagg_round import Body, secure_sum
from fedlora.errors import FedLoraError
from fedlora.simulation.messages import from_record, to_record
from fedlora.training.secure import pack_step, unpack_step

_LOG = logging.getLogger(__name__)
COMPLETE_GRAPH_UP_TO = 64
"""Up to so many clients everybody masks with everybody; above, each with so many neighbours."""
NOISE_TAIL = 6.0
"""Numbers are clipped at the clipping norm plus so many standard deviations of a share of noise."""
DEFAULT_LIMIT = 8.0
"""Largest magnitude of one number of an update where no clipping norm bounds it."""


def secure_plan(aggregator: Aggregator, run_id: str, server_round: int, clients: int) -> SecAggPlan:
    """Return a round's public constants: encoding, thresholds, fewest clients in a sum."""
    plan = aggregator.plan
    limit = DEFAULT_LIMIT if aggregator.rules.max_norm is None else aggregator.rules.max_norm
    if plan is not None:
        limit = plan.clipping_norm + NOISE_TAIL * plan.share_stddev
    least = max(2, aggregator.rules.min_replies)
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

    def __call__(self, step: str, questions: Mapping[str, Body]) -> dict[str, Body]:
        """Ask each node for its clients; whoever does not answer in time is a dropout."""
        by_node: dict[int, dict[str, Body]] = {}
        for client, body in questions.items():
            by_node.setdefault(self._home[client], {})[client] = body
        messages = [
            Message(
                to_record(pack_step(self._plan, step, bodies)), node, MessageType.QUERY, ttl=self._timeout
            )
            for node, bodies in sorted(by_node.items())
        ]
        answers: dict[str, Body] = {}
        for reply in self._grid.send_and_receive(messages, timeout=self._timeout):
            own = set(by_node.get(reply.metadata.src_node_id, {}))
            answers.update({c: body for c, body in self._read(reply, step).items() if c in own})
        return answers

    def _read(self, reply: Message, step: str) -> dict[str, Body]:
        if reply.has_error():
            _LOG.warning("secure aggregation: step %s: %s", step, reply.error.reason)
            return {}
        try:
            plan, answered, bodies = unpack_step(from_record(reply.content))
        except (FedLoraError, ValueError, TypeError, KeyError, AttributeError) as error:
            _LOG.warning("secure aggregation: step %s: %s", step, error)
            return {}
        return bodies if plan == self._plan and answered == step else {}


def secure_result(
    aggregator: Aggregator,
    grid: Grid,
    home: Mapping[str, int],
    clients: Sequence[str],
    *,
    run_id: str,
    server_round: int,
    timeout_seconds: float,
) -> AggregateResult:
    """Open the sum of the clients' withheld updates and finish the round with it.

    Args:
        aggregator: begun for this round.
        grid: Flower's grid.
        home: client to node.
        clients: who trained and withholds an update.
        run_id: unique name of the run.
        server_round: round number.
        timeout_seconds: bound of each of the four steps.

    Raises:
        TooFewRepliesError: too many dropouts; nothing was opened.
        PrivacyError: the event could not be charged; nothing was opened.
    """
    plan = secure_plan(aggregator, run_id, server_round, len(clients))
    shapes = update_shapes(aggregator.layout, aggregator.mode.uplink)
    count = sum(math.prod(shape) for shape in shapes.values())
    degree = None if len(clients) <= COMPLETE_GRAPH_UP_TO else COMPLETE_GRAPH_UP_TO
    exchange = GridExchange(grid, home, plan, timeout_seconds)
    total, used = secure_sum(
        exchange, plan, sorted(clients), count, degree, before_open=aggregator.authorize_sum
    )
    return aggregator.finish_sum(used, vector_blocks(total, shapes))
