"""What a planned run would cost an account, for `fedlora budget plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedlora.accounting import Event, GaussianEvent, PoissonGaussianEvent, calibrate_noise_multiplier
from fedlora.errors import LedgerError, PrivacyParameterError, UnsupportedEventError
from fedlora.figures import at_least
from fedlora.ledger import Account, Budget, Ledger, person_event

if TYPE_CHECKING:
    from fedlora.config.schema import FedLoraConfig

_SAMPLED_GAUSSIAN = ("factor", "lora_fa", "prism", "dp_sgd")


@dataclass(frozen=True)
class Plan:
    """A run, as an account sees it.

    Attributes:
        event: one step.
        steps: steps in all.
        dataset: data-set name.
        terms: budget for accounts that the ledger does not know yet; None if not given.
    """

    event: Event
    steps: int
    dataset: str
    terms: Budget | None


def plan_from_options(
    event: str,
    noise_multiplier: float | None,
    sample_rate: float | None,
    steps: int | None,
    dataset: str,
    terms: Budget | None,
) -> Plan:
    """Build a plan from the command line's options.

    Raises:
        PrivacyParameterError: if an option is missing or out of range.
        UnsupportedEventError: if the event's JSON is of an unknown kind.
    """
    if steps is None or not steps >= 1 or not dataset:
        raise PrivacyParameterError(
            "budget plan: needs a CONFIG, or --dataset, --steps >= 1 and --noise-multiplier or --event; add them"
        )
    return Plan(_step_event(event, noise_multiplier, sample_rate), steps, dataset, terms)


def _step_event(event: str, noise_multiplier: float | None, sample_rate: float | None) -> Event:
    if event:
        try:
            return Event.from_json(json.loads(event))
        except json.JSONDecodeError as error:
            raise PrivacyParameterError(f"--event: not JSON ({error}); give what a report prints") from error
    if noise_multiplier is None:
        raise PrivacyParameterError("budget plan: neither --event nor --noise-multiplier is given; add one")
    if sample_rate is None:
        return GaussianEvent(noise_multiplier)
    return PoissonGaussianEvent(noise_multiplier, sample_rate)


def plan_from_config(path: str, overrides: Sequence[str], *, dataset: str) -> Plan:
    """Build a plan from a run's configuration (record-level mechanisms of the sampled Gaussian kind).

    Raises:
        ConfigError: if the configuration is not valid.
        UnsupportedEventError: if its event needs the model's shapes or is not paid for by clients.
    """
    from fedlora.config import load_config, total_steps
    from fedlora.config.schema import LoraFaMechanism, RecordPrivacy

    config = load_config(path, list(overrides))
    privacy, kind = config.privacy, config.mechanism.kind
    layered = isinstance(config.mechanism, LoraFaMechanism) and config.mechanism.per_layer_clip
    if not isinstance(privacy, RecordPrivacy) or kind not in _SAMPLED_GAUSSIAN or layered:
        raise UnsupportedEventError(
            f"budget plan: mechanism {kind} with unit {privacy.unit}: its event needs the model's shapes or is not "
            "paid by clients; run 'fedlora check CONFIG' and give the event with --event and --steps"
        )
    steps = total_steps(config)
    sigma = privacy.noise_multiplier
    if sigma is None:
        sigma = calibrate_noise_multiplier(
            lambda noise: _config_step(config, noise).times(steps),
            float(privacy.target_epsilon or 0.0),
            privacy.target_delta,
            adjacency=privacy.adjacency,
            accountant_name=privacy.accountant,
        )
    budget = privacy.budget
    terms = Budget(
        budget.epsilon,
        budget.delta,
        privacy.adjacency,
        "record" if privacy.group_by is None else "person",
        privacy.accountant,
        budget.window,
        budget.on_exhausted,
    )
    return Plan(_config_step(config, sigma), steps, dataset or config.data.name, terms)


def _config_step(config: FedLoraConfig, noise_multiplier: float) -> Event:
    """Return the event of one step of a sampled Gaussian mechanism, for a record or a whole person."""
    from fedlora.config.schema import RecordPrivacy

    event, privacy = PoissonGaussianEvent(noise_multiplier, config.training.sample_rate), config.privacy
    if not isinstance(privacy, RecordPrivacy) or privacy.group_by is None:
        return event
    return person_event(event, privacy.max_records_per_group, adjacency=privacy.adjacency)


def plan_record(ledger: Ledger, plan: Plan, client: str) -> dict[str, Any]:
    """Return what a plan costs every account of its data set (or one client's).

    Raises:
        LedgerError: if there is no such account and none can be assumed.
    """
    known = [
        item for item in ledger.accounts() if item.dataset == plan.dataset and client in ("", item.client)
    ]
    if client and not known:
        known = [Account(client, plan.dataset)]
    if not known:
        raise LedgerError(
            f"budget plan: no account for data set {plan.dataset!r}; name a client with --client"
        )
    return {
        "dataset": plan.dataset,
        "steps": plan.steps,
        "event": plan.event.to_json(),
        "accounts": [project(ledger, item, plan) for item in known],
    }


def plan_text(record: Mapping[str, Any]) -> str:
    """Return a plan's record for people: a line per account, and what its figures mean once for all that share it."""
    lines: dict[str, list[str]] = {}
    for row in record["accounts"]:
        means = (
            f"  epsilon: unit {row['unit']}; relation {row['adjacency']}; delta {row['delta']:g}; accountant "
            f"{row['accountant']}\n  holds against: {row['adversary']}\n  sampling: {row['sampling_assumption']}"
        )
        said = (
            f"{row['client']}: spent {at_least(row['spent'])}, after the run {at_least(row['projected'])} of "
            f"{row['budget']:g} ({row['window']}): {'fits' if row['fits'] else 'does NOT fit'}; at most "
            f"{row['most_steps']} steps fit"
        )
        lines.setdefault("\n".join([means, *(f"  note: {one}" for one in row["conditions"])]), []).append(
            said
        )
    return "\n".join(text for means, said in lines.items() for text in [*said, means])


def project(ledger: Ledger, account: Account, plan: Plan) -> dict[str, Any]:
    """Return what the plan costs one account on top of what it spent.

    Raises:
        LedgerError: if the account is new and no terms are given.
    """
    projection = ledger.project(account, plan.event, plan.steps, plan.terms)
    if projection is None:
        raise LedgerError(
            f"account {account.client}/{account.dataset}: not in this ledger; give --epsilon and --delta"
        )
    return {
        "client": account.client,
        "dataset": account.dataset,
        "spent": projection.spent,
        "projected": projection.projected,
        "budget": projection.budget.epsilon,
        "delta": projection.budget.delta,
        "unit": projection.budget.unit,
        "adjacency": projection.budget.adjacency,
        "adversary": projection.adversary,
        "accountant": projection.accountant,
        "sampling_assumption": projection.sampling_assumption,
        "conditions": list(projection.conditions),
        "window": projection.budget.window,
        "fits": projection.fits,
        "most_steps": projection.most_steps,
    }
