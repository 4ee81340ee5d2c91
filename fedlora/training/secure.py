"""Secure aggregation at a node: finished updates are withheld and leave only as masked vectors.

A round under secure aggregation has two parts. The round request is answered without updates
(`withhold`); then the steps of `fedlora.aggregation.secagg_round` follow, whose third sends each client's
update under masks that only the sum takes off. Under client-level privacy with noise at the clients the
update is clipped here and gets its share of noise before it is encoded.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from fedlora.aggregation import NormalSource, client_plan, clip_and_share
from fedlora.aggregation.secagg_blocks import encoding_for, share_limit, update_vector
from fedlora.aggregation.secagg_client import SecAggPlan, Verify
from fedlora.aggregation.secagg_field import FixedPoint
from fedlora.aggregation.secagg_round import REFUSED, Body, SecAggNode
from fedlora.config.schema import ClientPrivacy, FedLoraConfig
from fedlora.errors import InconsistentRepliesError, PolicyRefusedError, StaleRoundError, WireError
from fedlora.mechanisms.noise import NoiseSource, OsNoise, SeededNoise
from fedlora.names import WIRE_SCHEMA
from fedlora.training.fields import BROKEN
from fedlora.training.port import SECAGG, Packet, error_record
from fedlora.training.requests import ClientReply, RoundRequest
from fedlora.wire.payload import AdapterPayload

_LOG = logging.getLogger(__name__)

VECTOR: Final = "vector/"
PINNED_THRESHOLD: Final = 2 / 3
"""Least share of neighbours whose shares restore a secret where the server is not trusted with the lists."""
Replies = tuple[ClientReply, ...]

NormalsFor = Callable[[FedLoraConfig, str, int], NormalSource]
"""(configuration, client, round) -> the client's own noise."""


def pack_plan(plan: SecAggPlan) -> dict[str, Any]:
    """Write a plan as JSON values."""
    encoding = plan.encoding
    return {
        "run_id": plan.run_id,
        "round": plan.server_round,
        "limit": encoding.limit,
        "clients": encoding.clients,
        "bits": encoding.bits,
        "threshold_share": plan.threshold_share,
        "least_clients": plan.least_clients,
    }


def unpack_plan(record: Mapping[str, Any]) -> SecAggPlan:
    """Read a plan.

    Raises:
        WireError: if a field is missing or of the wrong type.
        PrivacyParameterError: if the encoding is out of range.
    """
    try:
        encoding = FixedPoint(float(record["limit"]), int(record["clients"]), record["bits"])
        return SecAggPlan(
            str(record["run_id"]),
            int(record["round"]),
            encoding,
            float(record["threshold_share"]),
            int(record["least_clients"]),
        )
    except BROKEN as problem:
        raise WireError(f"secure aggregation: malformed plan ({type(problem).__name__})") from None


def pack_step(plan: SecAggPlan, step: str, bodies: Mapping[str, Body]) -> Packet:
    """Put one step's questions or answers into a packet; vectors travel as arrays."""
    arrays = {f"{VECTOR}{client}": body["vector"] for client, body in bodies.items() if "vector" in body}
    plain = {c: {k: v for k, v in body.items() if k != "vector"} for c, body in bodies.items()}
    header = {"schema": WIRE_SCHEMA, "op": SECAGG, "plan": pack_plan(plan), "step": step, "bodies": plain}
    return Packet(header, arrays)


def unpack_step(packet: Packet) -> tuple[SecAggPlan, str, dict[str, Body]]:
    """Read what `pack_step` wrote.

    Raises:
        WireError: if the packet holds something else.
    """
    header = packet.header
    if header.get("schema") != WIRE_SCHEMA or header.get("op") != SECAGG:
        raise WireError(f"packet: op {header.get('op')!r}; expected {SECAGG!r}")
    bodies, step = header.get("bodies"), header.get("step")
    if not isinstance(bodies, dict) or not isinstance(step, str):
        raise WireError("secure aggregation: packet without step or bodies")
    found: dict[str, Body] = {}
    for client, body in bodies.items():
        if not isinstance(body, dict):
            raise WireError("secure aggregation: a body is not an object")
        vector = packet.arrays.get(f"{VECTOR}{client}")
        found[client] = body if vector is None else {**body, "vector": vector}
    return unpack_plan(header.get("plan") or {}), step, found


class _Normals:
    def __init__(self, source: NoiseSource) -> None:
        self._source, self.private = source, source.private

    def normal(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        flat = self._source.gaussians(math.prod(shape), torch.device("cpu"), torch.float64)
        return flat.numpy().reshape(shape)


def client_normals(config: FedLoraConfig, client: str, server_round: int) -> NormalSource:
    """Return a client's own noise: the operating system's unless the run is marked as a test."""
    if config.seeded_noise:
        return _Normals(SeededNoise(config.run.seed, f"share|{client}", server_round))
    return _Normals(OsNoise())


def check_withhold(config: FedLoraConfig, request: RoundRequest) -> None:
    """Refuse a request that would hand single updates to the server where only sums were agreed.

    Raises:
        PolicyRefusedError: if the configuration says secure aggregation and the request does not withhold.
    """
    if config.federation.secure_aggregation and not request.withhold:
        raise PolicyRefusedError(
            "federation.secure_aggregation is on, but the server asks for single updates; nothing is trained"
        )


def withhold(desk: SecureDesk, request: RoundRequest, config: FedLoraConfig, replies: Replies) -> Replies:
    """Keep the replies' updates at the desk and return the replies without them.

    A client that states that it has no records (runs without privacy only) fails by name: in a sum nobody could leave
    its update out later.
    """
    kept = tuple(_without_empty(reply) for reply in replies)
    held = {reply.client: reply.payload for reply in kept if reply.payload is not None}
    desk.withhold(request.run_id, request.server_round, held, request.payload, config)
    return tuple(replace(reply, payload=None) for reply in kept)


def _without_empty(reply: ClientReply) -> ClientReply:
    if reply.payload is None or reply.payload.notes.get("num_examples") != 0:
        return reply
    problem = InconsistentRepliesError(f"client {reply.client!r} has no examples; its update is skipped")
    return replace(reply, status="failed", payload=None, error=error_record(problem))


@dataclass(frozen=True)
class _Withheld:
    payload: AdapterPayload
    current: AdapterPayload
    config: FedLoraConfig


class SecureDesk:
    """Keeps one round's finished updates of a node until secure aggregation has taken them.

    Args:
        normals: a client's own noise, for shares of noise.
        least_clients: the site's own floor: fewer clients in a sum are refused whatever the server asks.
        sign: signs announced keys with the site's identity key, or None.
        verify: checks peers' signatures against pinned identities, or None.
    """

    def __init__(
        self,
        normals: NormalsFor = client_normals,
        *,
        least_clients: int = 2,
        sign: Callable[[bytes], bytes] | None = None,
        verify: Verify | None = None,
    ) -> None:
        """Start empty."""
        self._normals, self._least = normals, least_clients
        self._sign, self._verify = sign, verify
        self._held: dict[str, _Withheld] = {}
        self._privacy: ClientPrivacy | None = None
        self._round: tuple[str, int] | None = None
        self._node: SecAggNode | None = None
        self._plan: SecAggPlan | None = None

    def withhold(
        self,
        run_id: str,
        server_round: int,
        updates: Mapping[str, AdapterPayload],
        current: AdapterPayload,
        config: FedLoraConfig,
    ) -> None:
        """Keep a round's updates; those of an earlier round are forgotten."""
        self._held = {client: _Withheld(payload, current, config) for client, payload in updates.items()}
        privacy = getattr(config, "privacy", None)
        shares = isinstance(privacy, ClientPrivacy) and privacy.noise_at == "clients"
        self._privacy = privacy if shares else None
        self._round, self._node, self._plan = (run_id, server_round), None, None

    def handle(self, packet: Packet) -> Packet:
        """Answer one step.

        Raises:
            StaleRoundError: if the plan is not the withheld round's, or changes between steps.
            PolicyRefusedError: if the plan would open sums of too few clients.
        """
        plan, step, questions = unpack_step(packet)
        if (plan.run_id, plan.server_round) != self._round or (self._plan is not None and plan != self._plan):
            raise StaleRoundError(
                f"secure aggregation: run {plan.run_id!r} round {plan.server_round} is not the round whose updates "
                "are withheld here, or its plan changed"
            )
        self._check_plan(plan)
        if self._node is None:
            self._plan = plan
            self._node = SecAggNode(plan, self._vector, sign=self._sign, verify=self._verify)
        late = step in ("confirm", "unmask")
        mine = {client: body for client, body in questions.items() if late or client in self._held}
        answers = self._node.handle(step, mine)
        for client, body in answers.items():
            if REFUSED in body:
                _LOG.warning("secure aggregation: step %s: client %s: %s", step, client, body[REFUSED])
        return pack_step(plan, step, answers)

    def _check_plan(self, plan: SecAggPlan) -> None:
        """Hold the server's constants against the site's floor and, with shares of noise, the run's own terms."""
        floor, share = self._least, PINNED_THRESHOLD - 1e-9 if self._verify is not None else 0.5
        if self._privacy is not None:
            terms = client_plan(self._privacy, expected_clients=1.0, sample_rate=None)
            floor = max(floor, terms.honest_clients or 0)
            own = encoding_for(share_limit(terms), plan.encoding.clients)
            if plan.encoding.bits != own.bits or not math.isclose(
                plan.encoding.limit, own.limit, rel_tol=1e-6
            ):
                raise PolicyRefusedError(
                    f"secure aggregation: encoding of limit {plan.encoding.limit:g} in {plan.encoding.bits} bits; the "
                    f"noise needs {own.limit:g} in {own.bits}: another one would cut or drown the shares of noise"
                )
        if plan.least_clients < floor or plan.threshold_share <= share:
            raise PolicyRefusedError(
                f"secure aggregation: the server would open sums of {plan.least_clients} clients at threshold "
                f"{plan.threshold_share}; this site needs at least {floor} and more than {share:.3f}"
            )

    def _vector(self, client: str) -> npt.NDArray[np.float32]:
        held = self._held.pop(client)
        payload, privacy = held.payload, held.config.privacy
        if isinstance(privacy, ClientPrivacy) and privacy.noise_at == "clients" and self._round is not None:
            plan = client_plan(privacy, expected_clients=1.0, sample_rate=None)
            payload = clip_and_share(
                payload, held.current, plan, self._normals(held.config, client, self._round[1])
            )
        return update_vector(payload, held.current)
