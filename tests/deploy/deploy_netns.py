"""Real networks for the end-to-end tests: namespaces around a switch, cables to pull, doors before trainers."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
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


def enter(space: str) -> None:
    """Move this thread into a network namespace; sockets that it and its threads make from now on are in it."""
    with open(f"/run/netns/{space}", "rb") as handle:
        if _LIBC.setns(handle.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


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
