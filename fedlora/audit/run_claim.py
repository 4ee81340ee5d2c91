"""What a finished run claims, read from its folder, recomputed from its events and held against what attacks prove."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlora.accounting import Event, compose, epsilon_of
from fedlora.audit.verdict import Verdict, judge
from fedlora.config.schema import FedLoraConfig, NoPrivacy
from fedlora.errors import DataError, FedLoraError
from fedlora.training.selfcheck import SelfCheck

_ROUNDING = 1e-6


@dataclass(frozen=True)
class RunClaim:
    """PUBLIC. What a run's folder says about its privacy.

    Attributes:
        epsilon: largest epsilon of a client that the run states; None if it has not ended or claims none.
        delta: that the run states beside it.
        counted_at: delta at which its ledgers count, the budget's.
        from_events: largest epsilon over clients, recomputed here from the events in `ledger-mirror.json`.
        status: how the run ended, "unfinished" without a summary.
    """

    epsilon: float | None
    delta: float | None
    counted_at: float
    from_events: float | None
    status: str

    def check(self) -> SelfCheck:
        """Return whether the run states at least what its own events imply."""
        name = "the run's claim"
        if self.status == "unfinished" or self.from_events is None:
            return SelfCheck(name, True, f"{self.status}; no events to recompute an epsilon from")
        stated = "none" if self.epsilon is None else f"{self.epsilon:.6g}"
        detail = f"stated {stated}, its events imply {self.from_events:.6g}"
        if self.delta != self.counted_at:
            return SelfCheck(
                name, False, f"stated at delta {self.delta}, counted at {self.counted_at}; {detail}"
            )
        if self.epsilon is None:
            return SelfCheck(name, self.status != "finished", f"{self.status}; {detail}")
        return SelfCheck(name, self.epsilon >= self.from_events * (1.0 - _ROUNDING), detail)


def read_claim(folder: Path, config: FedLoraConfig) -> RunClaim:
    """Read what a run states and recompute what its events imply.

    Args:
        folder: run folder.
        config: the run's configuration.

    Raises:
        DataError: if a file is damaged, or an event cannot be read.
    """
    summary, mirror = _object(folder / "summary.json"), _object(folder / "ledger-mirror.json")
    statement = summary.get("statement") or {}
    return RunClaim(
        epsilon=_number(summary.get("epsilon")),
        delta=_number(statement.get("delta")),
        counted_at=0.0 if isinstance(config.privacy, NoPrivacy) else config.privacy.budget.delta,
        from_events=_largest(mirror, config),
        status=str(summary.get("status", "unfinished")),
    )


def _largest(mirror: Mapping[str, Any], config: FedLoraConfig) -> float | None:
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy):
        return None
    known: dict[str, float] = {}
    for client, entry in mirror.items():
        events = entry.get("events") or ()
        key = json.dumps(events, sort_keys=True)
        if events and key not in known:
            try:
                parts = [(Event.from_json(one["event"]), int(one["steps"])) for one in events]
                report = epsilon_of(
                    compose(parts),
                    privacy.budget.delta,
                    adjacency=privacy.adjacency,
                    accountant=privacy.accountant,
                )
            except (FedLoraError, KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"ledger-mirror.json: events of {client} cannot be read ({type(error).__name__})"
                ) from error
            known[key] = report.epsilon
    return max(known.values(), default=None)


def hold_to_claim(verdict: Verdict, claim: RunClaim) -> Verdict:
    """Return the verdict of an attack on the run's mechanism, judged by what the run itself states too.

    The attacked steps are at most the run's, so a bound above the run's own epsilon breaks the run's claim, provided
    that the bound is for a delta at least as large as the claim's.
    """
    conditions = {
        **verdict.conditions,
        "epsilon_that_the_run_states": claim.epsilon,
        "epsilon_from_the_runs_events": claim.from_events,
        "run_status": claim.status,
    }
    held = replace(verdict, conditions=conditions)
    if claim.epsilon is None or verdict.claimed_epsilon is None or claim.epsilon >= verdict.claimed_epsilon:
        return held
    if verdict.delta is None or not (claim.counted_at <= verdict.delta):
        return held
    return replace(
        held, claimed_epsilon=claim.epsilon, verdict=judge(claim.epsilon, verdict.lower_bound, verdict.power)
    )


def _object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON; the file is damaged") from error
    if not isinstance(found, Mapping):
        raise DataError(f"{path}: a JSON object is needed")
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        value = float("inf") if value == "inf" else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
