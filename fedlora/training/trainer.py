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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fedlora
from fedlora.accounting import Event
from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.errors import DataError, FedLoraError, LedgerError
from fedlora.ledger.types import Account, Budget, CommitRequest, Refusal, Reservation
from fedlora.training.answers import (
    Signer,
    checked_update,
    failed,
    reduced_reply,
    refused,
    same_answer,
    stamped,
    with_examples,
)
from fedlora.training.charging import BudgetKeeper, Standing, charges, plan_round
from fedlora.training.cohort_retry import TooLargeError
from fedlora.training.drawing import Coins, dropout_masks, make_job
from fedlora.training.policy import Policy
from fedlora.training.port import Hello, Packet, where_it_failed
from fedlora.training.replies import MemoryReplies, Replies
from fedlora.training.requests import ClientReply, RoundReply, RoundRequest
from fedlora.training.secure import SecureDesk, check_withhold, withhold
from fedlora.training.selfcheck import require_selfchecks
from fedlora.training.session import (
    Workbench,
    build_workbench,
    check_claims,
    check_clients,
    check_request,
    noise_alone,
    read_config,
    same_container,
)
from fedlora.training.shelf import Records, Shelf
from fedlora.training.slots import Slots, SlotStore, keeps_slots
from fedlora.training.witness import Known, LedgerWitness

_LOG = logging.getLogger(__name__)

__all__ = ["Admitted", "Session", "Signer", "Trainer"]

Engine = Any


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
        witness: checks heads that the server knows, and signs receipts for its mirror; None in simulations.
        desk: withholds updates for secure aggregation, with the site's identity; without one where None.
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
        witness: LedgerWitness | None = None,
        desk: SecureDesk | None = None,
    ) -> None:
        """Keep the parts; nothing is loaded or read yet."""
        self._shelf, self._policy, self._keeper = shelf, policy, keeper
        self._budgets, self._dataset = budgets, dataset
        self._replies: Replies = MemoryReplies() if replies is None else replies
        self._sign, self._identity, self._timings = sign, identity, timings
        self._slots = SlotStore(None) if slots is None else slots
        self._witness = witness
        self._desk = SecureDesk() if desk is None else desk
        self._run_id = ""
        self._session: Session | None = None
        self._unfit: dict[str, Exception] = {}
        self._lock = threading.Lock()
        self.last_timings: Mapping[str, float] = {}
        """Seconds of the last round by part; for the site's own metrics, never sent in a deployment."""
        self.coins: Coins | None = None
        """Coins of the next rounds; the operating system's where None. Set by a simulation's node only."""

    @property
    def engine(self) -> Engine:
        """The cohort engine of the open session; None before one is open."""
        return None if self._session is None else self._session.engine

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
            self.last_timings = {}
            try:
                check_clients(request.clients)
                replies, timings = self._round(request)
                if request.withhold and self._session is not None:
                    replies = withhold(self._desk, request, self._session.bench.config, replies)
                told = timings if self._timings else {}
                return reduced_reply(self._bench(), request, replies, told)
            except FedLoraError as error:
                _LOG.warning("round %s refused: %s", request.server_round, error)
                replies = same_answer(request, error)
            except Exception as error:
                _LOG.error("round %s failed: %s", request.server_round, where_it_failed(error))
                replies = same_answer(request, error)
        return RoundReply(request.run_id, request.server_round, replies)

    def secure(self, packet: Packet) -> Packet:
        """Answer one step of secure aggregation for the updates withheld in this round."""
        with self._lock:
            return self._desk.handle(packet)

    # -- the order of a round -------------------------------------------------------------------

    def _round(self, request: RoundRequest) -> tuple[tuple[ClientReply, ...], dict[str, float]]:
        started, busy = time.perf_counter(), time.thread_time()
        config = self._checked_config(request)
        check_withhold(config, request)
        session = self._open(config, request.config_hash)
        opened, open_cpu = time.perf_counter(), time.thread_time() - busy
        check_request(session.bench, request)
        if request.run_id != self._run_id:
            self._slots.forget()
            self._run_id, self._unfit = request.run_id, {}
        self._policy.check_round(request.server_round, request.steps)
        known = {client: Known.from_json(one) for client, one in request.known.items()}
        if self._witness is not None:
            self._witness.check(known)
        answers = self._admit(session, request)
        reserved = time.perf_counter()
        admitted = [one for one in answers.values() if isinstance(one, Admitted)]
        busy = time.thread_time()
        done = self._train(session, request, admitted)
        trained, busy = time.perf_counter(), time.thread_time() - busy
        replies = self._witnessed(session, request, known, self._settle(session, request, answers, done))
        ended = time.perf_counter()
        timings = {
            "open": opened - started,
            "reserve": reserved - opened,
            "train": trained - reserved,
            "settle": ended - trained,
        }
        self.last_timings = {**timings, "train_cpu": busy, "open_cpu": open_cpu}
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

            self._session, self._unfit = None, {}
            bench = build_workbench(config)
            self._policy.check_base(bench.base.fingerprint)
            self._policy.check_trained(bench.layout)
            self._policy.check_joint_noise(config, noise_alone(bench))
            check_claims(bench)
            if isinstance(config.privacy, RecordPrivacy):
                require_selfchecks(bench)
            engine = CohortEngine(bench.adapted, bench.mechanism, bench.task, config)
            self._session = Session(bench, engine, config_hash)
        return self._session

    def _admit(self, session: Session, request: RoundRequest) -> dict[str, Admitted | ClientReply]:
        """Reserve for every client that lives here, then (and only then) open the records."""
        here = set(self._shelf.clients())
        answers: dict[str, Admitted | ClientReply] = {}
        for client in request.clients:
            if client not in here:
                answers[client] = failed(client, DataError(f"client {client}: does not live at this node"))
        answers |= {c: failed(c, self._unfit[c]) for c in request.clients if c in here and c in self._unfit}
        asked = [client for client in request.clients if client not in answers]
        granted = self._reserve(session, request, asked)
        for client in asked:
            answer = granted[client]
            if isinstance(answer, Refusal):
                again = not request.withhold
                answers[client] = refused(client, answer, self._replies, request, may_repeat=again)
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
        """Open a client's records, all checked once: every record decides whether they fit, never a draw of some.

        What does not fit costs the round that found it and is remembered until another configuration or run.
        """
        granted = steps if reservation is None else reservation.steps
        try:
            records = self._shelf.open(client, session.bench.task)
            check: Any = getattr(self._shelf, "check", None)
            if check is not None:
                check(client, session.bench.task)
        except Exception as error:
            self._unfit[client] = error.with_traceback(None)
            return failed(client, error)
        return Admitted(client, reservation, records, granted)

    def _train(self, session: Session, request: RoundRequest, admitted: Sequence[Admitted]) -> dict[str, Any]:
        """Train in groups of equal step counts; a client whose records cannot be read fails alone."""
        done: dict[str, Any] = {}
        for steps in sorted({one.steps for one in admitted}):
            jobs = []
            for one in (one for one in admitted if one.steps == steps):
                try:
                    job = make_job(session.bench.config, one.client, one.records, request, steps, self.coins)
                    jobs.append(replace(job, slots=self._earlier_slots(session, one.client, request)))
                except Exception as error:
                    done[one.client] = failed(one.client, error)
            if jobs:
                first = (request.server_round - 1) * session.bench.config.training.local_steps
                config, names = session.bench.config, [job.client for job in jobs]
                try:
                    with dropout_masks(config, session.bench.adapted, names, request.server_round):
                        updates = session.engine.train(request.payload, jobs, steps, first)
                except TooLargeError as error:
                    updates = error.done
                    done |= {client: failed(client, why) for client, why in error.clients.items()}
                done |= {update.client: update for update in updates}
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
            reply = checked_update(session.bench, client, answer.steps, result)
            fresh[client] = reply = with_examples(reply, session.bench.config, len(answer.records))
            if keeps_slots(session.bench.mechanism) and result is not None:
                self._slots.save(client, request.server_round, result.slots)
            if answer.reservation is not None:
                digest = self._replies.keep(answer.reservation, reply, request)
                commits.append(CommitRequest(answer.reservation, reply.steps, session.bench.event, digest))
        if commits:
            self._keeper.commit(commits)
        standings = self._standings(session, [one for one in fresh.values() if one.status == "ok"])
        return tuple(
            stamped(fresh[client], request, standings.get(client), self._sign) for client in request.clients
        )

    def _witnessed(
        self,
        session: Session,
        request: RoundRequest,
        known: Mapping[str, Known],
        replies: tuple[ClientReply, ...],
    ) -> tuple[ClientReply, ...]:
        """Add the ledger's signed receipts of this round and of those that the server misses."""
        witness = self._witness
        if witness is None or not charges(session.bench.config):
            return replies
        here, dataset = set(self._shelf.clients()), self._data_set(session)
        signed = []
        for reply in replies:
            if reply.client in here:
                rounds = {request.server_round, *known.get(reply.client, Known()).missing}
                found = witness.receipts(Account(reply.client, dataset), request.run_id, rounds)
                reply = replace(reply, ledger_receipts=found)
            signed.append(reply)
        return tuple(signed)

    def _data_set(self, session: Session) -> str:
        return session.bench.config.data.name if self._dataset is None else self._dataset

    def _bench(self) -> Workbench | None:
        return None if self._session is None else self._session.bench

    def _standings(self, session: Session, replies: Sequence[ClientReply]) -> dict[str, Standing]:
        privacy = session.bench.config.privacy
        if not isinstance(privacy, RecordPrivacy) or not replies:
            return {}
        dataset = self._data_set(session)
        accounts = [Account(reply.client, dataset) for reply in replies]
        found = self._keeper.standing(accounts, privacy.target_delta)
        return {account.client: standing for account, standing in found.items()}
