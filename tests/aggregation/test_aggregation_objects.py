"""Payload objects that are not what they seem: recorded as rejected, never raised, never in the sum; tied names."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from aggregation_cases import KINDS, aggregator, dense, random_payload, relative, run, truncated

from fedlora.wire import AdapterLayout, ModuleSpec, payload_fingerprint


def first(payload):
    return next(iter(payload.blocks))


def with_block(change):
    return lambda p: replace(p, blocks={**p.blocks, first(p): change(p.blocks[first(p)])})


def with_spec(**change):
    def edit(p):
        name = next(iter(p.modules))
        return replace(p, modules={**p.modules, name: replace(p.modules[name], **change)})

    return edit


def hidden_nan(block):
    """NaN under a mask: NumPy's own sums would step over it."""
    bad = block.copy()
    bad.flat[0] = np.nan
    return np.ma.masked_array(bad, mask=np.isnan(bad))


class Silent(np.ndarray):
    """An array whose products are always zero."""

    def __array_function__(self, func, types, args, kwargs):
        return 0.0


ODD = {
    "none": with_block(lambda b: None),
    "list": with_block(lambda b: b.tolist()),
    "number": with_block(lambda b: 1.0),
    "numpy scalar": with_block(lambda b: np.float32(1)),
    "objects": with_block(lambda b: b.astype(object)),
    "complex": with_block(lambda b: b.astype(np.complex64)),
    "float64": with_block(lambda b: b.astype(np.float64)),
    "half": with_block(lambda b: b.astype(np.float16)),
    "other byte order": with_block(lambda b: b.astype(">f4")),
    "masked nan": with_block(hidden_nan),
    "subclass": with_block(lambda b: (b * np.float32(np.nan)).view(Silent)),
    "transposed": with_block(lambda b: b.T),
    "module none": lambda p: replace(p, modules=dict.fromkeys(p.modules)),
    "module list": lambda p: replace(p, modules={m: [s.out_features] for m, s in p.modules.items()}),
    "rank 0": with_spec(rank=0),
    "rank huge": with_spec(rank=2**40),
    "rank true": with_spec(rank=True),
    "scaling nan": with_spec(scaling=float("nan")),
    "scaling inf": with_spec(scaling=float("inf")),
    "scaling negative": with_spec(scaling=-1.0),
    "bytes name": lambda p: replace(p, blocks={k.encode(): v for k, v in p.blocks.items()}),
    "number name": lambda p: replace(p, blocks=dict(enumerate(p.blocks.values()))),
    "upper case twin": lambda p: replace(p, blocks={**p.blocks, first(p).upper(): p.blocks[first(p)]}),
    "twin with a prefix": lambda p: replace(p, blocks={**p.blocks, "module." + first(p): p.blocks[first(p)]}),
    "twin module": lambda p: replace(p, modules={**p.modules, "a.q.": next(iter(p.modules.values()))}),
    "half of a module": lambda p: replace(p, blocks={k: v for k, v in p.blocks.items() if k != first(p)}),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", KINDS)
def test_an_odd_object_is_rejected_by_name_and_leaves_no_trace(kind, odd):
    down, up = KINDS[kind]
    current = random_payload(down, 1)
    good = {f"c{i}": random_payload(up, 10 + i) for i in range(3)}
    wanted = run(kind, current, good).payload
    agg = aggregator(kind)
    agg.begin(current)
    agg.add("c0", good["c0"])
    assert agg.add("evil", ODD[odd](random_payload(up, 99))) is False
    assert "evil" in agg.rejected["evil"]
    agg.add("c1", good["c1"])
    agg.add("c2", good["c2"])
    result = agg.finish()
    assert result.accepted == ("c0", "c1", "c2")
    assert set(result.rejected) == {"evil"}
    for name, block in wanted.blocks.items():
        np.testing.assert_array_equal(result.payload.blocks[name], block)


@pytest.mark.parametrize("kind", ["product", "stack", "aligned", "factor_mean"])
def test_a_rank_that_is_no_whole_number_is_rejected(kind):
    agg = aggregator(kind)
    agg.begin(random_payload("factors", 1))
    assert not agg.add("evil", with_spec(rank=3.0)(random_payload("factors", 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_and_memory_orders_of_equal_numbers_give_the_same_bits(kind):
    down, up = KINDS[kind]
    current = random_payload(down, 1)
    plain = {f"c{i}": random_payload(up, 10 + i) for i in range(3)}
    rng = random.Random(0)

    def rewrite(block):
        choice = rng.randrange(4)
        if choice == 0:
            return np.asfortranarray(block)
        if choice == 1:
            frozen = block.copy()
            frozen.flags.writeable = False
            return frozen
        if choice == 2:
            return np.ascontiguousarray(block[::-1])[::-1]
        return np.repeat(block, 2, axis=0)[::2]

    other = {
        c: replace(p, blocks={n: rewrite(b) for n, b in reversed(p.blocks.items())}) for c, p in plain.items()
    }
    one, two = run(kind, current, plain).payload, run(kind, current, other).payload
    for name, block in one.blocks.items():
        np.testing.assert_allclose(two.blocks[name], block, rtol=0, atol=2e-6 * np.abs(block).max())


TIED = ModuleSpec(8, 8, 2, 1.5)
TIED_LAYOUT = AdapterLayout(
    {"encoder.embed": TIED, "decoder.embed": TIED, "decoder.embed2": TIED}, {}, "base"
)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_names_that_share_one_array_are_averaged_each_once(kind):
    """Two modules may come as one and the same array: no name is summed twice and none is written through."""
    down, up = KINDS[kind]
    current = random_payload(down, 1, TIED_LAYOUT)
    if down == "frames":
        blocks = {n: current.blocks["encoder.embed|" + n.split("|")[1]] for n in current.blocks}
        current = replace(current, blocks=blocks)

    def tie(payload):
        shared = {n: payload.blocks["encoder.embed|" + n.split("|")[1]] for n in payload.blocks}
        return replace(payload, blocks=shared)

    tied = {f"c{i}": tie(random_payload(up, 20 + i, TIED_LAYOUT)) for i in range(4)}
    apart = {c: replace(p, blocks={n: b.copy() for n, b in p.blocks.items()}) for c, p in tied.items()}
    before = {c: {n: b.copy() for n, b in p.blocks.items()} for c, p in tied.items()}
    one = run(kind, current, tied, layout=TIED_LAYOUT)
    two = run(kind, current, apart, layout=TIED_LAYOUT)
    for name, block in two.payload.blocks.items():
        np.testing.assert_array_equal(one.payload.blocks[name], block)
    for client, blocks in before.items():
        for name, block in blocks.items():
            np.testing.assert_array_equal(tied[client].blocks[name], block)
    if kind == "product":
        mean = np.mean([dense(p, "encoder.embed") for p in apart.values()], axis=0)
        for module in TIED_LAYOUT.modules:
            assert relative(dense(one.payload, module), truncated(mean, 2)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_update_object_from_two_clients_counts_twice(kind):
    down, up = KINDS[kind]
    current, same = random_payload(down, 1), random_payload(up, 2)
    other = random_payload(up, 3)
    shared = run(kind, current, {"a": same, "b": same, "c": other}).payload
    copied = replace(same, blocks={n: b.copy() for n, b in same.blocks.items()})
    apart = run(kind, current, {"a": same, "b": copied, "c": other}).payload
    for name, block in apart.blocks.items():
        np.testing.assert_array_equal(shared.blocks[name], block)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_answers_again_after_a_rejection_is_used_once(kind):
    down, up = KINDS[kind]
    agg = aggregator(kind)
    agg.begin(random_payload(down, 1))
    bad = ODD["masked nan"](random_payload(up, 2))
    assert not agg.add("a", bad)
    assert agg.add("a", random_payload(up, 2))
    assert not agg.add("a", random_payload(up, 2))
    assert agg.finish().accepted == ("a",)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["blocks", "modules", "base_fingerprint", "notes", "scaling", None])
def test_a_field_of_another_type_is_rejected_by_name_and_leaves_no_trace(kind, field):
    """Nothing like it comes off the wire; a caller of `Aggregator.add` gets its reason all the same."""
    down, up = KINDS[kind]
    current, good = random_payload(down, 0), random_payload(up, 5, scale=0.1)
    bad = None
    if field == "scaling":
        path, spec = next(iter(good.modules.items()))
        bad = replace(good, modules={**good.modules, path: replace(spec, scaling="2")})
    elif field is not None:
        bad = replace(good, **{field: None})
    agg = aggregator(kind)
    agg.begin(current)
    assert agg.add("a", good)
    assert not agg.add("b", bad)
    result = agg.finish()
    assert result.accepted == ("a",)
    assert result.rejected["b"]
    assert payload_fingerprint(result.payload) == payload_fingerprint(run(kind, current, {"a": good}).payload)
