"""Disclosure and amplification risk of the specifications that a run's clients paid for, with what they assume.

"PAVE Specifications of Learnwares Yield Intrinsic Privacy-Preserving Capabilities", Theorems 4.2 and 4.3: how much more
an attacker can tell neighbouring data sets apart once the specification is seen, beside what was known before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from fedlora.accounting import pave
from fedlora.report.html import grid, note, section, upper
from fedlora.report.run_data import RunData
from fedlora.report.shapes import finite_number

ASSUMPTIONS: Final = (
    "Each figure bounds the growth of the advantage at telling two neighbouring data sets apart (0 none, 1 complete), "
    "under the release's own relation, unit and delta; it does not bound an attack's success, to which earlier "
    "knowledge may already contribute.",
    "Disclosure (Theorem 4.2) assumes side information that is fixed, or given which the release is still private. "
    "Other releases from the same records add to it: the account's own epsilon covers all of them together.",
    "Amplification (Theorem 4.3) assumes that the specification is still private given the released model. That holds "
    "where the model was trained without looking at the specification; where a run started from it or was grouped by "
    "it, take the account's epsilon for both together. The model's own leakage is not bounded.",
    "The paper's bound is e^epsilon - 1 + delta; the tight one is the total-variation bound "
    "(e^epsilon - 1 + 2 delta) / (e^epsilon + 1). Both are the same for the two theorems.",
)


def risk_rows(data: RunData) -> list[dict[str, Any]]:
    """Return one entry per paid specification with its two bounds; infinite epsilon gives 1."""
    rows = []
    for one in data.specifications.get("specifications") or ():
        if not isinstance(one, Mapping):
            continue
        epsilon, delta = _epsilon(one.get("epsilon")), finite_number(one.get("delta")) or 1.0
        known = math.isfinite(epsilon) and 0.0 < delta < 1.0
        paper = pave.risk_bound(epsilon, delta) if known else 1.0
        tight = pave.risk_bound_tight(epsilon, delta) if known else 1.0
        rows.append(
            {**one, "risk_paper": paper, "risk_tight": tight, "gain_increase": pave.gain_increase(tight)}
        )
    return rows


def _epsilon(value: Any) -> float:
    """Return a stated epsilon; whatever is no finite number >= 0 is infinite."""
    found = finite_number(value)
    return found if found is not None and found >= 0 else math.inf


def risks(data: RunData) -> str:
    """Return the report's part on specifications; empty where the run has none."""
    rows = risk_rows(data)
    if not rows:
        return ""
    heads = ("client", "specification", "epsilon", "delta", "per", "relation", "accountant",
             "disclosure and amplification, at most", "the paper's bound",
             "a guess improves by at most")  # fmt: skip
    table = grid(heads, [
        [one.get("client"), one.get("name"), upper(one.get("epsilon")), one.get("delta"), one.get("unit"),
         one.get("adjacency"), one.get("accountant"),
         upper(one["risk_tight"]), upper(one["risk_paper"]), upper(one["gain_increase"])]
        for one in rows
    ])  # fmt: skip
    meant = sorted({f"Against {one.get('adversary')}; sampling: {one.get('sampling')}." for one in rows})
    notes = "".join(note(text) for text in (*meant, *ASSUMPTIONS))
    return section("Risks of the specifications", table + notes)
