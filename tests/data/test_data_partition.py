from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from data_helpers import data_config
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.config.schema import ColumnPartition, FlwrPartition
from fedlora.data import bound_groups, check_disjoint, load_rows, partition_rows, split_validation
from fedlora.data.metrics import mean_over_clients
from fedlora.data.partition import dirichlet_partition, partition_table, quantity_partition
from fedlora.data.partition_flwr import partition_with
from fedlora.data.partition_plot import partition_svg
from fedlora.errors import DataError


def make_rows(path: Path, count: int = 300) -> object:
    lines = [
        json.dumps({"text": f"t{number}", "label": number % 3, "user": f"u{number % 7}"})
        for number in range(count)
    ]
    path.write_text("\n".join(lines))
    return load_rows(data_config(source={"kind": "file", "paths": [str(path)]}))


KINDS = [
    {"kind": "dirichlet", "clients": 5, "alpha": 0.3},
    {"kind": "dirichlet", "clients": 5, "alpha": 1e-12},
    {"kind": "quantity", "clients": 4, "alpha": 0.5},
    {"kind": "quantity", "clients": 4},
    {"kind": "column", "column": "user"},
    {"kind": "source", "column": "label"},
    {"kind": "files"},
]


@pytest.mark.parametrize("kind", KINDS)
def test_partitions_cover_everything_once_and_follow_the_seed(
    tmp_path: Path, kind: dict[str, object]
) -> None:
    rows = make_rows(tmp_path / "a.jsonl")
    partition = data_config(partition=kind).partition
    one, same = partition_rows(rows, partition, 7), partition_rows(rows, partition, 7)
    assert {name: list(part) for name, part in one.items()} == {
        name: list(part) for name, part in same.items()
    }
    check_disjoint(one, len(rows))
    assert sum(len(part) for part in one.values()) == 300
    if kind["kind"] in ("dirichlet", "quantity"):
        other = partition_rows(rows, partition, 8)
        assert any(list(one[name]) != list(other[name]) for name in one)
        assert list(one)[:2] == ["client-0000", "client-0001"]


def test_large_alpha_is_even_and_small_alpha_is_skewed() -> None:
    labels = [number % 4 for number in range(4000)]
    even = dirichlet_partition(labels, 4, 1e6, np.random.default_rng(0))
    skewed = dirichlet_partition(labels, 4, 0.05, np.random.default_rng(0))
    counts = partition_table(even, labels)
    assert all(240 <= count <= 260 for client in counts.values() for count in client.values())
    assert max(len(part) for part in skewed.values()) > 1300
    equal = quantity_partition(10, 3, None, np.random.default_rng(0))
    assert sorted(len(part) for part in equal.values()) == [3, 3, 4]


def test_one_client_per_file_and_per_value(tmp_path: Path) -> None:
    for name, count in (("a", 2), ("b", 3)):
        (tmp_path / f"{name}.txt").write_text("x\n" * count)
    rows = load_rows(data_config(source={"kind": "file", "paths": [str(tmp_path / "*.txt")]}))
    split = partition_rows(rows, data_config(partition={"kind": "files"}).partition, 0)
    assert {Path(name).name: len(part) for name, part in split.items()} == {"a.txt": 2, "b.txt": 3}
    users = make_rows(tmp_path / "u.jsonl", 20)
    partition = ColumnPartition(kind="column", column="user", clients=3, min_records=3)
    assert list(partition_rows(users, partition, 0)) == ["u0", "u1", "u2"]
    with pytest.raises(DataError, match="lower min_records"):
        partition_rows(users, ColumnPartition(kind="column", column="user", min_records=4), 0)
    with pytest.raises(DataError, match="row 1: column 'nope' is missing"):
        partition_rows(users, ColumnPartition(kind="column", column="nope"), 0)


def test_a_record_in_two_clients_is_refused() -> None:
    check_disjoint({"a": np.array([0, 1]), "b": np.array([2])}, 3)
    with pytest.raises(DataError, match="1 records are given to more than one client"):
        check_disjoint({"a": np.array([0, 1]), "b": np.array([1])}, 3)
    with pytest.raises(DataError, match=r"outside 0\.\.2"):
        check_disjoint({"a": np.array([3])}, 3)


class HalfPartitioner:
    """Has the surface of a partitioner of flwr-datasets."""

    num_partitions = 2
    overlap = 0
    dataset = None

    def load_partition(self, number: int) -> object:
        size = len(self.dataset) // 2
        return self.dataset.select(range(max(0, number * size - self.overlap), (number + 1) * size))


def test_partitioners_of_flwr_datasets_fit(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    rows = make_rows(tmp_path / "a.jsonl", 10)
    split = partition_with(HalfPartitioner(), rows)
    assert {name: list(part) for name, part in split.items()} == {
        "client-0000": [0, 1, 2, 3, 4],
        "client-0001": [5, 6, 7, 8, 9],
    }
    bad = HalfPartitioner()
    bad.overlap = 2
    with pytest.raises(DataError, match="2 records"):
        partition_with(bad, rows)


class CutPartitioner(HalfPartitioner):
    """Cuts at stated sizes; what is left over belongs to nobody."""

    def __init__(self, partition_sizes: list[int], partition_by: str = "label", seed: int = 42) -> None:
        if min(partition_sizes) < 0:
            raise ValueError("partition_sizes must be >= 0")
        self.sizes, self.by, self.seed = partition_sizes, partition_by, seed
        self.num_partitions = len(partition_sizes)
        MADE.append(self)

    def load_partition(self, number: int) -> object:
        assert self.dataset.column_names == [self.by, "__position__"], "no other column is shown"
        first = sum(self.sizes[:number])
        return self.dataset.select(range(first, first + self.sizes[number]))


MADE: list[CutPartitioner] = []


def flwr(rows: Any, partitioner: str = "CutPartitioner", **arguments: object) -> dict[str, list[int]]:
    partition = FlwrPartition(kind="flwr", partitioner=partitioner, arguments=arguments)
    return {name: part.tolist() for name, part in partition_rows(rows, partition, 11).items()}


@pytest.fixture
def flwr_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    module = ModuleType("flwr_datasets.partitioner")
    module.CutPartitioner = CutPartitioner  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flwr_datasets", ModuleType("flwr_datasets"))
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", module)


@pytest.mark.usefixtures("flwr_datasets")
def test_a_partitioner_of_flwr_datasets_is_named_in_the_configuration(tmp_path: Path) -> None:
    rows = make_rows(tmp_path / "a.jsonl", 10)
    split = flwr(rows, partition_sizes=[5, 0, 2], partition_by="label")
    assert split == {"client-0000": [0, 1, 2, 3, 4], "client-0001": [], "client-0002": [5, 6]}
    assert MADE[-1].seed == 11, "the run's seed"
    flwr(rows, partition_sizes=[5], partition_by="label", seed=3)
    assert MADE[-1].seed == 3


@pytest.mark.usefixtures("flwr_datasets")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partitioner": "IidPartitioner"}, "has no IidPartitioner; it has CutPartitioner"),
        ({"partition_sizes": [-1]}, "CutPartitioner refuses them: partition_sizes must be >= 0"),
        ({"alpha": 1.0}, "CutPartitioner refuses them: .*alpha"),
        ({"partition_sizes": [11], "partition_by": "label"}, "cannot split these records .IndexError."),
        ({"partition_sizes": [1], "partition_by": "topic"}, "cannot split these records"),
    ],
)
def test_a_partitioner_of_flwr_datasets_that_does_not_fit_is_one_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        flwr(make_rows(tmp_path / "a.jsonl", 10), **{"partition_sizes": [5], **changes})


def test_flwr_datasets_that_is_not_installed_is_said_with_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(DataError, match="pip install flwr-datasets"):
        flwr(make_rows(tmp_path / "a.jsonl", 10))


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_h18_groups_are_bounded_and_only_the_excess_is_dropped(groups: list[int], most: int) -> None:
    kept = bound_groups(groups, np.arange(len(groups)), most)
    for group in set(groups):
        members = [place for place in kept if groups[place] == group]
        assert len(members) == min(most, groups.count(group))


@pytest.mark.parametrize("records", [0, 1, 2, 4, 5, 10])
def test_h29_a_split_of_tiny_clients_loses_and_repeats_nothing(records: int) -> None:
    index = np.arange(100, 100 + records)
    for fraction in (0.0, 0.2, 0.9):
        train, held = split_validation(index, fraction, 3)
        assert sorted([*train, *held]) == list(index)
        assert fraction > 0 or len(held) == 0
        assert list(split_validation(index, fraction, 3)[1]) == list(held)


def test_one_record_more_or_less_moves_no_other_between_training_and_validation() -> None:
    index = np.arange(1000)
    train, held = split_validation(index, 0.2, 3)
    assert 120 < len(held) < 280  # six standard deviations of a coin
    for gone in (0, 500, 999):
        fewer, _ = split_validation(np.delete(index, gone), 0.2, 3)
        assert set(train) - set(fewer) <= {gone}
        assert set(fewer) <= set(train)
    assert list(split_validation(index, 0.2, 4)[1]) != list(held)


def test_h29_the_mean_is_over_clients_with_data() -> None:
    per_client = {"a": None, "b": {"accuracy": 0.5}, "c": {"accuracy": 1.0, "f1": float("nan")}}
    assert mean_over_clients(per_client) == {"accuracy": 0.75}
    assert mean_over_clients({"a": None}) == {}
    assert mean_over_clients({}) == {}


def test_partition_plot_has_every_count_and_escapes_names() -> None:
    from xml.etree import ElementTree

    table = {"a<b": {"x": 3, "y": 1}, "client-0001": {}, "c": {"y": 2}}
    drawn = ElementTree.fromstring(partition_svg(table))
    titles = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert {"x: 3", "y: 1", "y: 2"} <= set(titles)
    texts = [node.text for node in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "a<b" in texts
    assert "4" in texts
    many = partition_svg({f"c{number}": {"x": 1} for number in range(100)})
    assert "and 40 more clients" in many
    ElementTree.fromstring(partition_svg({}))
