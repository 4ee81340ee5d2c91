"""What a site tells the server's mirror, and what it learns from it: signed receipts out, known heads in.

A ledger cannot tell from inside that an older copy of everything was put back. The server remembers the newest
head that this site's receipts named and sends it along with every request; a ledger that does not reach it refuses
before anything is reserved or read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlora.errors import LedgerError, LedgerIntegrityError
from fedlora.ledger import Account, Ledger
from fedlora.ledger.receipts import make_receipts, sign_receipt

MAX_RECEIPTS = 1000
"""Most receipts in one answer; a client that lost more rounds than this in one run sends the newest."""


@dataclass(frozen=True)
class Known:
    """PUBLIC. What the server's mirror knows about one client.

    Attributes:
        head: newest chain head that a receipt of this client named; "" if none.
        missing: rounds of this run that were asked for and for which no receipt came.
    """

    head: str = ""
    missing: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"head": self.head, "missing": list(self.missing)}

    @staticmethod
    def from_json(data: object) -> Known:
        """Read plain values.

        Raises:
            LedgerError: if they are something else.
        """
        if not isinstance(data, Mapping) or set(data) != {"head", "missing"}:
            raise LedgerError("known head: got other fields; allowed: head, missing; update the server")
        head, missing = data["head"], data["missing"]
        good = isinstance(missing, list) and all(type(one) is int for one in missing)
        if not isinstance(head, str) or not good:
            raise LedgerError("known head: got other types; allowed: a text and round numbers")
        return Known(head, tuple(missing))


class LedgerWitness:
    """Speaks for a site's ledger with its identity key (SENSITIVE)."""

    def __init__(self, ledger: Ledger, key: Ed25519PrivateKey) -> None:
        """Bind both; whoever opened the ledger closes it."""
        self._ledger, self._key = ledger, key

    def check(self, known: Mapping[str, Known]) -> None:
        """Check that every head that the server knows lies on this ledger's chain.

        Raises:
            LedgerIntegrityError: if this ledger is older than a head, or went another way.
        """
        for client, one in known.items():
            if not one.head:
                continue
            try:
                self._ledger.known_head_check(one.head)
            except LedgerIntegrityError as error:
                raise LedgerIntegrityError(
                    f"client {client}: the server knows a newer head; {error}"
                ) from None

    def receipts(
        self, account: Account, run_id: str, rounds: Collection[int]
    ) -> tuple[Mapping[str, Any], ...]:
        """Return signed receipts (JSON) of those rounds of a run that the ledger charged.

        Args:
            account: whose.
            run_id: run.
            rounds: this round and those that the server misses.
        """
        if account not in self._ledger.accounts():
            return ()
        wanted = [one for one in make_receipts(self._ledger, account, run_id) if one.server_round in rounds]
        return tuple(sign_receipt(one, self._key).to_json() for one in wanted[-MAX_RECEIPTS:])
