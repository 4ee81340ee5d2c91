"""Checkpoints: exact, atomic, damage noticed, the one before used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedlora.errors import CheckpointError
from fedlora.wire.fingerprint import payload_fingerprint
from fedlora.wire.payload import AdapterPayload, ModuleSpec
from server.checkpoint import Checkpoint, load, load_newest, save


def make(server_round: int, config_hash: str = "c" * 64) -> Checkpoint:
    blocks = {"q|lora_B": np.full((6, 2), server_round, dtype=np.float32)}
    payload = AdapterPayload("lora_b", blocks, {"q": ModuleSpec(6, 4, 2, 2.0)}, "r" * 64, "f" * 64)
    state = {"moment/q": np.arange(3, dtype=np.float64), "count": 4, "clip": 0.125}
    return Checkpoint(server_round, config_hash, payload, state, {"spent": {"a": {"e": 3}}})


def test_everything_comes_back_exactly(tmp_path: Path) -> None:
    path = save(tmp_path, make(7))
    back = load(path)
    assert payload_fingerprint(back.payload) == payload_fingerprint(make(7).payload)
    assert (back.round, back.memory) == (7, {"spent": {"a": {"e": 3}}})
    assert back.state["count"] == 4
    assert back.state["clip"] == 0.125
    assert back.state["moment/q"].dtype == np.float64
    assert back.state["moment/q"].tolist() == [0.0, 1.0, 2.0]


def test_only_the_newest_two_are_kept(tmp_path: Path) -> None:
    for number in range(1, 6):
        save(tmp_path, make(number))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["round-000004.ckpt", "round-000005.ckpt"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_h35_a_damaged_checkpoint_is_noticed_and_the_previous_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, make(5))
    newest = save(tmp_path, make(6))
    data = newest.read_bytes()
    if damage == "truncated":
        newest.write_bytes(data[:-7])
    elif damage == "empty":
        newest.write_bytes(b"")
    else:
        newest.write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    with pytest.raises(CheckpointError):
        load(newest)
    assert load_newest(tmp_path, "c" * 64).round == 5


def test_no_usable_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none usable among 0"):
        load_newest(tmp_path, "c" * 64)
    save(tmp_path, make(1)).write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="none usable among 1"):
        load_newest(tmp_path, "c" * 64)


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    save(tmp_path, make(1, "d" * 64))
    with pytest.raises(CheckpointError, match="belongs to configuration"):
        load_newest(tmp_path, "c" * 64)


def test_a_crash_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, make(3))
    before = path.read_bytes()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.folder.os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, make(3))
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["round-000003.ckpt"]
