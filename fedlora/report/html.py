"""The look and the small parts that the report and the comparison share: style, numbers, tables, the document."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fedlora.figures import at_least_digits, at_most_digits

STYLE: Final = """
:root{--ink:#1c2733;--soft:#5b6b7a;--line:#d9e0e6;--good:#2f7d4f;--bad:#b3372b;--paper:#fff;--tint:#f4f7f9}
*{box-sizing:border-box}body{margin:0;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--tint)}
main{max-width:1080px;margin:0 auto;padding:16px}h1{font-size:1.5rem;margin:.4em 0;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:0 0 .5em}
section{background:var(--paper);border:1px solid var(--line);border-radius:8px;padding:16px;margin:12px 0;
overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.92rem}th,td{text-align:left;padding:4px 10px 4px 0;
border-bottom:1px solid var(--line);vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.n{white-space:nowrap}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px}
.card b{display:block;font-size:1.35rem}.card{overflow-wrap:anywhere}
.card{background:var(--tint);border-radius:8px;padding:10px}.soft{color:var(--soft)}.bad{color:var(--bad);font-weight:600}
.good{color:var(--good);font-weight:600}svg{max-width:100%;height:auto}figure{margin:0}
figcaption{font-size:.82rem;color:var(--soft)}.charts svg text{font-size:19px}pre{overflow-x:auto;font-size:.82rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(300px,1fr));gap:12px}
.bar{display:flex;height:14px;border-radius:3px;overflow:hidden;background:var(--line)}.bar i{display:block;height:100%}
"""
SHADES: Final = (
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
_HIDDEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
VERDICT_CLASS: Final = {"passed": "good", "failed": "bad"}


class Upper(float):
    """An upper bound, such as an epsilon: shown rounded up, never below its value."""


class Lower(float):
    """A lower bound, or what is left of a budget: shown rounded down."""


def upper(value: Any) -> Any:
    """Mark a number as an upper bound; whatever is no number stays as it is."""
    return Upper(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def lower(value: Any) -> Any:
    """Mark a number as a lower bound; whatever is no number stays as it is."""
    return Lower(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def bounded(name: str, value: Any) -> Any:
    """Mark a figure as the bound that its name says it is."""
    if name in ("lower_bound", "one_run_bound", "left"):
        return lower(value)
    return upper(value) if "epsilon" in name else value


def visible(text: str) -> str:
    r"""Return foreign text in which nothing hides or turns around what is written beside it.

    Control characters and those that change the direction of writing become U+FFFD; line ends and tabs stay.

    Example:
        >>> visible("site\u202e1\x00") == "site\ufffd1\ufffd"
        True
    """
    return _HIDDEN.sub("\ufffd", text)


def escape(value: Any) -> str:
    """Return text that cannot become markup."""
    return html.escape(visible(str(value)))


def number(value: Any, digits: int = 4) -> str:
    """Format a figure for reading; the exact one is in the embedded data."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "-" if value is None else escape(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    if not math.isfinite(value):
        return "infinite"
    if isinstance(value, Upper):
        return at_least_digits(value, digits)
    return at_most_digits(value, digits) if isinstance(value, Lower) else f"{value:.{digits}g}"


def section(title: str, body: str) -> str:
    """Return one framed part of the page."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def details(title: str, body: str) -> str:
    """Return a part that opens on a click."""
    return f"<section><details><summary>{escape(title)}</summary>{body}</details></section>"


def note(text: str) -> str:
    """Return a quiet line of explanation."""
    return f'<p class="soft">{escape(text)}</p>'


def table_of(values: Mapping[str, Any]) -> str:
    """Return names and values, nested mappings as tables of their own."""
    rows = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            shown = table_of(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            shown = "<br>".join(number(one, 6) for one in value) or "-"
        else:
            shown = number(bounded(str(name), value), 6)
        rows.append(f"<tr><th>{escape(str(name).replace('_', ' '))}</th><td>{shown}</td></tr>")
    return f"<table>{''.join(rows)}</table>"


def grid(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with a head; numbers are aligned to the right."""

    def cell(value: Any) -> str:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        mark = VERDICT_CLASS.get(value) if isinstance(value, str) else None
        kind = " class=n" if numeric else f' class="{mark}"' if mark else ""
        return f"<td{kind}>{number(value)}</td>"

    numeric = [any(isinstance(row[i], int | float) for row in rows) for i in range(len(heads))]
    head = "".join(
        f"<th{' class=n' if right else ''}>{escape(name)}</th>"
        for name, right in zip(heads, numeric, strict=True)
    )
    body = "".join("<tr>" + "".join(cell(value) for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def slice_of(share: float, shade: int, title: str) -> str:
    """Return one piece of a bar."""
    colour = SHADES[shade % len(SHADES)]
    return f'<i style="width:{100 * share:.2f}%;background:{colour}" title="{escape(title)}"></i>'


def document(title: str, parts: Sequence[str], data: Any) -> str:
    """Return a whole page that asks the network for nothing and runs nothing.

    Args:
        title: headline.
        parts: sections; empty ones are left out.
        data: JSON-ready values, embedded unrounded as the element `#data`.
    """
    embedded = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        + "".join(part for part in parts if part)
        + f'</main><script type="application/json" id="data">{embedded}</script></body></html>\n'
    )
    return page.encode("utf-8", "replace").decode(
        "utf-8"
    )  # half a surrogate pair can be told, but not written
