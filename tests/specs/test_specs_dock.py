"""Specifications, matching and the dock."""

from __future__ import annotations

import base64
import dataclasses
import time

import numpy as np
import pytest

from fedlora.errors import DataError, LayoutMismatchError, PrivacyParameterError, UnsupportedEventError
from fedlora.specs.dock import Dock
from fedlora.specs.intrinsic import refuse_intrinsic
from fedlora.specs.types import PrivacyStatement, Specification
from fedlora.specs.vectors import (
    PublicProjection,
    compact_vector,
    cosine,
    distortion,
    expanded_cosine,
    specification_vector,
    unit_vector,
)
from fedlora.wire.payload import AdapterPayload, ModuleSpec

NONE = PrivacyStatement(guarantee="none")


def make_specification(name: str, vector: np.ndarray, **changes) -> Specification:
    fields = {
        "name": name,
        "vector": unit_vector(np.asarray(vector, np.float32)),
        "kind": "model",
        "base_fingerprint": "base",
        "recipe": "recipe",
        "projection": "none",
        "privacy": NONE,
        "licence": "Apache-2.0",
    }
    return Specification(**{**fields, **changes})


def make_payload(
    rng: np.random.Generator, kind: str = "lora_b", out: int = 6, rank: int = 2
) -> AdapterPayload:
    modules = {f"layer.{i}": ModuleSpec(out, 5, rank, 1.0) for i in range(3)}
    blocks = {f"{m}|lora_B": rng.standard_normal((out, rank)).astype(np.float32) for m in modules}
    return AdapterPayload(kind, blocks, modules, "recipe", "base")


@pytest.fixture
def dock(tmp_path):
    with_file = Dock(tmp_path / "dock.sqlite")
    yield with_file
    with_file.close()


def test_match_is_exact_and_sorted(dock):
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((200, 32))
    for i, vector in enumerate(vectors):
        dock.add(make_specification(f"m{i}", vector))
    query = make_specification("q", rng.standard_normal(32), kind="task")
    units = np.stack([unit_vector(v.astype(np.float32)) for v in vectors])
    want = np.argsort(-(units @ query.vector), kind="stable")[:7]
    found = dock.match(query, 7)
    assert [m.name for m in found] == [f"m{i}" for i in want]
    assert [m.cosine for m in found] == sorted((m.cosine for m in found), reverse=True)


def test_only_comparable_entries_match(dock):
    vector = np.ones(8)
    dock.add(make_specification("other-base", vector, base_fingerprint="another"))
    dock.add(make_specification("other-recipe", vector, recipe="another"))
    with pytest.raises(DataError, match="comparable"):
        dock.match(make_specification("q", vector))
    dock.add(make_specification("same", vector))
    assert [m.name for m in dock.match(make_specification("q", vector))] == ["same"]


def test_kind_filter_looks_past_the_first_candidates(dock):
    rng = np.random.default_rng(1)
    base = rng.standard_normal(16)
    for i in range(120):
        dock.add(make_specification(f"t{i}", base + 0.01 * rng.standard_normal(16), kind="task"))
    dock.add(make_specification("far-model", -base))
    assert [m.name for m in dock.match(make_specification("q", base), 3)] == ["far-model"]


def test_entries_survive_reopening(tmp_path):
    path = tmp_path / "dock.sqlite"
    first = Dock(path)
    added = make_specification("kept", np.arange(1, 9), metadata={"task": "news", "labels": 5})
    first.add(added)
    first.close()
    second = Dock(path)
    again = second.get("kept")
    assert again.metadata == {"task": "news", "labels": 5}
    np.testing.assert_array_equal(again.vector, added.vector)
    assert second.match(make_specification("q", np.arange(1, 9)))[0].name == "kept"
    second.close()


def test_name_is_taken_once(dock):
    dock.add(make_specification("a", np.ones(4)))
    with pytest.raises(DataError, match="already has"):
        dock.add(make_specification("a", np.ones(4)))
    assert len(dock) == 1


@pytest.mark.parametrize(
    "vector",
    [np.zeros(4, np.float32), np.array([np.nan, 1], np.float32), np.array([np.inf, 1], np.float32)],
)
def test_vectors_without_direction_are_refused(vector):
    with pytest.raises(DataError):
        unit_vector(vector)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../../etc/passwd"},
        {"name": ""},
        {"kind": "other"},
        {"vector": np.ones(4, np.float32)},
        {"vector": np.ones((2, 2), np.float32) / 2},
        {"vector": np.full(2048, 1 / np.sqrt(2048), np.float32)},
        {"vector": np.array([1.0, 0.0])},
        {"licence": ""},
    ],
)
def test_malformed_specifications_are_refused(change):
    fields = dataclasses.asdict(make_specification("a", np.ones(4)))
    fields["privacy"] = NONE
    with pytest.raises(DataError):
        Specification(**{**fields, **change})


def test_intrinsic_mode_is_refused_when_the_recipe_is_public(dock):
    claim = PrivacyStatement(guarantee="conditional", conditions=("secret lora_A",))
    with pytest.raises(UnsupportedEventError, match="no privacy"):
        dock.add(make_specification("a", np.ones(4), privacy=claim))
    with pytest.raises(UnsupportedEventError, match="product"):
        refuse_intrinsic(claim, recipe_public=False, expanded_released=True)
    refuse_intrinsic(claim, recipe_public=False, expanded_released=False)
    refuse_intrinsic(NONE, recipe_public=True, expanded_released=True)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), 0.0, -1.0, True])
def test_a_dp_statement_without_its_meaning_is_refused(bad):
    full = {
        "guarantee": "dp",
        "epsilon": 1.0,
        "delta": 1e-5,
        "unit": "record",
        "adjacency": "add_or_remove",
        "adversary": "anyone who reads the dock",
        "accountant": "pld",
        "sampling": "poisson",
        "num_events": 3,
    }
    PrivacyStatement(**full)
    with pytest.raises(PrivacyParameterError):
        PrivacyStatement(**{**full, "epsilon": bad})
    with pytest.raises(PrivacyParameterError):
        PrivacyStatement(**{**full, "unit": None})


def test_compact_vector_follows_the_chosen_layers():
    payload = make_payload(np.random.default_rng(0))
    assert compact_vector(payload).shape == (3 * 12,)
    np.testing.assert_array_equal(
        compact_vector(payload, ["layer.2"]), payload.blocks["layer.2|lora_B"].ravel()
    )
    with pytest.raises(LayoutMismatchError, match=r"layer\.9"):
        compact_vector(payload, ["layer.9"])
    with pytest.raises(LayoutMismatchError, match="lora_fa"):
        compact_vector(dataclasses.replace(payload, kind="factors"))


def test_projection_is_public_and_keeps_cosines():
    rng = np.random.default_rng(3)
    dim = 9000
    left = rng.standard_normal(dim).astype(np.float32)
    right = (0.8 * left + 0.6 * rng.standard_normal(dim)).astype(np.float32)
    projection = PublicProjection(dim, 1024)
    a, b = projection.apply(np.stack([left, right]))
    np.testing.assert_array_equal(
        PublicProjection(dim, 1024).apply(left[None])[0], projection.apply(left[None])[0]
    )
    assert abs(cosine(a, b) - cosine(left, right)) < 4 / np.sqrt(1024)


def test_specification_vector_projects_long_adapters():
    payload = make_payload(np.random.default_rng(1), out=400, rank=2)
    vector, name = specification_vector(payload)
    assert vector.shape == (1024,)
    assert name == "gaussian-2400-1024-0"


def test_expanded_cosine_equals_the_dense_one():
    rng = np.random.default_rng(4)
    lora_a = {f"l{i}": rng.standard_normal((3, 20)) for i in range(2)}
    left = {k: rng.standard_normal((7, 3)) for k in lora_a}
    right = {k: rng.standard_normal((7, 3)) for k in lora_a}
    dense = [np.concatenate([(side[k] @ lora_a[k]).ravel() for k in lora_a]) for side in (left, right)]
    want = dense[0] @ dense[1] / np.linalg.norm(dense[0]) / np.linalg.norm(dense[1])
    assert expanded_cosine(left, right, lora_a) == pytest.approx(want, abs=1e-12)
    assert distortion(left, right, lora_a) >= 0


def test_distortion_vanishes_for_wide_layers():
    rng = np.random.default_rng(5)

    def mean_distortion(width: int) -> float:
        values = []
        for _ in range(10):
            lora_a = {"l": rng.standard_normal((4, width)) / 2}
            values.append(
                distortion({"l": rng.standard_normal((9, 4))}, {"l": rng.standard_normal((9, 4))}, lora_a)
            )
        return float(np.mean(values))

    assert mean_distortion(4000) < 0.25 * mean_distortion(16)


@pytest.mark.long
def test_top_ten_of_a_hundred_thousand_within_fifty_milliseconds_and_exact(tmp_path):
    """CPU time of all threads together, so that other load on the machine does not count."""
    rng = np.random.default_rng(6)
    dock = Dock(tmp_path / "dock.sqlite")
    rows = rng.standard_normal((100_000, 1024), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    identity = dock.add(make_specification("seed", rows[0]))
    group = dock._groups[next(iter(dock._groups))]
    for place in range(1, len(rows)):
        group.append(identity + place, "model", rows[place])
    times, found = [], 0
    for _ in range(20):
        query = unit_vector(rng.standard_normal(1024).astype(np.float32))
        start = time.process_time()
        best = group.best(query, 10, "model", None)
        times.append(time.process_time() - start)
        exact = np.argsort(-(rows.astype(np.float64) @ query.astype(np.float64)))[:10] + identity
        found += len({one for one, _ in best} & set(exact.tolist()))
    assert sorted(times)[10] < 0.05
    assert found / 200 >= 0.95
    times = []
    for place in range(20):  # one more entry moves none of those that are there
        start = time.process_time()
        dock.add(make_specification(f"more-{place}", rows[place]))
        times.append(time.process_time() - start)
    assert max(times) < 0.25
    assert group.count == len(rows) + 20
    dock.close()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 4095, 4096, 4097, 9000])
def test_vectors_in_blocks_are_found_in_every_place(count):
    from fedlora.specs.dock import _Group

    rng = np.random.default_rng(8)
    rows = rng.standard_normal((count, 4)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    group = _Group(4)
    for place, row in enumerate(rows):
        group.append(place, ("model", "task")[place % 2], row)
    np.testing.assert_array_equal(np.concatenate(list(group.parts())), rows)
    for first in {0, 1, count // 2, count - 1}:
        np.testing.assert_array_equal(np.concatenate(list(group.parts(first)) or [rows[:0]]), rows[first:])
    query = rows[-1]
    want = np.argsort(-(rows @ query), kind="stable")[:3]
    assert [place for place, _ in group.best(query, 3, None, None)] == want.tolist()


# --- service ---------------------------------------------------------------------------------------

TOKEN = "0123456789abcdef"


@pytest.fixture
def service(dock):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from fedlora.specs.service import make_app

    return TestClient(make_app(dock, (TOKEN,)), headers={"Authorization": f"Bearer {TOKEN}"})


def entry(name="a", vector=None):
    from fedlora.specs.service import entry_json

    return entry_json(make_specification(name, np.ones(8) if vector is None else vector))


def test_service_round_trip(service):
    assert service.post("/v1/specifications", json=entry("a")).status_code == 201
    assert service.post("/v1/specifications", json=entry("a")).status_code == 409
    shown = service.get("/v1/specifications/a").json()
    assert shown["privacy"]["guarantee"] == "none"
    assert "vector" not in shown
    answer = service.post("/v1/match", json={"query": entry("q"), "top_k": 1}).json()
    assert answer["matches"][0]["name"] == "a"
    assert service.get("/v1/specifications/b").status_code == 404


def test_service_refuses_strangers(service, dock):
    for header in (
        {"Authorization": ""},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
    ):
        assert service.post("/v1/specifications", json=entry(), headers=header).status_code == 401
    assert len(dock) == 0
    assert service.get("/healthz", headers={"Authorization": ""}).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"vector": "not base64!"},
        {"vector": base64.b64encode(b"abc").decode()},
        {"vector": base64.b64encode(np.zeros(8, "<f4").tobytes()).decode()},
        {"vector": base64.b64encode(np.full(8, np.nan, "<f4").tobytes()).decode()},
        {"name": "../x"},
        {"kind": "weird"},
        {"unknown": 1},
        {"metadata": {"x": [1]}},
        {"metadata": {f"k{i}": 1 for i in range(60)}},
        {"privacy": {"guarantee": "dp", "epsilon": 1.0, "delta": 1e-5}},
        {"privacy": {"guarantee": "conditional"}},
    ],
)
def test_service_stores_nothing_malformed(service, dock, change):
    assert service.post("/v1/specifications", json={**entry(), **change}).status_code == 422
    assert len(dock) == 0


def test_service_refuses_large_bodies(service, dock):
    big = {**entry(), "metadata": {"x": "y" * 100_000}}
    assert service.post("/v1/specifications", json=big).status_code == 413
    assert service.post("/v1/specifications", content=iter([b"{", b"}"])).status_code == 411
    assert service.post("/v1/specifications", content=b"\xff\xfe not json").status_code == 422
    assert len(dock) == 0
