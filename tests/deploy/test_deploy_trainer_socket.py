"""The trainer's Unix socket: token, permissions, bounds, restarts."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fedlora.errors import (
    AuthenticationError,
    DeploymentError,
    PayloadTooLargeError,
    TrainerUnreachableError,
    WireError,
)
from fedlora.training.port import Packet, encode_packet
from fedlora.training.service import NONCE_BYTES, RELAY, SocketPort, load_token, proof, read_exactly
from fedlora.training.service_server import LARGE_BYTES, ServiceLimits, TrainerService, ensure_token


class Echo:
    """Answers with the packet it got, after an optional wait."""

    def __init__(self, wait: float = 0.0) -> None:
        self.wait, self.count = wait, 0

    def exchange(self, packet: Packet) -> Packet:
        self.count += 1
        time.sleep(self.wait)
        return packet


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = Path("/tmp") / f"fl{os.getpid()}{time.monotonic_ns() % 10**8}"  # Unix socket paths are short
    folder.mkdir(mode=0o700)
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def start(place: Path, port: Echo, **limits: float) -> TrainerService:
    token = ensure_token(place / "token")
    service = TrainerService(port, place / "s", token, limits=ServiceLimits(**limits))  # type: ignore[arg-type]
    service.start()
    return service


def client(place: Path, **changes: object) -> SocketPort:
    arguments: dict[str, object] = {"connect_seconds": 60.0, "request_seconds": 60.0, **changes}
    return SocketPort(str(place / "s"), str(place / "token"), **arguments)  # type: ignore[arg-type]


def test_packets_go_through_unchanged(place: Path) -> None:
    service = start(place, Echo())
    packet = Packet(
        {"op": "x", "n": 3}, {"a": np.arange(300_000, dtype=np.float32), "e": np.zeros((0, 4), np.int8)}
    )
    answer = client(place).exchange(packet)
    service.stop()
    assert answer.header == packet.header
    for name, array in packet.arrays.items():
        assert answer.arrays[name].dtype == array.dtype
        assert np.array_equal(answer.arrays[name], array)


def test_socket_and_token_are_private(place: Path) -> None:
    service = start(place, Echo())
    assert stat.S_IMODE((place / "s").stat().st_mode) == 0o600
    assert stat.S_IMODE((place / "token").stat().st_mode) == 0o600
    assert len(load_token(place / "token")) == 32
    service.stop()
    assert not (place / "s").exists()


def test_a_wrong_token_is_refused_by_name_and_nothing_is_asked(place: Path) -> None:
    port = Echo()
    service = start(place, port)
    wrong = place / "wrong"
    wrong.write_bytes(b"x" * 32)
    wrong.chmod(0o600)
    with pytest.raises(AuthenticationError, match="refused the token"):
        SocketPort(str(place / "s"), str(wrong), connect_seconds=60.0).exchange(Packet({}))
    service.stop()
    assert port.count == 0


def test_the_token_is_whole_as_soon_as_its_name_is_there(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay may look at any time; half a token would end it with an error."""
    seen: list[bool] = []
    sync = os.fsync

    def look(handle: int) -> None:
        seen.append((place / "token").exists())
        sync(handle)

    monkeypatch.setattr(os, "fsync", look)
    token = ensure_token(place / "token")
    assert seen == [False]
    assert load_token(place / "token") == token == ensure_token(place / "token")
    assert [file.name for file in place.iterdir()] == ["token"]


def test_trainers_that_make_the_token_at_once_agree_on_it(place: Path) -> None:
    found: list[bytes] = []
    together = threading.Barrier(8)

    def make() -> None:
        together.wait(60)
        found.append(ensure_token(place / "token"))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found))) == (8, 1)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o666])
def test_a_token_that_others_can_read_is_refused(place: Path, mode: int) -> None:
    ensure_token(place / "token")
    (place / "token").chmod(mode)
    with pytest.raises(AuthenticationError, match="others may read"):
        load_token(place / "token")


def test_a_fake_trainer_does_not_get_the_request(place: Path) -> None:
    ensure_token(place / "token")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(place / "s"))
    listener.listen(1)
    seen: list[bytes] = []

    def impostor() -> None:
        stream, _ = listener.accept()
        with stream:
            stream.sendall(b"n" * NONCE_BYTES)
            read_exactly(stream, 2 * NONCE_BYTES, time.monotonic() + 60, "handshake")
            stream.sendall(b"f" * NONCE_BYTES)
            stream.settimeout(60)
            seen.append(stream.recv(4096))

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(AuthenticationError, match="does not know the token"):
        client(place).exchange(Packet({"op": "secret"}))
    thread.join()
    listener.close()
    assert seen == [b""]


def handshake(place: Path) -> socket.socket:
    """Return an authenticated connection (OSError: the trainer, at its limit, closed it)."""
    token, until = load_token(place / "token"), time.monotonic() + 60
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(60)
        stream.connect(str(place / "s"))
        nonce = bytes(read_exactly(stream, NONCE_BYTES, until, "handshake"))
        stream.sendall(b"m" * NONCE_BYTES + proof(token, RELAY, nonce, b"m" * NONCE_BYTES))
        read_exactly(stream, NONCE_BYTES, until, "handshake")
    except WireError as error:
        raise ConnectionResetError(str(error)) from None
    return stream


def all_of(stream: socket.socket) -> bytes:
    """Return what comes until the other side closes (with a reset if it left something unread)."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := stream.recv(4096):
            data += part
    return data


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"\0" * 32,
        struct.pack(">4sIQ", b"FLRP", 10, 2**62),
        struct.pack(">4sIQ", b"FLRP", 2**31, 0),
        struct.pack(">4sIQ", b"FLRP", 4, 0) + b"nope",
        struct.pack(">4sIQ", b"FLRP", 2, 0) + b"[]",
    ],
)
def test_malformed_and_oversized_packets_are_answered_with_a_failure(place: Path, bad: bytes) -> None:
    port = Echo()
    service = start(place, port, max_message_bytes=1 << 20)
    with handshake(place) as stream:
        stream.sendall(bad)
        assert b"failure" in all_of(stream)
    assert client(place).exchange(Packet({"op": "after"})).header == {"op": "after"}
    service.stop()
    assert port.count == 1


def test_an_answer_above_the_limit_is_refused_at_the_relay(place: Path) -> None:
    service = start(place, Echo())
    with pytest.raises(PayloadTooLargeError):
        client(place, max_bytes=1000).exchange(Packet({}, {"a": np.zeros(10_000, np.float32)}))
    service.stop()


class Hungry(Echo):
    """Notes how many packets are in its hands at once: it waits for `hopes` of them, then 0.2 s for one more."""

    def __init__(self, hopes: int) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._hopes, self._changed = hopes, threading.Condition()

    def exchange(self, packet: Packet) -> Packet:
        with self._changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._hopes, 30.0)
            self._changed.wait_for(lambda: self.most > self._hopes, 0.2)
            self.now -= 1
        return Packet({"op": packet.header["op"]})


@pytest.mark.parametrize(("size", "at_once"), [(LARGE_BYTES // 4 + 10, 1), (10, 2)])
def test_large_packets_are_taken_one_at_a_time_and_small_ones_are_not(
    place: Path, size: int, at_once: int
) -> None:
    trainer = Hungry(at_once)
    service = start(place, trainer)
    packet = Packet({"op": "large"}, {"a": np.zeros(size, np.float32)})
    answers: list[Packet] = []
    threads = [
        threading.Thread(target=lambda: answers.append(client(place).exchange(packet))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    service.stop()
    assert len(answers) == 3
    assert trainer.most == 1 if at_once == 1 else trainer.most >= at_once


def test_the_relay_waits_for_a_trainer_that_restarts(place: Path) -> None:
    first = start(place, Echo())
    first.stop()
    started: list[TrainerService] = []
    timer = threading.Timer(0.7, lambda: started.append(start(place, Echo())))
    timer.start()
    assert client(place).exchange(Packet({"op": "later"})).header == {"op": "later"}
    timer.join()
    started[0].stop()


def test_no_trainer_is_one_clear_error_in_bounded_time(place: Path) -> None:
    ensure_token(place / "token")
    began = time.monotonic()
    with pytest.raises(TrainerUnreachableError, match="fedlora trainer"):
        client(place, connect_seconds=0.5).exchange(Packet({}))
    assert time.monotonic() - began < 30  # far below the 60 s of a request: it is the other bound that holds


def test_a_second_trainer_on_the_same_socket_is_refused(place: Path) -> None:
    service = start(place, Echo())
    with pytest.raises(DeploymentError, match="another trainer"):
        start(place, Echo())
    assert client(place).exchange(Packet({"op": "first"})).header == {"op": "first"}
    service.stop()


def test_a_file_in_the_sockets_place_is_left_alone(place: Path) -> None:
    (place / "s").write_text("precious")
    with pytest.raises(DeploymentError, match="something else"):
        start(place, Echo())
    assert (place / "s").read_text() == "precious"


def test_silent_connections_do_not_block_others(place: Path) -> None:
    service = start(place, Echo(), idle_seconds=1.0)
    idle = [handshake(place) for _ in range(8)]
    assert client(place).exchange(Packet({"op": "served"})).header == {"op": "served"}
    for stream in idle:
        stream.close()
    service.stop()


def test_one_request_costs_little(place: Path) -> None:
    service = start(place, Echo())
    packet = Packet({}, {"a": np.zeros(250_000, np.float32)})
    began = time.process_time()  # the service answers from a thread of this process
    for _ in range(5):
        client(place).exchange(packet)
    service.stop()
    assert (time.process_time() - began) / 5 < 0.2
    assert len(encode_packet(packet)) > 1_000_000


def test_an_answer_leaves_although_it_cannot_be_audited(place: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    token = ensure_token(place / "token")
    service = TrainerService(Echo(), place / "s", token, on_packet=full)
    service.start()
    assert client(place).exchange(Packet({"op": "round"})).header == {"op": "round"}
    service.stop()
