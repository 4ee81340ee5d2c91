"""`fedlora certs`: the federation's certificate authority and the server's certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli import pki
from fedlora.cli.common import JsonOption, emit

app = typer.Typer(
    help="Make, renew and show the federation's TLS certificates.\n\n"
    "Examples:\n\n"
    "  fedlora certs init certs --host fl.example.org --host 10.0.0.5\n\n"
    "  fedlora certs renew certs\n\n"
    "  fedlora certs show certs --json",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

Folder = Annotated[Path, typer.Argument(help="Folder of the certificates.")]
Hosts = Annotated[
    list[str] | None,
    typer.Option("--host", help="A DNS name or address that clients connect to; may be repeated."),
]
Days = Annotated[int, typer.Option("--days", min=1, max=825, help="Validity of the server's certificate.")]


def _report(folder: Path, as_json: bool, head: str) -> None:
    files = {}
    lines = [head] if head else []
    for name in (pki.CA_CERT, pki.SERVER_CERT):
        if not (folder / name).exists():
            continue
        facts = pki.certificate_facts(folder / name)
        files[name] = [
            {
                "subject": fact.subject,
                "names": list(fact.names),
                "not_before": fact.not_before.isoformat(),
                "not_after": fact.not_after.isoformat(),
                "sha256": fact.sha256,
                "days_left": round(fact.days_left(), 2),
            }
            for fact in facts
        ]
        for fact in facts:
            names = f" for {', '.join(fact.names)}" if fact.names else ""
            lines.append(
                f"{name}: {fact.subject}{names}, until {fact.not_after:%Y-%m-%d}, sha256 {fact.sha256[:16]}"
            )
    emit({"folder": str(folder), "certificates": files}, as_json=as_json, text="\n".join(lines))


@app.command()
def init(folder: Folder, host: Hosts = None, days: Days = 397, as_json: JsonOption = False) -> None:
    """Make a certificate authority and the server's first certificate.

    Example: fedlora certs init certs --host fl.example.org
    """
    hosts = host or ["localhost", "127.0.0.1"]
    pki.check_hosts(hosts)
    pki.make_ca(folder)
    pki.issue_server(folder, hosts, days=days)
    _report(folder, as_json, f"Made {folder}/ca.crt (give it to every site) and the server's certificate.")


@app.command()
def renew(
    folder: Folder,
    host: Hosts = None,
    days: Days = 397,
    new_ca: Annotated[
        bool,
        typer.Option(
            "--new-ca", help="Also replace the authority; ca.crt keeps the old one for the overlap."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Issue a new server certificate (same hosts unless given); restart the server afterwards.

    Example: fedlora certs renew certs --new-ca
    """
    hosts = host or list(pki.certificate_facts(folder / pki.SERVER_CERT)[0].names)
    pki.check_hosts(hosts)
    if new_ca:
        pki.make_ca(folder, replace=True)
    pki.issue_server(folder, hosts, days=days, replace=True)
    _report(
        folder,
        as_json,
        "Renewed the server's certificate." + (" Send ca.crt to every site." if new_ca else ""),
    )


@app.command()
def show(folder: Folder, as_json: JsonOption = False) -> None:
    """Show the certificates and check that the server's one is valid now.

    Example: fedlora certs show certs
    """
    pki.check_server_certificate(folder)
    _report(folder, as_json, "")
