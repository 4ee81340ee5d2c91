"""A site's own file: who it is, where its records are, what it may spend and what it allows.

The server never sees this file and cannot change it.

```yaml
schema: 1
site: {name: hospital-a, identity_key: keys/identity.pem}
socket: {path: run/trainer.sock, token_file: run/trainer.token}
data: {source: {kind: file, paths: [records.jsonl]}, name: notes-2026, columns: {text: text, label: label}}
ledger: {url: "sqlite:///ledger.db", secret_file: keys/ledger.secret}
budget: {epsilon: 8.0, delta: 1.0e-4, adjacency: add_or_remove, unit: record, on_exhausted: refuse}
policy: {mechanisms: [lora_fa], min_noise_multiplier: 0.5, max_rounds: 100, max_steps_per_round: 10, base_models: []}
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fedlora.config.load import Loaded, load_model
from fedlora.config.problems import Problem
from fedlora.config.rule_view import View
from fedlora.config.schema import (
    BudgetConfig,
    ColumnPartition,
    Count,
    FilesPartition,
    Name,
    Positive,
    Section,
    Source,
)

Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SiteConfig(Section):
    """The site's name (the key of its budget, with the data set's name) and its identity key's file."""

    name: Name
    identity_key: str | None = None


class SocketConfig(Section):
    """The Unix socket of the trainer; `group` may connect too, with the token of `token_file`."""

    path: str = Field(min_length=1)
    token_file: str = Field(min_length=1)
    group: str | None = None
    max_message_bytes: Count = 1_000_000_000
    idle_timeout_seconds: Positive = 60.0
    request_timeout_seconds: Positive = 3600.0


class SiteDataConfig(Section):
    """Where this site's records are; `partition` only where one node hosts several logical clients.

    `name` is the data set's name in the ledger: changed content keeps what was spent under it. With `group_by`
    (the column that names each person) at most `max_records_per_group` records of each person are used.
    """

    source: Source
    name: Name
    columns: dict[str, str] = Field(default_factory=dict)
    template: str | None = None
    group_by: str | None = None
    max_records_per_group: Count = 1
    partition: Annotated[ColumnPartition | FilesPartition, Field(discriminator="kind")] | None = None


class SiteBudgetConfig(BudgetConfig):
    """What may be spent on this data set, and in which terms; nothing has a default."""

    adjacency: Literal["add_or_remove", "replace_one"]
    unit: Literal["record", "person", "client"]
    accountant: Literal["best", "pld", "rdp", "prv"] = "best"


class LedgerConfig(Section):
    """The ledger's SQLAlchemy URL, the file of the secret that keys its hash chain, and its anchor.

    `anchor` remembers the newest head; by default it lies beside a SQLite file. Put it outside the ledger's
    backups, so that an old backup put back is seen; behind another URL there is none unless it is named.
    """

    url: str = Field(min_length=1)
    secret_file: str | None = None
    anchor: str | None = Field(default=None, min_length=1)


class SitePolicy(Section):
    """What a server may ask for; checked against every request before a record is read.

    Everything here is a choice of the site; what is left out is not allowed, or not limited where it says so.

    Attributes:
        mechanisms: mechanisms that may run.
        min_noise_multiplier: least noise multiplier.
        max_rounds: most rounds of one run.
        max_steps_per_round: most optimiser steps of one round.
        base_models: sha256 of the base models that may be trained; empty allows any, which must be written out.
        target_modules: module names that may be adapted; empty allows any.
        units: privacy units that may be asked for; "none" trains without any privacy.
        max_sample_rate: largest sampling rate.
        allow_remote_code: may a model bring its own Python code.
    """

    mechanisms: tuple[Literal["factor", "lora_fa", "prism", "noisy_projection", "dp_sgd", "none"], ...]
    min_noise_multiplier: Positive
    max_rounds: Count
    max_steps_per_round: Count
    base_models: tuple[Fingerprint, ...]
    target_modules: tuple[str, ...] = ()
    units: tuple[Literal["record", "client", "none"], ...] = ("record",)
    max_sample_rate: float = Field(default=1.0, gt=0, le=1)
    allow_remote_code: bool = False


class SecureSumsConfig(Section):
    """What this site asks of secure aggregation, whatever the server says.

    Attributes:
        peers: client to its site's identity: the `.pub` file beside its identity key, or 64 hex digits. With peers
            pinned, keys that their identities did not sign are refused; without, the server is trusted with them.
        least_clients: fewest clients whose sum may be opened.
    """

    peers: dict[str, str] = Field(default_factory=dict)
    least_clients: int = Field(default=2, ge=2)


class OperationsConfig(Section):
    """What operators watch: the audit log, and a local address for health and metrics."""

    audit_log: str | None = None
    metrics_address: str | None = Field(default=None, pattern=r"^[\w.:\[\]-]+:\d+$")


class TrainerConfig(Section):
    """One site's trainer, complete."""

    schema_: Literal[1] = Field(alias="schema")
    site: SiteConfig
    socket: SocketConfig
    data: SiteDataConfig
    ledger: LedgerConfig
    budget: SiteBudgetConfig
    policy: SitePolicy
    operations: OperationsConfig = OperationsConfig()
    secure_sums: SecureSumsConfig = SecureSumsConfig()


def trainer_problems(container: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of combinations in a trainer's file."""
    view = View(container)
    problems = []
    units = view("policy.units", ["record"])
    mechanisms = view("policy.mechanisms", [])
    if (
        isinstance(units, list)
        and isinstance(mechanisms, list)
        and units == ["record"]
        and "none" in mechanisms
    ):
        text = "allows none, which adds no noise per record, but policy.units allows record only; remove it"
        problems.append(Problem("policy.mechanisms", text))
    if (view("budget.unit") == "person") != (view("data.group_by") is not None):
        text = (
            "person needs data.group_by (the column that names each person), and data.group_by needs person"
        )
        problems.append(Problem("budget.unit", text))
    most = view.number("data.max_records_per_group", 1)
    if (
        most is not None
        and most > 1
        and (view("data.group_by") is None or view("budget.adjacency") != "add_or_remove")
    ):
        text = "above 1 needs data.group_by and budget.adjacency add_or_remove (no other bound is known)"
        problems.append(Problem("data.max_records_per_group", text))
    if view("secure_sums.peers") and view("site.identity_key") is None:
        text = "pinned peers need site.identity_key, so that they can know this site too"
        problems.append(Problem("secure_sums.peers", text))
    if isinstance(mechanisms, list) and not mechanisms:
        problems.append(
            Problem("policy.mechanisms", "is empty, so nothing could ever run; name at least one")
        )
    return problems


def load_trainer(
    path: str | Path, overrides: Sequence[str] = (), overlays: Sequence[str | Path] = ()
) -> Loaded[TrainerConfig]:
    """Load a site's file; relative paths in it are relative to the file (see `site_path`).

    Raises:
        ConfigError: listing every problem with its key and line.
    """
    return load_model(TrainerConfig, path, overrides, overlays, rules=trainer_problems)


def site_path(config_file: str | Path, value: str) -> Path:
    """Return a path of the site's file: absolute as it is, else relative to the file's folder."""
    path = Path(value)
    return path if path.is_absolute() else Path(config_file).resolve().parent / path
