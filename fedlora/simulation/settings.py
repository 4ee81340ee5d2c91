"""What a ServerApp needs beyond Flower's context, registered in-process by whoever starts the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlora.config.schema import FedLoraConfig


@dataclass(frozen=True)
class RoundRecord:
    """PUBLIC. One line of `metrics.jsonl`; None where a figure does not exist.

    Attributes:
        round: round number, 1, 2, ...; 0 is the evaluation before the first round.
        status: "ok", "skipped" (too few replies) or "initial".
        asked: clients asked.
        accepted: clients whose update was used.
        refused: client to error class (budget or policy).
        failed: client to reason.
        epsilon: largest epsilon any client's own ledger reports so far.
        epsilon_by_client: client to what its own ledger reported in this round (record-level privacy).
        diagnostics: gauge drift and noise in the weights, computed by the server from public values.
        residual: aggregation residual.
        metrics: public evaluation (accuracy, loss, ...), where this round was evaluated.
        seconds: wall time per part of the round.
        bytes_up: bytes of the answers as they came, masking steps of secure aggregation included.
        bytes_down: bytes of the requests and questions as they were sent.
        adapter: sha256 of the global adapter after the round.
    """

    round: int
    status: str
    asked: int = 0
    accepted: int = 0
    refused: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    epsilon: float | None = None
    residual: float | None = None
    metrics: Mapping[str, float] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    adapter: str = ""
    epsilon_by_client: Mapping[str, float] = field(default_factory=dict)
    diagnostics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """PUBLIC. How a run ended.

    Attributes:
        run_id: unique name of the run.
        folder: run folder.
        status: "finished", "budget-exhausted", "stopped-early" or "stopped" (to be resumed).
        rounds: rounds completed.
        metrics: last public evaluation.
        epsilon: largest epsilon of a client (its own ledger's), None without privacy.
        statement: what epsilon means: unit, adjacency, adversary, delta, accountant, assumptions.
        adapter: folder of the exported adapter, if it was exported.
        seconds: wall time per phase.
        warnings: what a reader must know ("no privacy", differences between ledger and mirror).
        memory: a simulation's memory plan and its workers' halved cohorts (`plan.json`); empty elsewhere.
    """

    run_id: str
    folder: Path
    status: str
    rounds: int
    metrics: Mapping[str, float] | None
    epsilon: float | None
    statement: Mapping[str, Any]
    adapter: Path | None
    seconds: Mapping[str, float]
    warnings: Sequence[str] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)


Progress = Callable[[RoundRecord], bool | None]
"""Called after every round; returning True ends the run early (status "stopped-early")."""


@dataclass
class ServerSettings:
    """One run's settings for the ServerApp.

    Attributes:
        config: resolved configuration.
        run_id: unique name; the ledger's key together with the round.
        folder: run folder.
        resume: go on from the newest usable checkpoint in the folder.
        clients: node number to its logical clients, where known; asked from the nodes otherwise.
        progress: called after every round.
        stop_after: end the process's part after this round (tests of resume); None for no early end.
        bench: the loaded base model, where whoever resolved the configuration has loaded it already.
        expect: all logical clients of a simulation on Flower's engine; the run waits for every one.
        app_hash: hash of the app's code that every node must run; None where the library's version is enough.
        ledger: where the clients' ledger is, if not beside the run folders; the server's own lies beside it.
        result: set by the ServerApp at the end.
    """

    config: FedLoraConfig
    run_id: str
    folder: Path
    resume: bool = False
    clients: Mapping[int, Sequence[str]] | None = None
    progress: Progress | None = None
    stop_after: int | None = None
    bench: Any = None
    expect: Sequence[str] | None = None
    app_hash: str | None = None
    ledger: Path | None = None
    result: RunResult | None = None


_REGISTERED: dict[int, ServerSettings] = {}


def register_settings(run_number: int, settings: ServerSettings) -> None:
    """Let the ServerApp of Flower run `run_number` in this process find its settings."""
    _REGISTERED[run_number] = settings


def take_settings(run_number: int) -> ServerSettings | None:
    """Return and forget the settings of a run, or None if it was not started in this process."""
    return _REGISTERED.pop(run_number, None)
