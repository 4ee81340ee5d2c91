"""Read a run folder: everything that a report shows comes from these files, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedlora.config import load_config
from fedlora.errors import DataError, FedLoraError
from fedlora.files import object_of, read_object
from fedlora.report import shapes
from fedlora.report.conditions import conditions_of

Json = Mapping[str, Any]


@dataclass(frozen=True)
class RunData:
    """PUBLIC. The files of one run folder.

    Attributes:
        path: the folder.
        summary: `summary.json`.
        rounds: `metrics.jsonl`, one record per round; round 0 is the start.
        config: text of the resolved `config.yaml`.
        environment: `environment.json`.
        clients: `ledger-mirror.json` (the mirror's table), client to its events and figures.
        ledger: `ledger.json`: the accounts that this machine keeps, with what is left of their budgets: in a
            simulation the clients', under client-level privacy the federation's.
        audits: `audit*.json`, verdicts of attacks.
        partition: `partition.json` of a simulation: client to records per label, if it was written.
        specifications: `specifications.json`: what the clients paid for specifications, if they did.
        receipts: `ledger-receipts.json` of a deployment: each account by the sites' signed receipts.
    """

    path: Path
    summary: Json
    rounds: Sequence[Json]
    config: str
    environment: Json
    clients: Json
    ledger: Json
    audits: Sequence[Json]
    partition: Json | None
    specifications: Json = field(default_factory=dict)
    receipts: Json = field(default_factory=dict)

    @cached_property
    def statement(self) -> Json:
        """What the run's epsilon means: as it says itself, while it has not ended as its configuration says."""
        said: Json | None = self.summary.get("statement")
        if said is not None:
            return said
        try:
            return conditions_of(load_config(self.path / "config.yaml"))
        except (FedLoraError, OSError):
            return {}

    @property
    def ended(self) -> bool:
        """Whether the run says itself what it cost; one that failed or was killed does not."""
        return "epsilon" in self.summary

    @property
    def epsilon(self) -> float | str | None:
        """The run's epsilon; of a run that does not say it, the largest that its rounds say."""
        if self.ended:
            said: float | str | None = self.summary["epsilon"]
            return said
        known = [record["epsilon"] for record in self.rounds if record.get("epsilon") is not None]
        return max(known, key=float, default=None)

    @property
    def private(self) -> bool:
        """Whether a guarantee is claimed at all."""
        said = self.statement.get("privacy", "none" if self.epsilon is None else "stated")
        return bool(said != "none")

    def accounts(self) -> dict[str, Json]:
        """Return client to its ledger's account; empty where the run folder has none (deployments)."""
        found = self.ledger.get("accounts") or ()
        return {str((one.get("account") or {}).get("client")): one for one in found}

    def receipts_by_client(self) -> dict[str, Any]:
        """Return client to what its receipts and unanswered rounds imply, over all its accounts the largest."""
        found: dict[str, Any] = {}
        for name, one in self.receipts.items():
            client, epsilon = str(one.get("client") or name.rpartition("/")[0]), one.get("epsilon")
            if epsilon is not None and not (client in found and float(found[client]) >= float(epsilon)):
                found[client] = epsilon
        return found

    def series(self, *keys: str) -> tuple[list[int], list[float]]:
        """Rounds and values of one figure, where it exists; `keys` is a path into the round's record.

        Example: `data.series("metrics", "accuracy")`.
        """
        found: tuple[list[int], list[float]] = ([], [])
        for record in self.rounds:
            value: Any = record
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, int | float) and math.isfinite(value):
                found[0].append(int(record["round"]))
                found[1].append(float(value))
        return found


def read_run(path: Path) -> RunData:
    """Read a run folder.

    Raises:
        DataError: if it is not one, or a file is damaged (names the file and what is wrong in it).
    """
    if not any((path / name).is_file() for name in ("metrics.jsonl", "summary.json")):
        raise DataError(
            f"{path} is not a run folder: it has neither metrics.jsonl nor summary.json; give the folder of a run"
        )

    def read(name: str, shape: shapes.Shape) -> Json:
        found = read_object(path / name)
        shapes.require(found, shape, str(path / name))
        return found

    return RunData(
        path=path,
        summary=read("summary.json", shapes.SUMMARY),
        rounds=_rounds(path / "metrics.jsonl"),
        config=_text(path / "config.yaml"),
        environment=read("environment.json", shapes.ANYTHING),
        clients=read("ledger-mirror.json", shapes.MIRROR),
        ledger=read("ledger.json", shapes.LEDGER),
        audits=[read(file.name, shapes.AUDIT) for file in sorted(path.glob("audit*.json")) if file.is_file()],
        partition=read("partition.json", shapes.PARTITION) or None,
        specifications=read("specifications.json", shapes.SPECIFICATIONS),
        receipts=read("ledger-receipts.json", shapes.RECEIPTS),
    )


def _rounds(file: Path) -> list[Json]:
    """Return the records of `metrics.jsonl`; a killed run's last line may be cut and is left out."""
    rounds: list[Json] = []
    if not file.is_file():  # a run that failed before its first evaluation
        return []
    whole, _, cut = file.read_bytes().rpartition(b"\n")
    lines = whole.split(b"\n") if whole else []
    for number, line in enumerate(lines, 1):
        record = object_of(line, f"{file}, line {number}")
        shapes.require(record, shapes.ROUND, f"{file}, line {number}")
        rounds.append(_later(record, rounds, f"{file}, line {number}"))
    try:
        last = object_of(cut, str(file))
    except DataError:
        return rounds
    shapes.require(last, shapes.ROUND, f"{file}, last line")
    return [*rounds, _later(last, rounds, f"{file}, last line")]


def _later(record: Json, rounds: Sequence[Json], place: str) -> Json:
    """Return a record that comes after all others; a round that stands twice would count twice.

    Raises:
        DataError: if it does not.
    """
    if rounds and record["round"] <= rounds[-1]["round"]:
        raise DataError(
            f"{place}: round {record['round']} comes after round {rounds[-1]['round']}; the file is damaged"
        )
    return record


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
