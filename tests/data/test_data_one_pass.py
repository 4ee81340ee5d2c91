"""Many records are read in one pass: the file is opened once, the database asked once, and the records are the same."""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import byte_tokenizer, data_config, model_config

from fedlora.config import config_from_container
from fedlora.config.schema import FedLoraConfig, SqlSource
from fedlora.data import EncodedRows, Rows, build_task, check_records
from fedlora.data import sql as sql_module
from fedlora.data.files import read_file, read_files
from fedlora.data.rows import is_text_valid
from fedlora.data.watch import WatchedFile
from fedlora.errors import DataError
from fedlora.ledger import chain
from fedlora.simulation.overlap import find_sharing

COUNT = 120
TEXTS = [f"word {place} grün \U0001f642 {'x' * (place % 7)}" for place in range(COUNT)]
LABELS = [("warm", "cold")[place % 2] for place in range(COUNT)]


def write(folder: Path, kind: str) -> Path:
    path = folder / f"rows.{kind}"
    pairs = list(zip(TEXTS, LABELS, strict=True))
    if kind == "jsonl":
        lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in pairs]
        lines.insert(3, "")
    elif kind == "csv":
        lines = ["text,label", *(f'"{text}\nsecond line",{label}' for text, label in pairs)]
    elif kind == "tsv":
        lines = ["text\tlabel", *(f"{text}\t{label}" for text, label in pairs)]
    else:
        lines = [text for text, _ in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def rows_of(path: Path) -> Rows:
    roles = {"text": "text"} if path.suffix == ".txt" else {"text": "text", "label": "label"}
    return Rows(read_file(path), roles)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every opening of a row file for reading; the checks between passes read nothing."""
    seen: list[Path] = []
    plain = WatchedFile.open

    def noted(watched: WatchedFile) -> Any:
        seen.append(watched.path)
        return plain(watched)

    monkeypatch.setattr(WatchedFile, "open", noted)
    return seen


def deal(clients: int, count: int = COUNT) -> dict[str, Any]:
    order = np.random.Generator(np.random.Philox(1)).permutation(count)
    return {f"c{number}": np.sort(order[number::clients]) for number in range(clients)}


def federation(tmp_path: Path, clients: int) -> FedLoraConfig:
    return config_from_container(
        {
            "schema": 1,
            "run": {"name": "t", "seed": 1, "dir": str(tmp_path)},
            "model": {"name_or_path": "tiny", "task": "sequence-classification", "num_labels": 2},
            "adapter": {"rank": 2, "lora_alpha": 4, "target_modules": ["query"], "modules_to_save": []},
            "data": {
                "source": {"kind": "file", "paths": ["unused.csv"]},
                "name": "t",
                "partition": {"kind": "quantity", "clients": clients},
            },
            "mechanism": {"kind": "lora_fa"},
            "privacy": {
                "unit": "record",
                "adjacency": "add_or_remove",
                "noise_multiplier": 1.0,
                "target_delta": 1e-5,
                "max_grad_norm": 1.0,
                "group_weights": {"adapters": 1.0},
                "budget": {"epsilon": 8.0, "delta": 1e-5, "on_exhausted": "refuse"},
                "noise_source": "os",
            },
            "training": {
                "expected_batch_size": 2,
                "nominal_records": 8,
                "steps_per_round": 1,
                "optimizer": {"kind": "sgd", "lr": 0.1},
            },
            "federation": {
                "rounds": 1,
                "clients_per_round": "all",
                "min_replies": 1,
                "aggregation": {"kind": "mean_b"},
            },
        }
    )


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "txt"])
def test_a_row_file_is_opened_once_a_pass_not_once_a_row(
    tmp_path: Path, opened: list[Path], kind: str
) -> None:
    rows = rows_of(write(tmp_path, kind))
    parts = deal(12)
    opened.clear()
    assert len(list(rows)) == COUNT
    assert len(opened) == 2  # the pass, and the look at the file after it
    opened.clear()
    found = find_sharing(federation(tmp_path, 12), rows, parts, secret=bytes(32))
    assert found is not None
    assert found.shared == 0
    assert len(opened) == 2
    task = build_task(model_config("causal-lm"), data_config(columns={"text": "text"}), byte_tokenizer())
    for look in (
        lambda: check_records(task, rows, parts),
        lambda: EncodedRows(task, rows).take(list(range(0, COUNT, 3))),
        lambda: EncodedRows(task, rows)[10:90],
    ):
        opened.clear()
        look()
        assert len(opened) == 2


def orders() -> Iterator[Any]:
    generator = np.random.Generator(np.random.Philox(2))
    yield []
    yield [5]
    yield list(range(COUNT))
    yield list(reversed(range(COUNT)))
    yield [3, 3, 7, 3, -1]
    yield generator.integers(0, COUNT, 300)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "txt"])
def test_one_pass_gives_the_records_that_single_reads_give(tmp_path: Path, kind: str) -> None:
    rows = rows_of(write(tmp_path, kind))
    for order in orders():
        assert list(rows.read_many(order)) == [rows[int(place)] for place in order]
    view = rows.subset([9, 4, 100])
    assert list(view) == [rows[9], rows[4], rows[100]]


def test_one_pass_over_several_files_opens_each_once(tmp_path: Path, opened: list[Path]) -> None:
    paths = []
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name, "jsonl"))
    rows = Rows(read_files(paths, "auto", None)[0])
    opened.clear()
    assert [row["text"] for row in rows] == TEXTS * 3
    assert opened == [path for path in paths for _ in range(2)]
    order = [0, COUNT, 2 * COUNT, 1]
    assert [row["text"] for row in rows.read_many(order)] == [TEXTS[0], TEXTS[0], TEXTS[0], TEXTS[1]]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "txt"])
@pytest.mark.parametrize("how", ["shorter", "another file", "gone"])
def test_a_file_that_changes_during_a_pass_is_refused(tmp_path: Path, kind: str, how: str) -> None:
    path = write(tmp_path, kind)
    rows = rows_of(path)
    reading = iter(rows)
    for _ in range(3):
        next(reading)
    if how == "shorter":
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "gone":
        path.unlink()
    else:
        other = tmp_path / "other"
        other.write_bytes(path.read_bytes() + b"1\n")
        other.replace(path)
    with pytest.raises(DataError, match=r"changed while it was in use|can no longer be read"):
        list(reading)


@pytest.mark.parametrize("key", ["id", "ID", "name"])
def test_a_database_is_asked_once_for_many_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE r (id INTEGER PRIMARY KEY, name TEXT, text TEXT)")
        connection.executemany(
            "INSERT INTO r VALUES (?, ?, ?)",
            [(3 * place, f"n{place:04d}", text) for place, text in enumerate(TEXTS)],
        )
    source = SqlSource(kind="sql", url=f"sqlite:///{path}", query="SELECT * FROM r", key=key)
    rows = Rows(sql_module.open_sql(source))
    asked: list[int] = []
    plain = sql_module._connection

    def noted(one: SqlSource) -> Any:
        asked.append(1)
        return plain(one)

    monkeypatch.setattr(sql_module, "_connection", noted)
    assert [row["text"] for row in rows] == TEXTS
    assert len(asked) == (1 if key != "ID" else COUNT + 1)  # a key in another spelling is looked up by itself
    order = [5, 5, 119, 0]
    assert list(rows.read_many(order)) == [rows[place] for place in order]
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM r WHERE id = 15")
    with pytest.raises(DataError, match="changed while it was in use"):
        list(rows.read_many([4, 5]))


def test_fingerprints_are_those_of_records_read_one_by_one(tmp_path: Path) -> None:
    rows, parts = rows_of(write(tmp_path, "csv")), deal(7)
    parts["c6"] = np.append(parts["c6"], parts["c0"][0])
    secret = bytes(range(32))
    found = find_sharing(federation(tmp_path, 7), rows, parts, secret=secret)
    assert found is not None
    key = chain.derive_key(secret, "overlap")
    for client, index in parts.items():
        bodies = [
            json.dumps(rows[int(place)], sort_keys=True, ensure_ascii=False).encode() for place in index
        ]
        hashes = sorted({hmac.new(key, body, "sha256").digest()[:8] for body in bodies})
        assert found.fingerprints[client] == hashlib.sha256(b"".join(hashes)).hexdigest()
    assert (found.shared, found.most_clients, found.example) == (1, 2, ("c0", "c6", 1))


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ("plain", True),
        ("grün \U0001f642", True),
        (HALF, False),
        ({"a": 1, "b": 2.5, "c": None, "d": True, "e": b"\xff"}, True),
        ({"a": "x", HALF: "y"}, False),
        ({"a": ["x", ("y", {"z": HALF})]}, False),
        ({"a": ["x", ("y", {"z": "ü"})]}, True),
        ([[], {}, ""], True),
        ((type("Text", (str,), {})(HALF),), False),
    ],
)
def test_every_text_in_a_record_is_looked_at(value: object, valid: bool) -> None:
    assert is_text_valid(value) is valid


def test_a_bad_record_in_a_pass_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "fine"}, {"text": "also"}, {"other": "x"}]))
    rows = Rows(read_file(path), {"text": "text"})
    with pytest.raises(DataError, match="row 3"):
        list(rows)
