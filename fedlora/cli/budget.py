"""`fedlora budget`: what was spent, what a plan would cost, whether a ledger is intact, copies of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlora.cli.budget_options import AnchorOption, KeyOption, LedgerArgument, key_of
from fedlora.cli.budget_restore import accept, restore
from fedlora.cli.common import JsonOption, emit
from fedlora.errors import LedgerError
from fedlora.figures import at_least, at_most
from fedlora.ledger import Account, Budget, Ledger, LedgerReport, open_ledger

app = typer.Typer(
    help="Show, plan, verify, export, back up and restore privacy ledgers.\n\n"
    "LEDGER is a SQLite file or a SQLAlchemy URL; its key is found by --key, FEDLORA_LEDGER_KEY, or beside it "
    "(LEDGER.key, the same name ending in .key, ledger.secret, keys/ledger.secret).\n\n"
    "Example: fedlora budget show ledger.db --json",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)

ClientOption = Annotated[str, typer.Option("--client", help="Only this client.")]
DatasetOption = Annotated[str, typer.Option("--dataset", help="Only this data set.")]
PlanConfig = Annotated[
    str, typer.Argument(metavar="[CONFIG]", help="The run's YAML file (or use the options).")
]
PlanOverrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides.")
]
EventOption = Annotated[str, typer.Option("--event", help="Accounting event of one step, as JSON.")]
NoiseOption = Annotated[float | None, typer.Option(help="Noise over clipping norm.")]
RateOption = Annotated[float | None, typer.Option(help="Poisson rate; left out: all records each step.")]
StepsOption = Annotated[int | None, typer.Option(help="Noised steps in all.")]
NewEpsilon = Annotated[
    float | None, typer.Option(help="Budget for an account that is not in the ledger yet.")
]
NewDelta = Annotated[float | None, typer.Option(help="Its delta.")]
NewAdjacency = Annotated[str, typer.Option(help="Its neighbouring relation.")]
SHOWN = 20


def open_for(ledger: str, key: Path | None, anchor: Path | None, *, write: bool = False) -> Ledger:
    """Open an existing ledger.

    Raises:
        LedgerError: if it or its key is missing or unreadable.
    """
    secret, register = key_of(ledger, key)
    return open_ledger(
        ledger, secret=secret, create=False, read_only=not write, anchor=anchor, register=register
    )


def report_record(report: LedgerReport) -> dict[str, Any]:
    """Return a report as plain values."""
    budget = report.budget
    return {
        "client": report.account.client,
        "dataset": report.account.dataset,
        "epsilon": report.epsilon,
        "epsilon_lifetime": report.epsilon_lifetime,
        "delta": report.delta,
        "left": report.left,
        "budget": {
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "window": budget.window,
            "on_exhausted": budget.on_exhausted,
        },
        "unit": report.unit,
        "adjacency": report.adjacency,
        "accountant": report.accountant,
        "adversary": report.adversary,
        "sampling_assumption": report.sampling_assumption,
        "num_events": report.num_events,
        "conditions": list(report.conditions),
        "rounds": [
            {
                "run_id": row.run_id,
                "server_round": row.server_round,
                "state": row.state,
                "event": json.loads(row.event_json),
                "steps_reserved": row.steps_reserved,
                "steps_charged": row.steps_charged,
                "at": row.at,
                "reply_digest": row.reply_digest,
            }
            for row in report.rounds
        ],
    }


def _report_text(report: LedgerReport) -> str:
    left = "" if report.left is None else f", left {at_most(report.left)} of {report.budget.epsilon:g}"
    lines = [
        f"{report.account.client} / {report.account.dataset}",
        f"  epsilon {at_least(report.epsilon)} at delta {report.delta:g}{left} ({report.budget.window})",
        f"  unit {report.unit}; relation {report.adjacency}; accountant {report.accountant}; "
        f"{report.num_events} noised steps",
        f"  holds against: {report.adversary}",
        f"  sampling: {report.sampling_assumption}",
        *(f"  note: {text}" for text in report.conditions),
    ]
    if report.budget.window != "lifetime":
        lines.insert(2, f"  epsilon over its whole life {at_least(report.epsilon_lifetime)}")
    for row in report.rounds:
        lines.append(
            f"  run {row.run_id} round {row.server_round}: {row.steps_charged} of {row.steps_reserved} steps, "
            f"{row.state}"
        )
    return "\n".join(lines)


@app.command()
def show(
    ledger: LedgerArgument,
    key: KeyOption = None,
    anchor: AnchorOption = None,
    client: ClientOption = "",
    dataset: DatasetOption = "",
    delta: Annotated[float | None, typer.Option("--delta", help="Recompute at this delta.")] = None,
    rounds: Annotated[bool, typer.Option("--rounds", help="List every round.")] = False,
    limit: Annotated[int, typer.Option("--limit", help="Accounts shown at most.")] = SHOWN,
    as_json: JsonOption = False,
) -> None:
    """Show what was spent and what is left, per client and data set.

    Example: fedlora budget show ledger.db --client site-1 --rounds
    """
    with open_for(ledger, key, anchor) as opened:
        chosen = [
            account
            for account in opened.accounts()
            if client in ("", account.client) and dataset in ("", account.dataset)
        ]
        if (client or dataset) and not chosen:
            raise LedgerError(
                f"budget show: no account matches client {client!r}, data set {dataset!r}; check names"
            )
        some = chosen[: max(limit, 1)]
        reports = [opened.report(item, delta) for item in some] if rounds else opened.reports(some, delta)
        worst = [] if client or dataset or rounds else opened.reports(opened.worst_accounts()[:64], delta)
        largest = max((item.epsilon_lifetime for item in [*reports, *worst]), default=0.0)
        integrity = {"checked": "full" if not reports else reports[0].integrity, "head": opened.head()}
    text = "\n\n".join(_report_text(item) for item in reports) or "the ledger has no accounts"
    text += f"\n\n{len(reports)} of {len(chosen)} accounts shown; largest epsilon {at_least(largest)}"
    text += f"; head {integrity['head']}"
    if integrity["checked"] != "full":
        text += f"\nchain checked {integrity['checked']}; 'fedlora budget verify' checks all of it"
    record = {
        "ledger": ledger,
        "accounts": [report_record(item) for item in reports],
        "num_accounts": len(chosen),
        "largest_epsilon": largest,
        "integrity": integrity,
    }
    emit(record, as_json=as_json, text=text)


@app.command()
def verify(
    ledger: LedgerArgument,
    key: KeyOption = None,
    anchor: AnchorOption = None,
    known_head: Annotated[
        str, typer.Option("--known-head", help="A head from a report or the server's mirror.")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Check pages, every link of the chain, and that no older copy was put back.

    Exit codes: 0 intact; 28 damaged, edited, rolled back, wrong key or from a newer fedlora; 27 cannot be opened.

    Example: fedlora budget verify ledger.db --known-head 0000...
    """
    with open_for(ledger, key, anchor) as opened:
        report = opened.verify()
        if known_head:
            opened.known_head_check(known_head)
    record = {
        "ledger": ledger,
        "intact": True,
        "entries": report.entries,
        "accounts": report.accounts,
        "open_reservations": report.open_reservations,
        "head": report.head,
        "ledger_id": report.ledger_id,
    }
    text = (
        f"intact: {report.entries} entries, {report.accounts} accounts, {report.open_reservations} open reservations "
        f"(they count as spent)\nhead {report.head}"
    )
    emit(record, as_json=as_json, text=text)


@app.command()
def export(
    ledger: LedgerArgument,
    output: Annotated[Path, typer.Argument(help="New file; .csv or .json decides the format.")],
    key: KeyOption = None,
    anchor: AnchorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write every entry to CSV or JSON, for auditors.

    Example: fedlora budget export ledger.db entries.csv
    """
    from fedlora.ledger.exporting import write_export

    with open_for(ledger, key, anchor) as opened:
        count = write_export(opened, output, kind=output.suffix.lstrip(".").lower())
        head = opened.head()
    emit(
        {"output": str(output), "entries": count, "head": head},
        as_json=as_json,
        text=f"{count} entries -> {output}",
    )


@app.command()
def backup(
    ledger: LedgerArgument,
    output: Annotated[Path, typer.Argument(help="New file for the copy.")],
    key: KeyOption = None,
    anchor: AnchorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a SQLite ledger consistently, also while it is in use.

    Example: fedlora budget backup ledger.db ledger-monday.db
    """
    from fedlora.ledger.exporting import backup as copy

    with open_for(ledger, key, anchor) as opened:
        head = copy(opened, output)
    text = f"copied to {output}; it ends at head {head}\nputting it back later is a rollback: what came since counts"
    emit({"output": str(output), "head": head}, as_json=as_json, text=text)


@app.command()
def amend(
    ledger: LedgerArgument,
    client: Annotated[str, typer.Option("--client", help="Client.")],
    dataset: Annotated[str, typer.Option("--dataset", help="Data set.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; every later report repeats it.")],
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="New epsilon.")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="New delta.")] = None,
    accountant: Annotated[str, typer.Option("--accountant", help="New accountant.")] = "",
    window: Annotated[str, typer.Option("--window", help="New window.")] = "",
    key: KeyOption = None,
    anchor: AnchorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change an account's terms, as its owner; nothing that was spent is forgotten.

    Example: fedlora budget amend ledger.db --client site-1 --dataset news --epsilon 10 --reason "board decision 12"
    """
    with open_for(ledger, key, anchor, write=True) as opened:
        account = Account(client, dataset)
        old = opened.report(account, with_rounds=False).budget
        terms = Budget(
            epsilon=old.epsilon if epsilon is None else epsilon,
            delta=old.delta if delta is None else delta,
            adjacency=old.adjacency,
            unit=old.unit,
            accountant=accountant or old.accountant,
            window=window or old.window,
            on_exhausted=old.on_exhausted,
        )
        opened.amend_budget(account, terms, reason=reason)
        report = opened.report(account, with_rounds=False)
    emit({"account": report_record(report)}, as_json=as_json, text=_report_text(report))


@app.command()
def plan(
    ledger: LedgerArgument,
    config: PlanConfig = "",
    overrides: PlanOverrides = None,
    client: ClientOption = "",
    dataset: DatasetOption = "",
    event: EventOption = "",
    noise_multiplier: NoiseOption = None,
    sample_rate: RateOption = None,
    steps: StepsOption = None,
    epsilon: NewEpsilon = None,
    delta: NewDelta = None,
    adjacency: NewAdjacency = "add_or_remove",
    key: KeyOption = None,
    anchor: AnchorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a run would cost on top of what was spent, before it runs.

    Example: fedlora budget plan ledger.db run.yaml --client site-1

    Example: fedlora budget plan ledger.db --client s1 --dataset news --noise-multiplier 1 --sample-rate .1 --steps 60
    """
    from fedlora.cli.budget_plan import plan_from_config, plan_from_options, plan_record, plan_text

    if config:
        wanted = plan_from_config(config, overrides or [], dataset=dataset)
    else:
        fallback = None if epsilon is None or delta is None else Budget(epsilon, delta, adjacency)
        wanted = plan_from_options(event, noise_multiplier, sample_rate, steps, dataset, fallback)
    if not Path(ledger).exists() and "://" not in ledger:
        raise LedgerError(f"ledger {ledger}: no such file; check the path")
    with open_for(ledger, key, anchor) as opened:
        record = plan_record(opened, wanted, client)
    emit(record, as_json=as_json, text=plan_text(record))


app.command()(restore)
app.command()(accept)

__all__ = ["app", "open_for", "report_record"]
