"""Several runs side by side: one table, every epsilon with its conditions, accuracy over epsilon and over rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fedlora.accounting.plot import svg
from fedlora.report.conditions import conditions_line
from fedlora.report.html import document, grid, note, section, upper, visible
from fedlora.report.run_data import RunData

_TAKEN: Final = (
    "run",
    "status",
    "mechanism",
    "epsilon",
    "epsilon_means",
    "delta",
    "unit",
    "rounds",
    "audits",
)
"""Names that no metric may replace."""


def comparison(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return one row per run: mechanism, epsilon with its meaning, rounds, bytes, audits and every metric.

    Args:
        runs: PUBLIC. Run folders, in the order to show. Of one that has not ended the epsilon is the one so far.
    """
    rows = []
    for run in runs:
        statement, metrics = run.statement, run.summary.get("metrics") or {}
        verdicts = {str(one.get("attack")): one.get("verdict") for one in run.audits}
        rows.append(
            {
                "run": run.summary.get("run_id", run.path.name),
                "status": run.summary.get("status", "not ended"),
                "mechanism": statement.get("mechanism"),
                "epsilon": run.epsilon,
                "epsilon_means": conditions_line(statement),
                "delta": statement.get("delta"),
                "unit": statement.get("unit"),
                "adjacency": statement.get("adjacency"),
                "adversary": statement.get("adversary"),
                "accountant": statement.get("accountant"),
                "sampling": statement.get("sampling_assumption"),
                "rounds": run.summary.get("rounds", max((one["round"] for one in run.rounds), default=0)),
                "bytes_up": sum(int(record.get("bytes_up") or 0) for record in run.rounds),
                "seconds": (run.summary.get("seconds") or {}).get("total"),
                "audits": "; ".join(f"{name}: {word}" for name, word in sorted(verdicts.items())) or "none",
                **{name: value for name, value in metrics.items() if name not in _TAKEN},
            }
        )
    return rows


def render_comparison(runs: Sequence[RunData]) -> str:
    """Return the comparison as one HTML document: runs are columns, so that long conditions stay readable."""
    rows = comparison(runs)
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "run"]
    table = grid(
        ["", *(str(row["run"]) for row in rows)],
        [
            [k.replace("_", " "), *(upper(r.get(k)) if k == "epsilon" else r.get(k) for r in rows)]
            for k in keys
        ],
    )
    text = "Epsilons compare only where unit, adjacency, adversary and delta are the same."
    parts = [section("Runs", note(text) + table), _curves(runs, rows)]
    return document(f"fedlora: {len(runs)} runs", parts, rows)


def _curves(runs: Sequence[RunData], rows: Sequence[dict[str, Any]]) -> str:
    """Return one chart per metric, a curve per run, straight between evaluated rounds."""
    drawn = []
    for metric in sorted(
        {name for run in runs for record in run.rounds for name in (record.get("metrics") or {})}
    ):
        found = [run.series("metrics", metric) for run in runs]
        x = sorted({one for rounds, _ in found for one in rounds})
        if len(x) < 2:
            continue
        curves, name = {}, visible(metric)
        for place, (row, (rounds, values)) in enumerate(zip(rows, found, strict=True), 1):
            line = (
                np.interp(x, rounds, values, left=np.nan, right=np.nan) if rounds else np.full(len(x), np.nan)
            )
            curves[f"{place}: {visible(str(row['run']))}"] = line.tolist()
        drawn.append(
            svg(name, "round", [float(one) for one in x], curves, y_label=name, signed=_signed(curves))
        )
    return section("Over rounds", f'<div class="charts">{"".join(drawn)}</div>') if drawn else ""


def _signed(curves: Mapping[str, Sequence[float]]) -> bool:
    return any(value <= 0.0 for curve in curves.values() for value in curve)
