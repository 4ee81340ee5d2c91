"""One self-contained HTML page per run: no scripts, no external requests, figures as inline SVG.

Every number on the page stands, unrounded, in the JSON element `#data`, which equals the run's files; sums over rounds
stand there under "derived".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fedlora.report.conditions import conditions_line
from fedlora.report.embedded import client_rows, derived, embedded_data, most_spent, shown_clients
from fedlora.report.figures import charts, partition, rounds_table, time_split
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
from fedlora.report.risks import risks
from fedlora.report.run_data import RunData

BY_RECEIPTS: Final = (
    "By receipts: what the site's signed receipts imply, rounds that it was asked for and did not answer counted in "
    "full; its own ledger may say less."
)
RUNS_TERMS: Final = (
    "The budget is that of the run's configuration, less the largest figure of the row. Each site enforces its own, "
    "which may be smaller and is not told to the server: fedlora budget show at the site says it."
)
ALL_FILES: Final = "ledger.json, ledger-mirror.json and partition.json of the run folder have all."


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
        _rounds(data),
        _clients(data),
        partition(data, shown_clients(data)),
        _audits(data),
        risks(data),
        details("Configuration", f"<pre>{escape(data.config)}</pre>"),
        details("Environment", table_of(data.environment)),
    ]
    return document(f"fedlora run {data.summary.get('run_id', data.path.name)}", parts, embedded_data(data))


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


def _rounds(data: RunData) -> str:
    table = rounds_table(data)
    means = note(f"Epsilon: {_conditions(data)}.") if "epsilon" in table else ""  # in a refusal's words
    return details("Rounds: who took part, refused or failed", means + table)


def _clients(data: RunData) -> str:
    rows = client_rows(data)
    if not rows:
        return ""
    level, told = _client_level(data), not data.accounts()
    whose = "the server's ledger, of all clients together," if level else "the client's own ledger"
    notes = [
        f"The reported figure is from {whose} and binds; it may include earlier runs over the same "
        f"data. The recomputed one counts this run's events as the server saw them. Epsilon: {_conditions(data)}."
    ]
    if data.receipts:
        notes.append(BY_RECEIPTS)
    if told:
        notes.append(RUNS_TERMS)
    kept, receipts = most_spent(data), data.receipts_by_client()
    if len(kept) < len(rows):
        notes.append(
            f"Shown are {len(kept)} of {len(rows)} clients, those with the largest epsilon; {ALL_FILES}"
        )
    heads = ["client", "steps", "epsilon, its ledger", "epsilon, recomputed", "epsilon, by receipts"]
    heads += ["budget, the run's terms", "left of it"] if told else ["budget", "budget left"]
    if level:
        heads[:2] = ["account", "rounds"]
    shown = [
        [client, steps, upper(said), upper(counted), upper(receipts.get(client)), budget, lower(left)]
        for client, steps, said, counted, budget, left in kept
    ]
    if not data.receipts:
        heads, shown = [*heads[:4], *heads[5:]], [[*row[:4], *row[5:]] for row in shown]
    title = "Federation" if level else "Clients"
    return section(title, "".join(note(text) for text in notes) + grid(heads, shown))


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


__all__ = ["derived", "embedded_data", "render"]
