"""What the server's mirror reports: differences, and the figure that stands (PUBLIC)."""

from __future__ import annotations

from dataclasses import dataclass

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
