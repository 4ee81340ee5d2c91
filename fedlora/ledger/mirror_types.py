"""What the server's mirror keeps of an account, and what it reports: differences, the figure that stands (PUBLIC)."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedlora.ledger.chain import decode_head
from fedlora.ledger.receipts import Receipt
from fedlora.ledger.types import Account


@dataclass(frozen=True)
class MirrorFlag:
    """One difference. `code` is stable; `text` names figures.

    Codes: bad-signature, key-changed, unreadable (the receipt was not taken); rollback,
    another-ledger, missing-events, lower-epsilon, event-differs, steps-differ, second-release, terms-changed
    (it was taken and the difference is reported).
    """

    client: str
    dataset: str
    code: str
    text: str


@dataclass(frozen=True)
class MirrorReport:
    """What the server may say about one account.

    Attributes:
        account: whose.
        epsilon: the figure that stands: the larger of the other two.
        claimed: largest epsilon that the client's receipts claim (over all its runs).
        recomputed: from the receipts and the unanswered rounds that this server knows.
        delta: of all figures.
        adjacency: neighbouring relation.
        unit: unit of the guarantee.
        unanswered: rounds asked for without a receipt; counted as spent in full.
        head: newest chain head known; send it along, so that the client can detect its own rollback.
        flags: differences.
    """

    account: Account
    epsilon: float
    claimed: float
    recomputed: float
    delta: float
    adjacency: str
    unit: str
    unanswered: tuple[tuple[str, int], ...]
    head: str
    flags: tuple[MirrorFlag, ...]


Charges = dict[tuple[str, int, str, str], tuple[str, int]]
"""(run, round, ledger entry, reply) -> (event, steps)."""


@dataclass
class History:
    """One account's receipts, in the order they came, with what is asked about them for every further one.

    Attributes:
        receipts: all of them.
        newest: the one with the newest head.
        charges: what they charge; nothing is ever dropped.
    """

    receipts: list[Receipt] = field(default_factory=list)
    newest: Receipt | None = None
    charges: Charges = field(default_factory=dict)
    _sent: dict[tuple[str, int], set[str]] = field(default_factory=dict)

    def add(self, receipt: Receipt) -> None:
        """Take one more."""
        self.receipts.append(receipt)
        if self.newest is None or decode_head(receipt.head)[0] > decode_head(self.newest.head)[0]:
            self.newest = receipt
        if receipt.reply_digest:
            self._sent.setdefault((receipt.run_id, receipt.server_round), set()).add(receipt.reply_digest)
        # One entry may be reported twice, reserved first and then committed: the later steps stand.
        entry = f"{receipt.ledger_id}/{receipt.entry}"
        base = (receipt.run_id, receipt.server_round, entry)
        if receipt.reply_digest:
            self.charges.pop((*base, ""), None)
        self.charges[(*base, receipt.reply_digest)] = (receipt.event, receipt.steps)

    def replies(self, run_id: str, server_round: int) -> set[str]:
        """Return the digests of all replies of one round."""
        return self._sent.get((run_id, server_round), set())
