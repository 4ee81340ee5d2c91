"""The resident trainer's end of the Unix socket: bounded, authenticated, one packet in, one out."""

from __future__ import annotations

import contextlib
import grp
import hmac
import logging
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedlora.errors import DeploymentError, FedLoraError, PayloadTooLargeError, WireError
from fedlora.training.port import Packet, PacketPort, encode_packet, failure_packet
from fedlora.training.service import (
    HANDSHAKE_SECONDS,
    NONCE_BYTES,
    RELAY,
    TOKEN_BYTES,
    TRAINER,
    load_token,
    proof,
    read_body,
    read_exactly,
    read_prefix,
    send_all,
)

_LOG = logging.getLogger(__name__)
MAX_CONNECTIONS = 8
LARGE_BYTES = 16 * 1024 * 1024
"""Larger packets are taken one at a time, or every connection could fill memory up to the largest packet."""


@dataclass(frozen=True)
class ServiceLimits:
    """Bounds of the service.

    Attributes:
        max_message_bytes: largest packet accepted.
        idle_seconds: how long an authenticated connection may send nothing.
        send_seconds: how long sending one answer may take.
        max_connections: connections served at once; more are closed at once.
    """

    max_message_bytes: int = 1_000_000_000
    idle_seconds: float = 60.0
    send_seconds: float = 600.0
    max_connections: int = MAX_CONNECTIONS


@dataclass(frozen=True)
class Took:
    """What one packet took from its first byte to its answer, in seconds: on the clock, and of processor time."""

    seconds: float
    cpu_seconds: float


def ensure_token(path: Path, group: str | None = None) -> bytes:
    """Return the token of a file; make it (0600, or 0640 for a group) if it does not exist.

    Raises:
        AuthenticationError: if an existing file is readable by others or has another length.
        DeploymentError: if it cannot be made.
    """
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as stream:
                if group is not None:
                    os.fchown(handle, -1, group_id(group))
                    os.fchmod(handle, 0o640)
                stream.write(secrets.token_bytes(TOKEN_BYTES))
                stream.flush()
                os.fsync(handle)
            os.link(temporary, path)  # whole or not there: a relay may be looking; fails if it exists by now
        except FileExistsError:
            pass
        except OSError as error:
            raise DeploymentError(f"trainer token {path}: cannot be made ({error.strerror})") from None
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
    return load_token(path)


def group_id(name: str) -> int:
    """Return a group's id.

    Raises:
        DeploymentError: if there is no such group.
    """
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise DeploymentError(
            f"socket.group: there is no group {name!r} on this machine; make it first"
        ) from None


class TrainerService:
    """Serves a packet port on a Unix socket until stopped.

    Args:
        port: answers packets (never raises for the trainer's own errors).
        path: the socket; a stale one is replaced, a live one is not.
        token: the shared token.
        limits: bounds.
        group: a group that may connect beside the owner.
        on_packet: called with (question, answer, what it took) after each packet, for metrics and audit.
        after: called when an answer has left, for work that nobody waits for.
    """

    def __init__(
        self,
        port: PacketPort,
        path: str | os.PathLike[str],
        token: bytes,
        *,
        limits: ServiceLimits | None = None,
        group: str | None = None,
        on_packet: Callable[[Packet, Packet, Took], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Keep the parts; `start` opens the socket."""
        self._port, self._path, self._token = port, Path(path), token
        self._limits = ServiceLimits() if limits is None else limits
        self._group, self._on_packet, self._after = group, on_packet, after
        self._slots = threading.BoundedSemaphore(self._limits.max_connections)
        self._large = threading.Lock()
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._own: int | None = None

    def start(self) -> None:
        """Open the socket and serve in the background.

        Raises:
            DeploymentError: if another trainer answers there, or the socket cannot be made.
        """
        self._listener = self._bind()
        self._thread = threading.Thread(target=self._accept, name="trainer-socket", daemon=True)
        self._thread.start()

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Stop accepting, wait for open connections up to the grace, remove the socket."""
        self._stopping.set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        deadline = time.monotonic() + grace_seconds
        for _ in range(self._limits.max_connections):
            self._slots.acquire(timeout=max(0.0, deadline - time.monotonic()))
        self._remove_own()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _bind(self) -> socket.socket:
        path = str(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            old = os.umask(0o177)
            try:
                listener.bind(path)
            finally:
                os.umask(old)
            self._own = self._path.lstat().st_ino
            if self._group is not None:
                os.chown(path, -1, group_id(self._group))
                os.chmod(path, 0o660)
            listener.listen(self._limits.max_connections)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DeploymentError(
                f"trainer socket {path}: cannot be opened ({reason}); check its folder"
            ) from None
        return listener

    def _remove_own(self) -> None:
        """Remove the socket's name if it still is the one made here: it may belong to another trainer by now."""
        with contextlib.suppress(OSError):
            if self._own is not None and self._path.lstat().st_ino == self._own:
                self._path.unlink()
        self._own = None

    def _remove_stale(self) -> None:
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise DeploymentError(f"trainer socket {self._path}: something else has this name; move it away")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2.0)
            try:
                probe.connect(str(self._path))
            except (ConnectionRefusedError, FileNotFoundError):
                self._path.unlink(missing_ok=True)
                return
        raise DeploymentError(f"trainer socket {self._path}: another trainer answers there; stop it first")

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None and not self._stopping.is_set():
            try:
                stream, _ = listener.accept()
            except OSError:
                if self._stopping.is_set():
                    return
                time.sleep(0.1)
                continue
            if not self._slots.acquire(blocking=False):
                _LOG.warning(
                    "trainer socket: more than %s connections; one was closed", self._limits.max_connections
                )
                stream.close()
                continue
            threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        try:
            with stream:
                if self._authenticated(stream):
                    while not self._stopping.is_set() and self._one(stream):
                        pass
        except (OSError, WireError, TimeoutError) as error:
            _LOG.info("trainer socket: connection ended (%s)", type(error).__name__)
        except Exception as error:
            _LOG.error("trainer socket: connection failed (%s)", type(error).__name__)
        finally:
            self._slots.release()

    def _authenticated(self, stream: socket.socket) -> bool:
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        mine = secrets.token_bytes(NONCE_BYTES)
        send_all(stream, mine, deadline)
        answer = bytes(read_exactly(stream, 2 * NONCE_BYTES, deadline, "handshake"))
        theirs, given = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(given, proof(self._token, RELAY, mine, theirs)):
            _LOG.warning("trainer socket: a connection with a wrong token was refused (%s)", _peer(stream))
            return False
        send_all(stream, proof(self._token, TRAINER, theirs, mine), deadline)
        return True

    def _one(self, stream: socket.socket) -> bool:
        """Serve one packet; return whether the connection goes on."""
        deadline = time.monotonic() + self._limits.idle_seconds
        stream.settimeout(self._limits.idle_seconds)
        if stream.recv(1, socket.MSG_PEEK) == b"":
            return False
        started, busy = time.monotonic(), time.thread_time()
        try:
            prefix, size = read_prefix(stream, deadline, self._limits.max_message_bytes)
            with self._large if size > LARGE_BYTES else contextlib.nullcontext():
                deadline = time.monotonic() + self._limits.idle_seconds  # the turn may have come late
                packet = read_body(stream, prefix, size, deadline, self._limits.max_message_bytes)
                answer = self._port.exchange(packet)
                self._note(packet, answer, Took(time.monotonic() - started, time.thread_time() - busy))
                del packet
        except (WireError, PayloadTooLargeError) as error:
            _LOG.warning("trainer socket: refused a packet (%s)", error)
            self._answer(stream, failure_packet(error))
            return False
        self._answer(stream, answer)
        if self._after is not None:
            try:
                self._after()
            except Exception as error:
                _LOG.info("trainer socket: work ahead failed (%s)", type(error).__name__)
        return True

    def _note(self, packet: Packet, answer: Packet, took: Took) -> None:
        """Tell metrics and audit; what is charged already is answered even if they cannot be written."""
        if self._on_packet is None:
            return
        try:
            self._on_packet(packet, answer, took)
        except Exception as error:
            _LOG.error("trainer socket: a request could not be audited (%s)", type(error).__name__)

    def _answer(self, stream: socket.socket, packet: Packet) -> None:
        try:
            data = encode_packet(packet)
        except FedLoraError as error:
            data = encode_packet(failure_packet(error))
        send_all(stream, data, time.monotonic() + self._limits.send_seconds)


def _peer(stream: socket.socket) -> str:
    """Return the peer's process and user, where the system tells them."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return "peer unknown"
    try:
        pid, uid, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    except OSError:
        return "peer unknown"
    return f"pid {pid}, uid {uid}"
