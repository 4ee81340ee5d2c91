"""Hostile records and sources: refused by file and row, never a crash, never content, never silently something else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_helpers import byte_tokenizer, data_config, model_config

from fedlora.data import EncodedRows, Rows, check_records, label_names, load_rows, partition_rows
from fedlora.data.tasks import build_task
from fedlora.errors import DataError

SECRET = "TOPSECRET"


def use(source: dict[str, Any], task: str = "sequence-classification", **data: Any) -> EncodedRows:
    """Do what a run does with records before its first round."""
    config = data_config(source=source, **({"labels": ["a", "b"]} | data))
    model = model_config(task)
    rows = load_rows(config)
    label_names(model, config, rows)
    built = build_task(model, config, byte_tokenizer())
    check_records(built, rows, partition_rows(rows, config.partition, 1))
    return EncodedRows(built, rows)


def file(path: Path, content: str | bytes) -> dict[str, Any]:
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return {"kind": "file", "paths": [str(path)]}


LONG = "1" * 5000
RECORDS: dict[str, tuple[str, str, str]] = {
    "NaN for a text": ("a.jsonl", '{"text": NaN, "label": "a"}', "row 1: column 'text' is empty"),
    "infinity for a text": ("a.jsonl", '{"text": 1e999, "label": "a"}', "row 1: column 'text' is empty"),
    "infinity for a label": ("a.jsonl", '{"text": "x", "label": Infinity}', "row 1"),
    "a field twice": ("a.jsonl", '{"text": "x", "text": "TOPSECRET", "label": "a"}', "row 1: .* twice"),
    "a field twice, below": ("a.jsonl", '{"text": "x", "label": "a", "z": [{"q": 1, "q": 2}]}', "row 1: .* twice"),
    "a field twice in a list": ("a.json", '[{"text": "x", "text": "TOPSECRET", "label": "a"}]', "twice"),
    "deep nesting": ("a.jsonl", '{"text": "x", "z": ' + "[" * 200_000 + "]" * 200_000 + "}", "row 1: is nested"),
    "deep nesting in a list": ("a.json", "[" * 200_000 + "]" * 200_000, "nested too deeply"),
    "a long number": ("a.jsonl", '{"text": "x", "label": "a", "z": ' + LONG + "}", "row 1: .* too long"),
    "a long number in a list": ("a.json", '[{"text": "x", "label": "a", "z": ' + LONG + "}]", "too long"),
    "half an emoji for a name": ("a.jsonl", '{"text": "x", "label": "a", "\\ud800": 1}', "row 1: .* surrogate"),
    "a null label": ("a.jsonl", '{"text": "x", "label": null}', "row 1"),
    "a dictionary for a label": ("a.jsonl", '{"text": "x", "label": {"TOPSECRET": 1}}', "row 1"),
    "an unclosed quote": ("a.csv", 'text,label\n"TOPSECRET,a\nb,c\n', "row [34]: malformed quotes"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
def test_hostile_records_are_refused_by_file_and_row_without_content(case: str, tmp_path: Path) -> None:
    name, content, message = RECORDS[case]
    with pytest.raises(DataError, match=message) as caught:
        use(file(tmp_path / name, content + "\n"))
    assert name in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("label", [LONG, "²", "1e400"])
def test_labels_that_are_no_small_numbers_are_refused(label: str, tmp_path: Path) -> None:
    source = file(tmp_path / "a.csv", f"text,label\nx,{label}\n")
    task = build_task(
        model_config("sequence-classification", num_labels=2), data_config(source=source), byte_tokenizer()
    )
    with pytest.raises(DataError, match="row 2"):
        check_records(task, load_rows(data_config(source=source)), {"c": np.arange(1)})


def test_a_word_list_that_is_empty_has_loss_zero_and_a_huge_word_costs_bounded_time(tmp_path: Path) -> None:
    rows = [
        {"tokens": [], "tags": []},
        {"tokens": "", "tags": ""},
        {"tokens": ["x" * 5_000_000, "y"], "tags": ["a", "b"]},
    ]
    source = file(tmp_path / "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    encoded = use(source, "token-classification")
    assert [one.targets for one in encoded[:2]] == [0, 0]
    assert len(encoded[2].input_ids) == 64
    batch = encoded._task.collate(encoded[:3])
    assert batch["labels"].shape == batch["input_ids"].shape


@pytest.mark.parametrize(
    "image", [[[0.5, 0.2], [0.1, 0.9]], [[300, 2], [1, 1]], [[-1, 2], [1, 1]], [], [[1, 2], [3]], None]
)
def test_images_that_are_no_grey_levels_are_refused(image: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: the image"):
        use(file(tmp_path / "a.jsonl", json.dumps({"image": image, "label": "a"})), "image-classification")


@pytest.mark.parametrize("value", ["1e39", "nan", "-1e400", "TOPSECRET"])
def test_regression_labels_keep_the_loss_finite(value: str, tmp_path: Path) -> None:
    source = file(tmp_path / "a.csv", f"text,label\nx,{value}\n")
    task = build_task(
        model_config("sequence-classification", num_labels=1), data_config(source=source), byte_tokenizer()
    )
    with pytest.raises(DataError, match="row 2: the label of a regression") as caught:
        EncodedRows(task, load_rows(data_config(source=source)))[0]
    assert SECRET not in str(caught.value)


def test_whatever_a_library_says_of_a_record_is_withheld(tmp_path: Path) -> None:
    class Tokenizer:
        model_max_length = 64

        def __call__(self, text: str, *_: Any, **__: Any) -> Any:
            raise KeyError(text)

    class Store:
        columns = ("text", "label")

        def __len__(self) -> int:
            return 1

        def read(self, index: int) -> Any:
            raise UnicodeDecodeError("utf-8", SECRET.encode(), index, 1, SECRET)

        origin = staticmethod(lambda index: f"store, row {index + 1}")

    source = file(tmp_path / "a.csv", f"text,label\n{SECRET},a\n")
    config = data_config(source=source, labels=["a", "b"])
    task = build_task(model_config("sequence-classification"), config, Tokenizer())
    for rows, where in (
        (load_rows(config), "row 2: the record cannot be encoded"),
        (Rows(Store(), {}), "row 1"),
    ):  # type: ignore[arg-type]
        with pytest.raises(DataError, match=where) as caught:
            EncodedRows(task, rows)[0]
        assert SECRET not in str(caught.value)


FACTORIES = f'''
import pandas
def boom(): raise ValueError("{SECRET}")
def midway():
    yield {{"text": "x", "label": "a"}}
    raise RuntimeError("{SECRET}")
def nothing(): return None
def number(): return 5
def text(): return "{SECRET}"
def keys(): return [{{1: "{SECRET}", "text": "x", "label": "a"}}]
def missing(): return pandas.DataFrame({{"text": ["x", None], "label": ["a", "b"]}})
def twins(): return pandas.DataFrame([["x", "{SECRET}", "a"]], columns=["text", "text", "label"])
'''


@pytest.mark.parametrize(
    "name", ["boom", "midway", "nothing", "number", "text", "keys", "missing", "twins", "nosuch"]
)
def test_a_factory_that_fails_says_where_and_withholds_the_message(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    module = f"hostile_factory_{os.getpid()}"
    (tmp_path / f"{module}.py").write_text(FACTORIES)
    (tmp_path / f"{module}_broken.py").write_text(f'raise ValueError("{SECRET}")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    for target in (f"{module}:{name}", f"{module}_broken:{name}"):
        with pytest.raises(DataError, match=module) as caught:
            use({"kind": "factory", "target": target})
        assert SECRET not in str(caught.value)
    sys.modules.pop(module, None)


@pytest.mark.parametrize("key", [None, "id"])
def test_a_query_that_names_a_column_twice_is_refused_and_may_end_in_a_comment(
    key: str | None, tmp_path: Path
) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "t.db") as base:
        base.execute("create table t(id integer primary key, text, label)")
        base.execute("insert into t values(1, 'x', 'a')")
    url = f"sqlite:///{tmp_path}/t.db"
    with pytest.raises(DataError, match="'text' more than once"):
        use({"kind": "sql", "url": url, "query": "select id, label, text, label as text from t", "key": key})
    assert len(use({"kind": "sql", "url": url, "query": "select * from t -- all", "key": key})) == 1


def test_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    columns = [arrow.array([value]) for value in ("x", SECRET, "a")]
    parquet.write_table(arrow.table(columns, names=["text", "text", "label"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="'text' more than once"):
        use({"kind": "file", "paths": [str(tmp_path / "a.parquet")]})


def test_one_file_under_several_paths_gives_its_records_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file(tmp_path / "a.csv", "text,label\nx,a\n")
    (tmp_path / "soft.csv").symlink_to("a.csv")
    os.link(tmp_path / "a.csv", tmp_path / "hard.csv")
    (tmp_path / "sub").mkdir()
    paths = ["a.csv", "./a.csv", str(tmp_path / "a.csv"), "sub/../a.csv", "*.csv"]
    assert len(use({"kind": "file", "paths": paths})) == 1


def _json(rows: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "label": "a"}) + "\n" for text in rows).encode()


def _csv(rows: list[str]) -> bytes:
    return ("text,label\n" + "".join(f"{text},a\n" for text in rows)).encode()


def _parquet(rows: list[str]) -> bytes:
    import io

    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    out = io.BytesIO()
    parquet.write_table(arrow.table({"text": rows, "label": ["a"] * len(rows)}), out, row_group_size=1)
    return out.getvalue()


WRITERS: dict[str, Callable[[list[str]], bytes]] = {"a.jsonl": _json, "a.csv": _csv, "a.parquet": _parquet}


@pytest.mark.parametrize("how", ["same sizes", "renamed over", "shorter", "appended", "deleted", "garbage"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_changes_in_any_way_is_noticed(name: str, how: str, tmp_path: Path) -> None:
    write, path = WRITERS[name], tmp_path / name
    path.write_bytes(write(["aa", "bb", "cc"]))
    os.utime(path, (1, 1))
    rows = load_rows(data_config(source={"kind": "file", "paths": [str(path)]}))
    assert rows[1]["text"] == "bb"
    other = write(["dd", "ee", "ff"])
    if how == "renamed over":
        (tmp_path / "new").write_bytes(other)
        (tmp_path / "new").replace(path)
    elif how == "deleted":
        path.unlink()
    else:
        changed = {"same sizes": other, "shorter": write(["dd"]), "appended": write(["aa", "bb", "cc", "dd"])}
        path.write_bytes(changed.get(how, b"\xff" * 100))
    for read in (lambda: rows[2], lambda: rows.column("text")):
        with pytest.raises(DataError, match="changed while it was in use"):
            read()


@pytest.mark.parametrize("order", ["", " order by number desc"])
def test_a_query_gives_every_process_its_records_in_one_order(
    order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ORDER BY a database may start anywhere (PostgreSQL joins a scan that is under way)."""
    import sqlite3

    from fedlora.data import sql

    for name, numbers in (("one", [3, 1, 2]), ("two", [2, 3, 1])):
        with sqlite3.connect(tmp_path / name) as base:
            base.execute("create table t(number, text, label)")
            base.executemany("insert into t values(?, 'x', 'a')", [(number,) for number in numbers])
    found = []
    for name in ("one", "two"):
        monkeypatch.setattr(sql, "_ENGINES", {})
        source = {"kind": "sql", "url": f"sqlite:///{tmp_path}/{name}", "query": f"select * from t{order}"}
        found.append(load_rows(data_config(source=source)).column("number"))
    assert found[0] == found[1] == ([3, 2, 1] if order else [1, 2, 3])


def test_a_source_that_shrank_between_driver_and_worker_is_named(tmp_path: Path) -> None:
    source = file(tmp_path / "a.csv", "text,label\nx,a\ny,b\nz,a\n")
    shared_out = np.arange(len(load_rows(data_config(source=source))))
    file(tmp_path / "a.csv", "text,label\nx,a\n")
    here = load_rows(data_config(source=source))
    for chosen in (shared_out, np.array([-1])):
        with pytest.raises(DataError, match="it has 1 records here, fewer than where they were shared out"):
            here.subset(chosen)
    assert len(here[-1:]) == len(here.subset([])) + 1 == 1
