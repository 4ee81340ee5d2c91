"""Optimiser state between rounds: as of a round, on disk while a checkpoint asks for it, memory only where asked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from fedlora.errors import FileAccessError
from fedlora.training.slots import SlotStore, drop_states_after


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


def test_a_state_that_does_not_fit_on_the_disk_is_named_and_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk left an empty file; the client then failed in every later process that read it."""
    store = SlotStore(tmp_path / "clients")
    store.save("a", 1, state(1.0))

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(FileAccessError, match=r"clients/.*000002.*No space left"):
            store.save("a", 2, state(2.0))
    assert len(list((tmp_path / "clients").iterdir())) == 1
    for one in (store, SlotStore(tmp_path / "clients")):
        found = one.load("a", 3)
        assert found is not None
        assert found["count"].item() == 1.0


@pytest.mark.parametrize("taken", [(1, 2, 3, 4, 5, 6), (1, 3, 6), (2, 5, 6), (6,)])
def test_a_state_stays_until_no_checkpoint_on_disk_asks_for_it(
    tmp_path: Path, taken: tuple[int, ...]
) -> None:
    """While round 6 runs, a run may still go on from the checkpoint of round 4 where that of round 5 is damaged."""
    store = SlotStore(tmp_path)
    for number in taken:
        store.save("a", number, state(number))
    for checkpoint in (4, 5, 6):
        found = SlotStore(tmp_path).load("a", checkpoint + 1)
        expected = max((number for number in taken if number <= checkpoint), default=None)
        assert (None if found is None else found["count"].item()) == expected
    assert len(list(tmp_path.iterdir())) <= 3


def test_states_of_rounds_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    """A client that the repeated round does not sample would go on from a round that never was."""
    store = SlotStore(tmp_path)
    for client, number in (("a", 3), ("a", 4), ("b", 4)):
        SlotStore(tmp_path).save(client, number, state(number))
    drop_states_after(tmp_path, 3)
    found = store.load("a", 9)
    assert found is not None
    assert found["count"].item() == 3
    assert store.load("b", 9) is None
    drop_states_after(tmp_path / "none", 0)


def test_a_file_that_a_killed_worker_left_cut_gives_way_to_the_state_before_it(tmp_path: Path) -> None:
    store = SlotStore(tmp_path)
    store.save("a", 1, state(1.0))
    store.save("a", 2, state(2.0))
    newest = max(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:20])
    found = SlotStore(tmp_path).load("a", 3)
    assert found is not None
    assert found["count"].item() == 1.0
    newest.write_bytes(b"")
    assert SlotStore(tmp_path).load("a", 3) is not None
