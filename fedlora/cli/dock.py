"""`fedlora dock`: store, match and serve compact LoRA specifications."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    no_args_is_help=True, help="Find the right adapter without seeing the data (PAVE specifications)."
)

DockFile = Annotated[Path, typer.Argument(help="The dock's SQLite file; created if absent.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def add(
    dock_file: DockFile,
    entry: Annotated[Path, typer.Argument(help="A specification as JSON (see `fedlora dock --help`).")],
    as_json: AsJson = False,
) -> None:
    """Add one specification.

    Example: fedlora dock add dock.sqlite news-adapter.json
    """
    from fedlora.specs.dock import Dock

    dock = Dock(dock_file)
    try:
        specification = read_entry(entry)
        identity = dock.add(specification)
        _print({"id": identity, "name": specification.name, "specifications": len(dock)}, as_json)
    finally:
        dock.close()


@app.command()
def match(
    dock_file: DockFile,
    query: Annotated[Path, typer.Argument(help="The query's specification as JSON; it is not stored.")],
    top_k: Annotated[int, typer.Option(help="How many entries, best first.")] = 5,
    kind: Annotated[str, typer.Option(help="model, task or any.")] = "model",
    as_json: AsJson = False,
) -> None:
    """Show the stored adapters that fit a task best.

    Example: fedlora dock match dock.sqlite my-task.json --top-k 3
    """
    from dataclasses import asdict

    from fedlora.specs.dock import Dock

    dock = Dock(dock_file)
    try:
        found = dock.match(read_entry(query), top_k, kind=None if kind == "any" else kind)
    finally:
        dock.close()
    if as_json:
        _print({"matches": [asdict(entry) for entry in found]}, True)
        return
    for entry in found:
        promise = entry.privacy
        said = f"epsilon {promise.epsilon:.3g}" if promise.epsilon is not None else "no privacy claimed"
        typer.echo(f"{entry.cosine:8.4f}  {entry.name}  ({entry.licence}; {said})")


@app.command()
def serve(
    dock_file: DockFile,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8700,
    tokens: Annotated[str, typer.Option(help="Environment variable with accepted tokens, one a line.")] = (
        "FEDLORA_DOCK_TOKENS"
    ),
) -> None:
    """Serve the dock over HTTP; put TLS in front of it.

    Example: FEDLORA_DOCK_TOKENS=$(openssl rand -hex 24) fedlora dock serve dock.sqlite
    """
    from fedlora.errors import ConfigError
    from fedlora.specs.dock import Dock

    try:
        import uvicorn

        from fedlora.specs.service import make_app
    except ModuleNotFoundError as error:
        raise ConfigError(f"the service needs {error.name}: pip install 'fedlora[dock]'") from error
    accepted = tuple(line.strip() for line in os.environ.get(tokens, "").splitlines() if line.strip())
    dock = Dock(dock_file)
    try:
        uvicorn.run(make_app(dock, accepted), host=host, port=port, log_level="warning", access_log=False)
    finally:
        dock.close()


def read_entry(path: Path) -> Any:
    """Read a specification from its JSON entry (the service's schema).

    Raises:
        DataError: if the file is missing, not JSON or not a specification.
    """
    from pydantic import ValidationError

    from fedlora.errors import ConfigError, DataError

    try:
        from fedlora.specs.service import EntryBody
    except ModuleNotFoundError as error:
        raise ConfigError(f"the dock needs {error.name}: pip install 'fedlora[dock]'") from error
    try:
        return EntryBody.model_validate_json(path.read_bytes()).to_specification()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        fields = ", ".join(
            ".".join(str(part) for part in problem["loc"]) or "JSON" for problem in error.errors()
        )
        raise DataError(f"{path} is not a specification; look at: {fields}") from error


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        json.dump(result, sys.stdout)
        sys.stdout.write("\n")
    else:
        typer.echo("  ".join(f"{key}: {value}" for key, value in result.items()))
