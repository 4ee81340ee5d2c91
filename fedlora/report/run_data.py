"""Read a run folder: everything that a report shows comes from these files, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlora.errors import DataError

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
        ledger: `ledger.json` of a simulation: the clients' own accounts with what is left of their budgets.
        audits: `audit*.json`, verdicts of attacks.
        partition: `partition.json` of a simulation: client to records per label, if it was written.
        specifications: `specifications.json`: what the clients paid for specifications, if they did.
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

    def accounts(self) -> dict[str, Json]:
        """Return client to its ledger's account; empty where the run folder has no ledger (deployments)."""
        found = self.ledger.get("accounts") or ()
        return {str((one.get("account") or {}).get("client")): one for one in found}

    def series(self, *keys: str) -> tuple[list[int], list[float]]:
        """Rounds and values of one figure, where it exists; `keys` is a path into the round's record.

        Example: `data.series("metrics", "accuracy")`.
        """
        found: tuple[list[int], list[float]] = ([], [])
        for record in self.rounds:
            value: Any = record
            for key in keys:
                value = value.get(key) if isinstance(value, Mapping) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                found[0].append(int(record["round"]))
                found[1].append(float(value))
        return found


def read_run(path: Path) -> RunData:
    """Read a run folder.

    Raises:
        DataError: if it is not one, or a file is damaged (names the file).
    """
    if not (path / "metrics.jsonl").is_file():
        raise DataError(f"{path} is not a run folder: metrics.jsonl is missing; give the folder of a run")
    rounds: list[Json] = []
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            rounds.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break  # a killed run's last line may be cut
            raise DataError(f"{path}/metrics.jsonl, line {number}: not JSON; the file is damaged") from error
    audits = [_read(file) for file in sorted(path.glob("audit*.json"))]
    config = path / "config.yaml"
    return RunData(
        path=path,
        summary=_read(path / "summary.json"),
        rounds=rounds,
        config=config.read_text(encoding="utf-8") if config.is_file() else "",
        environment=_read(path / "environment.json"),
        clients=_read(path / "ledger-mirror.json"),
        ledger=_read(path / "ledger.json"),
        audits=audits,
        partition=_read(path / "partition.json") or None,
        specifications=_read(path / "specifications.json"),
    )


def _read(file: Path) -> Json:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not JSON; the file is damaged") from error
    if not isinstance(content, Mapping):
        raise DataError(f"{file}: a JSON object is needed")
    return content
