"""Which ledger a `fedlora budget` command is about: its place, its key and its anchor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedlora.errors import LedgerError
from fedlora.ledger import load_secret, register_of

LedgerArgument = Annotated[str, typer.Argument(metavar="LEDGER", help="SQLite file or SQLAlchemy URL.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="File with the ledger's secret.")]
AnchorOption = Annotated[Path | None, typer.Option("--anchor", help="Anchor file (default: LEDGER.anchor).")]


def find_key(ledger: str, key: Path | None) -> Path:
    """Return the file of the ledger's secret.

    Raises:
        LedgerError: if none is found.
    """
    base = Path(ledger.removeprefix("sqlite:///"))
    given = os.environ.get("FEDLORA_LEDGER_KEY", "")
    if key is not None or given:
        return key if key is not None else Path(given)
    folder = base.parent
    beside = (
        Path(f"{base}.key"),
        base.with_suffix(".key"),
        folder / "ledger.secret",
        folder / "keys" / "ledger.secret",
    )
    for candidate in beside if "://" not in str(base) else ():
        if candidate.is_file():
            return candidate
    raise LedgerError(
        f"ledger {base}: no key found (tried {', '.join(path.name for path in beside)} beside it); "
        "required: the client's secret; give --key FILE or set FEDLORA_LEDGER_KEY"
    )


def key_of(ledger: str, key: Path | None) -> tuple[bytes, Path]:
    """Return a ledger's secret (SENSITIVE) and the register beside its key.

    Raises:
        LedgerError: if the key is missing or unreadable.
    """
    file = find_key(ledger, key)
    try:
        return load_secret(file), register_of(file)
    except FileNotFoundError:
        raise LedgerError(f"ledger key {file}: no such file; give --key FILE") from None
