"""Ports of the tests: nobody else's, not even of the same tests running beside."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import ports


def test_a_port_stays_its_own_until_the_process_ends() -> None:
    mine = [ports.reserved_port() for _ in range(20)]
    code = (  # another run of these tests that tries the very same ports first
        "import ports, random, sys; mine = [int(one) for one in sys.argv[1:]];"
        "random.SystemRandom.sample = lambda self, every, count: [*mine, *every]; print(ports.reserved_port())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, mine)],
        cwd=Path(ports.__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(set(mine)) == 20
    assert int(done.stdout) not in mine
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert first <= 22_000 or max(mine) < first, "the kernel gives these to anybody"
    for port in mine:
        socket.create_server(("127.0.0.1", port)).close()
