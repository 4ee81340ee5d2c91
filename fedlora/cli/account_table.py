"""`fedlora account table`: the documented table of the noisy projection's epsilon, computed again."""

from __future__ import annotations

from fedlora.accounting import measured
from fedlora.cli.account_common import progress
from fedlora.cli.account_options import DeltaOption, guarded
from fedlora.cli.common import JsonOption, emit
from fedlora.errors import PrivacyParameterError

_COLUMNS = (
    "sample_rate",
    "noise_multiplier",
    "steps",
    "width",
    "rank",
    "out_width",
    "published",
    "moments",
    "smallest",
    "lower_bound",
    "gaussian",
)

_MEANS = {
    "unit": "one record, whose whole gradient was clipped before the projection",
    "adjacency": "add_or_remove",
    "adversary": "sees every release and every projection, and knows all records but that one",
    "accountant": "by column: Theorem 5 as published, Renyi moments, our smallest bound, a lower bound, no projection",
    "sampling_assumption": "Poisson at each row's rate; at rate 1 the record is in every step",
}
"""What each figure of the table means, beside its delta."""


@guarded
def table(delta: DeltaOption = 1e-5, as_json: JsonOption = False) -> None:
    """Print the published bound, ours, a lower bound and the Gaussian's figure, row by row (a quarter of a minute)."""
    if not 0.0 < delta < 1.0:
        raise PrivacyParameterError(f"--delta: got {delta}, allowed is a number > 0 and < 1")
    with progress():
        rows = measured.table(delta)
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines.extend("| " + " | ".join(f"{row[name]:.4g}" for name in _COLUMNS) + " |" for row in rows)
    means = {"delta": delta, **_MEANS}
    lines.extend(f"{name.replace('_', ' ')}: {said}" for name, said in means.items())
    emit({**means, "rows": rows}, as_json=as_json, text="\n".join(lines))


__all__ = ["table"]
