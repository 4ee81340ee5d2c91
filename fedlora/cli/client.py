"""`fedlora client`: a site's connection to the server (Flower's SuperNode); it holds no data."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedlora.addresses import host_and_port
from fedlora.cli.common import JsonOption, emit
from fedlora.cli.files import PUBLIC, read_file, require_private, write_file
from fedlora.cli.keyring import parse_public
from fedlora.cli.processes import Child, StopSignals, child_environment, free_port, script
from fedlora.cli.refusals import reason_of
from fedlora.cli.state import AuditLog, StateFile, note_change
from fedlora.errors import AuthenticationError, DeploymentError, FedLoraError
from fedlora.names import ENV_TRAINER_SOCKET, ENV_TRAINER_TOKEN

_LOG = logging.getLogger("fedlora.client")
_CA_REMEDY = "get ca.crt from the server's operator"
WEDGED = "SSL/TLS handshake error detected"
"""After this Flower 1.42's SuperNode may stay alive without ever asking for work again."""
WEDGED_SECONDS = 5.0
GRACE_SECONDS = 120.0
"""A node that died is "online" at the server until its heartbeat is overdue; until then its key is refused too."""
NOT_ACTIVATED = "[code: 2004]"
ACCEPTED = "Receiving:"
ACTIVATED = "SuperNode ID:"
"""The server has let the node in."""
ACCEPTED_FILE = "accepted-key"
THROWN_OUT = "401 Unauthorized"
"""Said to a node that was in: its key was removed. Its next refusal is final, nothing of it is "online" any more."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

app = typer.Typer(
    help="Start one site's connection to the server.", rich_markup_mode=None, add_completion=False
)

GAVE_UP = "SuperNode terminated gracefully"
"""All that Flower 1.42's SuperNode says when the server refuses the signature of anything but a heartbeat."""
BAD_SIGNATURE = (
    "the server refused the signature; compare this machine's clock with the server's, then the key"
)


@dataclass(frozen=True)
class ClientSettings:
    """One SuperNode's settings; see the options of `fedlora client`."""

    superlink: str
    ca: Path
    key: Path
    trainer_socket: Path
    token_file: Path
    state: Path
    max_wait_seconds: float
    host: str
    port: int

    def check(self) -> str:
        """Check files before anything is started; return the key's fingerprint.

        Raises:
            DeploymentError: if a file is missing or of another kind, or private files are readable by others.
            AuthenticationError: if the key is of another kind.
        """
        require_certificates(read_file(self.ca, "CA certificate", _CA_REMEDY), self.ca)
        read_file(self.key, "deployment key", "make it with `fedlora keys new`")
        require_private(self.key, "deployment key")
        if host_and_port(self.superlink) is None:
            raise DeploymentError(
                f"--superlink: got {self.superlink!r}; give host:port, with a port below 65536"
            )
        return _fingerprint(self.key)

    def command(self, port: int) -> list[str]:
        """Return the SuperNode's command line."""
        return [
            script("flower-supernode"),
            *("--superlink", self.superlink),
            *("--root-certificates", str(self.ca.resolve())),
            *("--auth-supernode-private-key", str(self.key.resolve())),
            *("--host", self.host, "--port", str(port)),
            *("--max-wait-time", str(self.max_wait_seconds)),
        ]


def require_certificates(data: bytes, path: Path) -> None:
    """Refuse a CA file without a certificate: the SuperNode would try for good and never say why.

    Raises:
        DeploymentError: if it holds none.
    """
    from cryptography import x509

    try:
        x509.load_pem_x509_certificates(data)
    except ValueError:
        raise DeploymentError(f"CA certificate {path}: no certificate in PEM in it; {_CA_REMEDY}") from None


def _fingerprint(key: Path) -> str:
    from cryptography.hazmat.primitives import serialization

    try:
        private = serialization.load_ssh_private_key(key.read_bytes(), None)
    except (ValueError, TypeError):
        raise AuthenticationError(
            f"deployment key {key}: not an OpenSSH private key; make it with `fedlora keys new`"
        ) from None
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return parse_public(public.decode(), str(key))[1]


@app.command()
def client(
    superlink: Annotated[str, typer.Option("--superlink", help="The server's address, host:port.")],
    ca: Annotated[Path, typer.Option("--ca", help="The federation's ca.crt; the only CA that is trusted.")],
    key: Annotated[Path, typer.Option("--key", help="This site's deployment key.")],
    trainer_socket: Annotated[
        Path | None, typer.Option("--trainer-socket", help="The trainer's Unix socket.")
    ] = None,
    token: Annotated[Path | None, typer.Option("--token", help="The trainer's token file.")] = None,
    state: Annotated[Path, typer.Option("--state", help="Folder for logs and state.")] = Path("client-state"),
    with_trainer: Annotated[
        Path | None,
        typer.Option(
            "--with-trainer", help="Also start the trainer of this site file, under this user (trials)."
        ),
    ] = None,
    max_wait: Annotated[
        float, typer.Option("--max-wait", help="Give up after so many seconds without the server.")
    ] = 3600.0,
    host: Annotated[
        str, typer.Option("--host", help="Address of the SuperNode's own local interface.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Its port; 0 takes a free one.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Connect a site to the server and pass its messages to the trainer, until stopped.

    It needs the trainer's socket and token, the CA certificate and its own key; nothing else. Run it as a user
    that can read neither the data nor the ledger.

    Example: fedlora client --superlink fl.example.org:8000 --ca ca.crt --key keys/hospital-a
    --trainer-socket run/trainer.sock --token run/trainer.token

    Example: fedlora client --superlink localhost:8000 --ca ca.crt --key keys/a --with-trainer site.yaml
    """
    socket, token_file = _trainer_place(trainer_socket, token, with_trainer)
    settings = ClientSettings(superlink, ca, key, socket, token_file, state, max_wait, host, port)
    fingerprint = settings.check()
    status = _with_trainer(settings, fingerprint, with_trainer)
    emit({"status": status, "fingerprint": fingerprint}, as_json=as_json, text=f"client {status}")


def _with_trainer(settings: ClientSettings, fingerprint: str, site_file: Path | None) -> str:
    """Run the relay, and the trainer of a site file along with it if one is given."""
    stop = StopSignals()
    trainer = _start_trainer(site_file, settings.state) if site_file is not None else None
    try:
        return run_client(settings, fingerprint, stop, trainer)
    finally:
        if trainer is not None:
            trainer.stop()


def _trainer_place(socket: Path | None, token: Path | None, with_trainer: Path | None) -> tuple[Path, Path]:
    if with_trainer is not None:
        from fedlora.config.trainer import load_trainer, site_path

        site = load_trainer(with_trainer).config
        return site_path(with_trainer, site.socket.path), site_path(with_trainer, site.socket.token_file)
    if socket is None or token is None:
        raise DeploymentError(
            "give --trainer-socket and --token, or --with-trainer for a trial under one user"
        )
    return socket, token


def _start_trainer(site_file: Path, state: Path) -> Child:
    _LOG.warning(
        "--with-trainer: code that the server ships runs under the user that can read the data; for trials only"
    )
    environment = child_environment({}, state.resolve() / "flower")
    command = [sys.executable, "-m", "fedlora.cli.main", "trainer", str(site_file.resolve())]
    child = Child(
        "trainer",
        command,
        environment=environment,
        folder=state.resolve() / "empty",
        log=state / "trainer.log",
    )
    child.start()
    return child


def run_client(settings: ClientSettings, fingerprint: str, stop: StopSignals, trainer: Child | None) -> str:
    """Run the SuperNode until stopped; restart it after a crash, with a growing pause.

    Returns:
        "stopped".

    Raises:
        AuthenticationError: if the server refuses the key or its certificate does not fit.
        DeploymentError: if the server stays away longer than allowed, or the trainer ends.
    """
    life = _Life(settings, fingerprint)
    while True:
        if life.once(stop, trainer):
            return "stopped"
        pause = life.pause_or_raise()
        _LOG.warning("SuperNode ended (%s); again in %.0f s", life.reason, pause)
        if stop.wait(pause):
            life.stopped()
            return "stopped"


class _Life:
    """One relay's SuperNodes, one after the other, and what is known about the server between them."""

    def __init__(self, settings: ClientSettings, fingerprint: str) -> None:
        self._settings, self._fingerprint = settings, fingerprint
        self.state = StateFile(settings.state, "client")
        self._audit = AuditLog(settings.state / "audit.jsonl")
        self._pause, self._reached = 1.0, time.monotonic()
        self._began = self._reached
        self._seen: list[str] = []
        self._activated, self._alone, self._told = threading.Event(), False, False
        self._thrown_out = False
        self.reason = ""

    def once(self, stop: StopSignals, trainer: Child | None) -> bool:
        """Run one SuperNode to its end; return whether that was asked for."""
        settings = self._settings
        self._seen, self._activated, self._told = [], threading.Event(), False
        self._read_key()
        wedged = threading.Event()
        child = _start_node(settings, self._fingerprint, self._seen, wedged, self._activated)
        facts = {"superlink": settings.superlink, "key": self._fingerprint, "node_pid": child.pid}
        more = {"trainer_socket": str(settings.trainer_socket), "connected": False}
        note_change(self.state, self._audit, "client started", "running", **facts, **more)
        self._began = time.monotonic()
        try:
            asked = _watch(child, stop, trainer, wedged, self._connected)
            self._alone = not asked and child.poll() is not None
        finally:
            child.stop()
        if asked:
            self.stopped()
        return asked

    def _read_key(self) -> None:
        """Tell by the key's file which key the next SuperNode will use: it may have been rotated."""
        with contextlib.suppress(OSError, FedLoraError):
            self._fingerprint = _fingerprint(self._settings.key)

    def stopped(self) -> None:
        """Note a stop that was asked for while no SuperNode ran."""
        note_change(self.state, self._audit, "client stopped", "stopped", connected=False)

    def _connected(self) -> None:
        """Tell once for each SuperNode that the server has let it in."""
        if self._activated.is_set() and not self._told:
            self._told = True
            _LOG.info("connected to %s as %s", self._settings.superlink, self._fingerprint)
            note_change(self.state, self._audit, "client connected", "running", connected=True)

    def pause_or_raise(self) -> float:
        """Judge why a SuperNode ended; return how long to wait before the next one, in seconds.

        Raises:
            AuthenticationError: if the server refuses the key or its certificate does not fit.
            DeploymentError: if the server has been away for longer than allowed.
        """
        settings, now = self._settings, time.monotonic()
        error, self.reason = reason_of(self._seen)
        if error is None and self._gave_up() and not self._activated.is_set():
            error, self.reason = AuthenticationError, BAD_SIGNATURE
        if self._activated.is_set():
            self._reached = now
            self._thrown_out = any(THROWN_OUT in line for line in self._seen) or self._gave_up()
            if error is None and self._thrown_out:
                self.reason = BAD_SIGNATURE
        note_change(self.state, self._audit, "client down", "down", reason=self.reason, connected=False)
        patient = self._is_patient(now)
        if error is not None and not patient:
            raise error(f"server {settings.superlink} refused {self._fingerprint}: {self.reason}")
        if self._activated.is_set() and now - self._began > 60:
            self._pause = 1.0
        if now - self._reached > settings.max_wait_seconds:
            raise DeploymentError(
                f"server {settings.superlink}: not reachable for {settings.max_wait_seconds:.0f} s ({self.reason})"
            )
        pause, self._pause = self._pause, min(15.0 if patient else 60.0, self._pause * 2)
        return pause

    def _gave_up(self) -> bool:
        """Whether the SuperNode went by itself and without a word: the server refused a signature."""
        return self._alone and any(GAVE_UP in line for line in self._seen)

    def _is_patient(self, now: float) -> bool:
        """Whether a refusal may only mean that the server still thinks that an earlier SuperNode is there."""
        accepted = self._settings.state / ACCEPTED_FILE
        known = accepted.exists() and accepted.read_text() == self._fingerprint
        unknown = not self._thrown_out and any(NOT_ACTIVATED in line for line in self._seen)
        return known and (unknown or self._gave_up()) and now - self._reached < GRACE_SECONDS


def note_accepted(state: Path, fingerprint: str) -> None:
    """Remember which key the server gave work to: its next refusals may only mean that it was there a moment ago."""
    file = state / ACCEPTED_FILE
    if not file.exists() or file.read_text() != fingerprint:
        write_file(file, fingerprint.encode(), mode=PUBLIC, replace=True)


def _start_node(
    settings: ClientSettings,
    fingerprint: str,
    seen: list[str],
    wedged: threading.Event,
    activated: threading.Event,
) -> Child:
    home = settings.state.resolve() / "flower"
    places = {
        ENV_TRAINER_SOCKET: str(settings.trainer_socket.resolve()),
        ENV_TRAINER_TOKEN: str(settings.token_file.resolve()),
    }

    def remember(line: str) -> None:
        seen.append(_COLOURS.sub("", line))
        del seen[:-200]
        if WEDGED in line:
            wedged.set()
        if ACTIVATED in line:
            activated.set()
        if ACCEPTED in line:
            note_accepted(settings.state, fingerprint)

    port = settings.port if settings.port != 0 else free_port(settings.host)
    child = Child(
        "supernode",
        settings.command(port),
        environment=child_environment(places, home),
        folder=settings.state.resolve() / "empty",
        log=settings.state / "supernode.log",
        on_line=remember,
    )
    child.start()
    return child


def _watch(
    child: Child,
    stop: StopSignals,
    trainer: Child | None,
    wedged: threading.Event,
    look: Callable[[], None],
) -> bool:
    """Wait, calling `look` in between; return whether a stop was asked for (else the SuperNode ended or must end).

    Raises:
        DeploymentError: if the trainer that was started along has ended.
    """
    while child.poll() is None:
        if stop.wait(0.5):
            return True
        look()
        if trainer is not None and trainer.poll() is not None:
            raise DeploymentError(f"trainer: ended with status {trainer.poll()}; see trainer.log")
        if wedged.is_set() and child.wait(WEDGED_SECONDS) is None:
            _LOG.warning("the connection broke while it was being made; starting the SuperNode again")
            return False
    child.wait(5.0)
    return False
