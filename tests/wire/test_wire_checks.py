"""Checks of single payloads and of rounds: H03, H05, H06, stale and repeated answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedlora.errors import LayoutMismatchError, NonFinitePayloadError, PayloadTooLargeError, StaleRoundError
from fedlora.wire import AdapterLayout, AdapterPayload, ModuleSpec, ReplyGuard, check_payload, expected_blocks

SPEC = ModuleSpec(6, 4, 2, 2.0)
LAYOUT = AdapterLayout({"layer.q": SPEC, "layer.v": SPEC}, {"score|weight": (3, 6)}, "base-hash")


def make(kind="lora_b", seed=0, modules=None, recipe="recipe-1"):
    rng = np.random.default_rng(seed)
    modules = dict(LAYOUT.modules) if modules is None else modules
    shapes = expected_blocks(modules, LAYOUT.extra, kind)
    blocks = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return AdapterPayload(kind, blocks, modules, recipe, LAYOUT.base_fingerprint)


def check(payload, **options):
    return check_payload(payload, LAYOUT, "recipe-1", **{"kind": "lora_b", "client": "client-7", **options})


def renamed(payload, rename):
    return replace(payload, blocks={rename(name): block for name, block in payload.blocks.items()})


def test_a_good_payload_passes_and_gives_its_norm():
    payload = make()
    expected = np.sqrt(sum(np.square(b.astype(np.float64)).sum() for b in payload.blocks.values()))
    assert check(payload) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("recipe", ["recipe-2", None, ""])
def test_h03_another_shared_a_is_refused_with_client_and_layer(recipe):
    with pytest.raises(LayoutMismatchError, match=r"client-7.*lora_A.*layer\.q"):
        check(make(recipe=recipe))


def test_h03_a_run_without_a_recipe_accepts_no_lora_b():
    with pytest.raises(LayoutMismatchError):
        check_payload(make(recipe=None), LAYOUT, None, kind="lora_b")


@pytest.mark.parametrize("prefix", ["_module.", "module.", "base_model.model."])
def test_h05_wrapper_prefixes_are_refused_with_examples(prefix):
    payload = renamed(make(), lambda name: prefix + name)
    with pytest.raises(LayoutMismatchError, match="unknown blocks") as caught:
        check(payload)
    assert prefix in str(caught.value)
    assert str(caught.value).count("lora_B") >= 2


def test_h05_prefix_on_modules_is_refused_too():
    modules = {"_module." + name: spec for name, spec in LAYOUT.modules.items()}
    with pytest.raises(LayoutMismatchError, match=r"wrapper prefix ._module\."):
        check(make(modules=modules))


def test_h05_key_sets_must_be_equal_both_ways():
    payload = make()
    fewer = {name: block for name, block in payload.blocks.items() if "layer.v" not in name}
    with pytest.raises(LayoutMismatchError, match="1 missing"):
        check(replace(payload, blocks=fewer))
    more = {**payload.blocks, "layer.q|bias": np.zeros(6, dtype=np.float32)}
    with pytest.raises(LayoutMismatchError, match="1 unknown"):
        check(replace(payload, blocks=more))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e38, -3e19])
@pytest.mark.parametrize("name", ["layer.q|lora_B", "layer.v|lora_B", "score|weight"])
def test_h06_non_finite_and_overflow_are_refused_with_client_and_layer(value, name):
    payload = make()
    block = payload.blocks[name].copy()
    block[1, 1] = value
    with pytest.raises(NonFinitePayloadError, match=rf"client-7.*{name.split('|')[0]}"):
        check(replace(payload, blocks={**payload.blocks, name: block}))


def test_h06_large_but_usable_numbers_pass():
    payload = make()
    big = {name: block * np.float32(1e15) for name, block in payload.blocks.items()}
    assert np.isfinite(check(replace(payload, blocks=big)))


def test_absurd_norms_are_refused_by_the_limit():
    with pytest.raises(NonFinitePayloadError, match="norm"):
        check(make(), max_norm=0.01)
    assert check(make(), max_norm=1e6) > 0


@pytest.mark.parametrize("shape", [(6, 3), (12,), (2, 6)])
def test_wrong_shapes_are_refused(shape):
    payload = make()
    blocks = {**payload.blocks, "layer.q|lora_B": np.zeros(shape, dtype=np.float32)}
    with pytest.raises(LayoutMismatchError, match=r"layer\.q"):
        check(replace(payload, blocks=blocks))


def test_wrong_dtype_kind_base_and_size_are_refused():
    payload = make()
    double = {name: block.astype(np.float64) for name, block in payload.blocks.items()}
    with pytest.raises(LayoutMismatchError, match="float64"):
        check(replace(payload, blocks=double))
    with pytest.raises(LayoutMismatchError, match="coordinates"):
        check(make("tangent"))
    with pytest.raises(LayoutMismatchError, match="base model"):
        check(replace(payload, base_fingerprint="other"))
    with pytest.raises(PayloadTooLargeError):
        check(payload, max_bytes=16)


def test_h02_mixed_ranks_pass_only_where_a_mode_takes_them():
    modules = {"layer.q": ModuleSpec(6, 4, 3, 0.5)}
    payload = make("factors", modules=modules)
    assert check(payload, kind="factors", mixed=True) > 0
    with pytest.raises(LayoutMismatchError, match="missing"):
        check(payload, kind="factors")
    other = make("factors", modules={"layer.q": ModuleSpec(6, 4, 3, 0.5), "layer.v": SPEC})
    with pytest.raises(LayoutMismatchError, match="product or stack"):
        check(other, kind="factors")


@pytest.mark.parametrize(
    "spec", [ModuleSpec(6, 5, 2, 1.0), ModuleSpec(7, 4, 2, 1.0), ModuleSpec(6, 4, 5, 1.0)]
)
def test_mixed_still_needs_the_same_weights_and_a_possible_rank(spec):
    with pytest.raises(LayoutMismatchError, match="shape"):
        check(make("factors", modules={"layer.q": spec}), kind="factors", mixed=True)


@pytest.mark.parametrize("scaling", [0.0, -1.0, float("nan"), float("inf")])
def test_scalings_must_be_finite_and_positive(scaling):
    payload = make("factors", modules={"layer.q": ModuleSpec(6, 4, 2, scaling)})
    with pytest.raises(LayoutMismatchError, match="scaling"):
        check(payload, kind="factors", mixed=True)


@pytest.mark.parametrize(("run", "server_round"), [("run-a", 4), ("run-b", 5), ("run-b", 6)])
def test_stale_rounds_and_replays_of_other_runs_are_refused(run, server_round):
    guard = ReplyGuard("run-a", 5, ["c1"])
    with pytest.raises(StaleRoundError, match="round"):
        guard.check_round(run, server_round)
    guard.check_round("run-a", 5)


def test_duplicates_and_strangers_are_refused():
    guard = ReplyGuard("run-a", 5, ["c1", "c2"])
    guard.accept("c1")
    with pytest.raises(StaleRoundError, match="twice"):
        guard.accept("c1")
    with pytest.raises(StaleRoundError, match="not asked"):
        guard.accept("c9")
    assert guard.missing == ("c2",)
