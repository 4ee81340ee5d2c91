"""`fedlora budget restore`: put a copy of a lost ledger back, as its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.common import JsonOption, emit
from fedlora.errors import LedgerError
from fedlora.ledger import load_secret


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
    from fedlora.cli.budget import find_key
    from fedlora.ledger.restoring import restore as put_back

    file = find_key(str(ledger), key)
    try:
        secret = load_secret(file)
    except FileNotFoundError:
        raise LedgerError(f"ledger key {file}: no such file; give --key FILE") from None
    done = put_back(copy, ledger, secret=secret, reason=reason, anchor=anchor)
    lost = "nothing is missing" if done.missing == 0 else "entries may be missing; every report says so"
    record = {"ledger": str(ledger), "head": done.head, "missing_entries": done.missing}
    emit(record, as_json=as_json, text=f"{ledger}: restored; it ends at head {done.head}; {lost}")
