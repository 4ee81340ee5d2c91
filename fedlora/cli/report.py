"""`fedlora report`: one self-contained HTML file from a run folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlora.files import replace_text

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


app = typer.Typer(add_completion=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file; RUN/report.html if left out.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's report: accuracy, epsilon with its meaning, clients, time, configuration.

    Example: fedlora report runs/demo
    """
    from fedlora.report.page import embedded_data, render
    from fedlora.report.run_data import read_run

    data = read_run(run)
    target = run / "report.html" if output is None else output
    replace_text(target, render(data))
    print_result(
        {"report": str(target), **embedded_data(data)} if as_json else {"report": str(target)}, as_json
    )


def print_result(result: dict[str, Any], as_json: bool) -> None:
    """Print one JSON object, or the values in one line."""
    if as_json:
        json.dump(result, sys.stdout, allow_nan=False)
        sys.stdout.write("\n")
    else:
        typer.echo("  ".join(str(value) for value in result.values()))
