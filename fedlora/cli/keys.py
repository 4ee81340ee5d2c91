"""`fedlora keys`: keys of sites, and the server's allow-list."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli import keyring
from fedlora.cli.common import JsonOption, emit

app = typer.Typer(
    help="Make, allow, rotate and revoke the keys of sites.\n\n"
    "At the site:    fedlora keys new keys hospital-a\n\n"
    "At the server:  fedlora keys allow allow.json hospital-a hospital-a.pub\n\n"
    "Revoke:         fedlora keys revoke allow.json hospital-a",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Folder = Annotated[Path, typer.Argument(help="Folder of the site's keys.")]
SiteName = Annotated[str, typer.Argument(help="The site's name.")]
ListFile = Annotated[Path, typer.Argument(help="The server's allow-list (JSON).")]


@app.command()
def new(folder: Folder, name: SiteName, as_json: JsonOption = False) -> None:
    """Make a site's deployment key and, once, its identity key.

    Example: fedlora keys new keys hospital-a
    """
    public = keyring.new_deployment_key(folder, name)
    identity = folder / "identity.pem"
    if not identity.exists():
        keyring.new_identity_key(identity)
    _, fingerprint = keyring.read_public(public)
    emit(
        {"public_key": str(public), "fingerprint": fingerprint, "identity_key": str(identity)},
        as_json=as_json,
        text=f"Made {folder / name} (keep it here) and {public} ({fingerprint}): send the .pub file to the server.",
    )


@app.command()
def rotate(folder: Folder, name: SiteName, as_json: JsonOption = False) -> None:
    """Replace a site's deployment key; the identity key and the ledger stay.

    Example: fedlora keys rotate keys hospital-a
    """
    public = keyring.new_deployment_key(folder, name, rotate=True)
    _, fingerprint = keyring.read_public(public)
    emit(
        {"public_key": str(public), "fingerprint": fingerprint},
        as_json=as_json,
        text=f"Made a new key {fingerprint}: send {public} to the server; a running `fedlora client` uses it once the "
        "server allows it.",
    )


@app.command()
def allow(
    allow_list: ListFile,
    name: SiteName,
    public_key: Annotated[Path, typer.Argument(help="The site's .pub file.")],
    rotate_key: Annotated[bool, typer.Option("--rotate", help="Replace the site's present key.")] = False,
    client: Annotated[
        list[str] | None,
        typer.Option("--client", help="Logical client that the site answers for; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Put a site's public key on the allow-list; a running server takes it within seconds.

    Example: fedlora keys allow allow.json hospital-a hospital-a.pub
    """
    known = keyring.AllowList.load(allow_list, missing_ok=True)
    entry = known.allow(name, public_key, clients=tuple(client or ()), rotate=rotate_key)
    known.save()
    emit({"site": asdict(entry)}, as_json=as_json, text=f"{entry.name} is allowed with {entry.fingerprint}.")


@app.command()
def revoke(allow_list: ListFile, name: SiteName, as_json: JsonOption = False) -> None:
    """Revoke a site's key; a running server drops it within seconds.

    Example: fedlora keys revoke allow.json hospital-a
    """
    known = keyring.AllowList.load(allow_list)
    entry = known.revoke(name)
    known.save()
    emit({"site": asdict(entry)}, as_json=as_json, text=f"{entry.name} is revoked ({entry.fingerprint}).")


@app.command("list")
def list_(allow_list: ListFile, as_json: JsonOption = False) -> None:
    """List the sites of an allow-list.

    Example: fedlora keys list allow.json --json
    """
    entries = keyring.AllowList.load(allow_list).entries()
    lines = [f"{entry.name}: {entry.state} since {entry.changed}, {entry.fingerprint}" for entry in entries]
    emit(
        {"sites": [asdict(entry) for entry in entries]}, as_json=as_json, text="\n".join(lines) or "no sites"
    )
