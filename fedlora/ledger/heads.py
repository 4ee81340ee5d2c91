"""Heads known elsewhere: the check that shows an older copy of a ledger put back."""

from __future__ import annotations

from fedlora.errors import LedgerIntegrityError
from fedlora.ledger import chain
from fedlora.ledger.journal import Journal


def check_known_head(journal: Journal, head: str) -> None:
    """Check that a head known elsewhere lies on a ledger's chain.

    Raises:
        LedgerError: if the head cannot be read.
        LedgerIntegrityError: if the ledger is older than the head or another branch.
    """
    seq, mac = chain.decode_head(head)
    with journal.store.read() as connection:
        journal.sync(connection)
        found = journal.link_at(connection, seq)
    if found != mac:
        what = "does not reach it: an older copy was put back" if found is None else "went another way there"
        raise LedgerIntegrityError(
            f"ledger {journal.store.location}: a head known elsewhere is at entry {seq}, but this ledger "
            f"{what}; restore the newest ledger (the difference counts as spent)"
        )
