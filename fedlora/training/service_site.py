"""Put a site's trainer together from its own file: data, ledger, identity, policy."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlora.config.schema import DataConfig, FedLoraConfig, FileSource, NoPrivacy, RecordPrivacy
from fedlora.config.trainer import SitePolicy, TrainerConfig, site_path
from fedlora.data import Rows, Task, load_rows
from fedlora.errors import AuthenticationError, DataError, PolicyRefusedError
from fedlora.ledger import (
    Account,
    Budget,
    Ledger,
    bound_contributions,
    fingerprint_records,
    load_or_create_secret,
    open_ledger,
    record_bytes,
    register_of,
)
from fedlora.training.charging import LedgerKeeper
from fedlora.training.edge import edge_clients
from fedlora.training.pinned import secure_desk
from fedlora.training.policy import Policy
from fedlora.training.port import Packet, PacketPort, serve_packet
from fedlora.training.replies import LedgerReplies
from fedlora.training.shelf import LazyRecords, Records, Shelf
from fedlora.training.trainer import Signer, Trainer
from fedlora.training.witness import LedgerWitness

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SiteRules(Policy):
    """A site's policy: the common rules and those that only a site's file states.

    Attributes:
        units: privacy units that may be asked for.
        max_sample_rate: largest sampling rate.
        group_by: the site's own person column; a run must be accounted per person exactly where it is set.
        max_records_per_group: the site's bound per person; a run must account for at least as many.
    """

    units: frozenset[str] = frozenset({"record"})
    max_sample_rate: float = 1.0
    group_by: str | None = None
    max_records_per_group: int = 1

    @classmethod
    def from_site(cls, policy: SitePolicy, group_by: str | None, max_records_per_group: int = 1) -> SiteRules:
        """Build the rules from a site's file."""
        units = frozenset(policy.units)
        return cls(
            mechanisms=frozenset(policy.mechanisms),
            min_noise_multiplier=policy.min_noise_multiplier,
            base_fingerprints=frozenset(policy.base_models) if policy.base_models else None,
            max_rounds=policy.max_rounds,
            max_steps_per_round=policy.max_steps_per_round,
            allow_no_privacy="none" in units,
            allow_client_unit="client" in units,
            allow_seeded_noise=False,
            allow_remote_code=policy.allow_remote_code,
            units=units,
            target_modules=frozenset(policy.target_modules),
            max_sample_rate=policy.max_sample_rate,
            group_by=group_by,
            max_records_per_group=max_records_per_group,
        )

    def check_config(self, config: FedLoraConfig) -> None:
        """Check a run's configuration.

        Raises:
            PolicyRefusedError: naming the rule, what was asked and what is allowed.
        """
        super().check_config(config)
        if config.privacy.unit not in self.units:
            raise PolicyRefusedError(
                f"policy.units: asked for {config.privacy.unit}; allowed {', '.join(sorted(self.units))}"
            )
        if config.federation.rounds > (self.max_rounds or config.federation.rounds):
            raise PolicyRefusedError(
                f"policy.max_rounds: asked for {config.federation.rounds} rounds; allowed {self.max_rounds}"
            )
        self._check_modules(config)
        self._check_sampling(config)

    def _check_modules(self, config: FedLoraConfig) -> None:
        if not self.target_modules:
            return
        wanted = config.adapter.target_modules
        asked = {wanted} if isinstance(wanted, str) else set(wanted)
        extra = sorted((asked | set(config.adapter.modules_to_save)) - self.target_modules)
        if extra:
            raise PolicyRefusedError(
                f"policy.target_modules: asked for {', '.join(extra)}; allowed {', '.join(sorted(self.target_modules))}"
            )

    def _check_sampling(self, config: FedLoraConfig) -> None:
        rate = config.training.sample_rate
        if isinstance(config.privacy, NoPrivacy):
            return
        if not (rate <= self.max_sample_rate):
            raise PolicyRefusedError(
                f"policy.max_sample_rate: asked for {rate:.4g}; allowed {self.max_sample_rate:.4g}"
            )
        if isinstance(config.privacy, RecordPrivacy):
            asked = config.privacy.group_by
            if (asked is None) != (self.group_by is None):
                raise PolicyRefusedError(
                    f"data.group_by: the run's privacy.group_by is {asked}, this site's is {self.group_by}; the "
                    "guarantee must be per person on both sides or on neither"
                )
            counted = config.privacy.max_records_per_group
            if counted < self.max_records_per_group:
                raise PolicyRefusedError(
                    f"data.max_records_per_group: the run accounts for {counted} records per person, this site uses "
                    f"up to {self.max_records_per_group}; raise the run's "
                    "privacy.max_records_per_group or lower the site's"
                )


class SiteShelf:
    """A site's records; with `partition`, several logical clients; nothing is read before it is needed.

    Args:
        site: the only client's id where there is no partition.
        load: reads the rows.
        split: makes client ids and positions from rows; None for one client.
        bound: keeps a person's records within the site's bound.
        seen: told a client and its records' bytes when they are first opened (for the ledger's fingerprint).
    """

    def __init__(
        self,
        site: str,
        load: Callable[[], Rows],
        split: Callable[[Rows], Mapping[str, Index]] | None,
        bound: Callable[[Rows, Index], Index] | None,
        seen: Callable[[str, Iterable[bytes]], None] | None = None,
    ) -> None:
        """Keep the callables; nothing is read yet."""
        self._site, self._load, self._split, self._bound, self._seen = site, load, split, bound, seen
        self._rows: Rows | None = None
        self._told: set[str] = set()
        self._parts: Mapping[str, Index] | None = None
        self._open: dict[str, LazyRecords] = {}
        self._fit: set[str] = set()
        self._task: Task | None = None

    def clients(self) -> Sequence[str]:
        """Return the logical client ids that live here (an edge site reads its own rows for their names)."""
        return (self._site,) if self._split is None else tuple(self._divided())

    def open(self, client: str, task: Task) -> Records:
        """Open one client's records.

        Raises:
            DataError: if the client does not live here, or has no records.
        """
        parts = self._divided()
        if client not in parts:
            raise DataError(f"client {client}: does not live at this site")
        if task is not self._task:
            self._open, self._fit, self._task = {}, set(), task
        if client not in self._open:
            rows, index = self._read(), parts[client]
            if self._seen is not None and client not in self._told:
                self._seen(client, (record_bytes(rows[int(place)]) for place in index))
                self._told.add(client)
            index = index if self._bound is None else self._bound(rows, index)
            self._open[client] = LazyRecords(rows=rows, indices=index, task=task)
        return self._open[client]

    def check(self, client: str, task: Task) -> None:
        """Encode every record of a client once, so that one that does not fit fails the client in every round alike.

        Raises:
            DataError: naming file and row of the first record that does not fit, never its content.
        """
        if client not in self._fit or task is not self._task:
            records = self.open(client, task)
            task.check_rows(self._read())
            for position in range(len(records)):
                records.batch(np.asarray([position], dtype=np.int64))
            self._fit.add(client)

    def _read(self) -> Rows:
        if self._rows is None:
            self._rows = self._load()
        return self._rows

    def _divided(self) -> Mapping[str, Index]:
        if self._parts is None:
            rows = self._read()
            whole = {self._site: np.arange(len(rows), dtype=np.int64)}
            self._parts = whole if self._split is None else self._split(rows)
        return self._parts


@dataclass(frozen=True)
class Site:
    """Everything of one site that runs: its trainer, ledger and client ids."""

    config: TrainerConfig
    trainer: Trainer
    ledger: Ledger
    shelf: SiteShelf

    def port(self) -> PacketPort:
        """Return the trainer as a packet port."""
        return _Port(self.trainer)


@dataclass(frozen=True)
class _Port:
    trainer: Trainer

    def exchange(self, packet: Packet) -> Packet:
        """Answer a packet with the trainer."""
        return serve_packet(self.trainer, packet)


def load_identity(path: Path) -> Ed25519PrivateKey:
    """Return a site's Ed25519 identity key from its PEM file (SENSITIVE).

    Raises:
        AuthenticationError: if the file is missing, readable by others, or another kind of key.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise AuthenticationError(f"identity key {path}: others may read it; run chmod 600 {path}")
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        raise AuthenticationError(
            f"identity key {path}: cannot be read; make it with `fedlora keys new`"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise AuthenticationError(f"identity key {path}: not an Ed25519 key; make it with `fedlora keys new`")
    return key


def site_signer(path: Path) -> tuple[Signer, str]:
    """Return (signer of replies, public key in hex) of an Ed25519 identity key in PEM.

    Raises:
        AuthenticationError: if the file is missing, readable by others, or another kind of key.
    """
    key = load_identity(path)
    public = key.public_key().public_bytes_raw().hex()
    lock = threading.Lock()

    def sign(claim: Mapping[str, Any]) -> Mapping[str, Any]:
        text = json.dumps(dict(claim), sort_keys=True, separators=(",", ":"), allow_nan=False)
        with lock:
            signature = key.sign(b"fedlora-reply-v1\n" + text.encode()).hex()
        return {"claim": dict(claim), "public_key": public, "signature": signature}

    return sign, public


def build_site(
    config: TrainerConfig, config_file: str | Path, wrap: Callable[[Shelf], Shelf] | None = None
) -> Site:
    """Build a site's trainer; opens (or creates) the ledger, reads no record of a one-client site.

    Args:
        config: the site's own file.
        config_file: its path; relative paths in it start there.
        wrap: gives the trainer another view of the site's records.

    Raises:
        LedgerError: if the ledger cannot be opened or is damaged.
        AuthenticationError: if the identity key is unusable.
    """
    secret_file = site_path(config_file, config.ledger.secret_file or "ledger.secret")
    secret = load_or_create_secret(secret_file)
    ledger = _ledger(config, config_file, secret, register_of(secret_file))
    shelf = _shelf(config, config_file, secret, ledger)
    clients = shelf.clients()
    sign, identity, witness, key = None, None, None, None
    if config.site.identity_key is not None:
        key_file = site_path(config_file, config.site.identity_key)
        sign, identity = site_signer(key_file)
        key = load_identity(key_file)
        witness = LedgerWitness(ledger, key)
    trainer = Trainer(
        shelf if wrap is None else wrap(shelf),
        SiteRules.from_site(config.policy, config.data.group_by, config.data.max_records_per_group),
        LedgerKeeper(ledger),
        budgets=dict.fromkeys(clients, _terms(config)),
        dataset=config.data.name,
        replies=LedgerReplies(ledger),
        sign=sign,
        identity=identity,
        witness=witness,
        desk=secure_desk(config, config_file, clients, key),
    )
    return Site(config, trainer, ledger, shelf)


def _terms(config: TrainerConfig) -> Budget:
    """Return what each client of the site may spend, in the site's own terms."""
    budget = config.budget
    return Budget(
        epsilon=budget.epsilon,
        delta=budget.delta,
        adjacency=budget.adjacency,
        unit=budget.unit,
        accountant=budget.accountant,
        window=budget.window,
        on_exhausted=budget.on_exhausted,
    )


def _ledger(config: TrainerConfig, config_file: str | Path, secret: bytes, register: Path) -> Ledger:
    url, named = config.ledger.url, config.ledger.anchor
    anchor = None if named is None else site_path(config_file, named)
    if anchor is not None:
        anchor.parent.mkdir(parents=True, exist_ok=True)
    if "://" in url:
        folder = site_path(config_file, "ledger.replies")
        replies = None if url.startswith("sqlite") else folder
        return open_ledger(url, secret=secret, anchor=anchor, replies=replies, register=register)
    path = site_path(config_file, url)
    path.parent.mkdir(parents=True, exist_ok=True)
    return open_ledger(path, secret=secret, anchor=anchor, register=register)


def _shelf(config: TrainerConfig, config_file: str | Path, secret: bytes, ledger: Ledger) -> SiteShelf:
    source = config.data.source
    if isinstance(source, FileSource):
        paths = tuple(str(site_path(config_file, path)) for path in source.paths)
        source = source.model_copy(update={"paths": paths})
    data = DataConfig(
        source=source, name=config.data.name, columns=config.data.columns, template=config.data.template
    )

    def load() -> Rows:
        return load_rows(data)

    def split(rows: Rows) -> Mapping[str, Index]:
        return edge_clients(rows, config.data)

    def seen(client: str, records: Iterable[bytes]) -> None:
        ledger.note_fingerprint(Account(client, config.data.name), fingerprint_records(records, secret))

    def bound(rows: Rows, index: Index) -> Index:
        people = rows.column(str(config.data.group_by))
        groups = [people[int(place)] for place in index]
        kept = bound_contributions(
            groups,
            max_records=config.data.max_records_per_group,
            secret=secret,
            adjacency=config.budget.adjacency,
        )
        return index[np.asarray(kept.kept, dtype=np.int64)]

    return SiteShelf(
        config.site.name,
        load,
        None if config.data.partition is None else split,
        None if config.data.group_by is None else bound,
        seen,
    )
