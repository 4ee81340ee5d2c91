"""`fedlora budget restore` and `accept`: put a copy of a lost ledger back, or go on without, as its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.budget_options import AnchorOption, KeyOption, LedgerArgument, key_of
from fedlora.cli.common import JsonOption, emit


def restore(
    copy: Annotated[Path, typer.Argument(help="What `fedlora budget backup` wrote.")],
    ledger: Annotated[Path, typer.Argument(metavar="LEDGER", help="Where it goes; nothing may be there.")],
    reason: Annotated[
        str,
        typer.Option(
            "--accept-loss", help="Why entries that may be missing are accepted; reports repeat it."
        ),
    ] = "",
    key: KeyOption = None,
    anchor: AnchorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put a copy in the place of a lost SQLite ledger; every link of it is checked first.

    If the anchor is still there and the copy is the newest state, nothing is lost. Otherwise what was charged
    since is in no figure any more: it must be accepted with a reason.

    Example: fedlora budget restore backups/monday.db ledger.db

    Example: fedlora budget restore backups/monday.db ledger.db --accept-loss "disk died on Tuesday, no run since"
    """
    from fedlora.ledger.restoring import restore as put_back

    secret, register = key_of(str(ledger), key)
    done = put_back(copy, ledger, secret=secret, reason=reason, anchor=anchor, register=register)
    lost = "nothing is missing" if done.missing == 0 else "entries may be missing; every report says so"
    record = {"ledger": str(ledger), "head": done.head, "missing_entries": done.missing}
    emit(record, as_json=as_json, text=f"{ledger}: restored; it ends at head {done.head}; {lost}")


def accept(
    ledger: LedgerArgument,
    reason: Annotated[
        str, typer.Option("--reason", help="Why it is accepted; every later report repeats it.")
    ],
    key: KeyOption = None,
    anchor: AnchorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with what is there though entries are missing: no ledger (a new one is begun), an older one, no anchor.

    What is missing is in no figure any more. A server whose mirror knows more still refuses.

    Example: fedlora budget accept ledger.db --reason "disk died on Tuesday, no copy; decision 12 of the board"
    """
    from fedlora.ledger.restoring import accept as go_on

    secret, register = key_of(ledger, key)
    done = go_on(ledger, secret=secret, reason=reason, register=register, anchor=anchor)
    record = {"ledger": ledger, "head": done.head, "missing_entries": done.missing}
    text = f"{ledger}: accepted; it ends at head {done.head}; entries are missing, and every report says so"
    emit(record, as_json=as_json, text=text)
