"""Files and tables larger than memory: what stays in memory is bounded, and draws by index give the right records."""

from __future__ import annotations

import csv
import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy

from fedlora.config.schema import DataConfig
from fedlora.data import Rows, load_rows
from fedlora.errors import DataError
from fedlora.training.sampling import PoissonSampler, SeededCoins

COUNT, WIDTH = 20_000, 1_000
"""20 MB of text: many times what may stay in memory below."""
ALLOWED = 4 * 2**20


def record(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "text": f'{number} "quoted",\nsecond line ' + "x" * (WIDTH - 40),
        "site": f"s{number % 3}",
    }


def write(kind: str, where: Path, count: int) -> dict[str, Any]:
    """Write `count` records and return the source that reads them."""
    path = where / f"rows.{kind}"
    if kind == "jsonl":
        with path.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(record(number)) + "\n" for number in range(count))
    elif kind == "csv":
        with path.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, ["id", "text", "site"])
            writer.writeheader()
            writer.writerows(record(number) for number in range(count))
    elif kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.Table.from_pylist([record(n) for n in range(count)]), path, row_group_size=500)
    else:
        engine = sqlalchemy.create_engine(f"sqlite:///{path}")
        with engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT, site TEXT)")
            rows = [(number, record(number)["text"], record(number)["site"]) for number in range(count)]
            connection.exec_driver_sql("INSERT INTO notes VALUES (?, ?, ?)", rows)
        engine.dispose()
        return {"kind": "sql", "url": f"sqlite:///{path}", "query": "SELECT * FROM notes;", "key": "id"}
    return {"kind": "file", "paths": [str(path)]}


def load(source: dict[str, Any]) -> Rows:
    return load_rows(DataConfig.model_validate_json(json.dumps({"source": source, "name": "large"})))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "sql"])
def test_poisson_draws_by_index_keep_memory_bounded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlora.data.tables.PARQUET_BYTES", 2**20)
    source = write(kind, tmp_path, COUNT)
    tracemalloc.start()
    rows = load(source)
    drawn = PoissonSampler(len(rows), 0.002, SeededCoins(1, "site", 1)).draw()
    found = [rows[int(place)] for place in drawn]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(rows) == COUNT
    assert len(drawn) > 10
    assert [int(row["id"]) for row in found] == drawn.tolist()
    assert all(row["text"] == record(int(row["id"]))["text"] for row in found)
    assert peak < ALLOWED < COUNT * WIDTH / 4
    groups = getattr(rows._store, "_groups", {})  # Arrow's memory is not traced
    assert sum(group.nbytes for group in groups.values()) <= 2**20


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "sql"])
def test_columns_copies_and_views_agree(kind: str, tmp_path: Path) -> None:
    rows = load(write(kind, tmp_path, 60))
    assert [str(value) for value in rows.column("id")] == [str(number) for number in range(60)]
    part = rows.subset([59, 0, 7])
    assert part.column("site") == ["s2", "s0", "s1"]
    assert [row["site"] for row in pickle.loads(pickle.dumps(part))] == ["s2", "s0", "s1"]
    assert rows.columns == ("id", "text", "site")


def test_parquet_groups_are_let_go(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from fedlora.data.tables import ParquetStore

    write("parquet", tmp_path, 3000)
    store = ParquetStore(tmp_path / "rows.parquet", keep_bytes=1)
    assert [int(store.read(place)["id"]) for place in (2999, 0, 1500, 499, 500)] == [2999, 0, 1500, 499, 500]
    assert len(store._groups) == 1


def sql_source(where: Path, statements: list[str], query: str, **more: Any) -> dict[str, Any]:
    engine = sqlalchemy.create_engine(f"sqlite:///{where / 'a.db'}")
    with engine.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    engine.dispose()
    return {"kind": "sql", "url": f"sqlite:///{where / 'a.db'}", "query": query, **more}


TABLE = ["CREATE TABLE t (id TEXT, text TEXT)"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("('a', 'x'), ('a', 'secret')", "two records have the same key"),
        ("('a', 'x'), (NULL, 'secret')", "has no key"),
    ],
)
def test_sql_keys_must_be_unique_and_stated(rows: str, message: str, tmp_path: Path) -> None:
    source = sql_source(tmp_path, [*TABLE, f"INSERT INTO t VALUES {rows}"], "SELECT * FROM t", key="id")
    with pytest.raises(DataError, match=message) as caught:
        load(source)
    assert "secret" not in str(caught.value)


def test_sql_records_are_numbered_by_key_and_changes_are_noticed(tmp_path: Path) -> None:
    insert = "INSERT INTO t VALUES ('b', 'two'), ('a', 'one: 12:30 :x')"
    source = sql_source(tmp_path, [*TABLE, insert], "SELECT * FROM t WHERE text <> ' :x'", key="id")
    rows = load(source)
    assert [row["text"] for row in rows] == ["one: 12:30 :x", "two"]
    sql_source(tmp_path, ["DELETE FROM t WHERE id = 'b'"], "")
    with pytest.raises(DataError, match="sql query, row 2: the table changed"):
        rows[1]
    with pytest.raises(DataError, match="the table changed"):
        rows.column("text")


CHANGES: dict[str, Callable[[Path], Any]] = {
    "shorter": lambda path: path.write_text("id,text\n1,a\n"),
    "longer fields": lambda path: path.write_text('id,text\n1,"' + "b" * 50 + '"\n'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_csv_that_changes_is_noticed(change: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,a\n2,b\n3,c\n")
    rows = load({"kind": "file", "paths": [str(path)]})
    CHANGES[change](path)
    with pytest.raises(DataError, match="changed while it was in use"):
        rows[2]
    with pytest.raises(DataError, match="changed while it was in use"):
        rows.column("text")


@pytest.mark.parametrize("stated", [None, ["text", "label", "text"]])
def test_a_header_that_names_a_column_twice_is_refused(stated: list[str] | None, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label, text\nold,x,new\n")
    with pytest.raises(DataError, match="the header names 'text' more than once"):
        load({"kind": "file", "paths": [str(tmp_path / "a.csv")], "header": stated})


def test_empty_columns_at_the_end_are_no_twins(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label,,\nred,x,,\n")
    assert load({"kind": "file", "paths": [str(tmp_path / "a.csv")]})[0]["label"] == "x"


def test_blank_lines_and_quotes_do_not_shift_records(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\r\n\r\n1,"a\r\n\r\nb"\r\n\r\n2,c\r\n')
    rows = load({"kind": "file", "paths": [str(path)]})
    assert [row["text"] for row in rows] == ["a\r\n\r\nb", "c"]
    assert [row["text"] for row in rows.subset(np.asarray([1, 0]))] == ["c", "a\r\n\r\nb"]
    assert rows.column("text") == ["a\r\n\r\nb", "c"]
    assert rows.origin(1).row == 7


def test_parquet_lets_kept_groups_go_where_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    from fedlora.data.tables import ParquetStore

    parquet.write_table(arrow.table({"text": list("abcd")}), tmp_path / "a.parquet", row_group_size=1)
    store = ParquetStore(tmp_path / "a.parquet")
    assert [store.read(place)["text"] for place in range(3)] == ["a", "b", "c"]
    opened = store._open()

    class Tight:
        def read_row_group(self, number: int) -> object:
            if store._groups:
                raise MemoryError
            return opened.read_row_group(number)

    monkeypatch.setattr(store, "_open", Tight)
    assert store.read(3)["text"] == "d"
    assert list(store._groups) == [3]
