"""Real networks for the end-to-end tests: namespaces around a switch, cables to pull, slow and lossy wires."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

CLONE_NEWNET = 0x40000000
HELLO_ANSWER = b'"op": "hello"'
_LIBC = ctypes.CDLL(None, use_errno=True)


def usable() -> bool:
    """Return whether network namespaces can be made here (root, iproute2)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"fl{os.getpid()}t"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """Hosts in namespaces of their own on one switch; every cable can be pulled."""

    def __init__(self) -> None:
        number = os.getpid() % 60000
        self._prefix = f"fl{os.getpid()}"
        self._net = f"10.{100 + number // 256 % 100}.{number % 256}"
        self._hosts: list[str] = []
        self._switch = f"{self._prefix}-sw"
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")

    def add(self, host: str) -> str:
        """Connect a host; return its address."""
        space, port = self.space(host), self._port(host)
        self._hosts.append(host)
        address = f"{self._net}.{len(self._hosts)}"
        _ip("netns", "add", space)
        _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", self._switch, "link", "set", port, "master", "br0")
        _ip("-n", self._switch, "link", "set", port, "up")
        _ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")
        return address

    def space(self, host: str) -> str:
        """Return the name of a host's namespace."""
        return f"{self._prefix}-{host[-6:]}"

    def _port(self, host: str) -> str:
        return f"p{host[-6:]}"

    def pull(self, host: str) -> None:
        """Pull a host's cable out of the switch: packets vanish, nobody is told."""
        _ip("-n", self._switch, "link", "set", self._port(host), "down")

    def plug(self, host: str) -> None:
        """Put it back."""
        _ip("-n", self._switch, "link", "set", self._port(host), "up")

    def close(self) -> None:
        """Remove every namespace."""
        for host in self._hosts:
            subprocess.run(["ip", "netns", "del", self.space(host)], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self._switch], capture_output=True, check=False)


def enter(space: str | None) -> None:
    """Move this thread into a network namespace; sockets made from now on are in it."""
    if space is None:
        return
    with open(f"/run/netns/{space}", "rb") as handle:
        if _LIBC.setns(handle.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


class SlowWire:
    """A TCP proxy inside a namespace: counts, delays, loses and stops bytes; TLS passes through untouched.

    Attributes:
        up: bytes that went to the server so far.
        delay: seconds that each chunk waits, in both directions.
        mute_when: asked half a second after each answer of the server; from True on nothing comes back.
        muted: set from then on.
        loss: every so many chunks one waits for a second more, as a lost packet does; 0 loses none.
        allowed: bytes that may still go up; None for all.
        since: asked at each chunk that goes up; what goes before it is True counts neither in `counted` nor against
            `allowed` (polls and heartbeats, of which a slow machine sends many).
        counted: bytes that went up since then.
    """

    def __init__(self, space: str | None, target: tuple[str, int]) -> None:
        self._space, self._target = space, target
        self.up = 0
        self.delay, self.loss = 0.0, 0
        self.allowed: int | None = None
        self.since: Callable[[], bool] | None = None
        self.counted = 0
        self.stopped = threading.Event()
        self.mute_when: Callable[[], bool] | None = None
        self.muted = threading.Event()
        self._closed = threading.Event()
        self._chunks = 0
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        ready.wait(10)

    def normal(self) -> None:
        """Let everything through again; what was held back is gone, its connections are closed."""
        self.allowed, self.mute_when, self.since = None, None, None
        self.delay, self.loss = 0.0, 0
        self.stopped.clear()
        self.muted.clear()

    def close(self) -> None:
        """Stop for good."""
        self._closed.set()
        self._listener.close()

    def _run(self, ready: threading.Event) -> None:
        enter(self._space)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        ready.set()
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target, timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for source, sink, up in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pump, args=(source, sink, up), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16384):
                self._wait()
                if not (self._upward(data, sink) if up else self._downward(data, sink)):
                    break
        for stream in (source, sink):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)

    def _wait(self) -> None:
        self._chunks += 1
        if self.delay:
            time.sleep(self.delay)
        if self.loss and self._chunks % self.loss == 0:
            time.sleep(1.0)

    def _upward(self, data: bytes, sink: socket.socket) -> bool:
        allowed, since = self.allowed, self.since  # `normal` may change them at any time
        if since is not None and not since():
            allowed = None
        else:
            self.counted += len(data)
        if allowed is not None and len(data) > allowed:
            sink.sendall(data[:allowed])
            self.up += allowed
            self.stopped.set()
            return self._hang()
        if allowed is not None:
            self.allowed = allowed - len(data)
        sink.sendall(data)
        self.up += len(data)
        return True

    def _downward(self, data: bytes, sink: socket.socket) -> bool:
        mute = self.mute_when  # `normal` may change it at any time
        if mute is not None:
            time.sleep(0.5)
            if mute():
                self.muted.set()
                return self._hang()
        sink.sendall(data)
        return True

    def _hang(self) -> bool:
        """Hold a connection silently until the wire is normal again, then drop it."""
        while (self.allowed is not None or self.mute_when is not None) and not self._closed.is_set():
            time.sleep(0.05)
        return False


class Door:
    """A Unix socket before a trainer's: its answers can be held back (all but hello), to choose moments."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self._target = path, target
        self._open = threading.Event()
        self._open.set()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(8)
        threading.Thread(target=self._run, daemon=True).start()

    def hold(self) -> None:
        """Hold answers back from now on."""
        self._open.clear()

    def release(self) -> None:
        """Let them through."""
        self._open.set()

    def close(self) -> None:
        """Stop."""
        self._open.set()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                far.connect(str(self._target))
            except OSError:
                near.close()
                continue
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        seen = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                seen += len(data)
                if answers and seen > 64 and HELLO_ANSWER not in data[:200]:  # 64: the handshake's two nonces
                    self._open.wait()
                sink.sendall(data)
        for stream in (source, sink):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
