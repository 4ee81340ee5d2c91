"""Network addresses as they stand in files and on command lines."""

from __future__ import annotations


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return the two parts of "host:port"; None if there is no host or no port between 1 and 65535."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        return None
    return host, int(port)
