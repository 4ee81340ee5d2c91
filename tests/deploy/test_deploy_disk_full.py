"""A full disk at the server or at a site in the middle of a run: a clear end, nothing lost, the run goes on afterwards.

The disk is full for this process only: no file may grow (RLIMIT_FSIZE), which needs no special right.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_deploy_mirror import NAMES, World, world

from fedlora.data import Task
from fedlora.errors import FileAccessError
from fedlora.training.port import Packet
from fedlora.training.requests import RoundReply, RoundRequest
from fedlora.training.service_site import Site
from fedlora.training.shelf import Records
from server import loop
from server.checkpoint import save

__all__ = ["world"]
ROUNDS = 4
FULL_IN = 3
"""The round in which there is no room any more."""


def fill() -> None:
    """Let no file of this process grow."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))


def free() -> None:
    """Make room again."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    yield
    free()


def lines(world: World) -> list[dict[str, Any]]:
    """The run's rounds."""
    return [json.loads(line) for line in (world.root / "runs" / "one" / "metrics.jsonl").open()]


def after_the_answers(name: str, answer: Packet) -> Packet:
    """Fill the disk when the last site has answered: the server has something to write that does not fit."""
    if (name, answer.header["round"]) == (NAMES[-1], FULL_IN):
        fill()
    return answer


def after_the_checkpoint(folder: Path, checkpoint: Any) -> Path:
    """Fill the disk when the round's checkpoint is written and its line in the metrics is not."""
    path = save(folder, checkpoint)
    if checkpoint.round == FULL_IN:
        fill()
    return path


def before_the_checkpoint(folder: Path, checkpoint: Any) -> Path:
    """Fill the disk when only the round's checkpoint is missing."""
    if checkpoint.round == FULL_IN:
        fill()
    return save(folder, checkpoint)


MOMENTS: dict[str, tuple[Any, Any, int]] = {
    "receipts": (after_the_answers, save, FULL_IN - 1),
    "the checkpoint": (None, before_the_checkpoint, FULL_IN - 1),
    "the metrics": (None, after_the_checkpoint, FULL_IN),
}
"""What does not fit: (a change of answers, the way to save, newest whole checkpoint)."""


@pytest.mark.parametrize("what", list(MOMENTS))
def test_a_full_disk_at_the_server_ends_the_run_by_name_and_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    change, saving, newest = MOMENTS[what]
    monkeypatch.setattr(loop, "save", saving)
    with pytest.raises(
        FileAccessError, match=r"the run folder cannot be written: .*cannot be written"
    ) as caught:
        world.run("one", rounds=ROUNDS, change=change)
    free()
    monkeypatch.undo()
    assert str(world.root / "runs") in str(caught.value)
    folder = world.root / "runs" / "one"
    assert [line["round"] for line in lines(world)] == list(range(FULL_IN))
    left = [path for path in folder.rglob("*") if path.name.startswith(".")]
    assert not left, "a half-written file is left"
    assert max((folder / "checkpoints").iterdir()).name == f"round-{newest:06d}.ckpt"
    for name in NAMES:
        assert [row.server_round for row in world.spent(name).rounds] == list(range(1, FULL_IN + 1))

    result, _ = world.run("one", rounds=ROUNDS, resume=True)
    assert result.status == "finished"
    assert [line["round"] for line in lines(world)] == list(range(ROUNDS + 1))
    assert [line["accepted"] for line in lines(world)[1:]] == [len(NAMES)] * ROUNDS
    for name in NAMES:
        rows = world.spent(name).rounds
        assert [row.server_round for row in rows] == list(range(1, ROUNDS + 1)), "a round was charged twice"
        assert {row.state for row in rows} == {"committed"}
    assert result.epsilon == pytest.approx(max(world.spent(name).epsilon for name in NAMES))


def test_a_full_disk_at_a_site_refuses_the_round_before_a_record_is_opened(world: World) -> None:
    opened: list[int] = []

    def watch(site: Site) -> None:
        if site.config.site.name != NAMES[0]:
            return
        handle, open_ = site.trainer.handle, site.shelf.open
        now = [0]

        def full(request: RoundRequest) -> RoundReply:
            now[0] = request.server_round
            if request.server_round == FULL_IN:
                fill()
            try:
                return handle(request)
            finally:
                free()

        def seen(client: str, task: Task) -> Records:
            opened.append(now[0])
            return open_(client, task)

        site.trainer.handle = full  # type: ignore[method-assign]
        site.shelf.open = seen  # type: ignore[method-assign]

    result, _ = world.run("one", rounds=ROUNDS, prepare=watch)
    assert result.status == "finished"
    assert FULL_IN not in opened
    assert set(opened) == {number for number in range(1, ROUNDS + 1) if number != FULL_IN}
    told = lines(world)[FULL_IN]
    assert (told["status"], told["accepted"]) == ("ok", 1)
    why = {**told["failed"], **told["refused"]}[NAMES[0]]
    assert "nothing may be released until it is writable again" in why
    charged = [row.server_round for row in world.spent(NAMES[0]).rounds]
    assert charged == [number for number in range(1, ROUNDS + 1) if number != FULL_IN]
    assert result.epsilon == pytest.approx(world.spent(NAMES[1]).epsilon)


def test_a_start_that_is_noted_already_is_not_noted_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(_: Path, checkpoint: Any) -> Path:
        raise RuntimeError(f"killed in round {checkpoint.round}")

    monkeypatch.setattr(loop, "save", never)
    with pytest.raises(RuntimeError, match="killed"):
        world.run("one", rounds=1)
    monkeypatch.undo()
    assert [line["round"] for line in lines(world)] == [0]
    world.run("one", rounds=1, resume=True)
    assert [line["round"] for line in lines(world)] == [0, 1]
