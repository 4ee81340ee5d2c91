"""The dock's service under load of valid, oversized, malformed and unauthenticated requests on loopback."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from ports import reserved_port

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

TOKEN = "a-token-of-the-load-test"
RATE = 200
DIMENSION = 1024


@contextmanager
def serving(folder: Path, **options: str):
    """Start `fedlora dock serve` on a loopback port of its own; yield (port, process)."""
    port = reserved_port()
    command = [
        str(Path(sys.executable).with_name("fedlora")),
        "dock",
        "serve",
        str(folder / "dock.sqlite"),
        "--port",
        str(port),
    ]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", value]
    process = subprocess.Popen(command, env={**os.environ, "FEDLORA_DOCK_TOKENS": TOKEN})
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, "the service ended"
                assert time.monotonic() < deadline, "the service did not start"
                time.sleep(0.1)
        yield port, process
    finally:
        process.terminate()
        process.wait(120)


def resident_megabytes(process: subprocess.Popen) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def entry(name: str, generator: np.random.Generator, **changes) -> dict:
    vector = generator.standard_normal(DIMENSION).astype("<f4")
    vector /= np.linalg.norm(vector)
    return {
        "name": name, "vector": base64.b64encode(vector.astype("<f4").tobytes()).decode(), "kind": "model",
        "base_fingerprint": "base", "recipe": "recipe", "projection": "none", "licence": "MIT",
        "privacy": {"guarantee": "none"}, "metadata": {"task": "t"}, **changes,
    }  # fmt: skip


class Call:
    """One request: method, path, body, headers and the status that must come back."""

    def __init__(
        self, kind, want, body=b"", *, path="/v1/specifications", method="POST", token=TOKEN, length=None
    ):
        self.kind, self.want = kind, want
        head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        if token is not None:
            head.append(f"Authorization: Bearer {token}")
        if method == "POST" and length != "none":
            head += [
                f"Content-Length: {len(body) if length is None else length}",
                "Content-Type: application/json",
            ]
        self.raw = "\r\n".join(head).encode() + b"\r\n\r\n" + body


def make_call(number: int, draw: random.Random, generator: np.random.Generator, stored: list[str]) -> Call:
    """Return the next request of the mix; names of valid new entries are added to `stored`."""
    good = entry(f"entry-{number}", generator)
    text = json.dumps(good).encode()
    kind = draw.choice(("add", "match", "match", "show", "taken", "big", "long", "broken", "deep", "schema", "nan",
                        "stranger", "wrong", "intrinsic", "unknown", "unsized", "surrogate"))  # fmt: skip
    if kind == "add" and len(stored) < 300:
        stored.append(good["name"])
        return Call(kind, 201, text)
    if kind == "match" or kind == "add":
        return Call(kind, 200, json.dumps({"query": good, "top_k": 5}).encode(), path="/v1/match")
    if kind == "show":
        return Call(kind, 200, path="/v1/specifications/first", method="GET")
    if kind == "taken":
        return Call(kind, 409, json.dumps({**good, "name": "first"}).encode())
    if kind == "big":
        return Call(kind, 413, json.dumps({**good, "metadata": {"x": "y" * 100_000}}).encode())
    if kind == "long":
        return Call(kind, 413, b"x", length=10**12)
    if kind == "broken":
        return Call(kind, 422, text[: len(text) // 2])
    if kind == "deep":
        return Call(kind, (400, 422), b"[" * 60_000)
    if kind == "schema":
        return Call(kind, 422, json.dumps({**good, "kind": "other", "z" * 5000: 1}).encode())
    if kind == "nan":
        bad = np.full(DIMENSION, np.nan, "<f4")
        return Call(
            kind, 422, json.dumps({**good, "vector": base64.b64encode(bad.tobytes()).decode()}).encode()
        )
    if kind == "stranger":
        return Call(kind, 401, draw.choice((text, b"[" * 60_000, b"")), token=None)
    if kind == "wrong":
        return Call(kind, 401, text, token="not-the-token-at-all")
    if kind == "intrinsic":
        return Call(kind, 422, json.dumps({**good, "privacy": {"guarantee": "conditional"}}).encode())
    if kind == "unknown":
        return Call(kind, 404, path="/v1/specifications/nobody", method="GET")
    if kind == "surrogate":
        return Call(kind, 422, json.dumps({**good, "licence": "\ud800"}).encode())
    return Call(kind, 411, text, length="none")


async def send(port: int, call: Call) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(call.raw)
        with contextlib.suppress(ConnectionError):  # refused before the body was read
            await writer.drain()
        line = await asyncio.wait_for(reader.readline(), 120)
        return int(line.split()[1])
    finally:
        writer.close()


async def flood(port: int, seconds: float, calls) -> Counter:
    """Send at a fixed rate; return (kind, want, got) counts."""
    seen: Counter = Counter()
    started = time.monotonic()

    async def one(call: Call) -> None:
        try:
            got: int | str = await send(port, call)
        except (ConnectionError, IndexError, ValueError):
            got = "cut"
        seen[(call.kind, call.want, got)] += 1

    waiting = set()
    for number in range(int(seconds * RATE)):
        due = started + number / RATE
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        waiting.add(asyncio.create_task(one(calls(number))))
        waiting = {task for task in waiting if not task.done()}
        while len(waiting) > 100:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting = {task for task in waiting if not task.done()}
    await asyncio.gather(*waiting)
    return seen


def run_flood(folder: Path, seconds: float) -> None:
    from fedlora.specs.dock import Dock

    draw, generator = random.Random(1), np.random.default_rng(1)
    stored = ["first"]
    with serving(folder) as (port, process):
        first = Call("add", 201, json.dumps(entry("first", generator)).encode())
        assert asyncio.run(send(port, first)) == 201

        def calls(number: int) -> Call:
            return make_call(number, draw, generator, stored)

        seen = asyncio.run(flood(port, min(3.0, seconds / 2), calls))
        before = resident_megabytes(process)
        seen += asyncio.run(flood(port, seconds, lambda number: calls(number + 1_000_000)))
        after = resident_megabytes(process)
        assert process.poll() is None
    wrong = {
        key: count
        for key, count in seen.items()
        if key[2] not in (key[1] if isinstance(key[1], tuple) else (key[1],))
        and not (key[2] == "cut" and key[0] in {"big", "long"})  # closed while the body was still coming
    }
    assert not wrong, wrong
    assert len({key[0] for key in seen}) == 16
    assert after < before + 24, (before, after)
    dock = Dock(folder / "dock.sqlite")
    assert len(dock) == len(stored)
    for name in stored:
        dock.get(name)
    dock.close()


def test_mixed_load_gets_the_right_answers_and_stores_nothing_else(tmp_path):
    run_flood(tmp_path, 3.0)


@pytest.mark.long
def test_a_minute_of_mixed_load_leaves_memory_flat(tmp_path):
    run_flood(tmp_path, 60.0)


def answer_of(folder: Path, receive, length: int, body_seconds: float) -> tuple[int, int]:
    """Return (status, entries stored) of one POST whose body `receive` gives."""
    from fedlora.specs.dock import Dock
    from fedlora.specs.service import make_app

    dock = Dock(folder / "dock.sqlite")
    sent: list[dict] = []

    async def reply(message):
        sent.append(message)

    headers = [
        (b"authorization", f"Bearer {TOKEN}".encode()), (b"content-length", str(length).encode()),
        (b"content-type", b"application/json"),
    ]  # fmt: skip
    path = "/v1/specifications"
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
        "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http", "root_path": "",
        "server": ("localhost", 80), "client": ("localhost", 1),
    }  # fmt: skip
    app = make_app(dock, (TOKEN,), body_seconds=body_seconds)
    asyncio.run(asyncio.wait_for(app(scope, receive, reply), 55))
    found = (sent[0]["status"], len(dock))
    dock.close()
    return found


def test_a_body_that_does_not_arrive_is_given_up_in_time(tmp_path):
    async def receive():
        await asyncio.sleep(60)

    assert answer_of(tmp_path, receive, 10, 0.2) == (408, 0)


def test_what_came_before_a_lost_connection_is_not_a_request(tmp_path):
    whole = json.dumps(entry("a", np.random.default_rng(0))).encode()
    messages = [
        {"type": "http.request", "body": whole, "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive():
        return messages.pop(0)

    assert answer_of(tmp_path, receive, len(whole) + 5, 60.0) == (400, 0)


def test_a_full_dock_takes_no_more(tmp_path):
    from starlette.testclient import TestClient

    from fedlora.specs.dock import Dock
    from fedlora.specs.service import make_app

    dock = Dock(tmp_path / "dock.sqlite", max_entries=2)
    client = TestClient(make_app(dock, (TOKEN,)), headers={"Authorization": f"Bearer {TOKEN}"})
    generator = np.random.default_rng(0)
    codes = [
        client.post("/v1/specifications", json=entry(f"e{number}", generator)).status_code
        for number in range(3)
    ]
    assert codes == [201, 201, 507]
    assert len(dock) == 2
    dock.close()


def test_two_processes_see_each_others_entries(tmp_path):
    from fedlora.specs.dock import Dock
    from fedlora.specs.entries import EntryBody

    generator = np.random.default_rng(0)
    left, right = Dock(tmp_path / "dock.sqlite"), Dock(tmp_path / "dock.sqlite")
    made = [EntryBody.model_validate(entry(f"e{i}", generator)).to_specification() for i in range(2)]
    left.add(made[0])
    right.add(made[1])
    assert (len(left), len(right)) == (2, 2)
    assert [one.name for one in left.match(made[0], 5)] == ["e1"]
    left.close()
    right.close()
