"""Contradictory combinations, each refused by name; what deriving fills in; a site's own file."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_sample import SAMPLE

from fedlora.accounting import PoissonGaussianEvent, epsilon_of
from fedlora.config import (
    FedLoraConfig,
    check_derived,
    config_container,
    config_from_container,
    derive_noise,
    total_steps,
)
from fedlora.config.rule_view import View
from fedlora.config.rules import RULES, config_problems, config_warnings
from fedlora.config.trainer import load_trainer
from fedlora.errors import ConfigError, PrivacyParameterError


def container(**changes: Any) -> dict[str, Any]:
    """The sample with dotted changes (double underscores for dots); ... removes a key."""
    found: dict[str, Any] = copy.deepcopy(
        yaml.safe_load(SAMPLE.replace("1.0e-4", "0.0001").replace("3.0e-3", "0.003"))
    )
    for key, value in changes.items():
        node = found
        *path, last = key.split("__")
        for part in path:
            node = node[part]
        if value is ...:
            node.pop(last, None)
        else:
            node[last] = value
    return found


CLIENT_UNIT = {
    "unit": "client",
    "adjacency": "add_or_remove",
    "target_epsilon": 8.0,
    "target_delta": 0.0001,
    "clipping_norm": 1.0,
    "budget": {"epsilon": 8.0, "delta": 0.0001, "on_exhausted": "refuse"},
    "noise_source": "os",
}
PROJECTION = {"kind": "noisy_projection", "projection_source": "shared"}
FROZEN_HEAD = {"adapter__freeze_head": True, "adapter__modules_to_save": []}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a member twice": ({"federation__members": ["a", "a"]}, "federation.members", "twice"),
    "fewer members than replies": (
        {"federation__members": ["a"], "federation__min_replies": 2},
        "federation.min_replies",
        "lower it",
    ),
    "a frozen head that is trained": (
        {"adapter__freeze_head": True, "adapter__modules_to_save": ["classifier"]},
        "adapter.modules_to_save",
        "set []",
    ),
    "more steps than can be accounted": (
        {"federation__rounds": 10**7, "training__steps_per_round": 10**7},
        "federation.rounds",
        "1e+12 in all",
    ),
    "a response kept where there is none": (
        {"data__on_overlong": "truncate_prompt"},
        "data.on_overlong",
        "truncate_end",
    ),
    "answers of a classifier": (
        {"data__public_eval": {"fraction": 0.1, "answers": "exact"}},
        "data.public_eval.answers",
        "remove it",
    ),
    "both noise keys": ({"privacy__noise_multiplier": 1.0}, "privacy.target_epsilon", "keep one"),
    "no noise key": ({"privacy__target_epsilon": ...}, "privacy.target_epsilon", "one of the two"),
    "mechanism none": ({"mechanism": {"kind": "none"}}, "mechanism.kind", "lora_fa"),
    "projection without record unit": (
        {"mechanism": PROJECTION, "privacy": CLIENT_UNIT},
        "mechanism.kind",
        "record",
    ),
    "client unit and product": (
        {"privacy": CLIENT_UNIT, "federation__aggregation": {"kind": "product"}},
        "federation.aggregation.kind",
        "mean_b or tangent",
    ),
    "client unit and stack": (
        {"privacy": CLIENT_UNIT, "federation__aggregation": {"kind": "stack"}},
        "federation.aggregation.kind",
        "without noise",
    ),
    "client unit and aligned": (
        {"privacy": CLIENT_UNIT, "federation__aggregation": {"kind": "aligned"}},
        "federation.aggregation.kind",
        "without noise",
    ),
    "client unit and factor_mean": (
        {"privacy": CLIENT_UNIT, "federation__aggregation": {"kind": "factor_mean"}},
        "federation.aggregation.kind",
        "without noise",
    ),
    "H21 weights by counts": (
        {"federation__aggregation": {"kind": "mean_b", "weights": "num_examples"}},
        "federation.aggregation.weights",
        "equal",
    ),
    "H21 weights by counts, client unit": (
        {"privacy": CLIENT_UNIT, "federation__aggregation": {"kind": "mean_b", "weights": "num_examples"}},
        "federation.aggregation.weights",
        "sensitivity",
    ),
    "H21 weights by counts, tangent": (
        {
            "mechanism": {"kind": "prism"},
            "federation__aggregation": {"kind": "tangent", "weights": "num_examples"},
        },
        "federation.aggregation.weights",
        "equal",
    ),
    "mean_b with two factors": ({"mechanism": {"kind": "factor"}}, "federation.aggregation.kind", "lora_A"),
    "mean_b with prism": ({"mechanism": {"kind": "prism"}}, "federation.aggregation.kind", "tangent"),
    "mean_b with client projection": (
        {
            "mechanism": {"kind": "noisy_projection", "projection_source": "client"},
            "adapter__modules_to_save": [],
        },
        "federation.aggregation.kind",
        "shared",
    ),
    "prism with product": (
        {"mechanism": {"kind": "prism"}, "federation__aggregation": {"kind": "product"}},
        "federation.aggregation.kind",
        "tangent",
    ),
    "projection's head without noise": (
        {"mechanism": PROJECTION},
        "mechanism.head_noise_multiplier",
        "own clip",
    ),
    "head noise without a head": (
        {"mechanism": {**PROJECTION, "head_noise_multiplier": 2.0}, **FROZEN_HEAD},
        "mechanism.head_noise_multiplier",
        "no head",
    ),
    "a head that is found by itself, without its noise": (
        {"mechanism": {**PROJECTION, "head_max_grad_norm": 1.0}, "adapter__modules_to_save": []},
        "mechanism.head_noise_multiplier",
        "freeze_head",
    ),
    "shared projection over two steps": (
        {"mechanism": PROJECTION, "adapter__modules_to_save": [], "training__steps_per_round": 2},
        "training.steps_per_round",
        "one step",
    ),
    "no clipping and no bound": (
        {"mechanism": {**PROJECTION, "clipping": False}, "adapter__modules_to_save": []},
        "mechanism.gradient_bound",
        "proved bound",
    ),
    "weights for a head that is not trained": (
        {"privacy__group_weights": {"head": 0.1, "adapters": 1.0}, **FROZEN_HEAD},
        "privacy.group_weights",
        "modules_to_save",
    ),
    "records per person without persons": (
        {"privacy__max_records_per_group": 3},
        "privacy.max_records_per_group",
        "group_by",
    ),
    "steps and epochs": ({"training__epochs_per_round": 1}, "training.steps_per_round", "keep one"),
    "H14 shuffled batches": ({"training__sampling": "shuffle"}, "training.sampling", "poisson"),
    "a rate above 1": (
        {"training__expected_batch_size": 300},
        "training.expected_batch_size",
        "nominal_records",
    ),
    "a target above the budget": ({"privacy__target_epsilon": 9.0}, "privacy.target_epsilon", "budget"),
    "adaptive clipping for free": (
        {"privacy": {**CLIENT_UNIT, "clipping": "adaptive-quantile"}},
        "privacy.quantile_noise_multiplier",
        "release",
    ),
    "shares of noise in the open": (
        {"privacy": {**CLIENT_UNIT, "noise_at": "clients", "honest_clients": 3}},
        "federation.secure_aggregation",
        "secure aggregation",
    ),
    "robust under secure aggregation": (
        {
            "federation__secure_aggregation": True,
            "federation__aggregation": {"kind": "mean_b", "robust": "median"},
        },
        "federation.aggregation.robust",
        "hides",
    ),
    "more replies than clients": ({"federation__min_replies": 9}, "federation.min_replies", "no round"),
    "two places for evaluation": (
        {"data__public_eval": {"split": "test", "fraction": 0.1}},
        "data.public_eval",
        "exactly one",
    ),
    "evaluation on the training records": (
        {
            "data__source": {"kind": "file", "paths": ["a.jsonl", "b.jsonl"]},
            "data__public_eval": {"source": {"kind": "file", "paths": ["b.jsonl"]}},
        },
        "data.public_eval.source",
        "without noise",
    ),
    "evaluation on the training split": (
        {"data__public_eval": {"split": "train"}},
        "data.public_eval.split",
        "Name other records",
    ),
    "labels that do not add up": (
        {"model__num_labels": 3, "data__labels": ["a", "b"]},
        "model.num_labels",
        "names 2",
    ),
    "a label twice": ({"data__labels": ["a", "b", "a"]}, "data.labels", "once"),
    "a classifier of one class": ({"data__labels": ["a"]}, "data.labels", "two names"),
    "a server without a port": (
        {"deployment": {"superlink": "fl.example.org"}},
        "deployment.superlink",
        "host:port",
    ),
    "a port that is none": ({"deployment": {"superlink": "a:99999"}}, "deployment.superlink", "65536"),
    "server optimiser on a growing stack": (
        {
            "mechanism": {"kind": "factor"},
            "federation__aggregation": {"kind": "stack"},
            "federation__server_optimizer": {"kind": "adam"},
        },
        "federation.server_optimizer.kind",
        "stack",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_contradictory_combinations_are_refused_by_name_with_what_to_change(name: str) -> None:
    changes, key, remedy = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        config_from_container(container(**changes))
    found = [one for one in caught.value.problems if one.startswith(key)]
    assert found, caught.value.problems
    assert any(remedy in one for one in found), found


GOOD: dict[str, dict[str, Any]] = {
    "sample": {},
    "noise multiplier": {"privacy__target_epsilon": ..., "privacy__noise_multiplier": 1.0},
    "factor, product": {"mechanism": {"kind": "factor"}, "federation__aggregation": {"kind": "product"}},
    "prism": {"mechanism": {"kind": "prism"}, "federation__aggregation": {"kind": "tangent"}},
    "regression": {"model__num_labels": 1},
    "client unit": {"privacy": CLIENT_UNIT},
    "no privacy": {
        "privacy": {"unit": "none"},
        "mechanism": {"kind": "none"},
        "federation__aggregation": {"kind": "product", "weights": "num_examples"},
    },
    "projection": {"mechanism": PROJECTION, **FROZEN_HEAD},
    "projection with head": {
        "mechanism": {**PROJECTION, "head_max_grad_norm": 1.0, "head_noise_multiplier": 4.0},
    },
    "projection with a head that is found by itself": {
        "mechanism": {**PROJECTION, "head_max_grad_norm": 1.0, "head_noise_multiplier": 4.0},
        "adapter__modules_to_save": [],
    },
    "weights for a head that is found by itself": {
        "privacy__group_weights": {"head": 0.1, "adapters": 1.0},
        "adapter__modules_to_save": [],
    },
}


@pytest.mark.parametrize("name", list(GOOD))
def test_sensible_combinations_are_accepted(name: str) -> None:
    assert config_from_container(container(**GOOD[name]))


def test_records_that_are_public_or_not_protected_may_be_evaluated_on() -> None:
    same = {"data__public_eval": {"split": "train"}}
    assert config_from_container(container(**same, data__marked_public=True)).data.marked_public
    free = config_from_container(
        container(
            **same,
            privacy={"unit": "none"},
            mechanism={"kind": "none"},
            federation__aggregation={"kind": "product"},
        )
    )
    assert free.privacy.unit == "none"


def test_h26_a_missing_quantisation_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind in ("4bit", "8bit"):
        found = config_problems(container(model__quantization=kind))
        assert any("bitsandbytes" in one.message and "quantization to null" in one.message for one in found)
    assert config_problems(container()) == []


def test_h23_seeded_noise_is_marked_and_refused_in_deployments() -> None:
    made = container(privacy__noise_source="seeded-test-only")
    assert any("no privacy" in note for note in config_warnings(config_from_container(made)))
    with pytest.raises(ConfigError, match="noise_source"):
        config_from_container(made, deployment=True)


def test_h18_the_unit_is_said_plainly() -> None:
    assert any(
        "per record, not per person" in note for note in config_warnings(config_from_container(container()))
    )
    grouped = config_from_container(container(privacy__group_by="user"))
    assert not any("per person" in note for note in config_warnings(grouped))


def test_every_rule_has_a_case_that_it_refuses() -> None:
    seen = set()
    for changes, _, _ in REFUSED.values():
        view = View(container(**changes))
        seen |= {rule.__name__ for rule in RULES if list(rule(view))}
    assert {rule.__name__ for rule in RULES} - seen == {"quantization_package"}


def event_of(config: FedLoraConfig) -> PoissonGaussianEvent:
    return PoissonGaussianEvent(float(config.privacy.noise_multiplier or 0), config.training.sample_rate)


def small(**changes: Any) -> FedLoraConfig:
    return config_from_container(container(federation__rounds=7, **changes))


@pytest.mark.parametrize(
    ("target", "rounds", "batch", "records"), [(3.0, 7, 10, 101), (1.0, 5, 7, 50), (8.0, 3, 4, 9)]
)
def test_h17_the_derived_noise_never_passes_the_target(
    target: float, rounds: int, batch: int, records: int
) -> None:
    config = config_from_container(
        container(
            privacy__target_epsilon=target,
            privacy__accountant="rdp",
            federation__rounds=rounds,
            training__steps_per_round=...,
            training__epochs_per_round=3,
            training__expected_batch_size=batch,
            training__nominal_records=records,
        )
    )
    resolved = derive_noise(config, event_of)
    steps = rounds * 3 * -(-records // batch)
    assert resolved.derived is not None
    assert (total_steps(config), resolved.derived.total_steps) == (steps, steps)
    report = epsilon_of([(event_of(resolved), steps)], 0.0001, accountant="rdp")
    assert target * 0.98 <= report.epsilon <= target
    assert resolved.derived.epsilon == pytest.approx(report.epsilon)


def test_deriving_from_noise_gives_epsilon_and_resolving_twice_changes_nothing() -> None:
    config = small(privacy__target_epsilon=..., privacy__noise_multiplier=1.1, privacy__accountant="rdp")
    resolved = derive_noise(config, event_of)
    assert resolved.derived is not None
    assert resolved.derived.from_ == "noise_multiplier"
    assert resolved.derived.epsilon == epsilon_of([(event_of(config), 7)], 0.0001, accountant="rdp").epsilon
    assert derive_noise(resolved, event_of) == resolved
    assert config.derived is None


@pytest.mark.parametrize("change", [{"noise_multiplier": 0.7}, {"epsilon": 0.5}, {"total_steps": 3}])
def test_a_resolved_configuration_that_lies_is_refused(change: dict[str, Any]) -> None:
    resolved = derive_noise(small(privacy__accountant="rdp"), event_of)
    check_derived(resolved, event_of)
    lie = config_container(resolved)
    lie["derived"].update(change)
    with pytest.raises(ConfigError, match="derived"):
        check_derived(config_from_container(lie), event_of)


RESOLVED_FROM_TARGET = derive_noise(small(privacy__accountant="rdp"), event_of)
RESOLVED_FROM_NOISE = derive_noise(
    small(privacy__target_epsilon=..., privacy__noise_multiplier=1.1, privacy__accountant="rdp"), event_of
)


@pytest.mark.parametrize(
    ("resolved", "change"),
    [
        (RESOLVED_FROM_NOISE, {"target_epsilon": 1.0}),
        (RESOLVED_FROM_TARGET, {"noise_multiplier": 0.1}),
        (RESOLVED_FROM_TARGET, {"target_epsilon": None, "noise_multiplier": None}),
    ],
)
def test_a_resolved_file_refuses_a_target_and_a_noise_that_contradict_each_other(
    resolved: FedLoraConfig, change: dict[str, Any]
) -> None:
    made = config_container(resolved)
    made["privacy"].update(change)
    with pytest.raises(ConfigError, match=r"privacy\.target_epsilon, privacy\.noise_multiplier"):
        config_from_container(made)


@pytest.mark.parametrize(
    ("resolved", "change"),
    [
        (RESOLVED_FROM_NOISE, {"target_epsilon": 1.0, "noise_multiplier": None}),
        (RESOLVED_FROM_NOISE, {"noise_multiplier": 4.0}),
        (RESOLVED_FROM_TARGET, {"target_epsilon": 1.0, "noise_multiplier": None}),
        (RESOLVED_FROM_TARGET, {"target_epsilon": 1.0}),
        (RESOLVED_FROM_TARGET, {"target_epsilon": None, "noise_multiplier": 4.0}),
    ],
)
def test_h38_a_changed_target_or_noise_of_a_resolved_file_takes_effect(
    resolved: FedLoraConfig, change: dict[str, Any]
) -> None:
    made = config_container(resolved)
    made["privacy"].update(change)
    again = derive_noise(config_from_container(made), event_of)
    assert again.derived is not None
    asked = "target_epsilon" if made["privacy"]["target_epsilon"] is not None else "noise_multiplier"
    assert again.derived.from_ == asked
    if asked == "noise_multiplier":
        assert again.privacy.noise_multiplier == again.derived.noise_multiplier == 4.0
    else:
        assert again.derived.epsilon is not None
        assert 0.98 <= again.derived.epsilon <= 1.0


def test_h41_client_level_runs_count_rounds_and_record_level_runs_count_steps() -> None:
    assert total_steps(config_from_container(container(training__steps_per_round=5))) == 300
    assert (
        total_steps(config_from_container(container(training__steps_per_round=5, privacy=CLIENT_UNIT))) == 60
    )
    epochs = container(
        training__steps_per_round=..., training__epochs_per_round=2, training__nominal_records=101
    )
    assert total_steps(config_from_container(epochs)) == 60 * 2 * 7


def test_a_target_that_no_noise_reaches_is_an_error() -> None:
    class Hopeless:
        def epsilon(self, event: object, config: object) -> tuple[float, str]:
            return 9.0, "stub"

        def calibrate(self, make: Callable[[float], object], config: object) -> float:
            make(1.0)
            return 1.0

    with pytest.raises(PrivacyParameterError, match="above the target"):
        derive_noise(small(), event_of, Hopeless())  # type: ignore[arg-type]


SITE = """\
schema: 1
site: {name: hospital-a}
socket: {path: run/s, token_file: run/t}
data: {source: {kind: file, paths: [records.jsonl]}, name: notes}
ledger: {url: ledger.db}
budget: {epsilon: 8.0, delta: 1.0e-5, adjacency: add_or_remove, unit: record, on_exhausted: refuse}
policy: {mechanisms: [lora_fa], min_noise_multiplier: 0.5, max_rounds: 10, max_steps_per_round: 5, base_models: []}
"""


def test_a_sites_file_loads_and_states_everything_that_binds(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE)
    assert load_trainer(file).config.policy.units == ("record",)
    for key in ("mechanisms", "min_noise_multiplier", "max_rounds", "max_steps_per_round", "base_models"):
        lines = SITE.replace(f"{key}: ", f"{key}_x: ", 1)
        file.write_text(lines)
        with pytest.raises(ConfigError) as caught:
            load_trainer(file)
        assert any(one.startswith(f"policy.{key}: missing") for one in caught.value.problems)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("policy.mechanisms=[]", "policy.mechanisms"),
        ("policy.mechanisms=[none]", "policy.mechanisms"),
        ("budget.unit=person", "budget.unit"),
        ("data.group_by=user", "budget.unit"),
        ("policy.base_models=[abc]", "policy.base_models.0"),
    ],
)
def test_a_sites_file_refuses_what_makes_no_sense(tmp_path: Path, override: str, key: str) -> None:
    file = tmp_path / "site.yaml"
    file.write_text(SITE)
    with pytest.raises(ConfigError) as caught:
        load_trainer(file, [override])
    assert any(one.startswith(key) for one in caught.value.problems), caught.value.problems


def test_a_key_of_another_kind_is_not_proposed_in_its_own_place() -> None:
    chosen = {"kind": "prism", "per_layer_clip": True}
    with pytest.raises(ConfigError) as caught:
        config_from_container(container(mechanism=chosen, federation__aggregation={"kind": "tangent"}))
    (said,) = caught.value.problems
    assert said.startswith("mechanism.per_layer_clip: got True; another kind of this section has this key")
    assert "adaptivity" in said
    assert "did you mean" not in said
