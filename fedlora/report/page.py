"""One self-contained HTML page per run: no scripts, no external requests, figures as inline SVG.

Every number on the page stands, unrounded, in the JSON element `#data`, which equals the run's files; sums over rounds
stand there under "derived".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlora.report.conditions import conditions_line
from fedlora.report.figures import (
    charts,
    partition,
    round_seconds,
    rounds_table,
    time_percent,
    time_split,
    time_totals,
)
from fedlora.report.html import (
    bounded,
    details,
    document,
    escape,
    grid,
    lower,
    note,
    number,
    section,
    table_of,
    upper,
)
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
        charts(data, _conditions(data), "epsilon" if _client_level(data) else "epsilon per client"),
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
    """Return what the page computes from the run's files.

    Sums over rounds, each client's steps and budget left; of a run that did not end, epsilon so far and what it means.
    """
    return {
        "epsilon": data.epsilon,
        "statement": dict(data.statement),
        "bytes_up": sum(int(record.get("bytes_up") or 0) for record in data.rounds),
        "bytes_down": sum(int(record.get("bytes_down") or 0) for record in data.rounds),
        "seconds": time_totals(data.rounds),
        "seconds_percent": time_percent(data.rounds),
        "seconds_per_round": [round_seconds(record) for record in data.rounds],
        "refusals": sum(len(record.get("refused") or {}) for record in data.rounds),
        "failures": sum(len(record.get("failed") or {}) for record in data.rounds),
        "partition": {
            c: sum(row.values()) for c, row in ((data.partition or {}).get("clients") or {}).items()
        },
        "clients": {str(row[0]): row[1:] for row in client_rows(data)},
    }


def _conditions(data: RunData) -> str:
    return conditions_line(data.statement)


def _client_level(data: RunData) -> bool:
    return data.statement.get("unit") == "one client"


def _whose(data: RunData) -> str:
    """Return what the run's epsilon is called."""
    name = "epsilon of the federation" if _client_level(data) else "largest epsilon of a client"
    return name if data.ended else f"{name}, so far"


def _headline(data: RunData) -> str:
    summary, sums = data.summary, derived(data)
    cards = {"status": summary.get("status"), "rounds": summary.get("rounds")}
    cards.update({str(name): value for name, value in (summary.get("metrics") or {}).items()})
    unknown = "not known" if data.private else "no privacy"
    cards[_whose(data)] = unknown if data.epsilon is None else upper(data.epsilon)
    cards["bytes up"], cards["bytes down"] = sums["bytes_up"], sums["bytes_down"]
    cards["refusals"], cards["failures"] = sums["refusals"], sums["failures"]
    body = "".join(
        f'<div class="card"><span class="soft">{escape(name)}</span><b>{number(value)}</b></div>'
        for name, value in cards.items()
    )
    said = "" if data.epsilon is None else note(f"epsilon {number(upper(data.epsilon))}: {_conditions(data)}")
    warnings = "".join(f'<p class="bad">{escape(one)}</p>' for one in _warnings(data))
    return f'<section><div class="cards">{body}</div>{said}{warnings}</section>'


def _warnings(data: RunData) -> list[str]:
    found = [str(one) for one in data.summary.get("warnings") or ()]
    if not data.summary:
        found.append(
            "summary.json is missing: the run has not ended, or was killed; figures are those so far"
        )
    if "error" in data.summary:
        found.append(f"the run ended with {data.summary['error']}: {data.summary.get('message', '')}")
    if _client_level(data):
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
    if data.epsilon is None:
        text = "This run has no privacy guarantee."
        if data.private:
            text = (
                "This run states no epsilon: take it as one that has no privacy guarantee."
                if data.ended
                else "No epsilon is known: no round has said one yet. What it would mean:"
            )
        return section("Privacy", f'<p class="bad">{text}</p>' + table_of(data.statement))
    rows = {_whose(data): data.epsilon, **data.statement}
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
    budget = (data.statement.get("budget") or {}).get("epsilon")
    for client in sorted({*data.clients, *accounts}):
        entry, account = data.clients.get(client) or {}, accounts.get(client) or {}
        said = entry.get("epsilon_reported")
        allowed, left = (account.get("budget") or {}).get("epsilon", budget), account.get("left")
        if not account and isinstance(allowed, int | float) and isinstance(said, int | float):
            left = max(0.0, allowed - said)
        steps = sum(int(one.get("steps") or 0) for one in entry.get("events") or ())
        spent = account.get("epsilon", said)
        rows.append([client, steps, spent, entry.get("epsilon_from_events"), allowed, left])
    return rows


def _clients(data: RunData) -> str:
    rows = client_rows(data)
    if not rows:
        return ""
    whose = (
        "the server's ledger, of all clients together," if _client_level(data) else "the client's own ledger"
    )
    text = (
        f"The reported figure is from {whose} and binds; it may include earlier runs over the same "
        f"data. The recomputed one counts this run's events as the server saw them. Epsilon: {_conditions(data)}."
    )
    heads = ("client", "steps", "epsilon, its ledger", "epsilon, recomputed", "budget", "budget left")
    if _client_level(data):
        heads = ("account", "rounds", *heads[2:])
    shown = [
        [client, steps, upper(said), upper(counted), budget, lower(left)]
        for client, steps, said, counted, budget, left in rows
    ]
    return section("Federation" if _client_level(data) else "Clients", note(text) + grid(heads, shown))


def _audits(data: RunData) -> str:
    if not data.audits:
        return section("Audits", note("This run was not audited; fedlora audit RUN attacks its mechanism."))
    columns = ("attack", "verdict", "claimed_epsilon", "lower_bound", "confidence", "power", "delta")
    rows = [[bounded(key, audit.get(key)) for key in columns] for audit in data.audits]
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
