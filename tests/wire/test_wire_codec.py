"""The codec: exact round trips, hostile headers, sizes."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.errors import LayoutMismatchError, PayloadTooLargeError, SchemaVersionError, WireError
from fedlora.wire import (
    AdapterLayout,
    AdapterPayload,
    ModuleSpec,
    expected_blocks,
    from_arrays,
    measured_size,
    payload_fingerprint,
    predict_size,
    to_arrays,
)

SPEC = ModuleSpec(6, 4, 2, 2.0)
LAYOUT = AdapterLayout(
    {"layer.q": SPEC, "layer.v": ModuleSpec(5, 4, 3, 1.0)}, {"score|weight": (3, 6)}, "base"
)


def make(kind="factors", seed=0, layout=LAYOUT, recipe="recipe"):
    rng = np.random.default_rng(seed)
    shapes = expected_blocks(layout.modules, layout.extra, kind)
    blocks = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return AdapterPayload(kind, blocks, dict(layout.modules), recipe, layout.base_fingerprint)


@pytest.mark.parametrize("kind", ["lora_b", "factors", "frames", "tangent", "projected"])
def test_float32_round_trip_is_bit_exact(kind):
    payload = make(kind)
    header, arrays = to_arrays(payload)
    back = from_arrays(header, arrays)
    assert payload_fingerprint(back) == payload_fingerprint(payload)
    assert back.modules == payload.modules
    assert set(back.blocks) == set(payload.blocks)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=0, max_size=4),
    st.sampled_from(["none", "bf16", "int8"]),
)
def test_any_shapes_round_trip(shapes, compression):
    rng = np.random.default_rng(1)
    blocks = {f"m|b{i}": rng.standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    payload = AdapterPayload("factors", blocks, {}, None, "base")
    back = from_arrays(*to_arrays(payload, compression=compression, rng=rng))
    for name, block in blocks.items():
        assert back.blocks[name].shape == block.shape
        np.testing.assert_allclose(back.blocks[name], block, atol=0.05, rtol=0.01)


def test_special_values_travel_bit_exactly():
    block = np.array([[np.nan, np.inf, -0.0, 1e-45, 3.4e38]], dtype=np.float32)
    payload = AdapterPayload("factors", {"m|x": block}, {}, None, "base")
    back = from_arrays(*to_arrays(payload))
    assert back.blocks["m|x"].tobytes() == block.tobytes()


def test_bf16_keeps_nan_and_rounds_to_even():
    values = np.array([1.0, np.nan, np.inf, -np.inf, 1.00390625, 1.01171875], dtype=np.float32)
    back = from_arrays(
        *to_arrays(AdapterPayload("factors", {"m|x": values}, {}, None, "base"), compression="bf16")
    ).blocks["m|x"]
    assert np.isnan(back[1])
    assert np.isposinf(back[2])
    assert np.isneginf(back[3])
    assert back[0] == 1.0
    assert back[4] == 1.0
    assert back[5] == np.float32(1.015625)


def test_int8_rounding_is_unbiased_and_biased_rounding_would_be_seen():
    row = np.array([[1.0, 0.3, -0.7, 0.011, 0.004]], dtype=np.float32)
    payload = AdapterPayload(
        "factors", {"m|x": np.repeat(row, 20_000, axis=0).reshape(1, -1)}, {}, None, "base"
    )
    back = from_arrays(*to_arrays(payload, compression="int8", rng=np.random.default_rng(3))).blocks["m|x"]
    back = back.reshape(-1, 5)
    mean = back.astype(np.float64).mean(axis=0)
    scale = 1.0 / 127
    assert np.all(np.abs(mean - row[0]) < 5 * scale / np.sqrt(20_000))
    nearest = np.rint(row[0] / scale) * scale
    assert np.any(np.abs(nearest - row[0]) > 5 * scale / np.sqrt(20_000))
    assert np.abs(back - row).max() <= scale * 1.0001


def test_int8_marks_non_finite_rows_for_the_check():
    wide = np.array([[1.0, np.nan, 3.0], [1.0, 2.0, 3.0]], dtype=np.float32)
    for block in (wide, wide.T.copy()):
        payload = AdapterPayload("factors", {"m|x": block}, {}, None, "base")
        back = from_arrays(*to_arrays(payload, compression="int8")).blocks["m|x"]
        back = back if block is wide else back.T
        assert np.isnan(back[0]).all()
        assert np.isfinite(back[1]).all()


@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
@pytest.mark.parametrize("kind", ["lora_b", "factors", "tangent"])
@pytest.mark.parametrize("rank", [4, 8])
def test_h34_predicted_bytes_within_ten_percent(compression, kind, rank):
    specs = {f"transformer.h.{i}.attn.c_attn": ModuleSpec(2304, 768, rank, 2.0) for i in range(12)}
    layout = AdapterLayout(specs, {"score|weight": (3, 768)}, "f" * 64)
    header, arrays = to_arrays(make(kind, layout=layout, recipe="a" * 64), compression=compression)
    measured = measured_size(header, arrays)
    predicted = predict_size(layout, kind, compression)
    assert measured.numbers == predicted.numbers
    assert abs(measured.header - predicted.header) <= 0.1 * measured.header
    assert abs(measured.total - predicted.total) <= 0.1 * measured.total


@pytest.mark.parametrize("limit", [10, 100, 200])
def test_h34_payload_above_the_limit_is_refused_with_both_numbers(limit):
    header, arrays = to_arrays(make())
    total = sum(a.nbytes for a in arrays.values())
    with pytest.raises(PayloadTooLargeError, match=rf"{total}.*{limit}"):
        from_arrays(header, arrays, max_bytes=limit)


def test_h34_small_int8_bytes_cannot_unpack_to_more_than_the_limit():
    block = np.zeros((1000, 1000), dtype=np.float32)
    header, arrays = to_arrays(
        AdapterPayload("factors", {"m|x": block}, {}, None, "base"), compression="int8"
    )
    with pytest.raises(PayloadTooLargeError):
        from_arrays(header, arrays, max_bytes=2_000_000)


def edited(**changes):
    header, arrays = to_arrays(make())
    head = json.loads(header)
    head.update(changes)
    return json.dumps(head), arrays


HOSTILE = [
    {"blocks": [["m|x", [2**30, 2**30]]]},
    {"blocks": [["m|x", [-1, 5]]]},
    {"blocks": [["m|x", [True, 5]]]},
    {"blocks": [["m|x", [2.0]]]},
    {"blocks": [["m|x", [1] * 40]]},
    {"blocks": [["m|x", [2]], ["m|x", [2]]]},
    {"blocks": [["", [2]]]},
    {"blocks": [[7, [2]]]},
    {"blocks": {"m|x": [2]}},
    {"blocks": [["m|x"]] * 3},
    {"modules": {"layer.q": [6, 4, 2, -1.0]}},
    {"modules": {"layer.q": [6, 4, 0, 1.0]}},
    {"modules": {"layer.q": [6, 4, 2]}},
    {"modules": [1, 2]},
    {"kind": "everything"},
    {"kind": ["factors"]},
    {"encoding": "pickle"},
    {"encoding": None},
    {"recipe": 5},
    {"base": None},
    {"notes": {"a": [1]}},
    {"notes": {str(i): i for i in range(1000)}},
    {"surprise": 1},
]


@pytest.mark.parametrize("change", HOSTILE, ids=lambda c: str(c)[:40])
def test_hostile_headers_are_refused_without_memory(change):
    header, arrays = edited(**change)
    tracemalloc.start()
    with pytest.raises(WireError):
        from_arrays(header, arrays)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000


@pytest.mark.parametrize(
    "text", ["", "[]", "nonsense", "[" * 100_000, '{"schema": NaN}', "null", '"x"', '{"schema": 1e400}']
)
def test_headers_that_are_not_ours_are_refused(text):
    with pytest.raises(WireError):
        from_arrays(text, {})


@pytest.mark.parametrize("version", [0, 2, "1", True, None, 1.0])
def test_other_schema_versions_are_refused_by_number(version):
    header, arrays = edited(schema=version)
    with pytest.raises(SchemaVersionError, match="schema"):
        from_arrays(header, arrays)


@pytest.mark.parametrize("change", ["drop", "short", "dtype", "extra", "shape"])
def test_arrays_must_be_exactly_what_the_header_says(change):
    header, arrays = to_arrays(make())
    arrays = dict(arrays)
    if change == "drop":
        arrays.pop("p0000")
    elif change == "short":
        arrays["p0000"] = arrays["p0000"][:-1]
    elif change == "dtype":
        arrays["p0000"] = arrays["p0000"].astype(np.float64)
    elif change == "extra":
        arrays["q"] = np.zeros(1, dtype=np.float32)
    else:
        arrays["p0000"] = arrays["p0000"].reshape(1, -1)
    with pytest.raises(LayoutMismatchError):
        from_arrays(header, arrays)


def test_many_chunks(monkeypatch):
    import fedlora.wire.codec as codec

    monkeypatch.setattr(codec, "CHUNK_ELEMENTS", 7)
    for compression in ("none", "bf16", "int8"):
        header, arrays = to_arrays(make(), compression=compression, rng=np.random.default_rng(0))
        assert len(arrays) > 3
        back = from_arrays(header, arrays)
        for name, block in make().blocks.items():
            np.testing.assert_allclose(back.blocks[name], block, atol=0.05)


def test_fingerprint_sees_one_bit_names_and_specs():
    payload = make()
    base = payload_fingerprint(payload)
    name = next(iter(payload.blocks))
    changed = payload.blocks[name].copy()
    changed.view(np.uint32)[0, 0] ^= 1
    assert payload_fingerprint(replace(payload, blocks={**payload.blocks, name: changed})) != base
    assert payload_fingerprint(replace(payload, recipe=None)) != base
    specs = {**payload.modules, "layer.q": replace(SPEC, scaling=1.0)}
    assert payload_fingerprint(replace(payload, modules=specs)) != base
    shuffled = dict(reversed(list(payload.blocks.items())))
    assert payload_fingerprint(replace(payload, blocks=shuffled)) == base


def test_blocks_of_other_dtypes_are_refused_before_packing():
    for dtype in (np.float64, np.float16, np.int32):
        payload = AdapterPayload("factors", {"m|x": np.zeros(2, dtype=dtype)}, {}, None, "base")
        with pytest.raises(WireError, match="float32"):
            to_arrays(payload)


@pytest.mark.parametrize("twice", ["modules", "notes", "kind", "encoding", "blocks"])
def test_a_module_a_note_or_a_field_named_twice_is_refused(twice):
    header, arrays = to_arrays(replace(make(), notes={"num_examples": 5}))
    head = json.loads(header)
    again = {
        "modules": lambda text: text.replace('"modules":{', '"modules":{' + _first(head["modules"]) + ",", 1),
        "notes": lambda text: text.replace('"notes":{', '"notes":{"num_examples":1000,', 1),
        "kind": lambda text: text.replace("{", '{"kind":"lora_b",', 1),
        "encoding": lambda text: text.replace("{", '{"encoding":"int8",', 1),
        "blocks": lambda text: text.replace(
            '"blocks":[', '"blocks":[' + json.dumps(head["blocks"][0]) + ",", 1
        ),
    }[twice](header)
    assert again != header
    with pytest.raises(LayoutMismatchError, match="twice"):
        from_arrays(again, arrays)


def _first(mapping):
    name, value = next(iter(mapping.items()))
    return f"{json.dumps(name)}:{json.dumps(value)}"


@pytest.mark.parametrize("odd", [[], {}, None, 10**400, -(10**400), True, "x", 1.5, [[]]])
def test_odd_values_in_any_field_of_the_header_are_refused_by_name(odd):
    header, arrays = to_arrays(make())
    head = json.loads(header)
    for key in head:
        if key == "recipe" and (odd is None or isinstance(odd, str)):
            continue
        if key in ("base", "notes", "modules") and type(odd) is type(head[key]):
            continue
        with pytest.raises(WireError):
            from_arrays(json.dumps({**head, key: odd}), arrays)
    module = next(iter(head["modules"]))
    for place in range(4):
        if place == 3 and odd == 1.5:
            continue
        entry = list(head["modules"][module])
        entry[place] = odd
        with pytest.raises(WireError):
            from_arrays(json.dumps({**head, "modules": {module: entry}}), arrays)
