"""An HTTPS proxy in a site's namespace: it knows every part of a reply by name, and stops the one that a test names.

TLS ends here and begins again: the proxy shows the server's own certificate, both sides trust the federation's CA.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deploy_netns import enter

FLEET = "/v1/fleet/"
PULL, PUSH, PART = f"{FLEET}pull-messages", f"{FLEET}push-messages", f"{FLEET}push-object"
ALIVE = (f"{FLEET}send-node-heartbeat", f"{FLEET}activate-node")
HOP_BY_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length")
PATIENCE = 40.0
"""Seconds that an answer of the server is waited for; longer than a SuperNode waits (30), so that it gives up first."""


class Reply:
    """The parts of the training reply that is on its way, or was last."""

    def __init__(self, message: str, parts: set[str]) -> None:
        self.message, self.parts = message, frozenset(parts)
        self.unsent, self.unanswered = set(parts), set(parts)

    @property
    def whole(self) -> bool:
        """Whether the server has acknowledged every part."""
        return not self.unanswered


class Gateway:
    """Passes a SuperNode's requests on, and holds parts of its next training reply.

    What is held stays so until `normal`: nothing of it depends on when one looks. Set a rule before the round begins:
    the reply is the one to what the site is asked from then on, not an earlier round's that tries to get through.

    Attributes:
        reply: that reply, once it was announced.
        held: set once something is held back.
    """

    def __init__(self, space: str, target: tuple[str, int], certs: Path) -> None:
        self._space, self._target, self._certs = space, target, certs
        self._trust = ssl.create_default_context(cafile=str(certs / "ca.crt"))
        self._change = threading.Condition()
        self._alive = 0.0
        self._rule, self._allowed, self._pieces = "", 0, (0.0, 0)
        self._asked: set[str] = set()
        self._free = threading.Event()
        self.held = threading.Event()
        self.reply: Reply | None = None
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), daemon=True).start()
        if not ready.wait(60):
            raise AssertionError("the gateway did not start")

    # -- what a test asks for ----------------------------------------------------------------------

    def cut_after(self, parts: int) -> None:
        """Let so many parts of the next reply through, half of one more, and nothing of any other."""
        self._set("cut", allowed=parts)

    def mute_last(self) -> None:
        """Let the next reply through whole; hold back the acknowledgement that makes it so."""
        self._set("mute")

    def slow(self, delay: float, loss: int) -> None:
        """Pass the next reply on in small pieces, each after a delay, some lost and sent again; hold its last part."""
        self._set("slow", pieces=(delay, loss))

    def normal(self) -> None:
        """Let everything through again; what a cut or a mute held back is gone, what was slow arrives now."""
        with self._change:
            self._rule = ""
        self._free.set()

    def alive_since(self, moment: float, seconds: float) -> None:
        """Wait until the server has answered a sign of life that was sent after a monotonic moment."""
        with self._change:
            if not self._change.wait_for(lambda: self._alive >= moment, seconds):
                raise AssertionError(f"{self._space}: no heartbeat was answered within {seconds} s")

    def close(self) -> None:
        """Stop for good."""
        self.normal()
        self._server.shutdown()
        self._server.server_close()

    # -- requests ----------------------------------------------------------------------------------

    def _set(self, rule: str, *, allowed: int = 0, pieces: tuple[float, int] = (0.0, 0)) -> None:
        with self._change:
            self.reply, self._rule, self._allowed, self._pieces = None, rule, allowed, pieces
            self._asked.clear()
            self._free.clear()
            self.held.clear()

    def _run(self, ready: threading.Event) -> None:
        enter(self._space)
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certs / "server.crt", self._certs / "server.key")
        listener = self._server.socket
        self._server.socket = context.wrap_socket(listener, server_side=True, do_handshake_on_connect=False)
        self.port = int(self._server.server_address[1])
        ready.set()
        self._server.serve_forever(poll_interval=0.1)

    def exchange(self, path: str, headers: dict[str, str], body: bytes, client: Any) -> Answer | None:
        """Return the server's answer, or None where the connection must end without one."""
        sent = time.monotonic()
        connection = http.client.HTTPSConnection(*self._target, timeout=PATIENCE, context=self._trust)
        with contextlib.closing(connection):
            connection.connect()
            if not self._may_go(path, headers, body, connection) or _gone(client):
                return None
            self._send(path, headers, body, connection)
            answer = connection.getresponse()
            found = Answer(answer.status, answer.getheaders(), answer.read())
        if found.status == 200 and not self._may_return(path, body, found.body):
            return None
        if found.status == 200 and path in ALIVE:
            with self._change:
                self._alive = max(self._alive, sent)
                self._change.notify_all()
        return found

    def _may_go(self, path: str, headers: dict[str, str], body: bytes, connection: Any) -> bool:
        """Hold a part where the rule says so; return whether it is to be sent afterwards."""
        with self._change:
            rule, reply = self._rule, self._reply_of(path, body)
            if reply is None:
                return True
            reply.unsent.discard(_part(body))
            last = not reply.unsent
            cut, self._allowed = rule == "cut" and self._allowed <= 0, self._allowed - 1
        if cut:
            _announce(path, headers, body, connection)
            connection.send(body[: len(body) // 2])
            self._hold()
            return False
        if rule == "slow" and last:
            self._hold()
        return True

    def _reply_of(self, path: str, body: bytes) -> Reply | None:
        """Return the reply that a request brings a part of, if it is the one that is looked at."""
        mine = path == PART and self.reply is not None and _part(body) in self.reply.parts
        return self.reply if mine else None

    def _send(self, path: str, headers: dict[str, str], body: bytes, connection: Any) -> None:
        _announce(path, headers, body, connection)
        delay, loss = self._pieces if path == PART and self._rule == "slow" else (0.0, 0)
        size = len(body) if delay == 0.0 else max(1, len(body) // 4)
        for number, start in enumerate(range(0, len(body), max(1, size)), start=1):
            time.sleep(delay + (1.0 if loss and number % loss == 0 else 0.0))
            connection.send(body[start : start + size])

    def _may_return(self, path: str, body: bytes, answer: bytes) -> bool:
        """Note what the server acknowledged; return whether the site is told."""
        if path in {PULL, PUSH}:
            self._note(path, body, answer)
        with self._change:
            reply = self._reply_of(path, body)
            if reply is None:
                return True
            reply.unanswered.discard(_part(body))
            mute = self._rule == "mute" and reply.whole
        if mute:
            self._hold()
        return not mute

    def _note(self, path: str, body: bytes, answer: bytes) -> None:
        """Note which messages ask the site to train, and which parts the reply to one of them has."""
        from flwr.proto import fleet_pb2 as proto

        with self._change:
            if path == PULL:
                pulled = proto.PullMessagesResponse.FromString(answer).messages_list
                self._asked |= {
                    one.metadata.message_id for one in pulled if one.metadata.message_type == "train"
                }
                return
            metadata = proto.PushMessagesRequest.FromString(body).messages_list[0].metadata
            if metadata.reply_to_message_id in self._asked:
                parts = proto.PushMessagesResponse.FromString(answer).objects_to_push
                self.reply = Reply(metadata.message_id, set(parts))

    def _hold(self) -> None:
        self.held.set()
        self._free.wait()


class Answer:
    """An answer of the server."""

    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status, self.body = status, body
        self.headers = [(name, value) for name, value in headers if name.lower() not in HOP_BY_HOP]


def _part(body: bytes) -> str:
    from flwr.proto.message_pb2 import PushObjectRequest

    return str(PushObjectRequest.FromString(body).object_id)


def _announce(path: str, headers: dict[str, str], body: bytes, connection: Any) -> None:
    connection.putrequest("POST", path, skip_host=True, skip_accept_encoding=True)
    for name, value in headers.items():
        if name.lower() not in HOP_BY_HOP:
            connection.putheader(name, value)
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders()


def _gone(client: Any) -> bool:
    """Whether a SuperNode gave a request up: it says nothing more on this connection before it has its answer."""
    return bool(select.select([client], [], [], 0)[0])


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that went away is what these tests are about."""


def _handler(gateway: Gateway) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                super().handle()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                answer = gateway.exchange(self.path, dict(self.headers), body, self.connection)
            except (OSError, http.client.HTTPException):
                answer = None
            if answer is None:
                self.close_connection = True
                return
            self.send_response_only(answer.status)
            for name, value in answer.headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

    return Handler
