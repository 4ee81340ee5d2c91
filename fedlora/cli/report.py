"""`fedlora report` and `fedlora compare`: one self-contained HTML file from run folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


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
    target.write_text(render(data), encoding="utf-8")
    _print({"report": str(target), **embedded_data(data)} if as_json else {"report": str(target)}, as_json)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Two or more run folders.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="HTML file to write.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put runs side by side.

    Example: fedlora compare runs/prism runs/lora-fa -o compare.html
    """
    from fedlora.report.compare import comparison, render_comparison
    from fedlora.report.run_data import read_run

    found = [read_run(path) for path in runs]
    if output is not None:
        output.write_text(render_comparison(found), encoding="utf-8")
    rows = comparison(found)
    if as_json:
        _print({"runs": rows, "report": None if output is None else str(output)}, True)
        return
    for row in rows:
        typer.echo("  ".join(f"{key}={value}" for key, value in row.items()))


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        json.dump(result, sys.stdout, allow_nan=False)
        sys.stdout.write("\n")
    else:
        typer.echo("  ".join(str(value) for value in result.values()))
