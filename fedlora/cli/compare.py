"""`fedlora compare`: run folders side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.report import AsJson, print_result
from fedlora.figures import at_least_digits, printable
from fedlora.files import replace_text

app = typer.Typer(add_completion=False)


@app.command()
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
        replace_text(output, render_comparison(found))
    rows = comparison(found)
    if as_json:
        print_result({"runs": rows, "report": None if output is None else str(output)}, True)
        return
    for row in rows:
        typer.echo("  ".join(f"{key}={_shown(key, value)}" for key, value in row.items()))


def _shown(key: str, value: object) -> str:
    """Return a figure for a terminal: an epsilon rounded up, and no control characters out of a run's files."""
    text = at_least_digits(value, 6) if key == "epsilon" and isinstance(value, int | float) else str(value)
    return printable(text)
