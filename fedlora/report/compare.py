"""Several runs side by side: one table, and accuracy against epsilon."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from typing import Any

from fedlora.report.page import _STYLE, _grid
from fedlora.report.run_data import RunData


def comparison(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return one row per run: name, mechanism, epsilon, delta, rounds, bytes and every metric.

    Args:
        runs: PUBLIC. Run folders, in the order to show.
    """
    rows = []
    for run in runs:
        statement = run.summary.get("statement") or {}
        rows.append(
            {
                "run": run.summary.get("run_id", run.path.name),
                "status": run.summary.get("status"),
                "mechanism": statement.get("mechanism"),
                "epsilon": run.summary.get("epsilon"),
                "delta": statement.get("delta"),
                "unit": statement.get("unit"),
                "rounds": run.summary.get("rounds"),
                "bytes_up": sum(int(record.get("bytes_up") or 0) for record in run.rounds),
                **(run.summary.get("metrics") or {}),
            }
        )
    return rows


def render_comparison(runs: Sequence[RunData]) -> str:
    """Return the comparison as one HTML document."""
    rows = comparison(runs)
    heads = list(dict.fromkeys(key for row in rows for key in row))
    table = _grid(heads, [[row.get(head) for head in heads] for row in rows])
    embedded = json.dumps(rows, allow_nan=False).replace("</", "<\\/")
    title = html.escape(f"fedlora: {len(runs)} runs")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{title}</title><style>{_STYLE}</style></head><body><main><h1>{title}</h1><section>{table}</section>"
        f'</main><script type="application/json" id="data">{embedded}</script></body></html>\n'
    )
