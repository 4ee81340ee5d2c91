"""What an epsilon means: unit, adjacency, adversary, delta, accountant and sampling, in one place for every view."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fedlora.config.client_terms import ROUTED_HONESTLY, client_terms
from fedlora.config.schema import ClientPrivacy, FedLoraConfig, NoPrivacy, RecordPrivacy

NO_PRIVACY: Final = "no privacy: nothing was clipped or noised"

UNCLIPPED: Final = (
    "every record's gradient norm is at most {bound:g}: stated by the configuration, not enforced"
)


def conditions_of(config: FedLoraConfig) -> dict[str, Any]:
    """Return what a run's epsilon means; it goes wherever the figure goes.

    A run's epsilon comes from ledgers, which count at the budget's delta; `target_delta`, at which the noise was
    chosen, may be smaller and is then stated beside it.

    Args:
        config: resolved configuration. PUBLIC.
    """
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy):
        return {"privacy": "none", "mechanism": config.mechanism.kind, "note": NO_PRIVACY}
    record = isinstance(privacy, RecordPrivacy)
    bound = getattr(config.mechanism, "gradient_bound", None)
    stated: dict[str, Any] = {} if bound is None else {"assumption": UNCLIPPED.format(bound=bound)}
    if privacy.target_delta != privacy.budget.delta:
        stated["target_delta"] = privacy.target_delta
    return {
        "privacy": "NO PRIVACY: seeded test noise" if config.seeded_noise else "differential privacy",
        "mechanism": config.mechanism.kind,
        "unit": _unit(config),
        "adjacency": privacy.adjacency,
        "adversary": _adversary(config),
        "delta": privacy.budget.delta,
        "accountant": privacy.accountant,
        "budget": {
            "epsilon": privacy.budget.epsilon,
            "delta": privacy.budget.delta,
            "window": privacy.budget.window,
        },
        "noise_multiplier": privacy.noise_multiplier,
        "sample_rate": config.training.sample_rate if record else _client_rate(config),
        "sampling_assumption": _record_sampling(config) if record else _client_sampling(config),
        **stated,
        **_sums(config),
    }


def _sums(config: FedLoraConfig) -> dict[str, Any]:
    """State what a client-level guarantee assumes beyond sampling, and what secure sums hide from whom."""
    found: dict[str, Any] = {}
    if isinstance(config.privacy, ClientPrivacy):
        terms = client_terms(config.privacy, config.federation)
        found["neighbouring"] = terms.neighbour
        if terms.assumptions:
            found["assumption"] = "; ".join(terms.assumptions)
    if config.federation.secure_aggregation:
        found["secure_aggregation"] = f"the server sees sums only; {ROUTED_HONESTLY}"
    return found


def _unit(config: FedLoraConfig) -> str:
    privacy = config.privacy
    if not isinstance(privacy, RecordPrivacy):
        return "one client"
    return "one record, not one person" if privacy.group_by is None else "each person's records"


def _adversary(config: FedLoraConfig) -> str:
    privacy = config.privacy
    if isinstance(privacy, ClientPrivacy):
        return client_terms(privacy, config.federation).adversary
    if isinstance(privacy, NoPrivacy):
        return NO_PRIVACY
    seen = "anyone who sees all updates, the server included"
    if getattr(config.mechanism, "projection_source", "client") == "shared":
        return f"{seen}, if the server draws each projection honestly and after the adapter is fixed"
    return seen


def _record_sampling(config: FedLoraConfig) -> str:
    rate = config.training.sample_rate
    if rate >= 1.0:
        return "no amplification by sampling is claimed; the divisor is the public expected batch size"
    return f"Poisson sampling at the public rate {rate:.4g}; the divisor is the public expected batch size"


def _client_rate(config: FedLoraConfig) -> float:
    asked = config.federation.clients_per_round
    claimed = isinstance(config.privacy, ClientPrivacy) and config.privacy.noise_at == "server"
    return asked if isinstance(asked, float) and claimed else 1.0


def _client_sampling(config: FedLoraConfig) -> str:
    if not isinstance(config.privacy, ClientPrivacy):
        return "no amplification by sampling is claimed"
    said = client_terms(config.privacy, config.federation).sampling
    return f"{said}; the divisor is the public expected number of clients"


def conditions_line(statement: Mapping[str, Any]) -> str:
    """Return the conditions of an epsilon as one line, for captions and terminals.

    Args:
        statement: what `conditions_of` returned, or a run's `summary.json` "statement".

    Example:
        >>> conditions_line({"unit": "one client", "adjacency": "add_or_remove", "adversary": "all but the server",
        ...                  "delta": 1e-05, "accountant": "best", "sampling_assumption": "no amplification"})
        'per one client, add_or_remove, delta 1e-05, against all but the server; accountant best; no amplification'
    """
    if statement.get("privacy") == "none":
        return "no privacy"
    if not statement:
        return "what it means is not stated"
    missing = "not stated"
    sampling = statement.get("sampling_assumption", statement.get("sampling", missing))
    line = (
        f"per {statement.get('unit', missing)}, {statement.get('adjacency', missing)}, "
        f"delta {_delta(statement.get('delta'), missing)}, against {statement.get('adversary', missing)}; "
        f"accountant {statement.get('accountant', missing)}; {sampling}"
    )
    if "assumption" in statement:
        line += f"; assumed: {statement['assumption']}"
    said = str(statement.get("privacy", ""))
    return f"{said}; {line}" if said.startswith("NO PRIVACY") else line


def _delta(value: Any, missing: str) -> str:
    return f"{value:g}" if isinstance(value, int | float) else missing if value is None else str(value)
