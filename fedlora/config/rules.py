"""Combinations that make no sense (or no privacy), each refused by name with what to change.

Rules read the plain container, not the validated object, so that they speak up beside every other problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fedlora.config.problems import Problem
from fedlora.config.rule_view import Rule, View
from fedlora.config.rules_run import RUN_RULES
from fedlora.config.schema import FedLoraConfig

PRIVATE_UNITS = ("record", "client")
LINEAR_AGGREGATIONS = ("mean_b", "tangent")
_NO_HEAD = "no head is trained: adapter.modules_to_save is empty"


def noise_choice(v: View) -> Iterator[Problem]:
    """Exactly one of target_epsilon and noise_multiplier is given; the other is derived.

    In a resolved configuration both stand together only if the noise is the one that was derived from a target.
    """
    if v.unit not in PRIVATE_UNITS:
        return
    epsilon, noise = v("privacy.target_epsilon"), v("privacy.noise_multiplier")
    follows = v("derived.from") == "target_epsilon" and noise == v("derived.noise_multiplier")
    if epsilon is not None and noise is not None and not follows:
        text = "both are given; keep one and set the other to null (it is derived and shown)"
        yield Problem("privacy.target_epsilon, privacy.noise_multiplier", text)
    if epsilon is None and noise is None:
        text = "one of the two is needed; there is no default for privacy"
        yield Problem("privacy.target_epsilon, privacy.noise_multiplier", text)


def mechanism_and_unit(v: View) -> Iterator[Problem]:
    """A record-level run needs a mechanism that adds noise per record, and some mechanisms need that unit."""
    if v.unit == "record" and v.mechanism == "none":
        text = "adds no noise per record, but privacy.unit is record; choose lora_fa, factor, prism or "
        yield Problem("mechanism.kind", text + "noisy_projection, or set privacy.unit to client or none")
    if v.unit in {"none", "client"} and v.mechanism in {"noisy_projection", "dp_sgd"}:
        text = f"{v.mechanism} is a record-level mechanism, but privacy.unit is {v.unit}; "
        yield Problem("mechanism.kind", text + "set privacy.unit to record or choose another mechanism")


def client_level_aggregation(v: View) -> Iterator[Problem]:
    """Client-level DP needs an aggregation whose sum has a bounded sensitivity."""
    if v.unit != "client":
        return
    if v.aggregation in {"product", "stack", "aligned", "factor_mean"}:
        text = f"{v.aggregation} leaves part of the update without noise under client-level privacy; use "
        yield Problem("federation.aggregation.kind", text + "mean_b or tangent, or privacy.unit record")
    if v("federation.aggregation.robust", "none") != "none":
        text = "changes the sensitivity under client-level privacy; set it to none"
        yield Problem("federation.aggregation.robust", text)


def equal_weights(v: View) -> Iterator[Problem]:
    """Weights by example counts break the sensitivity bound, and counts are private."""
    if v.unit in PRIVATE_UNITS and v("federation.aggregation.weights", "equal") == "num_examples":
        text = "num_examples depends on private record counts and breaks the sensitivity bound; use equal"
        yield Problem("federation.aggregation.weights", text)


def aggregation_fits_mechanism(v: View) -> Iterator[Problem]:
    """Each aggregation is exact only for the coordinates that fit it."""
    shared = v.mechanism == "noisy_projection" and v("mechanism.projection_source") == "shared"
    if v.aggregation == "mean_b" and v.mechanism in {"none", "factor", "prism"}:
        text = f"mean_b needs one lora_A shared by all clients, which {v.mechanism} does not have; use "
        yield Problem("federation.aggregation.kind", text + _advice(v.mechanism))
    if v.aggregation == "mean_b" and v.mechanism == "noisy_projection" and not shared:
        text = "mean_b needs one lora_A shared by all clients; set mechanism.projection_source to shared "
        yield Problem("federation.aggregation.kind", text + "or use product or stack")
    if v.mechanism == "prism" and v.aggregation not in {"tangent", "mean_b", ""}:
        text = f"prism sends tangent blocks, which {v.aggregation} cannot combine; use tangent"
        yield Problem("federation.aggregation.kind", text)
    if v.aggregation == "tangent" and v.mechanism == "lora_fa":
        text = "lora_fa changes lora_B only; use mean_b, which is exact for it"
        yield Problem("federation.aggregation.kind", text)


def _advice(mechanism: str) -> str:
    return "tangent" if mechanism == "prism" else "product or stack, or the mechanism lora_fa"


def noisy_projection_head(v: View) -> Iterator[Problem]:
    """A head that is not projected has its own clip and its own noise, or there is no amplification."""
    if v.mechanism != "noisy_projection":
        return
    for key in ("head_max_grad_norm", "head_noise_multiplier"):
        given = v(f"mechanism.{key}") is not None
        if v.trains_head and not given:
            text = "missing; a head (modules_to_save) is not projected and needs its own clip and noise "
            yield Problem(
                f"mechanism.{key}", text + "(or set adapter.freeze_head to true and modules_to_save to [])"
            )
        if given and not v.trains_head:
            yield Problem(f"mechanism.{key}", f"{_NO_HEAD}; remove it")


def noisy_projection_steps(v: View) -> Iterator[Problem]:
    """A shared projection must be fresh at each step, so a round has one step."""
    if v.mechanism != "noisy_projection":
        return
    if v("mechanism.projection_source") == "shared" and v("training.steps_per_round") != 1:
        text = "a shared projection is drawn once a round and covers one step; set steps_per_round to 1 "
        yield Problem("training.steps_per_round", text + "(or mechanism.projection_source to client)")
    clipping, bound = v("mechanism.clipping", True), v("mechanism.gradient_bound")
    if clipping is False and bound is None:
        text = "missing; without clipping a proved bound on each record's gradient is needed"
        yield Problem("mechanism.gradient_bound", text)
    if clipping is True and bound is not None:
        yield Problem(
            "mechanism.gradient_bound", "has no effect while mechanism.clipping is true; remove one"
        )


def group_rules(v: View) -> Iterator[Problem]:
    """Weights and bounds per group must refer to groups that exist."""
    weights = v("privacy.group_weights")
    if isinstance(weights, Mapping) and "head" in weights and not v.trains_head:
        yield Problem("privacy.group_weights", f"names a head, but {_NO_HEAD}")
    if isinstance(weights, Mapping) and v("mechanism.per_layer_clip") is True:
        text = "has no meaning with mechanism.per_layer_clip; use equal or turn per_layer_clip off"
        yield Problem("privacy.group_weights", text)
    count = v.number("privacy.max_records_per_group", 1)
    if v.unit == "record" and v("privacy.group_by") is None and count is not None and count > 1:
        text = "needs privacy.group_by: the column that names each person"
        yield Problem("privacy.max_records_per_group", text)
    if v.unit == "record" and count is not None and count > 1:
        if v("privacy.adjacency") == "replace_one":
            text = "above 1 has no known bound under replace_one; use 1 record per person, or add_or_remove"
            yield Problem("privacy.max_records_per_group", text)
        if v.mechanism == "noisy_projection":
            text = "above 1 has no known bound under noisy_projection; use 1, or another mechanism"
            yield Problem("privacy.max_records_per_group", text)


def step_choice(v: View) -> Iterator[Problem]:
    """Exactly one of steps_per_round and epochs_per_round is given."""
    given = [k for k in ("steps_per_round", "epochs_per_round") if v(f"training.{k}") is not None]
    if len(given) != 1:
        text = "both are given; keep one" if given else "one of the two is needed"
        yield Problem("training.steps_per_round, training.epochs_per_round", text)


def sampling_rules(v: View) -> Iterator[Problem]:
    """Amplification by sampling holds for Poisson draws with a public rate in (0, 1] only."""
    if v.unit == "record" and v("training.sampling", "poisson") == "shuffle":
        text = "shuffled batches are not Poisson draws, and no bound of this library covers them; use poisson"
        yield Problem("training.sampling", text)
    if v.exceeds("training.expected_batch_size", "training.nominal_records"):
        text = "is larger than training.nominal_records; the sampling rate would be above 1"
        yield Problem("training.expected_batch_size", text)


def budget_rules(v: View) -> Iterator[Problem]:
    """The run's target must fit the budget that it draws on."""
    if v.unit not in PRIVATE_UNITS:
        return
    if v("privacy.budget.on_exhausted") == "refuse" and v.exceeds(
        "privacy.target_epsilon", "privacy.budget.epsilon"
    ):
        text = "is above privacy.budget.epsilon, so no client could finish; lower it or raise the budget"
        yield Problem("privacy.target_epsilon", text)
    if v.exceeds("privacy.target_delta", "privacy.budget.delta"):
        text = "is above privacy.budget.delta; the budget would be counted at another delta"
        yield Problem("privacy.target_delta", text)


def client_level_rules(v: View) -> Iterator[Problem]:
    """Keys of client-level privacy that depend on each other."""
    if v.unit != "client":
        return
    quantile = v("privacy.quantile_noise_multiplier") is not None
    if v("privacy.clipping", "fixed") == "adaptive-quantile" and not quantile:
        text = "missing; the quantile estimate is a release and needs its own noise"
        yield Problem("privacy.quantile_noise_multiplier", text)
    if v("privacy.clipping", "fixed") == "fixed" and quantile:
        text = "has no effect with privacy.clipping fixed; remove it"
        yield Problem("privacy.quantile_noise_multiplier", text)
    if v("privacy.noise_at", "server") == "clients":
        if v("federation.secure_aggregation", False) is not True:
            text = "shares of noise protect only inside secure aggregation; set it to true"
            yield Problem("federation.secure_aggregation", text)
        if v("privacy.honest_clients") is None:
            text = "missing; shares of noise need a stated number of honest clients"
            yield Problem("privacy.honest_clients", text)
    if v.exceeds("privacy.honest_clients", "federation.min_replies"):
        text = "is above federation.min_replies; a round could finish with less noise than promised"
        yield Problem("privacy.honest_clients", text)


def secure_aggregation_rules(v: View) -> Iterator[Problem]:
    """The server sees only sums under secure aggregation."""
    if v("federation.secure_aggregation", False) is not True:
        return
    if v.aggregation not in (*LINEAR_AGGREGATIONS, ""):
        text = (
            f"{v.aggregation} needs each client's own update; under secure aggregation use mean_b or tangent"
        )
        yield Problem("federation.aggregation.kind", text)
    if v("federation.aggregation.robust", "none") != "none":
        text = "needs each client's own update, which secure aggregation hides; set one of the two off"
        yield Problem("federation.aggregation.robust", text)
    if v("federation.compression", "none") != "none":
        text = "quantises inside secure aggregation's own encoding; set it to none"
        yield Problem("federation.compression", text)


RULES: tuple[Rule, ...] = (
    noise_choice,
    mechanism_and_unit,
    client_level_aggregation,
    equal_weights,
    aggregation_fits_mechanism,
    noisy_projection_head,
    noisy_projection_steps,
    group_rules,
    step_choice,
    sampling_rules,
    budget_rules,
    client_level_rules,
    secure_aggregation_rules,
    *RUN_RULES,
)


def seeded_noise(v: View) -> Iterator[Problem]:
    """A real deployment refuses the seeded noise source."""
    if v("privacy.noise_source") == "seeded-test-only":
        yield Problem("privacy.noise_source", "gives no privacy and is refused in a deployment; use os")


def config_problems(container: Mapping[str, Any], *, deployment: bool = False) -> list[Problem]:
    """Return the problems of every rule for a plain container."""
    view = View(container)
    rules = (*RULES, seeded_noise) if deployment else RULES
    return [problem for rule in rules for problem in rule(view)]


def config_warnings(config: FedLoraConfig) -> list[str]:
    """Return what is allowed but should be known."""
    notes = []
    privacy = config.privacy
    if privacy.unit == "none":
        notes.append("privacy.unit is none: this run gives no privacy")
        return notes
    if privacy.noise_source == "seeded-test-only":
        notes.append("privacy.noise_source is seeded-test-only: this run gives no privacy")
    if privacy.target_delta * config.training.nominal_records >= 1:
        notes.append(
            "privacy.target_delta is not below 1 / training.nominal_records; it allows giving away a record"
        )
    if privacy.unit == "record" and privacy.group_by is None:
        notes.append("the guarantee is per record, not per person (privacy.group_by is not set)")
    return notes
