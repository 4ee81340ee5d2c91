"""Certificates, keys, the allow-list and the gate, without starting Flower."""

from __future__ import annotations

import asyncio
import datetime
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlora.cli import keyring, pki
from fedlora.cli.gate import Gate, is_local
from fedlora.cli.metrics import MetricsServer, Registry
from fedlora.cli.refusals import REFUSALS, reason_of
from fedlora.cli.superlink import PUSH, refuse_push
from fedlora.errors import AuthenticationError, DeploymentError

TOKEN = "t" * 64


def ask(
    gate: Gate, path: str, *, peer: str = "203.0.113.9", headers: dict[str, str] | None = None, body: int = 0
) -> int:
    """Send one request through a gate; return the status."""
    sent: list[dict[str, Any]] = []
    left = [body]
    raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]

    async def receive() -> dict[str, Any]:
        size = min(left[0], 1000)
        left[0] -= size
        return {"type": "http.request", "body": b"x" * size, "more_body": left[0] > 0}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "path": path, "headers": raw, "client": (peer, 1234), "method": "POST"}
    asyncio.run(gate(scope, receive, send))
    return int(sent[0]["status"])


async def inner(scope: Any, receive: Any, send: Any) -> None:
    """The application behind: reads the whole body, then answers 200."""
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def gate() -> Gate:
    return Gate(inner, token=TOKEN, max_body=5000)


@pytest.mark.parametrize(
    "path", ["/v1/control/start-run", "/v1/control/register-node", "/v1/control/stop-run"]
)
def test_control_needs_the_loopback_and_the_token(gate: Gate, path: str) -> None:
    good = {"Authorization": f"Bearer {TOKEN}"}
    assert ask(gate, path, peer="127.0.0.1", headers=good) == 200
    assert ask(gate, path, headers=good) == 403
    assert ask(gate, path, peer="127.0.0.1") == 403
    assert ask(gate, path, peer="127.0.0.1", headers={"Authorization": f"Bearer {TOKEN[:-1]}x"}) == 403
    assert ask(gate, path, peer="127.0.0.1", headers={"Authorization": TOKEN}) == 403


def push(node: int, messages: list[tuple[int, int, str]]) -> bytes:
    """A PushMessagesRequest of one node; messages are (in whose name, to whom, in reply to what)."""
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    request = PushMessagesRequest()
    request.node.node_id = node
    for source, target, reply in messages:
        metadata = request.messages_list.add().metadata
        metadata.src_node_id, metadata.dst_node_id, metadata.reply_to_message_id = source, target, reply
    return bytes(request.SerializeToString())


SERVER, MINE, THEIRS = 1, 2**63 + 5, 2**62 + 9
PUSHES: dict[str, tuple[bytes, int]] = {
    "a reply": (push(MINE, [(MINE, SERVER, "m1")]), 200),
    "nothing": (push(MINE, []), 200),
    "a reply in another site's name": (push(MINE, [(THEIRS, SERVER, "m1")]), 403),
    "one of them in another's name": (push(MINE, [(MINE, SERVER, "m1"), (THEIRS, SERVER, "m2")]), 403),
    "work for another site in the server's name": (push(MINE, [(SERVER, THEIRS, "")]), 403),
    "work for another site": (push(MINE, [(MINE, THEIRS, "")]), 403),
    "a message that answers nothing": (push(MINE, [(MINE, SERVER, "")]), 403),
    "a reply to another site": (push(MINE, [(MINE, THEIRS, "m1")]), 403),
    "rubbish": (b"\xff" * 50, 403),
}


@pytest.mark.parametrize("name", list(PUSHES))
def test_a_node_speaks_only_for_itself_and_only_to_the_server(name: str) -> None:
    body, status = PUSHES[name]
    seen: list[bytes] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await inner(scope, receive, send)

    pieces = [body[at : at + 7] for at in range(0, len(body), 7)] or [b""]
    queue = [{"type": "http.request", "body": one, "more_body": True} for one in pieces]
    queue += [{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return queue.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    gate = Gate(behind, token=TOKEN, inspect={PUSH: refuse_push})
    scope = {"type": "http", "path": PUSH, "headers": [], "client": ("203.0.113.9", 1), "method": "POST"}
    asyncio.run(gate(scope, receive, send))
    assert sent[0]["status"] == status
    assert seen == ([body] if status == 200 else [])


def test_what_a_node_pushes_is_bounded_too() -> None:
    gate = Gate(inner, token=TOKEN, max_body=5000, inspect={PUSH: refuse_push})
    assert ask(gate, PUSH, body=6000) == 413


def test_what_all_requests_hold_at_once_is_bounded_and_given_back() -> None:
    gate = Gate(inner, token=TOKEN, max_body=5000, max_held=9000)
    statuses: list[int] = []

    async def one(started: asyncio.Event, go_on: asyncio.Event) -> None:
        async def receive() -> dict[str, Any]:
            if started.is_set():
                await go_on.wait()
                return {"type": "http.request", "body": b"", "more_body": False}
            started.set()
            return {"type": "http.request", "body": b"x" * 4000, "more_body": True}

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(int(message["status"]))

        scope = {"type": "http", "path": "/v1/fleet/push-object", "headers": [], "client": ("203.0.113.9", 1)}
        await gate(scope, receive, send)

    async def three() -> None:
        go_on = asyncio.Event()
        starts = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(one(start, go_on)) for start in starts]
        await asyncio.gather(*(start.wait() for start in starts))
        await asyncio.sleep(0.05)
        assert statuses == [503]
        go_on.set()
        await asyncio.gather(*tasks)

    asyncio.run(three())
    assert sorted(statuses) == [200, 200, 503]
    assert ask(gate, "/v1/fleet/push-object", body=5000) == 200
    for _ in range(3):
        assert ask(gate, "/v1/fleet/push-object", body=6000) == 413
    assert ask(gate, "/v1/fleet/push-object", body=5000) == 200


@pytest.mark.parametrize("host", ["x/v1/control/start-run?", "x#", "a@b/", "x y", "x\x00", "é"])
def test_a_host_that_is_none_is_refused(gate: Gate, host: str) -> None:
    assert ask(gate, "/v1/fleet/pull-messages", headers={"host": "fl.example.org:8000"}) == 200
    assert ask(gate, "/v1/fleet/pull-messages", headers={"host": "[::1]:8000"}) == 200
    assert ask(gate, "/v1/fleet/pull-messages", headers={"host": host}) == 403


@pytest.mark.parametrize(
    "rest", ["", "../control/start-run", "a/b", "push-messages/", "push-messages?x", "A", "%2e"]
)
def test_the_fleet_has_simple_names_only(gate: Gate, rest: str) -> None:
    assert ask(gate, f"/v1/fleet/{rest}") == 403


def test_runtime_and_health_are_for_this_machine_only(gate: Gate) -> None:
    for path in ("/v1/runtime/acquire-task", "/health"):
        assert ask(gate, path) == 403
        assert ask(gate, path, peer="::1") == 200


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="/v1.controlfeun%2e-", max_size=30))
def test_nothing_but_the_fleet_is_open_to_others(rest: str) -> None:
    path = "/" + rest
    expected = 200 if path.startswith("/v1/fleet/") else 403
    assert ask(Gate(inner, token=TOKEN), path) == expected


def test_bodies_of_the_fleet_are_bounded_announced_or_not(gate: Gate) -> None:
    assert ask(gate, "/v1/fleet/push", body=4000) == 200
    assert ask(gate, "/v1/fleet/push", body=6000) == 413
    assert ask(gate, "/v1/fleet/push", headers={"Content-Length": "99999999999"}) == 413


def test_nodes_wait_until_the_allow_list_is_in_force(tmp_path: Path) -> None:
    gate = Gate(inner, token=TOKEN, open_file=str(tmp_path / "open"))
    assert ask(gate, "/v1/fleet/activate-node") == 503
    (tmp_path / "open").touch()
    assert ask(gate, "/v1/fleet/activate-node") == 200


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_only_loopback_addresses_are_local(peer: str, local: bool) -> None:
    assert is_local((peer, 1)) is local
    assert is_local(None) is False


def test_certificates_are_made_checked_and_rotated_with_an_overlap(tmp_path: Path) -> None:
    pki.make_ca(tmp_path)
    pki.issue_server(tmp_path, ["fl.example.org", "10.0.0.5"])
    facts = pki.check_server_certificate(tmp_path)
    assert set(facts.names) == {"fl.example.org", "10.0.0.5", "localhost", "127.0.0.1"}
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
    with pytest.raises(DeploymentError, match="exists already"):
        pki.make_ca(tmp_path)
    pki.make_ca(tmp_path, replace=True)
    assert len(pki.certificate_facts(tmp_path / "ca.crt")) == 2
    assert pki.check_server_certificate(tmp_path).sha256 == facts.sha256
    pki.issue_server(tmp_path, ["fl.example.org"], replace=True)
    assert pki.check_server_certificate(tmp_path).sha256 != facts.sha256


def test_expired_early_and_foreign_certificates_are_refused_in_one_line(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pki.make_ca(tmp_path / name)
        pki.issue_server(tmp_path / name, ["localhost"], days=5)
    now = datetime.datetime.now(datetime.UTC)
    with pytest.raises(AuthenticationError, match="expired"):
        pki.check_server_certificate(tmp_path / "a", now + datetime.timedelta(days=6))
    with pytest.raises(AuthenticationError, match="clock"):
        pki.check_server_certificate(tmp_path / "a", now - datetime.timedelta(days=1))
    (tmp_path / "a" / "ca.crt").write_bytes((tmp_path / "b" / "ca.crt").read_bytes())
    with pytest.raises(AuthenticationError, match="not signed"):
        pki.check_server_certificate(tmp_path / "a")


def test_h33_rotation_keeps_the_site_and_a_revoked_key_never_comes_back(tmp_path: Path) -> None:
    allow = keyring.AllowList.load(tmp_path / "allow.json", missing_ok=True)
    first = keyring.new_deployment_key(tmp_path, "hospital")
    keyring.new_identity_key(tmp_path / "identity.pem")
    identity = (tmp_path / "identity.pem").read_bytes()
    old_text = first.read_bytes()
    allow.allow("hospital", first, clients=("hospital", "lab"))
    second = keyring.new_deployment_key(tmp_path, "hospital", rotate=True)
    with pytest.raises(AuthenticationError, match="--rotate"):
        allow.allow("hospital", second)
    entry = allow.allow("hospital", second, rotate=True)
    assert entry.clients == ("hospital", "lab")
    assert (tmp_path / "identity.pem").read_bytes() == identity
    allow.save()
    again = keyring.AllowList.load(tmp_path / "allow.json")
    assert [one.fingerprint for one in again.allowed()] == [entry.fingerprint]
    (tmp_path / "old.pub").write_bytes(old_text)
    for name in ("hospital", "other"):
        with pytest.raises(AuthenticationError, match="revoked"):
            again.allow(name, tmp_path / "old.pub", rotate=True)
    again.revoke("hospital")
    assert again.allowed() == []
    with pytest.raises(AuthenticationError, match="not on the allow-list"):
        again.revoke("nobody")


@pytest.mark.parametrize(
    "content", ["", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGx x", "-----BEGIN OPENSSH PRIVATE KEY-----"]
)
def test_other_keys_are_refused_and_private_ones_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "k.pub").write_text(content)
    with pytest.raises(AuthenticationError):
        keyring.read_public(tmp_path / "k.pub")


@pytest.mark.parametrize(
    "content", ["{}", "[]", "no", '{"schema": 2, "sites": []}', '{"schema": 1, "sites": [{}]}']
)
def test_a_damaged_allow_list_allows_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "allow.json").write_text(content)
    with pytest.raises(DeploymentError):
        keyring.AllowList.load(tmp_path / "allow.json")


def test_names_cannot_leave_their_folder(tmp_path: Path) -> None:
    for name in ("../x", "a/b", "", ".x", "x" * 200):
        with pytest.raises(DeploymentError, match="name"):
            keyring.new_deployment_key(tmp_path, name)


@pytest.mark.parametrize(("pattern", "kind", "remedy"), REFUSALS)
def test_refusals_of_the_server_become_one_line(pattern: str, kind: type, remedy: str) -> None:
    lines = ["INFO: starting", f"Exit Code: 305 {pattern} and more", "Finished"]
    assert reason_of(lines) == (kind, remedy)
    assert reason_of(["ConnectionError: refused"])[0] is None


def test_metrics_and_health_are_served() -> None:
    import urllib.error
    import urllib.request

    registry = Registry()
    registry.describe("fedlora_rounds_total", "counter", "Rounds.")
    registry.add("fedlora_rounds_total", status="ok")
    registry.set("fedlora_epsilon_spent", 1.5, client='a"b')
    ready = [False]
    server = MetricsServer("127.0.0.1:0", registry, lambda: ready[0])
    base = f"http://127.0.0.1:{server.port}"
    text = urllib.request.urlopen(f"{base}/metrics", timeout=5).read().decode()
    assert 'fedlora_rounds_total{status="ok"} 1.0' in text
    assert 'fedlora_epsilon_spent{client="a\\"b"} 1.5' in text
    assert urllib.request.urlopen(f"{base}/healthz", timeout=5).status == 200
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{base}/readyz", timeout=5)
    assert caught.value.code == 503
    caught.value.close()
    ready[0] = True
    assert urllib.request.urlopen(f"{base}/readyz", timeout=5).status == 200
    server.close()
