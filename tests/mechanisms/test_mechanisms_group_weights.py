"""The public rule for group weights."""

from __future__ import annotations

import math

import pytest

from fedlora.errors import PrivacyParameterError
from fedlora.mechanisms.group_weights import (
    START_LOGIT,
    head_scale,
    mechanism_dimension,
    mechanism_energy,
    neyman_weights,
    weights_for,
)
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD
from fedlora.wire.payload import AdapterLayout, ModuleSpec

SPEC = ModuleSpec(384, 384, 8, 2.0)


def test_shares_follow_the_square_root_of_the_dimensions() -> None:
    rule = neyman_weights({"a": 0.5, "h": 3.0}, {"a": 6400, "h": 100})
    assert rule.shares["h"] == pytest.approx(10 / 90)
    assert rule.weights["a"] == 1.0
    total = sum((rule.weights[g] * rule.norms[g]) ** 2 for g in "ah")
    assert (rule.weights["h"] * 3.0) ** 2 / total == pytest.approx(rule.shares["h"], rel=0.02)
    assert rule.typical_norm == pytest.approx(math.sqrt(total))


def test_no_other_split_has_a_smaller_sum_of_noise_to_signal_ratios() -> None:
    dimensions = {"a": 72960, "h": 1540}
    rule = neyman_weights({"a": 0.1, "h": 1.0}, dimensions)

    def cost(share: float) -> float:
        return dimensions["h"] / share + dimensions["a"] / (1 - share)

    best = cost(rule.shares["h"])
    assert all(cost(s) >= best for s in (0.001, 0.01, 0.05, 0.1, 0.15, 0.3, 0.5, 0.9))


def test_weights_scale_against_the_norms_only() -> None:
    one = neyman_weights({"a": 1.0, "h": 2.0}, {"a": 1000, "h": 10})
    two = neyman_weights({"a": 10.0, "h": 20.0}, {"a": 1000, "h": 10})
    assert one.weights == two.weights
    three = neyman_weights({"a": 1.0, "h": 4.0}, {"a": 1000, "h": 10})
    assert three.weights["h"] == pytest.approx(one.weights["h"] / 2, rel=0.01)


def test_a_group_without_signal_gets_a_finite_weight() -> None:
    rule = neyman_weights({"a": 1.0, "h": 0.0}, {"a": 1000, "h": 10})
    assert math.isfinite(rule.weights["h"])
    assert rule.weights["h"] > 0


@pytest.mark.parametrize(
    ("norms", "dimensions"),
    [
        ({"a": 0.0}, {"a": 5}),
        ({"a": math.nan}, {"a": 5}),
        ({"a": 1.0}, {"b": 5}),
        ({"a": 1.0}, {"a": 0}),
        ({}, {}),
    ],
)
def test_unusable_public_norms_are_refused(norms: dict[str, float], dimensions: dict[str, int]) -> None:
    with pytest.raises(PrivacyParameterError, match="group weights"):
        neyman_weights(norms, dimensions)


def test_energy_and_dimension_follow_the_mechanisms_geometry() -> None:
    assert mechanism_energy("prism", SPEC, 1.0) == pytest.approx(16 / 384 - 64 / 384**2)
    assert mechanism_energy("lora_fa", SPEC, 1.0) == 4.0
    assert mechanism_energy("noisy_projection", SPEC, 1.0) == 1.0
    assert mechanism_dimension("prism", SPEC) == 8 * 760
    assert mechanism_dimension("factor", SPEC) == 8 * 768
    assert mechanism_dimension("lora_fa", SPEC) == 8 * 384
    assert mechanism_dimension("dp_sgd", SPEC) == 384 * 384


def test_prism_gets_a_much_smaller_head_weight_than_lora_fa() -> None:
    layout = AdapterLayout(
        {f"m{i}": SPEC for i in range(12)}, {"c|weight": (4, 384), "c|bias": (4,)}, "0" * 64
    )
    norms = dict.fromkeys(layout.modules, 0.01)
    prism = weights_for("prism", layout, norms, 1.0).weights
    fa = weights_for("lora_fa", layout, norms, 1.0).weights
    assert prism[GROUP_ADAPTERS] == fa[GROUP_ADAPTERS] == 1.0
    assert prism[GROUP_HEAD] < 0.2 * fa[GROUP_HEAD]


def test_one_group_alone_has_weight_one() -> None:
    layout = AdapterLayout({"m": SPEC}, {}, "0" * 64)
    assert weights_for("lora_fa", layout, {"m": 0.3}, 0.0).weights == {GROUP_ADAPTERS: 1.0}


@pytest.mark.parametrize(
    ("row", "feature", "factor"), [(0.5, 1.0, 4.0), (4.0, 1.0, 1.0), (0.0, 1.0, 1.0), (1.0, math.nan, 1.0)]
)
def test_a_head_is_scaled_up_to_an_asked_logit_and_never_down(
    row: float, feature: float, factor: float
) -> None:
    assert head_scale(row, feature, START_LOGIT) == factor


@pytest.mark.parametrize("kind", ["prism", "lora_fa"])
def test_public_norms_do_not_depend_on_how_tiny_a_new_head_starts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters' gradients pass through the head: measured at the start they would shrink with it."""
    from types import SimpleNamespace

    from engine_zoo import ZooTask, adapted_model, config, records

    from fedlora.mechanisms import build_mechanism
    from fedlora.training import groups

    monkeypatch.setattr(groups, "public_records", lambda task: records("bert", (5,) * 20))
    found = []
    for size in (1e-2, 1e-4):
        adapted = adapted_model("bert")
        for name, leaf in adapted.leaves.items():
            leaf.weight.data.mul_(size if name.endswith("classifier") else 1.0)
        mechanism = build_mechanism(config(kind), adapted.layout)
        parts = SimpleNamespace(task=ZooTask("bert"), adapted=adapted)
        found.append(groups.group_norms(mechanism, parts))  # type: ignore[arg-type]
    for group in (GROUP_ADAPTERS, GROUP_HEAD):
        assert found[0][group] == pytest.approx(found[1][group], rel=0.05)


def test_a_typical_head_start_scales_new_heads_alike_whatever_their_first_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from engine_zoo import ZooTask, adapted_model, config, records

    from fedlora.training import heads

    monkeypatch.setattr(heads, "public_records", lambda task, count=64: records("bert", (5,) * count))
    ends, logits = [], []
    for size in (1e-2, 1e-4, 1e4):
        adapted = adapted_model("bert")
        leaf = adapted.leaves["classifier"]
        leaf.weight.data.mul_(size)
        mode = adapted.model.training
        factors = heads.start_heads_at_typical_size(
            config("prism"),
            ZooTask("bert"),
            adapted,  # type: ignore[arg-type]
        )
        ends.append(leaf.weight.detach().clone())
        logits.append(factors["classifier"])
        assert adapted.model.training == mode
        assert not leaf._forward_pre_hooks
    assert torch.allclose(ends[0], ends[1], rtol=0.02)
    assert logits[0] > 1.0
    assert logits[2] == 1.0
    full = adapted_model("bert", adapt="full")
    matrices = config("dp_sgd", adapter={"target_modules": ("query", "value")})
    scaled = heads.start_heads_at_typical_size(matrices, ZooTask("bert"), full)  # type: ignore[arg-type]
    assert len(full.leaves) > 1
    assert set(scaled) <= {"classifier"}
