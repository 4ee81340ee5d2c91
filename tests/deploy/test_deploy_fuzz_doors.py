"""Ten thousand hostile inputs at each door that is open: the trainer's socket, the gate, the server's port, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import random
import socket
import ssl
import struct
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from deploy_helpers import Federation, wait_for
from flwr.supernode.node_auth_http_interceptor import now, public_key_to_bytes, sign_message
from test_deploy_fuzz import mutate, samples
from test_deploy_trainer_socket import client, handshake, place

from fedlora.cli.gate import CONTROL, FLEET, Gate
from fedlora.cli.metrics import MetricsServer, server_registry
from fedlora.procfs import descendants
from fedlora.training.packets import decode_packet
from fedlora.training.port import Packet, failure_packet
from fedlora.training.service_server import ServiceLimits, TrainerService, ensure_token

__all__ = ["place"]
INPUTS = 10_000
PROTOBUF = "application/protobuf"
ROUTES = (
    *("activate-node", "deactivate-node", "register-node", "unregister-node", "send-node-heartbeat"),
    *("pull-messages", "push-messages", "pull-object", "push-object", "get-run", "get-fab"),
    *("confirm-message-received", "", "../control/start-run", "%2e%2e/control/list-runs", "\\..\\control"),
)


class Counter:
    """A trainer that counts what reaches it, and answers a failure to everything but `still there`."""

    def __init__(self) -> None:
        self.seen: list[Packet] = []

    def exchange(self, packet: Packet) -> Packet:
        if packet.header == {"op": "still there"}:
            return packet
        self.seen.append(packet)
        return failure_packet(ValueError("x"))


def resident(pid: int | str = "self") -> int:
    """Resident memory of a process in bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def knock(place: Path, draw: random.Random, good: list[bytes], offered: set[bytes]) -> None:
    """One hostile connection: garbage in the handshake, or a damaged packet after it."""
    if draw.random() < 0.3:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(5)
            stream.connect(str(place / "s"))
            stream.sendall(draw.randbytes(draw.choice([0, 1, 63, 64, 65, 4096])))
        return
    data = mutate(draw.choice(good), draw)
    offered.add(data)
    with handshake(place) as stream:
        stream.sendall(data)
        if draw.random() < 0.1:
            return  # gone before the answer
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(65536):
            pass


def knock_often(place: Path, inputs: int) -> Counter:
    """Knock `inputs` times at a fresh trainer's socket; it must answer an honest question afterwards."""
    trainer = Counter()
    limits = ServiceLimits(max_message_bytes=1 << 20, idle_seconds=5.0, max_connections=8)
    service = TrainerService(trainer, place / "s", ensure_token(place / "token"), limits=limits)
    service.start()
    draw, good = random.Random(inputs), samples()
    offered: set[bytes] = set()
    before, threads = resident(), threading.active_count()
    for _ in range(inputs):
        with contextlib.suppress(OSError):  # closed on us, as it should be
            knock(place, draw, good, offered)
    assert client(place).exchange(Packet({"op": "still there"})).header == {"op": "still there"}
    assert resident() - before < 64_000_000
    wait_for("the ends of old ones", lambda: threading.active_count() <= threads + limits.max_connections, 60)
    service.stop(grace_seconds=6.0)
    whole = {data for data in offered if _whole(data)}
    assert len(trainer.seen) <= len(offered)
    assert {_shape(packet) for packet in trainer.seen} <= {
        _shape(decode_packet(data, 1 << 20)) for data in whole
    }
    return trainer


def _whole(data: bytes) -> bool:
    try:
        decode_packet(data, 1 << 20)
    except Exception:
        return False
    return True


def _shape(packet: Packet) -> str:
    return str(sorted(packet.header.items(), key=str)) + str(sorted(packet.arrays))


def test_hostile_connections_reach_no_trainer_and_leave_the_socket_usable(place: Path) -> None:
    knock_often(place, 1000)


@pytest.mark.long
def test_ten_thousand_hostile_connections_leave_the_trainers_socket_usable(place: Path) -> None:
    knock_often(place, INPUTS)


# -- the gate ----------------------------------------------------------------------------------------------------


def test_ten_thousand_odd_requests_pass_the_gate_only_where_they_may() -> None:
    draw = random.Random(3)
    token = "t" * 64
    passed: list[dict[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        passed.append(dict(scope))
        with contextlib.suppress(KeyError):
            while (await receive()).get("more_body"):
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})

    gate = Gate(inner, token=token, max_body=1000)
    parts = [
        "/v1/fleet/",
        "/v1/control/",
        "/v1/runtime/",
        "/health",
        "/",
        "//",
        "..",
        "%2e",
        "x",
        "\x00",
        "é",
        "V1",
    ]
    peers: list[Any] = [
        None,
        [],
        ("127.0.0.1", 1),
        ("10.0.0.1", 1),
        ("::1", 1),
        ("", 1),
        ("testclient", 1),
        (None, 1),
    ]
    tokens = [b"", b"Bearer " + token.encode(), b"bearer " + token.encode(), b"Bearer \xff", b"Basic x"]

    async def one() -> None:
        path = "".join(draw.choice(parts) for _ in range(draw.randrange(1, 5)))
        lines = [(b"authorization", draw.choice(tokens)) for _ in range(draw.randrange(3))]
        if draw.random() < 0.3:
            lines.append((b"content-length", draw.choice([b"-1", b"1e9", b"999999", b"x", b"\xff", b""])))
        scope = {
            "type": draw.choice(["http", "http", "http", "websocket", "other"]),
            "path": path, "headers": lines, "client": draw.choice(peers),
        }  # fmt: skip
        pieces = [{"type": "http.request", "body": b"x" * 600, "more_body": True}] * draw.randrange(3)
        last = {"type": "http.request", "body": b"x", "more_body": False}
        bodies = iter(
            [*pieces, draw.choice([last, {"type": "http.disconnect"}]), *[{"type": "http.disconnect"}] * 9]
        )

        async def receive() -> Any:
            return next(bodies)

        async def send(message: Any) -> None:
            assert message["type"] in {"http.response.start", "http.response.body", "websocket.close"}

        await gate(scope, receive, send)

    async def all_of_them() -> None:
        for _ in range(INPUTS):
            await one()

    asyncio.run(all_of_them())
    assert passed
    for scope in passed:
        local = scope["client"] in [("127.0.0.1", 1), ("::1", 1)]
        right = [value for name, value in scope["headers"] if name == b"authorization"]
        assert scope["type"] == "http"
        assert scope["path"].startswith(FLEET) or local
        if scope["path"].startswith(CONTROL):
            assert right == [b"Bearer " + token.encode()]


# -- metrics -----------------------------------------------------------------------------------------------------


def test_hostile_requests_leave_the_metrics_page_usable(capfd: pytest.CaptureFixture[str]) -> None:
    server = MetricsServer("127.0.0.1:0", server_registry("no privacy"), lambda: True)
    port = server.port
    draw = random.Random(5)
    starts = [
        b"GET /metrics HTTP/1.1\r\n",
        b"POST / HTTP/9.9\r\n",
        b"\x16\x03\x01",
        b"GET " + b"/" * 70_000,
        b"\x00",
    ]
    for _ in range(40):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as stream:
            if draw.random() < 0.3:  # a reset in the middle of the answer
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.sendall(draw.choice(starts) + draw.randbytes(draw.randrange(100)) + b"\r\n\r\n")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/readyz")
    assert connection.getresponse().read() == b"ready\n"
    connection.close()
    server.close()
    assert "Traceback" not in capfd.readouterr().err


# -- the server's port -------------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path, rounds=1, timeout=60.0, replies=1, sites=("site-a",)).make()
    try:
        made.start_server()
        wait_for("server", lambda: made.state().get("status") == "running", 180, made)
        yield made
    finally:
        made.stop()


class Signer:
    """Signs as Flower's SuperNodes do, with a key that nobody allowed; also tries an allowed site's public key."""

    def __init__(self, allowed: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP384R1())
        self._theirs = serialization.load_ssh_public_key(allowed.read_bytes())

    def lines(self, draw: random.Random) -> dict[str, str]:
        stamp = now().isoformat()
        if draw.random() < 0.2:
            stamp = draw.choice(["", "now", "1970-01-01T00:00:00+00:00", "9999-12-31T23:59:59+00:00"])
        signature = sign_message(self._key, stamp.encode()) if draw.random() < 0.8 else draw.randbytes(96)
        public = self._key.public_key() if draw.random() < 0.5 else self._theirs
        return {
            "flwr-public-key": b64encode(public_key_to_bytes(public)).decode(),  # type: ignore[arg-type]
            "flwr-timestamp": stamp,
            "flwr-signature": b64encode(signature).decode(),
        }


def storm(made: Federation, inputs: int) -> dict[int, int]:
    """Send hostile requests to the server's TLS port; return how many answers of each status came."""
    trust = ssl.create_default_context(cafile=str(made.root / "certs" / "ca.crt"))
    draw = random.Random(11)
    signer = Signer(made.root / "site-a" / "keys" / "site-a.pub")
    statuses: dict[int, int] = {}
    link: http.client.HTTPSConnection | None = None
    for number in range(inputs):
        if number % 100 == 0:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", made.port), 5) as raw:
                raw.sendall(draw.randbytes(200))  # no TLS at all
        link = link or http.client.HTTPSConnection("127.0.0.1", made.port, timeout=20, context=trust)
        prefix = draw.choice(["/v1/fleet/"] * 6 + ["/v1/control/", "/v1/runtime/", "/"])
        body = draw.randbytes(draw.choice([0, 1, 20, 300, 5000]))
        lines = {"Content-Type": draw.choice([PROTOBUF, PROTOBUF, PROTOBUF, "application/json", ""])}
        if draw.random() < 0.5:
            lines |= signer.lines(draw)
        for name in ("flwr-public-key", "Authorization", "X-Forwarded-For"):
            if draw.random() < 0.2:
                odd = [*("127.0.0.1", "0" * 64, "Bearer " + "0" * 64), draw.randbytes(40).hex()]
                lines[name] = draw.choice(odd)
        try:
            link.request(
                draw.choice(["POST", "POST", "GET", "PUT"]), prefix + draw.choice(ROUTES), body, lines
            )
            answer = link.getresponse()
            answer.read()
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
        except (OSError, http.client.HTTPException):
            link.close()
            link = None
    return statuses


@pytest.mark.long
def test_ten_thousand_hostile_requests_start_nothing_and_the_run_goes_on(served: Federation) -> None:
    pid = int(served.state()["superlink_pid"])
    before = resident(pid)
    statuses = storm(served, INPUTS)
    print(statuses)
    assert sum(statuses.values()) > INPUTS // 2
    assert not set(statuses) & {200, 201, 202, 204}, statuses
    assert served.state()["superlink_pid"] == pid
    assert resident(pid) - before < 200_000_000
    assert served.processes["server"].poll() is None
    assert descendants(served.processes["server"].pid)
    served.start_site("site-a")
    server = served.processes["server"]
    began = time.monotonic()
    wait_for("the run's end", lambda: server.poll() is not None, 240, served)
    print(f"the run took {time.monotonic() - began:.0f} s afterwards")
    assert server.returncode == 0, served.log("server")[-2000:]
    assert [line["accepted"] for line in served.rounds_done()] == [0, 1]
