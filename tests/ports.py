"""TCP ports that stay a test's own until its process ends."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_HELD: list[socket.socket] = []
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def reserved_port() -> int:
    """Return a TCP port that nobody takes before it is used.

    A port that was merely free a moment ago may be given to any process's next connection. This one lies below the
    range that the kernel gives ports out of, and a name that only one process can hold (an abstract Unix socket; a
    network namespace has its own names as it has its own ports) keeps other runs of these tests away from it.
    """
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32768
    last = first if first > 22_000 else 32_768
    for port in random.SystemRandom().sample(range(20_000, last), last - 20_000):
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0fedlora-tests-{port}")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except OSError:
            name.close()
            continue
        _HELD.append(name)
        return port
    raise AssertionError("no TCP port is free on this machine")
