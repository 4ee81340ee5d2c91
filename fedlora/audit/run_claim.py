"""What a finished run claims, read from its folder, recomputed from its events and held against what attacks prove.

Nothing that the folder says is taken for granted: the charged events give one epsilon, the rounds that released
something give another, with the event that the configuration's own mechanism has. A run must state at least both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlora.accounting import Event, compose, epsilon_of
from fedlora.audit.verdict import Verdict, judge
from fedlora.config.schema import ClientPrivacy, FedLoraConfig, NoPrivacy
from fedlora.errors import DataError, FedLoraError
from fedlora.files import object_of, read_object
from fedlora.training.checked import SelfCheck

_ROUNDING = 1e-6


@dataclass(frozen=True)
class RunClaim:
    """PUBLIC. What a run's folder says about its privacy.

    Attributes:
        epsilon: epsilon that the run states; None if it has not ended or claims none.
        delta: that the run states beside it.
        counted_at: delta at which its ledgers count, the budget's.
        from_events: largest epsilon over accounts, recomputed here from the events in `ledger-mirror.json`.
        status: how the run ended, "unfinished" without a summary.
        from_rounds: epsilon that the rounds in `metrics.jsonl` cost at least, by the configuration's own event.
        unit: "record", "person" or "client": of all three epsilons, at `counted_at`.
    """

    epsilon: float | None
    delta: float | None
    counted_at: float
    from_events: float | None
    status: str
    from_rounds: float | None = None
    unit: str = "record"

    def check(self) -> SelfCheck:
        """Return whether the run states at least what its own events imply."""
        name = "the run's claim"
        implied = [one for one in (self.from_events, self.from_rounds) if one is not None]
        if self.status == "unfinished" or not implied:
            return SelfCheck(name, True, f"{self.status}; nothing was released, or no epsilon is claimed")
        parts = {"stated": self.epsilon, "its events imply": self.from_events, "its rounds": self.from_rounds}
        detail = ", ".join(f"{said} {'none' if one is None else f'{one:.6g}'}" for said, one in parts.items())
        if self.delta != self.counted_at:
            return SelfCheck(
                name, False, f"stated at delta {self.delta}, counted at {self.counted_at}; {detail}"
            )
        if self.epsilon is None:
            return SelfCheck(name, self.status != "finished", f"{self.status}; {detail}")
        if self.from_events is None:
            return SelfCheck(name, False, f"ledger-mirror.json holds no events; {detail}")
        return SelfCheck(name, self.epsilon >= max(implied) * (1.0 - _ROUNDING), detail)


def read_claim(folder: Path, config: FedLoraConfig, event: Event | None = None) -> RunClaim:
    """Read what a run states and recompute what its events imply.

    Args:
        folder: run folder.
        config: the run's configuration.
        event: what one step (one round under client-level privacy) costs by that configuration.

    Raises:
        DataError: if a file is damaged, or an event cannot be read.
    """
    summary, mirror = read_object(folder / "summary.json"), read_object(folder / "ledger-mirror.json")
    statement = summary.get("statement") or {}
    if not isinstance(statement, Mapping) or not all(isinstance(one, Mapping) for one in mirror.values()):
        raise DataError(f"{folder}: summary.json or ledger-mirror.json holds no objects; the file is damaged")
    return RunClaim(
        epsilon=_stated(summary, statement, config),
        delta=_number(statement.get("delta")),
        counted_at=0.0 if isinstance(config.privacy, NoPrivacy) else config.privacy.budget.delta,
        from_events=_largest(mirror, config),
        status=str(summary.get("status", "unfinished")),
        from_rounds=None if event is None else _of_rounds(folder, mirror, config, event),
        unit="person" if getattr(config.privacy, "group_by", None) else config.privacy.unit,
    )


def _stated(summary: Mapping[str, Any], statement: Mapping[str, Any], config: FedLoraConfig) -> float | None:
    """Return the run's figure; where a budget's calendar window began anew in the run, that of its own events too."""
    stated = _number(summary.get("epsilon"))
    if stated is None or isinstance(config.privacy, NoPrivacy) or config.privacy.budget.window == "lifetime":
        return stated
    return max(stated, _number(statement.get("epsilon_from_this_runs_events")) or 0.0)


def _of_rounds(folder: Path, mirror: Mapping[str, Any], config: FedLoraConfig, event: Event) -> float | None:
    """Return what the rounds cost the account that paid most, at least.

    A release of client-level privacy costs the federation one event. Of record-level privacy only the number of
    accepted updates is known for each round: some client sent at least their share of them.
    """
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy):
        return None
    accepted, released, names = 0, 0, set(mirror)
    for record in _records(folder / "metrics.jsonl"):
        accepted += int(_number(record.get("accepted")) or 0)
        released += record.get("status") == "ok"
        said = record.get("epsilon_by_client")
        names |= set(said) if isinstance(said, Mapping) else set()
    steps = released
    if not isinstance(privacy, ClientPrivacy):
        steps = -(-accepted // len(names)) * config.training.local_steps if names else 0
    if steps < 1:
        return None
    report = epsilon_of(
        event.times(steps), privacy.budget.delta, adjacency=privacy.adjacency, accountant=privacy.accountant
    )
    return report.epsilon


def _records(path: Path) -> list[Mapping[str, Any]]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []  # a cut last line is no round
    return [object_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


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
    that the attacked steps sample as the run's do and that the bound is for a delta at least as large as the claim's.
    """
    conditions = {
        **verdict.conditions,
        "epsilon_that_the_run_states": claim.epsilon,
        "epsilon_from_the_runs_events": claim.from_events,
        "epsilon_from_the_runs_rounds": claim.from_rounds,
        "unit_and_delta_of_the_runs_epsilons": f"{claim.unit}, {claim.counted_at:g}",
        "run_status": claim.status,
    }
    held = replace(verdict, conditions=conditions)
    if not verdict.samples_as_the_run or claim.epsilon is None:
        return held
    if verdict.claimed_epsilon is None or claim.epsilon >= verdict.claimed_epsilon:
        return held
    if verdict.delta is None or not (claim.counted_at <= verdict.delta):
        return held
    return replace(
        held, claimed_epsilon=claim.epsilon, verdict=judge(claim.epsilon, verdict.lower_bound, verdict.power)
    )


def hold_to_noise(verdict: Verdict, config: FedLoraConfig) -> Verdict:
    """Return the verdict, which is no pass where the run's own noise can be repeated: attacks drew other noise."""
    if not config.seeded_noise:
        return verdict
    conditions = {"privacy": "NO PRIVACY: seeded test noise; the attack drew its own", **verdict.conditions}
    word = "weak attack" if verdict.verdict == "passed" else verdict.verdict
    return replace(verdict, verdict=word, conditions=conditions)


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        value = float("inf") if value == "inf" else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
