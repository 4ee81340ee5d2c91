"""Injection, the shared recipe, strict loading, heads and refusals."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "mechanisms"))
from engine_zoo import FAMILIES, FINGERPRINT, ZooTask, adapted_model, base_model, moved_payload, records

from fedlora.adapters import ARecipe, inject
from fedlora.adapters.heads import find_head
from fedlora.adapters.philox_normal import normal_quantile, normals
from fedlora.config.schema import AdapterConfig
from fedlora.errors import ConfigError, LayoutMismatchError, ModelError, UnsupportedCombinationError
from fedlora.wire.payload import AdapterPayload


def logits(adapted, family, rows):
    task = ZooTask(family)
    with torch.no_grad():
        return task.per_record_loss(adapted.model, task.collate(rows))


def test_quantile_matches_an_independent_one():
    mpmath = pytest.importorskip("mpmath")
    for p in (1e-16, 1e-9, 0.01, 0.075, 0.3, 0.5, 0.92, 0.999999):
        with mpmath.workdps(50):
            expected = float(mpmath.sqrt(2) * mpmath.erfinv(2 * mpmath.mpf(p) - 1))
        assert float(normal_quantile(np.array([p]))[0]) == pytest.approx(expected, rel=1e-13, abs=1e-14)


def test_h03_recipe_gives_the_same_bits_everywhere():
    golden = normals("fedlora golden", 5)
    assert [value.hex() for value in golden.tolist()] == GOLDEN
    recipe = ARecipe(7, {"a.q": (3, 5), "a.v": (2, 4)})
    assert recipe.sha256 == GOLDEN_RECIPE
    assert ARecipe(8, recipe.shapes).sha256 != recipe.sha256
    assert ARecipe(7, {"a.q": (3, 5), "a.v": (3, 4)}).sha256 != recipe.sha256
    assert ARecipe(7, recipe.shapes, "kaiming").sha256 != recipe.sha256


GOLDEN_RECIPE = "671aa3faa8606792ba389256a53cc22541910112c1e1e57f786b3fac7f426a9b"
GOLDEN = [
    "0x1.3a51131e7326cp+0",
    "0x1.2f0af96239d32p+0",
    "0x1.c1b39455a19fep-2",
    "-0x1.16ecd691f55b9p+1",
    "-0x1.0fcaaa776570fp-1",
]


@pytest.mark.parametrize("init", ["gaussian", "kaiming", "orthonormal"])
def test_recipe_has_the_stated_law(init):
    a = ARecipe(1, {"m": (16, 3000)}, init).draw("m").astype(np.float64)
    if init == "orthonormal":
        assert np.abs(a @ a.T - np.eye(16)).max() < 1e-6
        return
    variance = {"gaussian": 1 / 16, "kaiming": 1 / 9000}[init]
    assert a.var() == pytest.approx(variance, rel=0.03)
    assert a.mean() == pytest.approx(0.0, abs=4 * (variance / a.size) ** 0.5)


def test_spectral_start_has_no_recipe():
    with pytest.raises(UnsupportedCombinationError, match=r"adapter\.init"):
        ARecipe(1, {"m": (2, 4)}, "spectral").draw("m")


@pytest.mark.parametrize("family", FAMILIES)
def test_start_is_the_base_model_and_all_is_frozen(family):
    adapted = adapted_model(family)
    rows = records(family)
    task = ZooTask(family)
    plain = base_model(family)
    with torch.no_grad():
        expected = task.per_record_loss(plain.eval(), task.collate(rows))
    adapted.model.eval()
    assert torch.allclose(logits(adapted, family, rows), expected, atol=1e-12)
    assert not any(p.requires_grad for p in adapted.model.parameters())
    assert adapted.num_trained() > 0
    assert all(not name.startswith("base_model") for name in adapted.layout.modules)


@pytest.mark.parametrize(
    "changes",
    [{"rank_pattern": {"^q_proj": 16}}, {"alpha_pattern": {"layers.7.self_attn.q_proj": 32.0}},
     {"rank_pattern": {"q_proj": 4, "gate": 2}}],
)  # fmt: skip
def test_h04_patterns_without_a_match_are_refused_with_counts(changes):
    with pytest.raises(ConfigError, match="pattern matches no layer") as caught:
        adapted_model("llama", **changes)
    assert any(problem.endswith(": 0 layers") for problem in caught.value.problems)


def test_h04_patterns_that_match_set_rank_and_scaling():
    adapted = adapted_model(
        "llama", rank_pattern={"q_proj": 5}, alpha_pattern={"layers.0.self_attn.q_proj": 32.0}
    )
    spec = adapted.layout.modules["model.layers.0.self_attn.q_proj"]
    assert (spec.rank, spec.scaling) == (5, 32.0 / 5)
    assert adapted.layout.modules["model.layers.1.self_attn.q_proj"].scaling == 6.0 / 5
    assert dict(adapted.pattern_matches) == {
        "rank_pattern.q_proj": 2, "alpha_pattern.layers.0.self_attn.q_proj": 1,
    }  # fmt: skip


def test_rslora_all_linear_and_targets():
    assert next(iter(adapted_model("llama", use_rslora=True).layout.modules.values())).scaling == 6.0 / 3**0.5
    names = adapted_model("bert", target_modules="all-linear").layout.modules
    assert not any("classifier" in name for name in names)
    assert len(names) >= 12
    with pytest.raises(ConfigError, match="match no layer"):
        adapted_model("llama", target_modules=("q_proj", "w_pack"))


@pytest.mark.parametrize("prefix", ["_module.", "module.", "base_model.model."])
def test_h05_wrapper_prefixes_are_refused(prefix):
    adapted = adapted_model("bert")
    payload = adapted.write_factors()
    blocks = {prefix + name: value for name, value in payload.blocks.items()}
    with pytest.raises(LayoutMismatchError, match="names differ"):
        adapted.load(replace(payload, blocks=blocks))


@pytest.mark.parametrize("fault", ["missing", "surplus", "shape", "base", "recipe", "update"])
def test_h05_loading_is_strict_both_ways(fault):
    adapted = adapted_model("bert")
    payload = adapted.write_factors()
    name = next(iter(payload.blocks))
    blocks = dict(payload.blocks)
    if fault == "missing":
        del blocks[name]
    elif fault == "surplus":
        blocks["extra|weight"] = blocks[name]
    elif fault == "shape":
        blocks[name] = blocks[name][:-1]
    changed = replace(payload, blocks=blocks)
    if fault == "base":
        changed = replace(payload, base_fingerprint="1" * 64)
    if fault == "recipe":
        only_b = {key: value for key, value in blocks.items() if not key.endswith("lora_A")}
        changed = AdapterPayload("lora_b", only_b, payload.modules, "2" * 64, payload.base_fingerprint)
    if fault == "update":
        changed = replace(payload, kind="projected")
    with pytest.raises(LayoutMismatchError):
        adapted.load(changed)


@pytest.mark.parametrize("family", FAMILIES)
def test_load_and_write_are_inverse_and_frames_agree(family):
    adapted = adapted_model(family)
    payload = moved_payload(adapted.write_factors())
    adapted.load(payload)
    again = adapted.write_factors()
    assert all(np.array_equal(again.blocks[name], value) for name, value in payload.blocks.items())
    rows = records(family)
    expected = logits(adapted, family, rows)
    blocks = {
        name: value for name, value in payload.blocks.items() if not name.endswith(("lora_A", "lora_B"))
    }
    for name, spec in payload.modules.items():
        b, a = payload.blocks[f"{name}|lora_B"], payload.blocks[f"{name}|lora_A"]
        z = spec.scaling * b.astype(np.float64) @ a.astype(np.float64)
        u, s, vt = np.linalg.svd(z)
        r = spec.rank
        blocks |= {f"{name}|q_out": u[:, :r].astype(np.float32), f"{name}|core": np.diag(s[:r]).astype(np.float32),
                   f"{name}|q_in": vt[:r].T.astype(np.float32)}  # fmt: skip
    adapted.load(AdapterPayload("frames", blocks, payload.modules, None, FINGERPRINT))
    assert torch.allclose(logits(adapted, family, rows), expected, rtol=1e-4, atol=1e-5)


def test_h08_heads_are_found_or_asked_for():
    assert find_head(base_model("gpt2")) == ("score",)
    assert find_head(base_model("bert")) == ("classifier",)
    assert find_head(base_model("llama")) == ()
    torch.manual_seed(0)
    distil = hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(vocab_size=37, dim=16, hidden_dim=24, n_layers=1, n_heads=2, num_labels=3)
    )
    assert find_head(distil) == ("pre_classifier", "classifier")
    config = {"rank": 2, "lora_alpha": 2.0, "target_modules": ("q_lin",)}
    with pytest.raises(ModelError, match="pre_classifier"):
        inject(
            distil, AdapterConfig(**config, modules_to_save=("classifier",)), seed=1, fingerprint=FINGERPRINT
        )
    adapted = inject(distil, AdapterConfig(**config), seed=1, fingerprint=FINGERPRINT)
    assert set(adapted.layout.extra) == {
        "pre_classifier|weight", "pre_classifier|bias", "classifier|weight", "classifier|bias",
    }  # fmt: skip
    with pytest.raises(ModelError, match="match no module"):
        adapted_model("bert", modules_to_save=("classifier", "scorer"))


def test_tied_coupled_and_unknown_layers_are_refused():
    torch.manual_seed(0)
    tied = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=37, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    config = {"rank": 2, "lora_alpha": 2.0, "target_modules": ("c_attn",)}
    with pytest.raises(ModelError, match="tied"):
        inject(tied, AdapterConfig(**config, modules_to_save=("wte",)), seed=1, fingerprint=FINGERPRINT)

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    with pytest.raises(ModelError, match="batch normalisation"):
        inject(Normed(), AdapterConfig(**config), seed=1, fingerprint=FINGERPRINT)
    with pytest.raises(ModelError, match="allowed are Linear"):
        adapted_model("vit", modules_to_save=("projection", "classifier"))


def test_h24_a_second_injection_is_refused_and_taps_attach_once():
    adapted = adapted_model("bert")
    with pytest.raises(ModelError, match="adapter already"):
        inject(adapted.model, AdapterConfig(rank=2, lora_alpha=2.0, target_modules=("query",)), seed=1,
               fingerprint=FINGERPRINT)  # fmt: skip
    layer = next(iter(adapted.lora_layers.values()))
    before = layer.forward
    adapted.taps.attach(layer, lambda original: original)
    assert layer.forward is before


@pytest.mark.parametrize("init", ["gaussian", "spectral"])
@pytest.mark.parametrize(
    ("family", "changes", "layer"),
    [
        ("llama", {"rank": 100_000}, "q_proj"),
        ("llama", {"rank": 10**12}, "q_proj"),
        ("llama", {"rank_pattern": {"q_proj": 10**12}}, "q_proj"),
        ("bert", {"rank": 10**9, "target_modules": "all-linear"}, "query"),
        ("gpt2", {"rank": 10**9}, "c_"),
        ("llama", {"lora_alpha": 1e300}, "q_proj"),
        ("llama", {"lora_alpha": 1e-300}, "q_proj"),
        ("llama", {"alpha_pattern": {"q_proj": 1e38}}, "q_proj"),
    ],
)
def test_absurd_ranks_and_scalings_are_refused_before_weights_are_allocated(
    family, changes, layer, init, monkeypatch
):
    from fedlora.adapters import inject as module

    monkeypatch.setattr(sys.modules[module.__module__], "get_peft_model", None)  # nothing may reach PEFT
    with pytest.raises(ConfigError, match="out of bounds") as caught:
        adapted_model(family, **{"init": init, **changes})
    assert layer in caught.value.problems[0]
    assert "allowed is" in caught.value.problems[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_rank_of_a_layer_is_its_smaller_side(family):
    layers = adapted_model(family).layout.modules.values()
    most = min(min(spec.out_features, spec.in_features) for spec in layers)
    assert all(
        spec.rank == most
        for spec in adapted_model(family, rank=most, rank_pattern={}).layout.modules.values()
    )
    with pytest.raises(ConfigError, match="out of bounds"):
        adapted_model(family, rank=most + 1, rank_pattern={})


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ConfigError, match="no regular expression"):
        adapted_model("llama", rank_pattern={"*": 2})
