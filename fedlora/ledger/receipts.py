"""Receipts: what a client's ledger says about one round, signed with the client's identity key (PUBLIC)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedlora.accounting import Event
from fedlora.errors import AuthenticationError, FedLoraError, LedgerError
from fedlora.ledger import chain
from fedlora.ledger.chain import canonical_json, decode_head
from fedlora.ledger.ledger import Ledger
from fedlora.ledger.types import ACCOUNTANTS, ADJACENCIES, UNITS, Account, RoundRow, check_name

MAX_COUNT: Final = 10**15
MAX_EVENT_CHARACTERS: Final = 100_000
_INFINITE: Final = "inf"
_DOMAIN: Final = b"fedlora-receipt-v1\n"


@dataclass(frozen=True)
class Receipt:
    """One round in a client's ledger; nothing in it depends on records.

    Attributes:
        ledger_id: random identity of the ledger.
        client: account.
        dataset: account.
        run_id: run.
        server_round: round.
        entry: sequence number of the reservation.
        state: reserved, committed, abandoned or excess.
        event: canonical JSON of one step's event.
        steps: steps charged.
        reply_digest: sha256 of the reply that was sent, or "".
        epsilon: the account's spend over its lifetime after this round, over all runs.
        delta: of epsilon.
        adjacency: neighbouring relation.
        accountant: accountant of the terms.
        unit: unit of the guarantee.
        num_events: noised steps charged to the account in all.
        head: chain head.
    """

    ledger_id: str
    client: str
    dataset: str
    run_id: str
    server_round: int
    entry: int
    state: str
    event: str
    steps: int
    reply_digest: str
    epsilon: float
    delta: float
    adjacency: str
    accountant: str
    unit: str
    num_events: int
    head: str

    def to_bytes(self) -> bytes:
        """Return the bytes that are signed."""
        return _DOMAIN + canonical_json(self.to_json()).encode()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; an infinite epsilon is the text "inf"."""
        plain = dataclasses.asdict(self)
        return {**plain, "epsilon": _INFINITE} if self.epsilon == math.inf else plain

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Receipt:
        """Rebuild a receipt and check every field.

        Raises:
            LedgerError: if a field is missing, unknown, of another type or unreadable.
        """
        types = {"int": int, "str": str, "float": float}
        fields = {field.name: types[str(field.type)] for field in dataclasses.fields(Receipt)}
        if not isinstance(data, Mapping) or set(data) != set(fields):
            raise LedgerError(
                "receipt: got other fields than a receipt has; allowed: what Receipt makes; update fedlora"
            )
        if data["epsilon"] == _INFINITE:
            data = {**data, "epsilon": math.inf}
        for name, kind in fields.items():
            if type(data[name]) is not kind:
                raise LedgerError(
                    f"receipt {name}: got {type(data[name]).__name__}; allowed: {kind.__name__}"
                )
        receipt = Receipt(**data)
        _check_values(receipt)
        try:
            decode_head(receipt.head)
            Event.from_json(json.loads(receipt.event))
        except (ValueError, RecursionError, FedLoraError) as error:
            raise LedgerError("receipt: head or event cannot be read; allowed: what Receipt makes") from error
        return receipt


def _check_values(receipt: Receipt) -> None:
    """Check ranges and names: whatever a site signs, the mirror must be able to keep and to compose it.

    Raises:
        LedgerError: if a value is out of its range.
    """
    for name in ("ledger_id", "client", "dataset", "run_id"):
        check_name(f"receipt {name}", getattr(receipt, name))
    counts = (receipt.server_round, receipt.entry, receipt.steps, receipt.num_events)
    if not (receipt.epsilon >= 0 and 0 < receipt.delta < 1 and receipt.entry >= 1):
        raise LedgerError("receipt: got a figure out of its range; allowed: epsilon >= 0, 0 < delta < 1")
    if not all(0 <= count <= MAX_COUNT for count in counts):
        raise LedgerError(
            f"receipt: got a count out of its range; allowed: whole numbers from 0 to {MAX_COUNT}"
        )
    chosen = (receipt.state, receipt.adjacency, receipt.accountant, receipt.unit)
    allowed = (tuple(chain.KIND_NAMES.values()), ADJACENCIES, ACCOUNTANTS, UNITS)
    if not all(value in known for value, known in zip(chosen, allowed, strict=True)):
        raise LedgerError(
            "receipt: got a state, relation, accountant or unit that is not known; update fedlora"
        )
    if len(receipt.event) > MAX_EVENT_CHARACTERS or len(receipt.reply_digest) > 64:
        raise LedgerError("receipt: got an event or a digest that is too long; allowed: what Receipt makes")


@dataclass(frozen=True)
class SignedReceipt:
    """A receipt with its Ed25519 public key (64 hex digits) and signature (128 hex digits)."""

    receipt: Receipt
    public_key: str
    signature: str

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "receipt": self.receipt.to_json(),
            "public_key": self.public_key,
            "signature": self.signature,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SignedReceipt:
        """Rebuild a signed receipt (its signature is checked by `verify_receipt`).

        Raises:
            LedgerError: if it cannot be read.
        """
        if not isinstance(data, Mapping) or set(data) != {"receipt", "public_key", "signature"}:
            raise LedgerError("signed receipt: got other fields; allowed: receipt, public_key, signature")
        if not isinstance(data["public_key"], str) or not isinstance(data["signature"], str):
            raise LedgerError("signed receipt: got a key or signature that is not text; allowed: hex digits")
        return SignedReceipt(Receipt.from_json(data["receipt"]), data["public_key"], data["signature"])


def make_receipts(ledger: Ledger, account: Account, run_id: str) -> list[Receipt]:
    """Return one receipt per round of a run that was charged, in order (also those whose reply was lost).

    After a lost connection the client sends all of them, so that the server learns of rounds that
    were charged though it never saw a reply.

    Raises:
        LedgerError: if the account is unknown.
    """
    report = ledger.report(account)
    rows = [row for row in report.rounds if row.run_id == run_id and row.steps_charged > 0]

    def receipt(row: RoundRow) -> Receipt:
        return Receipt(
            ledger_id=ledger.ledger_id,
            client=account.client,
            dataset=account.dataset,
            run_id=run_id,
            server_round=row.server_round,
            entry=row.seq,
            state=row.state,
            event=row.event_json,
            steps=row.steps_charged,
            reply_digest=row.reply_digest,
            epsilon=report.epsilon_lifetime,
            delta=report.delta,
            adjacency=report.adjacency,
            accountant=report.budget.accountant,
            unit=report.unit,
            num_events=report.num_events,
            head=report.head,
        )

    return [receipt(row) for row in rows]


def make_receipt(ledger: Ledger, account: Account, run_id: str, server_round: int) -> Receipt:
    """Return the receipt of one round.

    Raises:
        LedgerError: if the ledger charged nothing for that round.
    """
    for receipt in reversed(make_receipts(ledger, account, run_id)):
        if receipt.server_round == server_round:
            return receipt
    raise LedgerError(
        f"receipt of round {server_round} of run {run_id!r}: nothing was charged; there is none to give"
    )


def sign_receipt(receipt: Receipt, key: Ed25519PrivateKey) -> SignedReceipt:
    """Sign a receipt with the client's identity key (SENSITIVE)."""
    return SignedReceipt(
        receipt, key.public_key().public_bytes_raw().hex(), key.sign(receipt.to_bytes()).hex()
    )


def verify_receipt(signed: SignedReceipt, trusted_key: str | None = None) -> Receipt:
    """Return the receipt if its signature holds.

    Args:
        signed: receipt with key and signature.
        trusted_key: the public key (hex) that must have signed; None accepts the key it names.

    Raises:
        AuthenticationError: if the key is another one or the signature does not hold.
    """
    if trusted_key is not None and signed.public_key != trusted_key:
        raise AuthenticationError(
            f"receipt of client {signed.receipt.client!r}: signed by another key than the one known; "
            "allowed: the client's identity key; re-register the client if its key was replaced"
        )
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signed.public_key))
        key.verify(bytes.fromhex(signed.signature), signed.receipt.to_bytes())
    except (ValueError, InvalidSignature) as error:
        raise AuthenticationError(
            f"receipt of client {signed.receipt.client!r}: the signature does not hold; the receipt is ignored"
        ) from error
    return signed.receipt
