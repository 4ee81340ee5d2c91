"""A record that does not fit the task fails its client in every round alike; no record is read before a reservation."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from trainer_helpers import SECRET, World, make_world

from fedlora.config.schema import DataConfig
from fedlora.data import Rows, load_rows
from fedlora.errors import DataError
from fedlora.ledger import Account, open_ledger
from fedlora.training.charging import LedgerKeeper
from fedlora.training.policy import Policy
from fedlora.training.service_site import SiteShelf
from fedlora.training.trainer import Trainer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("unfit"))


BAD = {
    "unknown label": {"text": "red", "label": "topsecret"},
    "no text": {"text": None, "label": "warm"},
    "text of another kind": {"text": ["topsecret"], "label": "warm"},
    "no label": {"text": "topsecret", "label": ""},
    "missing column": {"text": "topsecret"},
}


@pytest.mark.parametrize("fault", BAD)
def test_one_bad_record_fails_its_client_alone_in_every_round_and_costs_one(
    fault: str, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [json.dumps({"text": "red up", "label": "warm"})] * 40
    (tmp_path / "a.jsonl").write_text("\n".join([*good, json.dumps(BAD[fault]), *good]))
    rows = load_rows(
        DataConfig.model_validate_json(
            json.dumps(
                {"source": {"kind": "file", "paths": [str(tmp_path / "a.jsonl")]}, "name": "words-2026"}
            )
        )
    )

    def split(_: Rows) -> dict[str, np.ndarray]:
        return {"client-0000": np.arange(0, 30), "client-0001": np.arange(30, 81)}

    with open_ledger(tmp_path / "ledger.sqlite", secret=SECRET) as ledger:
        shelf = SiteShelf("edge", lambda: rows, split, None)
        trainer = Trainer(shelf, Policy(), LedgerKeeper(ledger))
        for number in (1, 2, 3):
            with caplog.at_level(logging.ERROR):
                reply = trainer.handle(world.request(number))
            assert {one.client: one.status for one in reply.replies} == {
                "client-0000": "ok",
                "client-0001": "failed",
            }
            told = json.dumps(reply.replies[1].error)
            assert "topsecret" not in told
            assert "a.jsonl" not in told
        assert len(ledger.rounds(Account("client-0000", "words-2026"))) == 3
        assert len(ledger.rounds(Account("client-0001", "words-2026"))) == 1
    assert "a.jsonl, row 41" in caplog.text
    assert "topsecret" not in caplog.text


def test_nothing_is_read_before_its_cost_is_on_disk(world: World, tmp_path: Path) -> None:
    spent_when_read: list[int] = []
    with open_ledger(tmp_path / "ledger.sqlite", secret=SECRET) as ledger:

        def load() -> Rows:
            spent_when_read.append(len(ledger.rounds(Account("site", "words-2026"))))
            return load_rows(world.config.data)

        trainer = Trainer(
            SiteShelf("site", load, None, None), Policy(), LedgerKeeper(ledger), dataset="words-2026"
        )
        trainer.handle(world.request(1, clients=("site",)))
    assert spent_when_read == [1]


def test_records_are_checked_once_for_a_task(world: World) -> None:
    encoded: list[int] = []

    class Counting:
        name = "counting"

        def check_rows(self, rows: Rows) -> None: ...

        def encode(self, row: object) -> list[int]:
            encoded.append(1)
            raise AssertionError

    shelf = SiteShelf("site", lambda: load_rows(world.config.data), None, None)
    shelf.check("site", world.bench.task)
    before = shelf.open("site", world.bench.task)
    shelf.check("site", world.bench.task)
    assert shelf.open("site", world.bench.task) is before
    with pytest.raises(DataError, match="AssertionError"):
        shelf.check("site", Counting())  # type: ignore[arg-type]
    assert encoded == [1]
