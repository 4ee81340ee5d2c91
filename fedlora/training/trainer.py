"""The trainer: the only code that touches records.

Order of one round, which no exception and no crash can change:

1. the request is checked against the site's own policy (nothing private is read);
2. every client's projected spend is checked and *reserved* durably, the whole cohort in one transaction;
3. records are read, drawn (Poisson) and trained on; noise enters before anything leaves;
4. what ran is *committed*: the event from the mechanism that ran, the steps from the optimiser's counter;
5. the reply leaves.

A crash between 2 and 4 counts as spent. A repeated round gets the same bytes or a refusal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fedlora
from fedlora.accounting import Event
from fedlora.aggregation import reduce_payloads
from fedlora.config.schema import FedLoraConfig, NoPrivacy
from fedlora.errors import (
    AccountingError,
    DataError,
    DuplicateRoundError,
    FedLoraError,
    LayoutMismatchError,
    LedgerError,
    StaleRoundError,
)
from fedlora.ledger.types import Account, Budget, CommitRequest, Refusal, Reservation
from fedlora.training.charging import BudgetKeeper, Standing, charges, plan_round
from fedlora.training.drawing import make_job
from fedlora.training.policy import Policy
from fedlora.training.port import Hello, Packet, error_record, where_it_failed
from fedlora.training.replies import MemoryReplies, Replies, release_digest
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.training.secure import SecureDesk, check_withhold, withhold
from fedlora.training.session import (
    Workbench,
    build_workbench,
    check_claims,
    check_clients,
    read_config,
    same_container,
)
from fedlora.training.shelf import Records, Shelf
from fedlora.training.slots import Slots, SlotStore, keeps_slots

_LOG = logging.getLogger(__name__)

Engine = Any
Signer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass
class Session:
    """A workbench with its engine, kept while the configuration stays the same."""

    bench: Workbench
    engine: Engine
    config_hash: str


@dataclass(frozen=True)
class Admitted:
    """One client with a durable reservation (None where nothing is charged) and its open records."""

    client: str
    reservation: Reservation | None
    records: Records
    steps: int


class Trainer:
    """Train the logical clients of one node, and charge each one's own account first.

    Args:
        shelf: the node's records.
        policy: the data owner's rules.
        keeper: durable spending (the site's ledger, or a simulation's grants).
        budgets: the site's own terms per client; the run configuration's where None.
        dataset: the site's own data-set name; the configuration's where None.
        replies: keeps the last replies for repeated requests.
        sign: signs each reply's receipt with the site's identity key.
        identity: fingerprint of that key.
        timings: send durations back; never in a deployment, where they tell batch sizes.
        slots: keeps optimiser state between rounds; in memory where None.
    """

    def __init__(
        self,
        shelf: Shelf,
        policy: Policy,
        keeper: BudgetKeeper,
        *,
        budgets: Mapping[str, Budget] | None = None,
        dataset: str | None = None,
        replies: Replies | None = None,
        sign: Signer | None = None,
        identity: str | None = None,
        timings: bool = False,
        slots: SlotStore | None = None,
    ) -> None:
        """Keep the parts; nothing is loaded or read yet."""
        self._shelf, self._policy, self._keeper = shelf, policy, keeper
        self._budgets, self._dataset = budgets, dataset
        self._replies: Replies = MemoryReplies() if replies is None else replies
        self._sign, self._identity, self._timings = sign, identity, timings
        self._slots = SlotStore(None) if slots is None else slots
        self._desk = SecureDesk()
        self._run_id = ""
        self._session: Session | None = None
        self._lock = threading.Lock()

    def hello(self) -> Hello:
        """Return public facts: client ids, library version, identity."""
        facts: dict[str, Any] = {}
        if self._session is not None:
            facts["base_fingerprint"] = self._session.bench.base.fingerprint
        return Hello(tuple(self._shelf.clients()), fedlora.__version__, self._identity, facts)

    def prepare(self, config: FedLoraConfig, config_hash: str) -> Event:
        """Load the base model for a configuration ahead of the first round; return its step event."""
        self._policy.check_config(config)
        with self._lock:
            return self._open(config, config_hash).bench.event

    def handle(self, request: RoundRequest) -> RoundReply:
        """Answer one round; see the module's text for the order.

        Args:
            request: PUBLIC. What the server asks.

        Returns:
            PUBLIC. One reply per asked client: an update, or a refusal or failure by name.
        """
        with self._lock:
            try:
                check_clients(request.clients)
                replies, timings = self._round(request)
                if request.withhold and self._session is not None:
                    replies = withhold(self._desk, request, self._session.bench.config, replies)
                return self._reply(request, replies, timings)
            except FedLoraError as error:
                _LOG.warning("round %s refused: %s", request.server_round, error)
                replies = self._all(request, error)
            except Exception as error:
                _LOG.error("round %s failed: %s", request.server_round, where_it_failed(error))
                replies = self._all(request, error)
        return RoundReply(request.run_id, request.server_round, replies)

    def _reply(
        self, request: RoundRequest, replies: tuple[ClientReply, ...], timings: Mapping[str, float]
    ) -> RoundReply:
        """Build the node's answer; where the server asks for it, its clients' updates are summed here."""
        told = timings if self._timings else {}
        session = self._session
        updates = {one.client: one.payload for one in replies if one.payload is not None}
        linear = session is not None and session.bench.mechanism.uplink in ("lora_b", "tangent", "projected")
        if session is None or not request.reduce or not linear or len(updates) < 2:
            return RoundReply(request.run_id, request.server_round, replies, timings=told)
        kind, recipe = session.bench.mechanism.uplink, request.payload.recipe
        total, used, _ = reduce_payloads(updates, session.bench.layout, recipe, kind)
        if total is None:
            return RoundReply(request.run_id, request.server_round, replies, timings=told)
        summed = set(used)
        bare = tuple(replace(one, payload=None) if one.client in summed else one for one in replies)
        return RoundReply(request.run_id, request.server_round, bare, total, used, timings=told)

    def secure(self, packet: Packet) -> Packet:
        """Answer one step of secure aggregation for the updates withheld in this round."""
        with self._lock:
            return self._desk.handle(packet)

    # -- the order of a round -------------------------------------------------------------------

    def _round(self, request: RoundRequest) -> tuple[tuple[ClientReply, ...], dict[str, float]]:
        started = time.perf_counter()
        config = self._checked_config(request)
        check_withhold(config, request)
        session = self._open(config, request.config_hash)
        self._check_payload(session, request)
        if request.run_id != self._run_id:
            self._slots.forget()
            self._run_id = request.run_id
        self._policy.check_round(request.server_round, request.steps)
        answers = self._admit(session, request)
        reserved = time.perf_counter()
        admitted = [one for one in answers.values() if isinstance(one, Admitted)]
        done = self._train(session, request, admitted)
        trained = time.perf_counter()
        replies = self._settle(session, request, answers, done)
        ended = time.perf_counter()
        timings = {"reserve": reserved - started, "train": trained - reserved, "settle": ended - trained}
        return replies, timings

    def _checked_config(self, request: RoundRequest) -> FedLoraConfig:
        session = self._session
        known = session is not None and session.config_hash == request.config_hash
        if session is not None and known and same_container(session.bench.config, request.config):
            return session.bench.config
        config = read_config(request.config, request.config_hash)
        self._policy.check_config(config)
        return config

    def _open(self, config: FedLoraConfig, config_hash: str) -> Session:
        if self._session is None or self._session.config_hash != config_hash:
            from fedlora.training.cohort import CohortEngine

            self._session = None
            bench = build_workbench(config)
            self._policy.check_base(bench.base.fingerprint)
            check_claims(bench)
            engine = CohortEngine(bench.adapted, bench.mechanism, bench.task, config)
            self._session = Session(bench, engine, config_hash)
        return self._session

    @staticmethod
    def _check_payload(session: Session, request: RoundRequest) -> None:
        mine, theirs = session.bench.base.fingerprint, request.payload.base_fingerprint
        if mine != theirs:
            raise LayoutMismatchError(
                f"base model: the server trains {theirs[:16]}, this site loaded {mine[:16]}; "
                "use the same model.name_or_path and revision on both sides"
            )
        if request.server_round < 1 or request.steps < 1:
            raise StaleRoundError(
                f"round request: round {request.server_round}, steps {request.steps}; both must be >= 1"
            )

    def _admit(self, session: Session, request: RoundRequest) -> dict[str, Admitted | ClientReply]:
        """Reserve for every client that lives here, then (and only then) open the records."""
        here = set(self._shelf.clients())
        answers: dict[str, Admitted | ClientReply] = {}
        for client in request.clients:
            if client not in here:
                answers[client] = self._failed(
                    client, DataError(f"client {client}: does not live at this node")
                )
        asked = [client for client in request.clients if client in here]
        granted = self._reserve(session, request, asked)
        for client in asked:
            answer = granted[client]
            if isinstance(answer, Refusal):
                answers[client] = self._refused(client, answer, may_repeat=not request.withhold)
            else:
                answers[client] = self._read(session, client, answer, request.steps)
        return answers

    def _reserve(
        self, session: Session, request: RoundRequest, clients: Sequence[str]
    ) -> dict[str, Reservation | Refusal | None]:
        config = session.bench.config
        if not charges(config):
            return dict.fromkeys(clients)
        plan = plan_round(
            config,
            clients,
            run_id=request.run_id,
            server_round=request.server_round,
            event=session.bench.event,
            steps=request.steps,
            budgets=self._budgets,
            dataset=self._dataset,
        )
        answers = self._keeper.reserve(plan)
        if len(answers) != len(plan):
            raise LedgerError(
                f"ledger: {len(answers)} answers to {len(plan)} reservations; nothing is released"
            )
        return dict(zip(clients, answers, strict=True))

    def _read(
        self, session: Session, client: str, reservation: Reservation | None, steps: int
    ) -> Admitted | ClientReply:
        granted = steps if reservation is None else reservation.steps
        try:
            records = self._shelf.open(client, session.bench.task)
        except Exception as error:
            return self._failed(client, error)
        return Admitted(client, reservation, records, granted)

    def _train(self, session: Session, request: RoundRequest, admitted: Sequence[Admitted]) -> dict[str, Any]:
        """Train in groups of equal step counts; a client whose records cannot be read fails alone."""
        done: dict[str, Any] = {}
        for steps in sorted({one.steps for one in admitted}):
            jobs = []
            for one in (one for one in admitted if one.steps == steps):
                try:
                    job = make_job(session.bench.config, one.client, one.records, request, steps)
                    jobs.append(replace(job, slots=self._earlier_slots(session, one.client, request)))
                except Exception as error:
                    done[one.client] = self._failed(one.client, error)
            if jobs:
                first = (request.server_round - 1) * session.bench.config.training.local_steps
                for update in session.engine.train(request.payload, jobs, steps, first):
                    done[update.client] = update
        return done

    def _earlier_slots(self, session: Session, client: str, request: RoundRequest) -> Slots | None:
        if not keeps_slots(session.bench.mechanism):
            return None
        return self._slots.load(client, request.server_round)

    def _settle(
        self,
        session: Session,
        request: RoundRequest,
        answers: Mapping[str, Admitted | ClientReply],
        done: Mapping[str, Any],
    ) -> tuple[ClientReply, ...]:
        """Check what ran, keep the replies, commit the cohort, then state each account's standing."""
        fresh: dict[str, ClientReply] = {}
        commits: list[CommitRequest] = []
        for client, answer in answers.items():
            if isinstance(answer, ClientReply):
                fresh[client] = answer
                continue
            result = done.get(client)
            if isinstance(result, ClientReply):
                fresh[client] = result
                continue
            fresh[client] = reply = self._checked_update(session, answer, result)
            if keeps_slots(session.bench.mechanism):
                self._slots.save(client, request.server_round, result.slots)
            if answer.reservation is not None:
                digest = self._replies.keep(answer.reservation, reply)
                commits.append(CommitRequest(answer.reservation, reply.steps, session.bench.event, digest))
        if commits:
            self._keeper.commit(commits)
        standings = self._standings(session, [one for one in fresh.values() if one.status == "ok"])
        return tuple(self._stamped(fresh[client], request, standings) for client in request.clients)

    # -- helpers --------------------------------------------------------------------------------

    @staticmethod
    def _checked_update(session: Session, admitted: Admitted, update: Any) -> ClientReply:
        if update is None:
            raise AccountingError(f"client {admitted.client}: the engine gave no result; nothing is released")
        if update.steps != admitted.steps:
            raise AccountingError(
                f"client {admitted.client}: the optimiser took {update.steps} steps, {admitted.steps} were "
                "reserved; nothing is released"
            )
        event: Event = session.bench.event
        if not isinstance(session.bench.config.privacy, NoPrivacy) and update.event.key() != event.key():
            raise AccountingError(
                f"client {admitted.client}: the event that ran differs from the reserved one; nothing is released"
            )
        return ClientReply(
            client=admitted.client,
            status="ok",
            payload=update.payload,
            event=event.to_json(),
            steps=update.steps,
        )

    def _standings(self, session: Session, replies: Sequence[ClientReply]) -> dict[str, Standing]:
        privacy = session.bench.config.privacy
        if isinstance(privacy, NoPrivacy) or not replies:
            return {}
        dataset = session.bench.config.data.name if self._dataset is None else self._dataset
        accounts = [Account(reply.client, dataset) for reply in replies]
        found = self._keeper.standing(accounts, privacy.target_delta)
        return {account.client: standing for account, standing in found.items()}

    def _stamped(
        self, reply: ClientReply, request: RoundRequest, standings: Mapping[str, Standing]
    ) -> ClientReply:
        standing = standings.get(reply.client)
        if standing is not None:
            reply = replace(reply, epsilon=standing.epsilon, ledger_head=standing.head)
        if self._sign is None or reply.status != "ok":
            return reply
        claim = {
            "run_id": request.run_id,
            "round": request.server_round,
            "client": reply.client,
            "digest": release_digest(reply),
            "event": reply.event,
            "steps": reply.steps,
            "ledger_head": reply.ledger_head,
        }
        return replace(reply, receipt=self._sign(claim))

    def _refused(self, client: str, refusal: Refusal, may_repeat: bool) -> ClientReply:
        """Return the kept reply of a repeated round, unless a second share of noise would be drawn for it."""
        if refusal.reason == "duplicate-round" and may_repeat:
            kept = self._replies.find(refusal)
            if kept is not None:
                return kept
            error: FedLoraError = (
                refusal.error
                if isinstance(refusal.error, DuplicateRoundError)
                else DuplicateRoundError(str(refusal.error))
            )
            return ClientReply(client=client, status="refused", error=error_record(error))
        return ClientReply(client=client, status="refused", error=error_record(refusal.error))

    @staticmethod
    def _failed(client: str, error: Exception) -> ClientReply:
        if not isinstance(error, FedLoraError):
            _LOG.error("client %s failed: %s", client, where_it_failed(error))
        return ClientReply(client=client, status="failed", error=error_record(error))

    @staticmethod
    def _all(request: RoundRequest, error: Exception) -> tuple[ClientReply, ...]:
        refused = isinstance(error, FedLoraError) and 20 <= error.exit_code < 35
        status = "refused" if refused else "failed"
        record = error_record(error)
        return tuple(
            ClientReply(client=client, status=status, error=record)  # type: ignore[arg-type]
            for client in dict.fromkeys(request.clients)
        )
