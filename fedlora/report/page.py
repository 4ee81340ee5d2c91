"""One self-contained HTML page per run: no scripts, no external requests, figures as inline SVG.

Every number on the page stands, unrounded, in the JSON element `#data`, which equals the run's files.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.accounting.plot import svg
from fedlora.report.run_data import RunData

_STYLE = """
:root{--ink:#1c2733;--soft:#5b6b7a;--line:#d9e0e6;--good:#2f7d4f;--bad:#b3372b;--paper:#fff;--tint:#f4f7f9}
*{box-sizing:border-box}body{margin:0;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--tint)}
main{max-width:1080px;margin:0 auto;padding:16px}h1{font-size:1.5rem;margin:.4em 0}h2{font-size:1.1rem;margin:0 0 .5em}
section{background:var(--paper);border:1px solid var(--line);border-radius:8px;padding:16px;margin:12px 0;
overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem}th,td{text-align:left;padding:4px 10px 4px 0;
border-bottom:1px solid var(--line);vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px}
.card b{display:block;font-size:1.35rem}
.card{background:var(--tint);border-radius:8px;padding:10px}.soft{color:var(--soft)}.bad{color:var(--bad);font-weight:600}
.good{color:var(--good);font-weight:600}svg{max-width:100%;height:auto}pre{overflow-x:auto;font-size:.82rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:12px}
.bar{display:flex;height:14px;border-radius:3px;overflow:hidden;background:var(--line)}.bar i{display:block;height:100%}
"""
_SHADES = (
    "#1b6ca8",
    "#c8553d",
    "#588157",
    "#8d5a97",
    "#b8860b",
    "#444",
    "#4aa3a2",
    "#d17ba0",
    "#7a7a2c",
    "#9aa7b1",
)


def render(data: RunData) -> str:
    """Return the report as one HTML document.

    Args:
        data: PUBLIC. A run folder's files.
    """
    title = f"fedlora run {data.summary.get('run_id', data.path.name)}"
    parts = [
        _headline(data),
        _privacy(data),
        _charts(data),
        _rounds(data),
        _clients(data),
        _partition(data),
        _audits(data),
        _details("Configuration", f"<pre>{html.escape(data.config)}</pre>"),
        _details("Environment", _table_of(data.environment)),
    ]
    embedded = json.dumps(embedded_data(data), allow_nan=False).replace("</", "<\\/")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><main><h1>{html.escape(title)}</h1>"
        + "".join(part for part in parts if part)
        + f'</main><script type="application/json" id="data">{embedded}</script></body></html>\n'
    )


def embedded_data(data: RunData) -> dict[str, Any]:
    """Return the numbers behind the page."""
    return {
        "summary": dict(data.summary),
        "rounds": list(data.rounds),
        "clients": dict(data.clients),
        "audits": list(data.audits),
        "partition": data.partition,
    }


def number(value: Any, digits: int = 4) -> str:
    """Format a figure for reading; the exact one is in the embedded data."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else html.escape(str(value))
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    return f"{value:.{digits}g}" if math.isfinite(value) else "infinite"


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{body}</section>"


def _details(title: str, body: str) -> str:
    return f"<section><details><summary>{html.escape(title)}</summary>{body}</details></section>"


def _headline(data: RunData) -> str:
    summary = data.summary
    metrics = summary.get("metrics") or {}
    cards = {"status": summary.get("status"), "rounds": summary.get("rounds")}
    cards.update({str(name): value for name, value in metrics.items()})
    cards["largest epsilon of a client"] = _epsilon_text(summary)
    sent = sum(int(record.get("bytes_up") or 0) for record in data.rounds)
    received = sum(int(record.get("bytes_down") or 0) for record in data.rounds)
    cards["bytes up / down"] = f"{number(sent)} / {number(received)}"
    body = "".join(
        f'<div class="card"><span class="soft">{html.escape(name)}</span><b>{number(value)}</b></div>'
        for name, value in cards.items()
    )
    warnings = "".join(f'<p class="bad">{html.escape(str(one))}</p>' for one in summary.get("warnings") or ())
    return f'<section><div class="cards">{body}</div>{warnings}</section>'


def _epsilon_text(summary: Mapping[str, Any]) -> Any:
    epsilon = summary.get("epsilon")
    return "no privacy" if epsilon is None else epsilon


def _privacy(data: RunData) -> str:
    """Unit, adjacency, adversary, delta, accountant and assumptions, next to the epsilon."""
    statement = data.summary.get("statement") or {}
    if data.summary.get("epsilon") is None:
        return _section(
            "Privacy", '<p class="bad">This run has no privacy guarantee.</p>' + _table_of(statement)
        )
    rows = {"epsilon (largest over clients)": data.summary["epsilon"], **statement}
    return _section("What the epsilon means", _table_of(rows))


def _charts(data: RunData) -> str:
    charts = []
    names = sorted({name for record in data.rounds for name in (record.get("metrics") or {})})
    wanted: list[tuple[str, str, tuple[str, ...]]] = [(name, name, ("metrics", name)) for name in names]
    wanted += [
        ("epsilon", "epsilon", ("epsilon",)),
        ("aggregation residual", "residual", ("residual",)),
        ("clients accepted", "clients", ("accepted",)),
        ("gauge drift", "drift", ("diagnostics", "gauge_drift")),
        ("intrinsic noise", "norm", ("diagnostics", "intrinsic_noise")),
        ("preconditioned noise", "norm", ("diagnostics", "preconditioned_noise")),
    ]
    for title, label, keys in wanted:
        x, y = data.series(*keys)
        if len(x) > 1 and any(value != y[0] for value in y[1:]):
            charts.append(svg(title, "round", [float(one) for one in x], {title: y}, y_label=label))
    return _section("Over rounds", f'<div class="charts">{"".join(charts)}</div>') if charts else ""


def _rounds(data: RunData) -> str:
    """Who took part, refused or failed, and where the time went."""
    rows = []
    for record in data.rounds:
        if record.get("round") == 0:
            continue
        refused, failed = record.get("refused") or {}, record.get("failed") or {}
        names = [f"{client}: {why}" for client, why in {**refused, **failed}.items()]
        total = sum(float(one) for one in (record.get("seconds") or {}).values())
        rows.append(
            [
                record.get("round"),
                record.get("status"),
                record.get("asked"),
                record.get("accepted"),
                "; ".join(names[:6]) + (" ..." if len(names) > 6 else ""),
                total,
                record.get("residual"),
            ]
        )
    heads = ("round", "status", "asked", "accepted", "refused or failed", "seconds", "residual")
    return _section("Where the time went", _time_split(data)) + _details("Rounds", _grid(heads, rows))


def _time_split(data: RunData) -> str:
    totals: dict[str, float] = {}
    for record in data.rounds:
        for name, value in (record.get("seconds") or {}).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    whole = sum(totals.values())
    if not whole > 0:
        return '<p class="soft">No times were recorded.</p>'
    bars = "".join(_slice(value / whole, i, name) for i, (name, value) in enumerate(totals.items()))
    rows = [[name, value, f"{100 * value / whole:.1f} %"] for name, value in totals.items()]
    return f'<div class="bar">{bars}</div>' + _grid(("part", "seconds", "share"), rows)


def _slice(share: float, shade: int, title: str) -> str:
    colour = _SHADES[shade % len(_SHADES)]
    return f'<i style="width:{100 * share:.2f}%;background:{colour}" title="{html.escape(title)}"></i>'


def _clients(data: RunData) -> str:
    rows = []
    for client, entry in sorted(data.clients.items()):
        steps = sum(int(one.get("steps") or 0) for one in entry.get("events") or ())
        rows.append(
            [
                client,
                steps,
                entry.get("epsilon_reported"),
                entry.get("epsilon_from_events"),
                entry.get("left"),
            ]
        )
    if not rows:
        return ""
    note = (
        '<p class="soft">The reported figure is from the client\'s own ledger and binds; it may include earlier '
        "runs. The recomputed one counts this run's events as the server saw them.</p>"
    )
    heads = ("client", "steps", "epsilon, its ledger", "epsilon, recomputed", "left")
    return _section("Clients", note + _grid(heads, rows))


def _partition(data: RunData) -> str:
    """Stacked bars of records per label (simulations only; a real site's counts never leave it)."""
    if not data.partition:
        return ""
    counts: Mapping[str, Mapping[str, int]] = data.partition.get("clients", data.partition)
    labels = sorted({label for row in counts.values() for label in row})
    largest = max((sum(row.values()) for row in counts.values()), default=0) or 1
    lines = []
    for client, row in sorted(counts.items()):
        bars = "".join(
            _slice(row.get(label, 0) / largest, i, f"{label}: {row.get(label, 0)}")
            for i, label in enumerate(labels)
        )
        lines.append(
            f'<tr><td>{html.escape(client)}</td><td style="width:75%"><div class="bar">{bars}</div></td></tr>'
        )
    key = " ".join(
        f'<span style="color:{_SHADES[i % len(_SHADES)]}">&#9632;</span> {html.escape(label)}'
        for i, label in enumerate(labels)
    )
    return _section("Partition of the simulated clients", f"<p>{key}</p><table>{''.join(lines)}</table>")


def _audits(data: RunData) -> str:
    rows = []
    for audit in data.audits:
        verdict = str(audit.get("verdict", "-"))
        rows.append(
            [
                audit.get("attack"),
                verdict,
                audit.get("claimed_epsilon"),
                audit.get("lower_bound"),
                audit.get("confidence"),
            ]
        )
    if not rows:
        return ""
    return _section(
        "Audits", _grid(("attack", "verdict", "claimed epsilon", "lower bound", "confidence"), rows)
    )


def _table_of(values: Mapping[str, Any]) -> str:
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            shown = _table_of(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            shown = "<br>".join(html.escape(str(one)) for one in value) or "-"
        else:
            shown = number(value, 6)
        rows.append(f"<tr><th>{html.escape(str(name).replace('_', ' '))}</th><td>{shown}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def _grid(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        return f'<td class="n">{number(value)}</td>' if numeric else f"<td>{number(value)}</td>"

    numeric = [any(isinstance(row[i], int | float) for row in rows) for i in range(len(heads))]
    head = "".join(
        f"<th{' class=n' if right else ''}>{html.escape(name)}</th>"
        for name, right in zip(heads, numeric, strict=True)
    )
    body = "".join("<tr>" + "".join(cell(value) for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
