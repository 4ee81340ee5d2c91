"""Working state of a ledger: a pure function of its entries, rebuilt from them and never trusted alone."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from fedlora.accounting import Event
from fedlora.errors import FedLoraError, LedgerIntegrityError
from fedlora.ledger import chain
from fedlora.ledger.chain import Entry
from fedlora.ledger.types import Account, AccountState, Budget, Pending

_NAMED: Final = 16
"""Accounts with the same records that are named to a further one at most."""


def integrity_error(seq: int, what: str) -> LedgerIntegrityError:
    """Return the error for a fault at one entry."""
    return LedgerIntegrityError(
        f"ledger entry {seq}: {what}; required: an unedited ledger and its own key; "
        "restore the newest good backup (what it lacks counts as spent) or use the right key file"
    )


@contextmanager
def readable_rows() -> Iterator[None]:
    """Turn what rows with values of a wrong type or range raise into LedgerIntegrityError."""
    try:
        yield
    except FedLoraError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        MemoryError,
        zlib.error,
    ) as error:
        raise LedgerIntegrityError(
            f"ledger: a row holds a value that no entry can have ({type(error).__name__}); required: an intact "
            "database; restore the newest backup and run 'fedlora budget verify'; what it lacks counts as spent"
        ) from error


class LedgerState:
    """Everything the ledger knows after `seq` entries.

    `apply` checks each link of the chain and each entry's meaning; a wrong one raises
    LedgerIntegrityError and leaves the state unusable, so callers drop it.
    """

    def __init__(self, key: bytes) -> None:
        """Start before the first entry, with the chain's key."""
        self._mac = chain.make_mac(key)
        self.seq = 0
        self.mac = chain.ZERO_MAC
        self.last_at = 0
        self.ledger_id = ""
        self.accounts: dict[int, AccountState] = {}
        self.account_ids: dict[Account, int] = {}
        self.account_texts: dict[int, str] = {0: chain.account_text("", "")}
        self.event_hashes: dict[int, str] = {0: ""}
        self.event_texts: dict[int, str] = {}
        self.event_ids: dict[str, int] = {}
        self.pending: dict[int, Pending] = {}
        self.conditions: dict[str, None] = {}
        self._holders: dict[str, dict[int, None]] = {}
        self.snapshot_seq = 0
        self.loaded_from = 0
        self._last_account = 0
        self._last_event = 0

    @property
    def head(self) -> str:
        """The chain head as 80 hex digits."""
        return chain.encode_head(self.seq, self.mac)

    def define_account(self, account_id: int, account: Account) -> None:
        """Learn an account row (authenticated by the links that use it)."""
        if account_id in self.accounts or account in self.account_ids:
            raise integrity_error(self.seq, f"account row {account_id} appears twice")
        self.accounts[account_id] = AccountState(account)
        self.account_ids[account] = account_id
        self.account_texts[account_id] = chain.account_text(account.client, account.dataset)

    def define_event(self, event_id: int, event_hash: str, text: str) -> None:
        """Learn an event row; its content must have the hash that links authenticate."""
        if hashlib.sha256(text.encode()).hexdigest() != event_hash:
            raise integrity_error(self.seq, f"event row {event_id} does not match its hash")
        if event_id in self.event_texts or event_hash in self.event_ids:
            raise integrity_error(self.seq, f"event row {event_id} appears twice")
        self.event_hashes[event_id] = event_hash
        self.event_texts[event_id] = text
        self.event_ids[event_hash] = event_id

    def event(self, event_id: int) -> Event:
        """Return an event by its number."""
        try:
            return Event.from_json(json.loads(self.event_texts[event_id]))
        except (KeyError, ValueError, FedLoraError) as error:
            raise integrity_error(self.seq, f"event {event_id} cannot be read") from error

    def link(self, bare: Entry) -> Entry:
        """Return the entry (made with an empty link) with the link that makes it the next one."""
        message = chain.link_message(
            self.mac, bare, self.account_texts[bare.account_id], self.event_hashes[bare.event_id]
        )
        return Entry._make((*bare[:-1], self._mac(message)))

    def replay(self, rows: Iterable[Entry]) -> None:
        """Check and apply entries in order.

        Raises:
            LedgerIntegrityError: at the first entry that does not hold.
        """
        texts, hashes = self.account_texts, self.event_hashes
        for entry in rows:
            if entry.seq != self.seq + 1:
                raise integrity_error(self.seq + 1, f"is missing (the next one is {entry.seq})")
            try:
                message = chain.link_message(self.mac, entry, texts[entry.account_id], hashes[entry.event_id])
            except KeyError as error:
                raise integrity_error(entry.seq, "points to an account or event that is missing") from error
            if self._mac(message) != entry.mac:
                raise integrity_error(entry.seq, "was edited, or the key is not this ledger's")
            self.apply(entry)

    def apply(self, entry: Entry) -> None:
        """Apply one entry whose link is known to hold (made or checked by this object)."""
        kind = entry.kind
        if kind == chain.RESERVE:
            self._apply_reserve(entry)
        elif kind in (chain.COMMIT, chain.ABANDON, chain.RELEASE):
            self._apply_settle(entry)
        else:
            self._apply_other(entry)
        if entry.at < self.last_at:
            raise integrity_error(entry.seq, "is older than the one before it")
        self.last_at = entry.at
        self.seq, self.mac = entry.seq, bytes(entry.mac)
        if entry.account_id > self._last_account:
            self._last_account = entry.account_id
        if entry.event_id > self._last_event:
            self._last_event = entry.event_id

    def _apply_reserve(self, entry: Entry) -> None:
        if entry.steps < 1 or entry.charge != entry.steps:
            raise integrity_error(entry.seq, "reserves other steps than it charges")
        self.pending[entry.seq] = Pending(
            entry.seq,
            entry.account_id,
            entry.event_id,
            entry.steps,
            entry.run_id,
            entry.server_round,
            entry.period,
        )
        self._charge(entry)
        if entry.detail:
            self._apply_detail(entry)

    def _apply_settle(self, entry: Entry) -> None:
        pending = self.pending.pop(entry.ref, None)
        if pending is None or (pending.account_id, pending.event_id) != (entry.account_id, entry.event_id):
            raise integrity_error(entry.seq, "settles a reservation that is not open")
        expected = {
            chain.COMMIT: entry.steps - pending.steps,
            chain.ABANDON: 0,
            chain.RELEASE: -pending.steps,
        }[entry.kind]
        if entry.charge != expected or entry.charge > 0 or entry.steps < 0 or entry.period != pending.period:
            raise integrity_error(entry.seq, "settles other steps than were reserved")
        if entry.charge != 0:
            self._charge(entry)

    def _apply_other(self, entry: Entry) -> None:
        if entry.kind == chain.EXCESS:
            if entry.charge < 1:
                raise integrity_error(entry.seq, "is an excess that charges nothing")
            self._charge(entry)
            self._apply_detail(entry)
            return
        if entry.charge != 0:
            raise integrity_error(entry.seq, "charges steps though it must not")
        if entry.kind == chain.GENESIS and entry.seq == 1:
            self.ledger_id = str(_parse(entry)["ledger_id"])
        elif entry.kind == chain.BUDGET:
            fields = _parse(entry)
            reason = str(fields.pop("reason", ""))
            state = self.accounts[entry.account_id]
            if state.terms is not None:
                state.conditions[f"budget terms were changed at entry {entry.seq}: {reason}"] = None
            state.terms = Budget(**fields)
        elif entry.kind == chain.FINGERPRINT:
            self._apply_fingerprint(entry)
        elif entry.kind == chain.NOTE:
            self._apply_detail(entry)
        elif entry.kind == chain.SNAPSHOT:
            self.snapshot_seq = entry.seq
        else:
            raise integrity_error(entry.seq, "is of an unknown kind")

    def _apply_fingerprint(self, entry: Entry) -> None:
        """Note changed records, and records that another account pays for too (a data set under a new name)."""
        state = self.accounts[entry.account_id]
        if state.fingerprint is not None:
            text = f"records changed at entry {entry.seq}; what was spent before stays spent"
            state.conditions[text] = None
        state.fingerprint = entry.digest
        holders = self._holders.setdefault(entry.digest, {})
        others = [self.accounts[number] for number in holders if number != entry.account_id]
        holders[entry.account_id] = None
        for other in others[:_NAMED]:
            if other.fingerprint == entry.digest:
                for one, two in ((state, other.account), (other, state.account)):
                    text = (
                        f"the same records are charged as {two.client}/{two.dataset} too: the figures add up"
                    )
                    one.conditions[text] = None

    def _apply_detail(self, entry: Entry) -> None:
        target = self.conditions if entry.account_id == 0 else self.accounts[entry.account_id].conditions
        for text in _parse(entry)["conditions"]:
            target[str(text)] = None

    def _charge(self, entry: Entry) -> None:
        if entry.account_id == 0 or entry.event_id == 0:
            raise integrity_error(entry.seq, "charges no account or no event")
        spend = self.accounts[entry.account_id].spend
        key = (entry.event_id, entry.period)
        total = spend.get(key, 0) + entry.charge
        if total < 0:
            raise integrity_error(entry.seq, "takes back more steps than were charged")
        spend[key] = total

    def dump(self) -> bytes:
        """Return the state as a snapshot body (JSON); its hash goes into a link of the chain."""
        terms: dict[Budget | None, int] = {}
        body = {
            "seq": self.seq,
            "mac": self.mac.hex(),
            "last_at": self.last_at,
            "ledger_id": self.ledger_id,
            "conditions": list(self.conditions),
            "accounts": [_dump_account(n, self.accounts[n], terms) for n in range(1, self._last_account + 1)],
            "terms": [None if item is None else dataclasses.asdict(item) for item in terms],
            "events": [[n, self.event_hashes[n]] for n in range(1, self._last_event + 1)],
            "pending": [dataclasses.astuple(self.pending[seq]) for seq in sorted(self.pending)],
        }
        return chain.canonical_json(body).encode()

    def load(self, body: bytes) -> None:
        """Take over a snapshot body whose hash was authenticated; definitions must already be known.

        Raises:
            LedgerIntegrityError: if account or event rows differ from the snapshot's.
        """
        data: dict[str, Any] = json.loads(body)
        known = [None if item is None else Budget(**item) for item in data["terms"]]
        for number, client, dataset, terms, spend, fingerprint, conditions in data["accounts"]:
            state = self.accounts.get(number)
            if state is None or state.account.client != client or state.account.dataset != dataset:
                raise integrity_error(data["seq"], f"account row {number} was edited")
            state.terms = known[terms]
            state.spend = {(event, period): steps for event, period, steps in spend}
            state.fingerprint = fingerprint
            if fingerprint is not None:
                self._holders.setdefault(fingerprint, {})[number] = None
            state.conditions = dict.fromkeys(conditions)
        if any(self.event_hashes.get(number) != text for number, text in data["events"]):
            raise integrity_error(data["seq"], "an event row was edited")
        self.pending = {row[0]: Pending(*row) for row in data["pending"]}
        self.conditions = dict.fromkeys(data["conditions"])
        self.seq, self.mac = data["seq"], bytes.fromhex(data["mac"])
        self.last_at, self.ledger_id = data["last_at"], data["ledger_id"]
        self.loaded_from = self.seq
        self._last_account, self._last_event = len(data["accounts"]), len(data["events"])


def _dump_account(number: int, state: AccountState, terms: dict[Budget | None, int]) -> list[Any]:
    return [
        number,
        state.account.client,
        state.account.dataset,
        terms.setdefault(state.terms, len(terms)),
        [[event, period, steps] for (event, period), steps in sorted(state.spend.items())],
        state.fingerprint,
        list(state.conditions),
    ]


def _parse(entry: Entry) -> dict[str, Any]:
    try:
        value = json.loads(entry.detail)
    except ValueError as error:
        raise integrity_error(entry.seq, "has a detail that cannot be read") from error
    if not isinstance(value, dict):
        raise integrity_error(entry.seq, "has a detail that cannot be read")
    return value
