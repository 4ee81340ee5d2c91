"""`fedlora dock`: release, store, match, group and serve compact LoRA specifications."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli import dock_release
from fedlora.cli.common import JsonOption, emit
from fedlora.figures import at_least_digits

app = typer.Typer(
    no_args_is_help=True,
    help="Find the right adapter without seeing the data (PAVE specifications).",
    rich_markup_mode=None,
    add_completion=False,
)
dock_release.register(app)

DockFile = Annotated[Path, typer.Argument(metavar="DOCK", help="The dock's SQLite file; created if absent.")]


@app.command()
def add(
    dock_file: DockFile,
    entry: Annotated[
        Path, typer.Argument(metavar="SPEC", help="A specification's JSON file (see `dock spec`).")
    ],
    as_json: JsonOption = False,
) -> None:
    """Add one specification.

    Example: fedlora dock add dock.sqlite news.json
    """
    from fedlora.specs.dock import Dock
    from fedlora.specs.entries import read_entry

    specification = read_entry(entry)
    dock = Dock(dock_file)
    try:
        found = {"id": dock.add(specification), "name": specification.name, "specifications": len(dock)}
    finally:
        dock.close()
    emit(found, as_json=as_json, text=f"{found['name']} added; the dock holds {found['specifications']}")


@app.command()
def match(
    dock_file: DockFile,
    query: Annotated[Path, typer.Argument(metavar="SPEC", help="The query's JSON file; it is not stored.")],
    top_k: Annotated[int, typer.Option(help="How many entries, best first.")] = 5,
    kind: Annotated[str, typer.Option(help="model, task or any.")] = "model",
    as_json: JsonOption = False,
) -> None:
    """Show the stored adapters that fit a task best.

    Example: fedlora dock match dock.sqlite my-task.json --top-k 3
    """
    from fedlora.specs.dock import Dock
    from fedlora.specs.entries import read_entry
    from fedlora.specs.types import other_target

    specification = read_entry(query)
    dock = Dock(dock_file, create=False)
    try:
        found = dock.match(specification, top_k, kind=None if kind == "any" else kind)
    finally:
        dock.close()
    lines = []
    for entry in found:
        promise = entry.privacy
        said = "no privacy claimed"
        if promise.epsilon is not None:
            said = (
                f"epsilon {at_least_digits(promise.epsilon, 3)} at delta {promise.delta:g} per {promise.unit}, "
                f"{promise.adjacency}, against {promise.adversary}; accountant {promise.accountant}; {promise.sampling}"
            )
        line = f"{entry.cosine:8.4f}  {entry.name}  ({entry.licence}; {said})"
        if other_target(specification.metadata, entry.metadata):
            line += f"  [another target, {entry.metadata['target']}: not comparable]"
        lines.append(line)
    emit({"matches": [asdict(entry) for entry in found]}, as_json=as_json, text="\n".join(lines))


@app.command()
def serve(
    dock_file: DockFile,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8700,
    tokens: Annotated[str, typer.Option(help="Environment variable with accepted tokens, one a line.")] = (
        "FEDLORA_DOCK_TOKENS"
    ),
    max_entries: Annotated[
        int, typer.Option(min=1, help="The dock takes no more entries than this.")
    ] = 1_000_000,
    max_connections: Annotated[int, typer.Option(min=1, help="Connections at once; more get 503.")] = 256,
) -> None:
    """Serve the dock over HTTP; put TLS in front of it.

    Example: FEDLORA_DOCK_TOKENS=$(openssl rand -hex 24) fedlora dock serve dock.sqlite
    """
    from fedlora.errors import ConfigError
    from fedlora.specs.dock import Dock

    try:
        from fedlora.specs.service import make_app
        from fedlora.specs.serving import run_service
    except ModuleNotFoundError as error:
        raise ConfigError(f"the service needs {error.name}: pip install 'fedlora[dock]'") from error
    accepted = tuple(line.strip() for line in os.environ.get(tokens, "").splitlines() if line.strip())
    dock = Dock(dock_file, max_entries=max_entries)
    try:
        service = make_app(dock, accepted)
        typer.echo(f"{dock_file}: {len(dock)} specifications, http://{host}:{port}/v1 (no TLS)", err=True)
        run_service(service, host, port, max_connections)
    finally:
        dock.close()
