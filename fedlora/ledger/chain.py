"""The hash chain over entries: HMAC-SHA256 with the client's secret, one link per entry.

Integrity guarantee: without the secret, no entry can be changed, inserted, removed from the
middle or reordered without `verify` noticing. Removing entries from the END (or putting an
older copy back) leaves a valid shorter chain; only a head known elsewhere can show that: the
anchor file beside the ledger, the last report, or the server's mirror.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fedlora.errors import LedgerIntegrityError

GENESIS: Final = "G"
BUDGET: Final = "B"
FINGERPRINT: Final = "F"
RESERVE: Final = "R"
COMMIT: Final = "C"
ABANDON: Final = "A"
RELEASE: Final = "U"
EXCESS: Final = "X"
NOTE: Final = "N"
SNAPSHOT: Final = "T"
KIND_NAMES: Final = {
    GENESIS: "genesis",
    BUDGET: "budget",
    FINGERPRINT: "fingerprint",
    RESERVE: "reserved",
    COMMIT: "committed",
    ABANDON: "abandoned",
    RELEASE: "released",
    EXCESS: "excess",
    NOTE: "note",
    SNAPSHOT: "snapshot",
}

ZERO_MAC: Final = bytes(32)
_SEPARATOR: Final = "\x1f"


class Entry(NamedTuple):
    """One append-only row. Names have no control characters, so the encoding below is injective.

    `charge` is the signed change of charged steps: +steps for a reservation, taken - reserved
    (<= 0) for a commit, -steps for a release before any data was touched, + for an excess.
    """

    seq: int
    kind: str
    account_id: int
    run_id: str
    server_round: int
    attempt: int
    event_id: int
    steps: int
    charge: int
    ref: int
    period: int
    at: int
    digest: str
    detail: str
    mac: bytes


COLUMNS: Final = Entry._fields


def canonical_json(value: object) -> str:
    """Return the one JSON text of a value (sorted keys, ASCII, no spaces, no NaN).

    Example:
        >>> canonical_json({"b": 1, "a": 0.5})
        '{"a":0.5,"b":1}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def derive_key(secret: bytes, purpose: str) -> bytes:
    """Derive a 32-byte key for one purpose from the client's secret.

    Raises:
        LedgerIntegrityError: if the secret has fewer than 16 bytes.
    """
    if len(secret) < 16:
        raise LedgerIntegrityError(
            f"ledger secret: got {len(secret)} bytes; required: at least 16; make one with load_or_create_secret"
        )
    return hmac.digest(secret, b"fedlora-ledger-v1/" + purpose.encode(), "sha256")


def make_mac(key: bytes) -> Callable[[bytes], bytes]:
    """Return message -> HMAC-SHA256(key, message), with the padded key hashed once.

    Reference: RFC 2104, section 2. A test compares it with the standard library.
    """
    block = (key if len(key) <= 64 else hashlib.sha256(key).digest()).ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in block))
    outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in block))

    def mac(message: bytes) -> bytes:
        first = inner.copy()
        first.update(message)
        second = outer.copy()
        second.update(first.digest())
        return second.digest()

    return mac


def account_text(client: str, dataset: str) -> str:
    """Return the text of an account inside a link."""
    return f"{client}{_SEPARATOR}{dataset}"


def link_message(previous: bytes, entry: Entry, account: str, event_hash: str) -> bytes:
    """Return the bytes that a link authenticates: previous link, every column, account and event content."""
    text = (
        f"{entry.seq}\x1f{entry.kind}\x1f{account}\x1f{entry.run_id}\x1f{entry.server_round}\x1f{entry.attempt}"
        f"\x1f{event_hash}\x1f{entry.steps}\x1f{entry.charge}\x1f{entry.ref}\x1f{entry.period}\x1f{entry.at}"
        f"\x1f{entry.digest}\x1f{entry.detail}"
    )
    return previous + text.encode()


def as_link(value: Any) -> bytes:
    """Return a stored link; a damaged cell may hold another type (and bytes(n) would be n zeros).

    Raises:
        TypeError: if it is a number or a text.
    """
    if isinstance(value, int | float | str):
        raise TypeError(f"a link is {type(value).__name__}")
    return bytes(value)


def encode_head(seq: int, mac: bytes) -> str:
    """Return a chain head as 80 hex digits: sequence number, then link."""
    return seq.to_bytes(8, "big").hex() + mac.hex()


def decode_head(head: str) -> tuple[int, bytes]:
    """Return (sequence number, link) of a chain head.

    Raises:
        LedgerIntegrityError: if it is not 80 hex digits.
    """
    try:
        raw = bytes.fromhex(head)
    except (ValueError, TypeError):
        raw = b""
    if len(raw) != 40:
        raise LedgerIntegrityError(
            "chain head: got a text that is not 80 hex digits; allowed: what Ledger.head() returned; copy it whole"
        )
    return int.from_bytes(raw[:8], "big"), raw[8:]
