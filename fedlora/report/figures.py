"""Charts and bars of a run's page: curves over rounds, where the time went, who holds which labels."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from fedlora.accounting.plot import svg
from fedlora.report.html import SHADES, escape, grid, note, section, slice_of, visible
from fedlora.report.run_data import RunData
from fedlora.report.shapes import finite_number

MOST_CURVES: Final = 6
_CURVES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("aggregation residual", "residual", ("residual",)),
    ("clients accepted", "clients", ("accepted",)),
    ("bytes up", "bytes", ("bytes_up",)),
    ("gauge drift", "share of the move", ("diagnostics", "gauge_drift")),
    ("intrinsic noise", "norm in the weights", ("diagnostics", "intrinsic_noise")),
    ("preconditioned noise", "norm in the weights", ("diagnostics", "preconditioned_noise")),
)
DIAGNOSTICS_NOTE: Final = (
    "Gauge drift: share of the factors' move that a rotation explains, so that changed the representation and not the "
    "model. Intrinsic noise: root mean square norm of the noise in the adapted weights that the mean of one plain "
    "step of rate 1 carries. Preconditioned noise: the same after the server's adaptive step; where clients take "
    "adaptive steps, their moments stay with them and it is not shown. A residual of 0 is exact."
)
PRIVATE_NOTE: Final = (
    "Losses, clip fractions, realised batch sizes and counts of private records do not leave a client: "
    "there are none to show."
)


def charts(data: RunData, conditions: str, title_of_epsilon: str = "epsilon per client") -> str:
    """Return one chart for every figure that changes over rounds; a constant one is said in words.

    Args:
        data: the run's files.
        conditions: what its epsilon means, for the caption of that chart.
        title_of_epsilon: headline of that chart.
    """
    drawn, constant = [], []
    names = sorted({name for record in data.rounds for name in (record.get("metrics") or {})})
    for title, label, keys in [*((name, name, ("metrics", name)) for name in names), *_CURVES]:
        x, y = data.series(*keys)
        if len(x) > 1 and any(value != y[0] for value in y[1:]):
            at = [float(one) for one in x]
            name = visible(title)
            chart = svg(name, "round", at, {name: y}, y_label=visible(label), signed=min(y) <= 0.0)
            drawn.append(f"<figure>{chart}</figure>")
        elif x:
            constant.append((title, int(y[0]) if y[0].is_integer() else y[0]))
    budget = epsilon_chart(data, title_of_epsilon)
    if budget:
        drawn.insert(len(names), f"<figure>{budget}<figcaption>{escape(conditions)}</figcaption></figure>")
    rows = grid(("constant over rounds", "value"), constant) if constant else ""
    body = f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""
    return (
        section("Over rounds", body + rows + note(DIAGNOSTICS_NOTE) + note(PRIVATE_NOTE))
        if body or rows
        else ""
    )


def epsilon_curves(data: RunData) -> tuple[list[int], dict[str, list[float]]]:
    """Return rounds and epsilon per group of clients whose ledgers say the same; at most `MOST_CURVES` groups.

    Clients that were not asked in a round keep their last figure: the spend does not fall. With more groups than curves
    those with the largest and smallest end and some between are kept.
    """
    rounds = [int(record["round"]) for record in data.rounds if record.get("epsilon_by_client")]
    said: dict[str, list[tuple[int, float]]] = {}
    for place, record in enumerate(r for r in data.rounds if r.get("epsilon_by_client")):
        for client, value in record["epsilon_by_client"].items():
            known = said.setdefault(client, [])
            if finite_number(value) is not None and (not known or known[-1][1] != value):
                known.append((place, float(value)))
    groups: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for client, steps in sorted(said.items()):
        if steps:
            groups.setdefault(tuple(steps), []).append(client)
    ordered = sorted(groups.items(), key=lambda one: (-one[0][-1][1], one[1]))
    if len(ordered) > MOST_CURVES:
        places = {round(i * (len(ordered) - 1) / (MOST_CURVES - 1)) for i in range(MOST_CURVES)}
        ordered = [ordered[i] for i in sorted(places)]
    named = {
        members[0] if len(members) == 1 else f"{len(members)} clients like {members[0]}": _held(
            steps, len(rounds)
        )
        for steps, members in ordered
    }
    return rounds, named


def _held(steps: Sequence[tuple[int, float]], count: int) -> list[float]:
    """Return a curve over `count` places from its changes (place, new value); 0 before the first."""
    curve = [0.0] * steps[0][0]
    for (place, value), (end, _) in itertools.pairwise([*steps, (count, 0.0)]):
        curve += [value] * (end - place)
    return curve


def epsilon_chart(data: RunData, title: str = "epsilon per client") -> str:
    """Return epsilon per client over rounds, or the run's where no client's own figure is known."""
    x, curves = epsilon_curves(data)
    if len(x) < 2:
        x, largest = data.series("epsilon")
        curves = {"epsilon": largest} if len(x) > 1 else {}
    if len(x) < 2:
        return ""
    shown = {visible(name): curve for name, curve in curves.items()}
    return svg(title, "round", [float(one) for one in x], shown, y_label="epsilon")


_ROUND_COLUMNS: Final = (
    "round", "status", "asked", "accepted", "refused", "failed", "who and why", "bytes up",
    "bytes down", "seconds", "residual", "gauge drift", "intrinsic noise", "preconditioned noise",
)  # fmt: skip


def rounds_table(data: RunData) -> str:
    """Return who took part, refused or failed, payloads, time and residual, round by round."""
    rows = []
    for record in data.rounds:
        if record.get("round") == 0:
            continue
        refused, failed = record.get("refused") or {}, record.get("failed") or {}
        names = [f"{client}: {why}" for client, why in {**refused, **failed}.items()]
        found = record.get("diagnostics") or {}
        rows.append(
            [
                record.get("round"),
                record.get("status"),
                record.get("asked"),
                record.get("accepted"),
                len(refused),
                len(failed),
                "; ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else ""),
                record.get("bytes_up"),
                record.get("bytes_down"),
                round_seconds(record),
                record.get("residual"),
                found.get("gauge_drift"),
                found.get("intrinsic_noise"),
                found.get("preconditioned_noise"),
            ]
        )
    return grid(_ROUND_COLUMNS, rows)


def round_seconds(record: Mapping[str, Any]) -> float:
    """Return a round's wall time."""
    return sum(float(one) for one in (record.get("seconds") or {}).values())


def time_totals(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return wall seconds per part over all rounds."""
    totals: dict[str, float] = {}
    for record in rounds:
        for name, value in (record.get("seconds") or {}).items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def time_percent(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each part's share of the time in percent; nothing where no time was recorded."""
    totals = time_totals(rounds)
    whole = sum(totals.values())
    return {name: 100.0 * value / whole for name, value in totals.items()} if whole > 0 else {}


def time_split(data: RunData) -> str:
    """Return a bar and a table of where the time went."""
    totals, percent = time_totals(data.rounds), time_percent(data.rounds)
    if not percent:
        return note("No times were recorded.")
    bars = "".join(slice_of(value / 100.0, i, name) for i, (name, value) in enumerate(percent.items()))
    rows = [[name, value, f"{percent[name]:.1f} %"] for name, value in totals.items()]
    return f'<div class="bar">{bars}</div>' + grid(("part", "seconds", "share"), rows)


def partition(data: RunData, shown: Collection[str] | None = None) -> str:
    """Return stacked bars of records per label (simulations only; a real site's counts never leave it).

    Args:
        data: the run's files.
        shown: clients to draw where they are too many; None draws all.
    """
    if not data.partition:
        return ""
    counts: Mapping[str, Mapping[str, int]] = data.partition.get("clients", data.partition)
    if shown is not None:
        counts = {client: row for client, row in counts.items() if client in shown}
    labels = sorted({label for row in counts.values() for label in row})
    totals = {client: sum(row.values()) for client, row in counts.items()}
    largest = max(totals.values(), default=0) or 1
    lines = []
    for client, row in sorted(counts.items()):
        bars = "".join(
            slice_of(row.get(label, 0) / largest, i, f"{label}: {row.get(label, 0)}")
            for i, label in enumerate(labels)
        )
        bar = f'<td style="width:70%"><div class="bar">{bars}</div></td>'
        lines.append(f'<tr><td>{escape(client)}</td>{bar}<td class="n">{totals[client]}</td></tr>')
    key = " ".join(
        f'<span style="color:{SHADES[i % len(SHADES)]}">&#9632;</span> {escape(label)}'
        for i, label in enumerate(labels)
    )
    says = note("Simulated data: in a deployment no count of records leaves a site.")
    return section("Partition of the simulated clients", f"{says}<p>{key}</p><table>{''.join(lines)}</table>")
