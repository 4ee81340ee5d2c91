"""One self-contained HTML page per run: no scripts, no external requests, figures as inline SVG.

Every number on the page stands, unrounded, in the JSON element `#data`, which equals the run's files; sums over rounds
stand there under "derived".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.report.conditions import conditions_line
from fedlora.report.figures import charts, partition, round_seconds, rounds_table, time_split, time_totals
from fedlora.report.html import details, document, escape, grid, note, number, section, table_of
from fedlora.report.risks import risk_rows, risks
from fedlora.report.run_data import RunData


def render(data: RunData) -> str:
    """Return the report as one HTML document.

    Args:
        data: PUBLIC. A run folder's files.
    """
    parts = [
        _headline(data),
        _privacy(data),
        charts(data, _conditions(data)),
        section("Where the time went", time_split(data)),
        details("Rounds: who took part, refused or failed", rounds_table(data)),
        _clients(data),
        partition(data),
        _audits(data),
        risks(data),
        details("Configuration", f"<pre>{escape(data.config)}</pre>"),
        details("Environment", table_of(data.environment)),
    ]
    return document(f"fedlora run {data.summary.get('run_id', data.path.name)}", parts, embedded_data(data))


def embedded_data(data: RunData) -> dict[str, Any]:
    """Return the numbers behind the page."""
    return {
        "summary": dict(data.summary),
        "rounds": list(data.rounds),
        "clients": dict(data.clients),
        "ledger": dict(data.ledger),
        "audits": list(data.audits),
        "partition": data.partition,
        "specifications": dict(data.specifications),
        "specification_risks": risk_rows(data),
        "environment": dict(data.environment),
        "derived": derived(data),
    }


def derived(data: RunData) -> dict[str, Any]:
    """Return what the page computes from the run's files: sums over rounds, and each client's steps and budget left."""
    return {
        "bytes_up": sum(int(record.get("bytes_up") or 0) for record in data.rounds),
        "bytes_down": sum(int(record.get("bytes_down") or 0) for record in data.rounds),
        "seconds": time_totals(data.rounds),
        "seconds_per_round": [round_seconds(record) for record in data.rounds],
        "refusals": sum(len(record.get("refused") or {}) for record in data.rounds),
        "failures": sum(len(record.get("failed") or {}) for record in data.rounds),
        "partition": {
            c: sum(row.values()) for c, row in ((data.partition or {}).get("clients") or {}).items()
        },
        "clients": {str(row[0]): row[1:] for row in client_rows(data)},
    }


def _statement(data: RunData) -> Mapping[str, Any]:
    found: Mapping[str, Any] = data.summary.get("statement") or {}
    return found


def _conditions(data: RunData) -> str:
    return conditions_line(_statement(data))


def _headline(data: RunData) -> str:
    summary, sums = data.summary, derived(data)
    cards = {"status": summary.get("status"), "rounds": summary.get("rounds")}
    cards.update({str(name): value for name, value in (summary.get("metrics") or {}).items()})
    epsilon = summary.get("epsilon")
    cards["largest epsilon of a client"] = "no privacy" if epsilon is None else epsilon
    cards["bytes up"], cards["bytes down"] = sums["bytes_up"], sums["bytes_down"]
    cards["refusals"], cards["failures"] = sums["refusals"], sums["failures"]
    body = "".join(
        f'<div class="card"><span class="soft">{escape(name)}</span><b>{number(value)}</b></div>'
        for name, value in cards.items()
    )
    said = "" if epsilon is None else note(f"epsilon {number(epsilon)}: {_conditions(data)}")
    warnings = "".join(f'<p class="bad">{escape(one)}</p>' for one in _warnings(data))
    return f'<section><div class="cards">{body}</div>{said}{warnings}</section>'


def _warnings(data: RunData) -> list[str]:
    found = [str(one) for one in data.summary.get("warnings") or ()]
    if not data.summary:
        found.append(
            "summary.json is missing: the run has not ended, or was killed; figures are those so far"
        )
    if "error" in data.summary:
        found.append(f"the run ended with {data.summary['error']}")
    if _statement(data).get("unit") == "one client":
        found.append(
            "This page says who took part. Under client-level privacy with sampled clients the guarantee assumes "
            "that only the server sees this: do not hand it on."
        )
    failed = [str(one.get("attack")) for one in data.audits if one.get("verdict") == "failed"]
    if failed:
        found.append(f"AUDIT FAILED ({', '.join(failed)}): the epsilon on this page does not hold")
    return found


def _privacy(data: RunData) -> str:
    """Unit, adjacency, adversary, delta, accountant and assumptions, next to the epsilon."""
    statement = _statement(data)
    if data.summary.get("epsilon") is None:
        text = (
            "This run has no privacy guarantee."
            if data.summary
            else "No epsilon is known: the run has no summary."
        )
        return section("Privacy", f'<p class="bad">{text}</p>' + table_of(statement))
    rows = {"epsilon (largest over clients)": data.summary["epsilon"], **statement}
    conditions = sorted(
        {str(one) for account in data.accounts().values() for one in account.get("conditions") or ()}
    )
    if conditions:
        rows["conditions of the ledger"] = conditions
    return section("What the epsilon means", table_of(rows))


def client_rows(data: RunData) -> list[list[Any]]:
    """Return client, steps, epsilon by its ledger and recomputed, budget and what is left of it.

    What is left comes from the clients' ledger where the run folder has it (simulations), else from the run's terms.
    """
    accounts, rows = data.accounts(), []
    budget = (_statement(data).get("budget") or {}).get("epsilon")
    for client in sorted({*data.clients, *accounts}):
        entry, account = data.clients.get(client) or {}, accounts.get(client) or {}
        said = entry.get("epsilon_reported")
        allowed, left = (account.get("budget") or {}).get("epsilon", budget), account.get("left")
        if not account and isinstance(allowed, int | float) and isinstance(said, int | float):
            left = max(0.0, allowed - said)
        steps = sum(int(one.get("steps") or 0) for one in entry.get("events") or ())
        rows.append(
            [client, steps, account.get("epsilon", said), entry.get("epsilon_from_events"), allowed, left]
        )
    return rows


def _clients(data: RunData) -> str:
    rows = client_rows(data)
    if not rows:
        return ""
    text = (
        "The reported figure is from the client's own ledger and binds; it may include earlier runs over the same "
        f"data. The recomputed one counts this run's events as the server saw them. Epsilon: {_conditions(data)}."
    )
    heads = ("client", "steps", "epsilon, its ledger", "epsilon, recomputed", "budget", "budget left")
    return section("Clients", note(text) + grid(heads, rows))


def _audits(data: RunData) -> str:
    if not data.audits:
        return section("Audits", note("This run was not audited; fedlora audit RUN attacks its mechanism."))
    columns = ("attack", "verdict", "claimed_epsilon", "lower_bound", "confidence", "power", "delta")
    rows = [[audit.get(key) for key in columns] for audit in data.audits]
    table = grid([key.replace("_", " ") for key in columns], rows)
    means = "".join(note(f"{audit.get('attack', 'audit')}: {_meaning(audit)}") for audit in data.audits)
    more = "".join(
        details(f"{audit.get('attack', 'audit')}: conditions and figures", table_of(_told(audit)))
        for audit in data.audits
    )
    text = (
        "Lower bounds are proven by attacks on the mechanism, at the stated confidence, for the attacked steps; power "
        "is the share of audits at half the noise that fail. A bound above the claim means that the claim is wrong."
    )
    return section("Audits", note(text) + table + means + more)


def _meaning(audit: Mapping[str, Any]) -> str:
    return conditions_line({**(audit.get("conditions") or {}), "delta": audit.get("delta")})


def _told(audit: Mapping[str, Any]) -> dict[str, Any]:
    return {**(audit.get("conditions") or {}), **(audit.get("figures") or {})}
