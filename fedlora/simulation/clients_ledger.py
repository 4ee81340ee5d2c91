"""Where the simulated clients' ledger is: found again by every later part of a run, never begun anew by one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from fedlora.config.schema import FedLoraConfig
from fedlora.errors import CheckpointError
from fedlora.files import replace_text
from fedlora.ledger import Ledger, load_or_create_secret, open_ledger, register_of
from fedlora.training.charging import charges

LEDGER_NOTE: Final = "ledger-path"


def open_clients_ledger(config: FedLoraConfig, path: Path | None, *, create: bool = True) -> Ledger | None:
    """Open (or make) the simulated clients' ledger; None where nothing is charged.

    Args:
        config: configuration; `run.dir` holds the ledger unless a path is given.
        path: the ledger file; its secret lies beside it.
        create: make it if it is not there.

    Raises:
        LedgerError: if it cannot be opened.
    """
    if not charges(config):
        return None
    target = ledger_file(config, path)
    if create:
        target.parent.mkdir(parents=True, exist_ok=True)
    key = _key_file(target)
    secret = load_or_create_secret(key)
    return open_ledger(target, secret=secret, create=create, register=register_of(key))


def largest_spending(config: FedLoraConfig) -> float | None:
    """Return the largest epsilon that an account of the configuration's data set has spent; None if none is charged.

    Under client-level privacy it is the federation's account, in the server's ledger beside the clients'.
    """
    clients = ledger_file(config)
    path = clients if charges(config) else clients.with_name(f"server-{clients.name}")
    if not path.exists():
        return None
    secret = load_or_create_secret(_key_file(path))
    with open_ledger(path, secret=secret, read_only=True) as book:
        known = [account for account in book.accounts() if account.dataset == config.data.name]
        return max((book.report(account, with_rounds=False).epsilon for account in known), default=None)


def ledger_file(config: FedLoraConfig, path: Path | None = None) -> Path:
    """Return the file of the clients' ledger: the one that is given, else that of every run with the same `run.dir`."""
    return Path(config.run.dir) / "ledger.sqlite" if path is None else path


def _key_file(ledger: Path) -> Path:
    return ledger.with_suffix(".key")


def clients_secret(config: FedLoraConfig, path: Path | None) -> bytes:
    """Return the key of the clients' ledger, SENSITIVE."""
    return load_or_create_secret(_key_file(ledger_file(config, path)))


def note_ledger(folder: Path, config: FedLoraConfig, path: Path | None) -> None:
    """Write down which ledger a run spends from, as seen from its folder where both move together."""
    target = ledger_file(config, path).absolute()
    beside = target.parent == folder.absolute().parent
    replace_text(folder / LEDGER_NOTE, os.path.relpath(target, folder.absolute()) if beside else str(target))


def ledger_of_run(folder: Path, given: Path | None) -> Path:
    """Return the ledger that an interrupted run goes on with: its own, wherever it is resumed from.

    Args:
        folder: the run's folder.
        given: what the caller names; needed only where the run's ledger has moved.

    Raises:
        CheckpointError: if another ledger is named although the run's own is there: what the run spent is in that one.
    """
    note = folder / LEDGER_NOTE
    text = note.read_text(encoding="utf-8").strip() if note.is_file() else "../ledger.sqlite"
    own = Path(os.path.normpath(folder.absolute() / text))
    if given is None or not own.exists():
        return own if given is None else given
    if not given.exists() or not os.path.samefile(given, own):
        raise CheckpointError(
            f"resume: got the ledger {given}, but the run spends from {own}; leave --ledger out, what it spent is there"
        )
    return own
