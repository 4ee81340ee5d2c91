"""Optimiser state between rounds: as of a round, two generations on disk, memory only where asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedlora.training.slots import SlotStore


def state(value: float) -> dict[str, torch.Tensor]:
    return {"first": torch.full((3,), value), "count": torch.tensor(value)}


def test_a_round_sees_the_state_before_it(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    assert store.load("a", 1) is None
    for number in (1, 2, 5):
        store.save("a", number, state(number))
    for fresh in (store, SlotStore(tmp_path)):
        found = fresh.load("a", 6)
        assert found is not None
        assert found["count"].item() == 5
    again = SlotStore(tmp_path).load("a", 5)
    assert again is not None
    assert again["count"].item() == 2
    assert SlotStore(tmp_path).load("a", 2) is None, "older generations are gone"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("names", [("a", "b"), ("client-0001", "client-00011"), ("x/y", "x.y")])
def test_clients_do_not_mix(tmp_path: Path, names: tuple[str, str]) -> None:
    store = SlotStore(tmp_path)
    store.save(names[0], 1, state(1.0))
    assert SlotStore(tmp_path).load(names[1], 2) is None


def test_memory_is_forgotten_between_runs() -> None:
    store = SlotStore(None)
    store.save("a", 1, state(1.0))
    assert store.load("a", 2) is not None
    store.forget()
    assert store.load("a", 2) is None


def test_a_repeated_round_replaces_its_file(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    store.save("a", 1, state(1.0))
    store.save("a", 1, state(7.0))
    found = SlotStore(tmp_path).load("a", 2)
    assert found is not None
    assert found["count"].item() == 7.0


def test_empty_state_is_not_written(tmp_path: Path) -> None:
    SlotStore(tmp_path).save("a", 1, {})
    assert list(tmp_path.iterdir()) == []
