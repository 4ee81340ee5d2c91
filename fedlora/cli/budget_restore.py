"""`fedlora budget restore` and `accept`: put a copy of a lost ledger back, or go on without, as its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.common import JsonOption, emit
from fedlora.errors import LedgerError
from fedlora.ledger import load_secret, register_of


def restore(
    copy: Annotated[Path, typer.Argument(help="What `fedlora budget backup` wrote.")],
    ledger: Annotated[Path, typer.Argument(metavar="LEDGER", help="Where it goes; nothing may be there.")],
    reason: Annotated[
        str,
        typer.Option(
            "--accept-loss", help="Why entries that may be missing are accepted; reports repeat it."
        ),
    ] = "",
    key: Annotated[Path | None, typer.Option("--key", help="File with the ledger's secret.")] = None,
    anchor: Annotated[
        Path | None, typer.Option("--anchor", help="Anchor file (default: LEDGER.anchor).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Put a copy in the place of a lost SQLite ledger; every link of it is checked first.

    If the anchor is still there and the copy is the newest state, nothing is lost. Otherwise what was charged
    since is in no figure any more: it must be accepted with a reason.

    Example: fedlora budget restore backups/monday.db ledger.db

    Example: fedlora budget restore backups/monday.db ledger.db --accept-loss "disk died on Tuesday, no run since"
    """
    from fedlora.ledger.restoring import restore as put_back

    secret, register = _key_of(str(ledger), key)
    done = put_back(copy, ledger, secret=secret, reason=reason, anchor=anchor, register=register)
    lost = "nothing is missing" if done.missing == 0 else "entries may be missing; every report says so"
    record = {"ledger": str(ledger), "head": done.head, "missing_entries": done.missing}
    emit(record, as_json=as_json, text=f"{ledger}: restored; it ends at head {done.head}; {lost}")


def accept(
    ledger: Annotated[str, typer.Argument(metavar="LEDGER", help="SQLite file or SQLAlchemy URL.")],
    reason: Annotated[
        str, typer.Option("--reason", help="Why it is accepted; every later report repeats it.")
    ],
    key: Annotated[Path | None, typer.Option("--key", help="File with the ledger's secret.")] = None,
    anchor: Annotated[
        Path | None, typer.Option("--anchor", help="Anchor file (default: LEDGER.anchor).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Go on with what is there though entries are missing: no ledger (a new one is begun), an older one, no anchor.

    What is missing is in no figure any more. A server whose mirror knows more still refuses.

    Example: fedlora budget accept ledger.db --reason "disk died on Tuesday, no copy; decision 12 of the board"
    """
    from fedlora.ledger.restoring import accept as go_on

    secret, register = _key_of(ledger, key)
    done = go_on(ledger, secret=secret, reason=reason, register=register, anchor=anchor)
    record = {"ledger": ledger, "head": done.head, "missing_entries": done.missing}
    text = f"{ledger}: accepted; it ends at head {done.head}; entries are missing, and every report says so"
    emit(record, as_json=as_json, text=text)


def _key_of(ledger: str, key: Path | None) -> tuple[bytes, Path]:
    """Return a ledger's secret (SENSITIVE) and the register beside its key."""
    from fedlora.cli.budget import find_key

    file = find_key(ledger, key)
    try:
        return load_secret(file), register_of(file)
    except FileNotFoundError:
        raise LedgerError(f"ledger key {file}: no such file; give --key FILE") from None
