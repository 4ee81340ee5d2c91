"""The round loop: bounded waits, too few replies as an event, a checkpoint each round, exact resume."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import Grid

from fedlora.config.resolve import config_hash
from fedlora.config.schema import FedLoraConfig
from fedlora.errors import AggregationError, BudgetExceededError, TooFewRepliesError
from fedlora.names import STATES_FOLDER
from fedlora.report.diagnostics import RoundDiagnostics
from fedlora.report.trackers import Trackers
from fedlora.simulation.settings import RoundRecord, ServerSettings
from fedlora.training.requests import ClientReply
from fedlora.training.slots import drop_states_after
from fedlora.wire.fingerprint import payload_fingerprint
from fedlora.wire.payload import AdapterPayload
from server.checkpoint import Checkpoint, load_newest, save
from server.evaluation import PublicEvaluator
from server.folder import RunFolder, plain
from server.mirror import LedgerMirror
from server.receipts import ReceiptDesk
from server.stopping import EarlyStopping
from strategies.fedlora_strategy import FedLoraStrategy

_LOG = logging.getLogger(__name__)
MAX_EMPTY_ROUNDS = 3
"""So many rounds in a row with too few replies end the run; so does a shorter run that consists of such rounds."""


@dataclass
class LoopState:
    """What the loop carries; everything but the clock is in the checkpoint."""

    round: int = 0
    empty_rounds: int = 0
    metrics: Mapping[str, float] | None = None
    status: str = "failed"
    seconds: dict[str, float] = field(default_factory=dict)

    def memory(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {"empty_rounds": self.empty_rounds, "metrics": self.metrics}


class Answers:
    """Sees every client's answer: counts it in the mirror and remembers who is out of budget."""

    def __init__(self, mirror: LedgerMirror, receipts: ReceiptDesk | None = None) -> None:
        """Start with an empty round; `receipts` takes signed ones (deployments)."""
        self.mirror, self.receipts = mirror, receipts
        self.out_of_budget: set[str] = set()

    def start_round(self) -> None:
        """Forget the last round's refusals and figures."""
        self.out_of_budget = set()
        self.mirror.start_round()

    def note(self, reply: ClientReply) -> None:
        """Take one client's answer in, used or not."""
        self.mirror.note(reply)
        if self.receipts is not None:
            self.receipts.note(reply)
        error = (reply.error or {}).get("error")
        if reply.status == "refused" and error == BudgetExceededError.__name__:
            self.out_of_budget.add(reply.client)


class RoundLoop:
    """Runs the rounds of one run.

    Args:
        settings: the run's settings.
        grid: Flower's grid (a deployment's or fedlora's own).
        strategy: samples, sends and aggregates.
        evaluator: public evaluation.
        mirror: counts what clients released.
        folder: run folder.
        before_round: called with the round number before clients are asked (fresh projections, rosters).
        epsilon: returns the largest epsilon that binds so far, or None without privacy.
        diagnostics: computes a round's public diagnostics; none without it.
        trackers: experiment trackers that see every published round.
    """

    def __init__(
        self,
        settings: ServerSettings,
        grid: Grid,
        strategy: FedLoraStrategy,
        evaluator: PublicEvaluator,
        answers: Answers,
        folder: RunFolder,
        before_round: Callable[[int], None],
        epsilon: Callable[[], float | None],
        diagnostics: RoundDiagnostics | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Bind the parts."""
        self._diagnostics, self._trackers = diagnostics, trackers
        self._settings, self._grid, self._strategy = settings, grid, strategy
        self._evaluator, self._answers, self._folder = evaluator, answers, folder
        self._before_round, self.epsilon = before_round, epsilon
        self._config: FedLoraConfig = settings.config
        self._hash = config_hash(settings.config)
        self._checkpoints: Path = folder.path / "checkpoints"
        self.state = LoopState()
        self._stop_early = False
        self._stopping = EarlyStopping.of(settings.config)

    def resume(self) -> None:
        """Go on from the newest usable checkpoint; a run that never completed a round starts at the first.

        Raises:
            CheckpointError: if checkpoints exist and none is usable, or they belong to another configuration.
        """
        if not any(self._checkpoints.glob("round-*.ckpt")):
            self._folder.keep_rounds_up_to(-1)  # the start is noted again
            drop_states_after(self._folder.path / STATES_FOLDER, 0)
            return
        found = load_newest(self._checkpoints, self._hash)
        drop_states_after(self._folder.path / STATES_FOLDER, found.round)
        self._strategy.restore(found.payload, found.state)
        self._answers.mirror.restore(found.memory["mirror"])
        self.state.round = found.round
        self.state.empty_rounds = int(found.memory["loop"]["empty_rounds"])
        self.state.metrics = found.memory["loop"]["metrics"]
        self._stopping.restore(found.memory["loop"].get("stopping", {}))
        self._folder.keep_rounds_up_to(found.round, found.memory.get("record"))
        _LOG.info("resumed after round %d", found.round)

    def run(self) -> str:
        """Run to the last round.

        Returns:
            "finished", or "budget-exhausted" if every asked client refused for its budget.

        Raises:
            TooFewRepliesError: after several rounds in a row without enough replies.
        """
        self.state.status = self._all_rounds()
        return self.state.status

    def _all_rounds(self) -> str:
        last = self._config.federation.rounds
        if self.state.round == 0 and not self._note_start_meanwhile():
            self._note_start()
        while self.state.round < last:
            if self._settings.stop_after is not None and self.state.round >= self._settings.stop_after:
                return "stopped"
            if not self._one_round(self.state.round + 1, last):
                return "budget-exhausted"
            if self._stop_early:
                return "stopped-early"
        return "finished"

    def _note_start_meanwhile(self) -> bool:
        """Let the grid note the start while the first round's clients train; return False where that cannot be.

        A rule for early stopping is checked against the metrics before any client is asked.
        """
        grid: Any = self._grid
        if not getattr(grid, "works_meanwhile", False) or self._stopping.config is not None:
            return False
        if self._settings.stop_after == 0:
            return False
        self._evaluator.rehearse(self._strategy.payload)
        grid.meanwhile = self._note_start
        return True

    def _note_start(self) -> None:
        started = time.perf_counter()
        metrics = self._evaluator.evaluate(self._strategy.payload)
        self._stopping.check(self._evaluator.names)
        seconds = {"evaluate": time.perf_counter() - started}
        adapter = payload_fingerprint(self._strategy.payload)
        self._publish(RoundRecord(0, "initial", metrics=metrics, seconds=seconds, adapter=adapter))

    def _one_round(self, number: int, last: int) -> bool:
        """Run one round; return False if the run must end because budgets are exhausted."""
        started = time.perf_counter()
        self._answers.start_round()
        self._before_round(number)
        messages = self._strategy.configure_train(number, ArrayRecord(), ConfigRecord(), self._grid)
        sent = self._strategy.payload
        configured = time.perf_counter()
        timeout = self._config.federation.round_timeout_seconds
        replies = list(self._grid.send_and_receive(messages, timeout=timeout))
        received = time.perf_counter()
        problem: AggregationError | None = None
        try:
            self._strategy.aggregate_train(number, replies)
        except AggregationError as error:
            problem = error
        aggregated = time.perf_counter()
        metrics = None
        if problem is None and self._evaluator.due(number, last):
            metrics = self.state.metrics = self._evaluator.evaluate(self._strategy.payload)
            self._stop_early = metrics is not None and self._stopping.over(metrics)
        evaluated = time.perf_counter()
        self.state.round = number
        silent = self._strategy.rounds[-1].silent
        trouble = TooFewRepliesError(silent) if problem is None and silent else problem
        self.state.empty_rounds = 0 if trouble is None else self.state.empty_rounds + 1
        seconds = {
            "configure": configured - started,
            "clients": received - configured,
            "aggregate": aggregated - received,
            "evaluate": evaluated - aggregated,
        }
        record = self._record(number, problem, metrics, seconds, sent)
        self._save(record)
        took = {**seconds, "checkpoint": time.perf_counter() - evaluated}
        self._publish(replace(record, seconds=took))
        return trouble is None or self._may_go_on(number, trouble)

    def _may_go_on(self, number: int, problem: AggregationError) -> bool:
        """Decide what a round without enough replies means (or without any, where noise alone was released).

        Raises:
            TooFewRepliesError: if this has happened too often in a row.
        """
        record = self._strategy.rounds[-1]
        said = [f"{client} refused: {reason}" for client, reason in sorted(record.refused.items())[:3]]
        why = "; ".join([str(problem), *said])
        _LOG.warning("round %d: %s", number, why)
        if record.asked and self._answers.out_of_budget >= set(record.asked):
            return False
        if self.state.empty_rounds >= min(MAX_EMPTY_ROUNDS, self._config.federation.rounds):
            raise TooFewRepliesError(
                f"{self.state.empty_rounds} rounds in a row (of {self._config.federation.rounds}) had too few replies; "
                f"last reason: {why}; "
                "look at the clients' logs, or lower federation.min_replies"
            )
        return True

    def _save(self, record: RoundRecord) -> None:
        """Write the round's checkpoint, its record in it: a crash before that is published loses no round's line."""
        loop = {**self.state.memory(), "stopping": self._stopping.memory()}
        memory = {"mirror": self._answers.mirror.memory(), "loop": loop, "record": plain(record)}
        state = self._strategy.state()
        save(self._checkpoints, Checkpoint(record.round, self._hash, self._strategy.payload, state, memory))

    def _record(
        self,
        number: int,
        problem: AggregationError | None,
        metrics: Mapping[str, float] | None,
        seconds: Mapping[str, float],
        sent: AdapterPayload,
    ) -> RoundRecord:
        record = self._strategy.rounds[-1]
        result = record.result
        failed = {**record.rejected, **dict.fromkeys(record.missing, "no answer in time")}
        return RoundRecord(
            round=number,
            status="ok" if problem is None else "skipped",
            asked=len(record.asked),
            accepted=len(record.accepted),
            refused=dict(record.refused),
            failed=failed,
            epsilon=self.epsilon(),
            residual=None if result is None else result.residual,
            metrics=metrics,
            seconds=seconds,
            bytes_up=record.wire_bytes_up,
            bytes_down=record.wire_bytes_down,
            adapter=payload_fingerprint(self._strategy.payload),
            epsilon_by_client=dict(record.epsilon),
            diagnostics={} if problem is not None else self._diagnose(sent, len(record.accepted)),
        )

    def _diagnose(self, sent: AdapterPayload, accepted: int) -> Mapping[str, float]:
        if self._diagnostics is None:
            return {}
        return self._diagnostics.of(sent, self._strategy.payload, accepted, self._strategy.aggregator.state())

    def _publish(self, record: RoundRecord) -> None:
        self._folder.append(record)
        if self._trackers is not None:
            self._trackers.note(plain(record))
        if self._settings.progress is not None and self._settings.progress(record) is True:
            self._stop_early = True
