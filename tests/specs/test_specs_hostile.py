"""Entries, dock files and connections of somebody who means harm, and mistakes that a user makes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sqlite3
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from fedlora.cli.main import main
from fedlora.errors import DataError, FedLoraError
from fedlora.specs.dock import Dock
from fedlora.specs.entries import read_entry, write_entry
from fedlora.specs.types import (
    DockBusyError,
    DockDamagedError,
    DockFullError,
    NotInDockError,
    PrivacyStatement,
    Specification,
)

NONE = PrivacyStatement("none")
STATED = {
    "guarantee": "dp", "epsilon": 1.0, "delta": 1e-5, "unit": "record", "adjacency": "add_or_remove",
    "adversary": "anyone", "accountant": "PLD", "sampling": "Poisson", "num_events": 1,
}  # fmt: skip


def unit(size: int = 8) -> np.ndarray:
    return np.full(size, 1 / np.sqrt(size), np.float32)


def made(name: str = "a", **changes) -> Specification:
    fields = {
        "name": name, "vector": unit(), "kind": "model", "base_fingerprint": "base", "recipe": "recipe",
        "projection": "none", "privacy": NONE, "licence": "MIT",
    }  # fmt: skip
    return Specification(**{**fields, **changes})


# --- entries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["a/../../b", "a/./b", "a//b", "a/", "a/..", "v\uff11", "a\u202eb", "a\nb", "x'); DROP TABLE y;--"],
)
def test_a_name_that_is_another_place_or_looks_like_another_name_is_refused(name):
    with pytest.raises(DataError, match="name"):
        made(name)
    assert made("a/b.c:d@e+f-g").name


@pytest.mark.parametrize("text", ["MIT\x1b[2J", "MIT\n  0.99  best", "MIT\0", "\u202eTIM", "MIT\r"])
@pytest.mark.parametrize("place", ["licence", "projection", "key", "value", "unit", "condition"])
def test_text_of_an_entry_cannot_write_on_a_terminal(text, place):
    changes = {
        "licence": {"licence": text}, "projection": {"projection": text}, "key": {"metadata": {text: 1}},
        "value": {"metadata": {"x": text}},
    }  # fmt: skip
    makers = {
        "unit": lambda: PrivacyStatement(**{**STATED, "unit": text}),
        "condition": lambda: PrivacyStatement("none", conditions=(text,)),
    }
    make = makers.get(place, lambda: made(**changes[place]))
    with pytest.raises(FedLoraError, match="printable"):
        make()


@pytest.mark.parametrize(
    "value",
    [2**53 + 1, 10**30, -(10**30), 10**400, float("nan"), float("inf"), True, None, [1]],
    ids=lambda one: repr(one)[:8],
)
def test_metadata_that_readers_of_json_disagree_about_is_refused(value):
    with pytest.raises(DataError, match="metadata"):
        made(metadata={"x": value})


@pytest.mark.parametrize("change", [{"epsilon": 1.0}, {"delta": 1e-5}, {"epsilon": 1.0, "delta": 1e-5}])
def test_a_statement_without_privacy_cannot_carry_an_epsilon(change):
    with pytest.raises(FedLoraError, match="no epsilon"):
        PrivacyStatement("none", **change)


@pytest.mark.parametrize(
    "change",
    [
        {"unit": ""}, {"unit": " "}, {"adversary": ""}, {"accountant": "  "}, {"sampling": ""}, {"adjacency": ""},
        {"adjacency": "some"}, {"num_events": 0}, {"num_events": -1}, {"num_events": True}, {"num_events": 10**30},
    ],
    ids=str,
)  # fmt: skip
def test_a_dp_statement_with_an_empty_meaning_is_refused(change):
    PrivacyStatement(**STATED)
    with pytest.raises(FedLoraError):
        PrivacyStatement(**{**STATED, **change})


# --- a dock's file -----------------------------------------------------------------------------------------

GOOD = json.dumps({"guarantee": "none", "conditions": []})
DAMAGE = {
    "nan": {"payload": save({"vector": np.full(8, np.nan, np.float32)})},
    "inf": {"payload": save({"vector": np.full(8, np.inf, np.float32)})},
    "large": {"payload": save({"vector": unit() * np.float32(1e6)})},
    "float64": {"payload": save({"vector": unit().astype(np.float64)})},
    "integers": {"payload": save({"vector": np.ones(8, np.int32)})},
    "two tensors": {"payload": save({"vector": unit(), "more": unit()})},
    "no vector": {"payload": save({"other": unit()})},
    "megabytes": {"payload": save({"vector": unit(), "more": np.ones(10**6, np.float32)})},
    "long header": {"payload": struct.pack("<Q", 2**62) + b"{}"},
    "text": {"payload": "text"},
    "empty": {"payload": b""},
    "kind": {"kind": "other"},
    "terabytes": {"dimension": 10**12},
    "no dimension": {"dimension": 0},
    "negative": {"dimension": -5},
    "word": {"dimension": "x"},
}
DAMAGE_SHOWN = {
    "cut statement": {"privacy": '{"a'},
    "list": {"privacy": "[]"},
    "more fields": {"privacy": '{"guarantee": "none", "conditions": [], "x": 1}'},
    "conditional": {"privacy": '{"guarantee": "conditional", "conditions": []}'},
    "epsilon without privacy": {"privacy": '{"guarantee": "none", "epsilon": 1.0, "conditions": []}'},
    "no meaning": {"privacy": '{"guarantee": "dp", "conditions": []}'},
    "metadata list": {"metadata": "[1]"},
    "cut metadata": {"metadata": "{"},
    "escape in name": {"name": "\x1b[2Jx"},
    "escape in licence": {"licence": "\x1b[2Jx"},
}


def damaged(path: Path, change: dict) -> None:
    dock = Dock(path)
    dock.add(made("good"))
    dock.close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM specification").fetchone())
        row |= {"id": 2, "name": "evil", **change}
        places = ",".join("?" * len(row))
        connection.execute(
            f"INSERT INTO specification ({','.join(row)}) VALUES ({places})", list(row.values())
        )


@pytest.mark.parametrize("what", DAMAGE)
def test_a_dock_file_with_a_hostile_vector_is_not_opened(tmp_path, what):
    damaged(tmp_path / "d.sqlite", DAMAGE[what])
    with pytest.raises(DockDamagedError):
        Dock(tmp_path / "d.sqlite")


@pytest.mark.parametrize("what", DAMAGE_SHOWN)
def test_a_dock_file_with_a_hostile_statement_shows_nothing(tmp_path, what):
    damaged(tmp_path / "d.sqlite", DAMAGE_SHOWN[what])
    dock = Dock(tmp_path / "d.sqlite")
    for _ in range(2):
        with pytest.raises(DockDamagedError):
            dock.match(made("q"), 5)
    assert dock.get("good").name == "good"
    dock.close()


def test_a_hostile_vector_that_comes_while_the_dock_is_open_is_refused_each_time(tmp_path):
    path = tmp_path / "d.sqlite"
    dock = Dock(path)
    damaged(path, DAMAGE["nan"])
    for _ in range(2):
        with pytest.raises(DockDamagedError):
            dock.match(made("q"), 5)
    dock.close()


def test_another_database_is_not_taken_for_a_dock(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE entries (x)")
    before = path.read_bytes()
    with pytest.raises(DataError, match="not a dock"):
        Dock(path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["ledger.sqlite"]


@pytest.mark.parametrize("command", ["match", "start"])
def test_a_misspelt_dock_is_not_created(tmp_path, command, capsys):
    write_entry(tmp_path / "q.json", made("q"))
    path = tmp_path / "typo.sqlite"
    assert main(["dock", command, str(path), str(tmp_path / "q.json")]) == DataError.exit_code
    assert "no such dock" in capsys.readouterr().err
    assert not path.exists()


def test_a_match_without_entries_of_the_kind_says_so(tmp_path, capsys):
    dock = Dock(tmp_path / "d.sqlite")
    dock.add(made("only", kind="task"))
    with pytest.raises(NotInDockError, match="kind model"):
        dock.match(made("q"))
    (found,) = dock.match(made("q"), kind=None)
    assert found.cosine <= 1.0
    dock.close()
    write_entry(tmp_path / "q.json", made("q"))
    assert main(["dock", "match", str(tmp_path / "d.sqlite"), str(tmp_path / "q.json")]) != 0
    assert "kind" in capsys.readouterr().err


def test_many_writers_never_fill_a_dock_beyond_its_limit(tmp_path):
    path, full = tmp_path / "d.sqlite", []
    Dock(path).close()

    def write(number: int) -> None:
        dock = Dock(path, max_entries=10)
        for place in range(5):
            try:
                dock.add(made(f"n{number}-{place}"))
            except DockFullError:
                full.append(number)
        dock.close()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    dock = Dock(path)
    assert (len(dock), len(full)) == (10, 20)
    dock.close()


def test_a_file_that_cannot_be_written_now_is_told_as_that(tmp_path):
    dock = Dock(tmp_path / "d.sqlite")
    dock._connection.execute("PRAGMA busy_timeout=50")
    with contextlib.closing(sqlite3.connect(tmp_path / "d.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DockBusyError, match="later"):
            dock.add(made("a"))
        other.execute("ROLLBACK")
    assert dock.add(made("a")) == 1
    dock.close()


# --- the service -----------------------------------------------------------------------------------------------


def test_the_service_answers_with_the_codes_of_its_table(tmp_path):
    pytest.importorskip("fastapi")
    from starlette.testclient import TestClient

    from fedlora.specs.entries import entry_json
    from fedlora.specs.service import make_app

    token = "0123456789abcdef"
    dock = Dock(tmp_path / "d.sqlite")
    client = TestClient(make_app(dock, (token,)), headers={"Authorization": f"Bearer {token}"})
    body = entry_json(made("a"))
    assert client.post("/v1/specifications", json=body).status_code == 201
    for change in (
        {"name": "a/../b"},
        {"licence": "\x1b[2J"},
        {"metadata": {"x": 10**30}},
        {"metadata": {"x": 10**400}},
        {"privacy": {**body["privacy"], "epsilon": 1.0}},
        {"privacy": {**STATED, "unit": ""}},
        {"privacy": {**STATED, "num_events": 0}},
    ):
        answer = client.post("/v1/specifications", json={**body, "name": "b", **change})
        assert answer.status_code == 422, change
    both = {
        "Transfer-Encoding": "chunked",
        "Content-Length": "2",
    }  # which of them counts, proxies disagree about
    assert client.post("/v1/specifications", content=b"{}", headers=both).status_code == 411
    assert len(dock) == 1
    query = {"query": {**body, "name": "q"}}
    assert client.post("/v1/match", json={**query, "kind": "task"}).status_code == 404
    assert client.post("/v1/match", json={**query, "top_k": 101}).status_code == 422
    dock._connection.execute("PRAGMA busy_timeout=50")
    with contextlib.closing(sqlite3.connect(tmp_path / "d.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert client.post("/v1/specifications", json={**body, "name": "b"}).status_code == 503
        other.execute("ROLLBACK")
    damaged_row = {"id": 9, "name": "evil", **DAMAGE["nan"]}
    with contextlib.closing(sqlite3.connect(tmp_path / "d.sqlite")) as other, other:
        other.row_factory = sqlite3.Row
        row = dict(other.execute("SELECT * FROM specification").fetchone()) | damaged_row
        other.execute(
            f"INSERT INTO specification ({','.join(row)}) VALUES ({','.join('?' * len(row))})",
            list(row.values()),
        )
    assert client.post("/v1/match", json=query).status_code == 500
    dock.close()


@contextlib.contextmanager
def bounded_server(allowed: int, head_seconds: float = 1.0, whole_seconds: float = 60.0):
    """Serve a tiny application in this process with short clocks; yield its port."""
    pytest.importorskip("uvicorn")
    import uvicorn

    from fedlora.specs import serving

    async def app(scope, receive, send):
        if scope["path"] == "/slow":
            await asyncio.sleep(60)
        if scope["path"] == "/large":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * 50_000_000})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    class Quick(serving.BoundedProtocol):
        pass

    Quick.head_seconds, Quick.whole_seconds = head_seconds, whole_seconds
    config = serving.service_config(app, "127.0.0.1", 0, allowed, http=Quick)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)


def until(condition) -> bool:
    """Return whether something becomes true within a minute."""
    deadline = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def status_of(port: int, head: bytes = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n") -> int:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as link:
        with contextlib.suppress(OSError):
            link.sendall(head)
        try:
            line = link.recv(1000)
        except OSError:
            return 0
    found = re.match(rb"HTTP/1\.1 (\d+)", line)
    return int(found.group(1)) if found else 0


def ended(link: socket.socket, seconds: float) -> bool:
    """Return whether the other side closes the connection in time."""
    link.settimeout(seconds)
    try:
        while link.recv(65536):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def test_silent_strangers_hold_the_service_for_no_longer_than_a_head_may_take():
    with bounded_server(allowed=4, head_seconds=60.0) as port:
        links = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
        assert until(lambda: status_of(port) == 503)
        for link in links:
            link.close()
    with bounded_server(allowed=4) as port:
        links = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
        assert all(ended(link, 30) for link in links)
        assert until(lambda: status_of(port) == 200)


def test_a_head_in_small_pieces_is_given_up_in_time():
    with bounded_server(allowed=4) as port:
        for first in (
            b"",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        ):  # also on a connection that was answered once
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(first + b"GET / HTTP/1.1\r\n")
                started, cut = time.monotonic(), False
                while not cut and time.monotonic() - started < 30:  # its clock stands at 1 s
                    time.sleep(0.1)
                    try:
                        link.sendall(b"X: y\r\n")
                    except OSError:
                        cut = True
                assert cut


def test_a_head_of_any_size_is_not_taken():
    with bounded_server(allowed=4) as port:
        head = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"a" * 8_000_000 + b"\r\n\r\n"
        assert status_of(port, head) in (0, 400, 431)
        assert until(lambda: status_of(port) == 200)


def test_an_answer_that_is_not_taken_or_never_ends_is_given_up():
    with bounded_server(allowed=4, whole_seconds=1.0) as port:
        for path in (b"/slow", b"/large"):
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                time.sleep(3.5)
                assert ended(link, 30)
        assert until(lambda: status_of(port) == 200)


def test_connections_far_above_the_limit_are_closed_at_once():
    with bounded_server(allowed=2, head_seconds=30.0) as port:
        links = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
        assert until(lambda: sum(ended(link, 0.02) for link in links) >= 80 - 68 - 1)
        for link in links:
            link.close()


# --- documentation ---------------------------------------------------------------------------------------------


def test_the_documented_configuration_is_accepted(tmp_path):
    from fedlora.config import load_config
    from fedlora.specs.release import check_configuration
    from fedlora.specs.shelves import check_target

    page = (Path(__file__).parents[2] / "docs/specifications.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "spec.yaml").write_text(block)
    config = load_config(tmp_path / "spec.yaml")
    check_configuration(config)
    check_target(config, "constant")


def test_the_documented_entry_is_accepted(tmp_path):
    page = (Path(__file__).parents[2] / "docs/specifications.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "entry.json").write_text(block)
    assert read_entry(tmp_path / "entry.json").kind == "model"
