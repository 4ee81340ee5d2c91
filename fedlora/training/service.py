"""The relay's end of the trainer's Unix socket: authenticate, send one packet, read one packet.

No torch in here: the relay imports this module in every process that Flower starts.

```
server -> client   32 bytes  nonce_s
client -> server   32 bytes  nonce_c, 32 bytes HMAC(token, "relay"   | nonce_s | nonce_c)
server -> client   32 bytes  HMAC(token, "trainer" | nonce_c | nonce_s)
client -> server   one packet (`fedlora.training.port`), then server -> client one packet, repeated
```

Both ends prove that they know the token; neither sends it. All lengths are bounded before anything is read.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fedlora.errors import AuthenticationError, PayloadTooLargeError, TrainerUnreachableError, WireError
from fedlora.names import ENV_TRAINER_TOKEN
from fedlora.training.port import (
    DEFAULT_MAX_BYTES,
    PREFIX_BYTES,
    Packet,
    decode_packet,
    encode_packet,
    packet_length,
)

NONCE_BYTES: Final = 32
TOKEN_BYTES: Final = 32
HANDSHAKE_SECONDS: Final = 10.0
_CHUNK: Final = 1 << 20
RELAY: Final = b"fedlora relay v1"
TRAINER: Final = b"fedlora trainer v1"


def proof(token: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    """Return HMAC-SHA256 over a role and two nonces."""
    return hmac.digest(token, role + first + second, "sha256")


def load_token(path: str | os.PathLike[str]) -> bytes:
    """Return the shared token of a token file.

    Raises:
        AuthenticationError: if it is missing, too short, or readable by others than owner and group.
    """
    file = Path(path)
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        token = file.read_bytes()
    except OSError as error:
        raise AuthenticationError(
            f"trainer token {file}: cannot be read ({error.strerror}); `fedlora trainer` makes it"
        ) from None
    if mode & 0o007:
        raise AuthenticationError(
            f"trainer token {file}: mode is {mode:04o}; others may read it; run chmod o= {file}"
        )
    if len(token) != TOKEN_BYTES:
        raise AuthenticationError(
            f"trainer token {file}: {len(token)} bytes; {TOKEN_BYTES} needed; delete it"
        )
    return token


def read_exactly(stream: socket.socket, size: int, deadline: float, what: str) -> bytearray:
    """Read exactly `size` bytes before a monotonic deadline; memory grows only with what arrives.

    Raises:
        WireError: if the peer closes early.
        TimeoutError: if the deadline passes.
    """
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"{what}: timed out")
        stream.settimeout(left)
        chunk = stream.recv(min(_CHUNK, size - len(data)))
        if not chunk:
            raise WireError(f"{what}: the other end closed after {len(data)} of {size} bytes")
        data += chunk
    return data


def read_packet(stream: socket.socket, deadline: float, max_bytes: int) -> Packet:
    """Read one packet.

    Raises:
        WireError: if it is malformed or cut short.
        PayloadTooLargeError: if it announces more than `max_bytes`.
        TimeoutError: if the deadline passes.
    """
    prefix, size = read_prefix(stream, deadline, max_bytes)
    return read_body(stream, prefix, size, deadline, max_bytes)


def read_prefix(stream: socket.socket, deadline: float, max_bytes: int) -> tuple[bytes, int]:
    """Read a packet's first bytes; return them and how many follow.

    Raises:
        WireError: if they are malformed or cut short.
        PayloadTooLargeError: if they announce more than `max_bytes`.
        TimeoutError: if the deadline passes.
    """
    prefix = bytes(read_exactly(stream, PREFIX_BYTES, deadline, "packet"))
    return prefix, packet_length(prefix, max_bytes)


def read_body(stream: socket.socket, prefix: bytes, size: int, deadline: float, max_bytes: int) -> Packet:
    """Read the rest of a packet; the errors are those of `read_packet`."""
    body = read_exactly(stream, size, deadline, "packet")
    return decode_packet(prefix + bytes(body), max_bytes)


def send_all(stream: socket.socket, data: bytes, deadline: float) -> None:
    """Send everything before a monotonic deadline.

    Raises:
        TimeoutError: if the deadline passes.
    """
    view = memoryview(data)
    while len(view) > 0:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("packet: timed out while sending")
        stream.settimeout(left)
        view = view[stream.send(view[:_CHUNK]) :]


@dataclass(frozen=True)
class SocketPort:
    """The resident trainer behind a Unix socket, as a packet port.

    A trainer that is being restarted is waited for; a request that was cut off is asked again, which is
    safe: the trainer answers a repeated round with the same bytes or refuses it.

    Attributes:
        path: the socket.
        token_file: file of the shared token; `FEDLORA_TRAINER_TOKEN_FILE` by default.
        connect_seconds: how long to wait for a trainer that does not answer.
        request_seconds: how long one request may take, reconnections included.
        max_bytes: largest answer accepted.
    """

    path: str
    token_file: str | None = None
    connect_seconds: float = 60.0
    request_seconds: float = 3600.0
    max_bytes: int = DEFAULT_MAX_BYTES
    sleep: Callable[[float], None] = time.sleep

    def exchange(self, packet: Packet) -> Packet:
        """Answer one packet with the resident trainer.

        Raises:
            TrainerUnreachableError: if it cannot be reached, or does not answer in time.
            AuthenticationError: if the token is wrong.
            PayloadTooLargeError: if the answer is larger than allowed.
        """
        token = load_token(self._token_file())
        data = encode_packet(packet)
        end = time.monotonic() + self.request_seconds
        reachable_by = time.monotonic() + self.connect_seconds
        reason = "no answer"
        while time.monotonic() < min(end, reachable_by):
            try:
                with self._connect(token) as stream:
                    send_all(stream, data, end)
                    return read_packet(stream, end, self.max_bytes)
            except (AuthenticationError, PayloadTooLargeError):
                raise
            except TimeoutError:
                reason = "timed out"
                break
            except (OSError, WireError) as error:
                reason = str(error) or type(error).__name__
                self.sleep(min(0.5, max(0.0, reachable_by - time.monotonic())))
        raise TrainerUnreachableError(
            f"trainer {self.path}: not reachable ({reason}); is `fedlora trainer` running and may this user connect?"
        )

    def _token_file(self) -> str:
        found = self.token_file or os.environ.get(ENV_TRAINER_TOKEN)
        if not found:
            raise AuthenticationError(f"trainer token: no file given; set {ENV_TRAINER_TOKEN}")
        return found

    def _connect(self, token: bytes) -> socket.socket:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stream.settimeout(HANDSHAKE_SECONDS)
            stream.connect(self.path)
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            theirs = bytes(read_exactly(stream, NONCE_BYTES, deadline, "handshake"))
            mine = secrets.token_bytes(NONCE_BYTES)
            send_all(stream, mine + proof(token, RELAY, theirs, mine), deadline)
            try:
                answer = bytes(read_exactly(stream, NONCE_BYTES, deadline, "handshake"))
            except (WireError, ConnectionError):
                raise AuthenticationError(
                    f"trainer {self.path}: refused the token; give both sides the same token file"
                ) from None
            if not hmac.compare_digest(answer, proof(token, TRAINER, mine, theirs)):
                raise AuthenticationError(
                    f"trainer {self.path}: does not know the token; is it the right socket?"
                )
        except BaseException:
            stream.close()
            raise
        return stream
