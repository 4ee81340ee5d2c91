"""How long a relay keeps trying: bounded, whatever happens, and starting anew once the server has let it in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlora.cli import client as relay
from fedlora.cli import keyring
from fedlora.errors import AuthenticationError, DeploymentError


class Clock:
    """Time that passes only when a SuperNode lives or a pause is waited for."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(relay.time, "monotonic", made.monotonic)
    return made


def settings(tmp_path: Path, max_wait: float) -> relay.ClientSettings:
    return relay.ClientSettings(
        "server:8000", Path("ca"), Path("key"), Path("s"), Path("t"), tmp_path, max_wait, "127.0.0.1", 0
    )


def nodes(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, lives: Callable[[int], tuple[float, list[str]]]
) -> list[int]:
    """Replace SuperNodes: each lives so long and says these lines; returns the list of those started."""
    started: list[int] = []

    def start(_: object, fingerprint: str, seen: list[str], wedged: object, activated: object) -> object:
        del fingerprint, wedged
        seconds, lines = lives(len(started))
        started.append(1)
        clock.now += seconds
        seen += lines
        if any(relay.ACTIVATED in line for line in lines):
            activated.set()  # type: ignore[attr-defined]
        return SimpleNamespace(pid=1, stop=lambda: None, poll=lambda: 0)

    monkeypatch.setattr(relay, "_start_node", start)
    monkeypatch.setattr(relay, "_watch", lambda *_: False)
    return started


def test_a_server_that_never_answers_is_given_up_after_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    started = nodes(monkeypatch, clock, lambda number: (300.0, ["ConnectError: refused"]))
    began = clock.now
    with pytest.raises(DeploymentError, match="not reachable for 900 s"):
        relay.run_client(settings(tmp_path, 900.0), "SHA256:x", clock, None)  # type: ignore[arg-type]
    assert clock.now - began < 2 * 900
    assert len(started) >= 3


def test_the_bound_begins_anew_after_the_server_has_let_the_node_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def lives(number: int) -> tuple[float, list[str]]:
        return (
            (7200.0, [f"{relay.ACTIVATED} 5", "ConnectError"]) if number == 2 else (300.0, ["ConnectError"])
        )

    started = nodes(monkeypatch, clock, lives)
    with pytest.raises(DeploymentError):
        relay.run_client(settings(tmp_path, 900.0), "SHA256:x", clock, None)  # type: ignore[arg-type]
    assert len(started) >= 6


def test_a_refusal_ends_at_once_or_after_the_grace_of_a_known_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    started = nodes(monkeypatch, clock, lambda number: (2.0, [relay.NOT_ACTIVATED]))
    with pytest.raises(AuthenticationError, match="does not know this key"):
        relay.run_client(settings(tmp_path, 900.0), "SHA256:x", clock, None)  # type: ignore[arg-type]
    assert len(started) == 1
    (tmp_path / relay.ACCEPTED_FILE).write_text("SHA256:x")
    began = clock.now
    with pytest.raises(AuthenticationError):
        relay.run_client(settings(tmp_path, 900.0), "SHA256:x", clock, None)  # type: ignore[arg-type]
    assert relay.GRACE_SECONDS <= clock.now - began < relay.GRACE_SECONDS + 60


def test_a_refused_signature_is_told_although_the_supernode_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    nodes(monkeypatch, clock, lambda number: (2.0, ["Connection attempt failed", relay.GAVE_UP]))
    with pytest.raises(AuthenticationError, match="clock"):
        relay.run_client(settings(tmp_path, 900.0), "SHA256:x", clock, None)  # type: ignore[arg-type]


def test_a_supernode_that_was_let_in_and_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    def lives(number: int) -> tuple[float, list[str]]:
        return (90.0, [f"{relay.ACTIVATED} 5", relay.GAVE_UP]) if number < 3 else (2.0, [relay.NOT_ACTIVATED])

    started = nodes(monkeypatch, clock, lives)
    with pytest.raises(AuthenticationError, match="does not know this key"):
        relay.run_client(settings(tmp_path, 900.0), "SHA256:x", clock, None)  # type: ignore[arg-type]
    assert len(started) == 4


@pytest.mark.parametrize(
    "said",
    [
        "httpx.HTTPStatusError: Client error '401 Unauthorized' for url '.../send-node-heartbeat'",
        f"INFO :      {relay.GAVE_UP}.",
    ],
    ids=["at a heartbeat", "at a request for work"],
)
def test_h33_a_key_that_was_removed_under_a_running_node_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, said: str
) -> None:
    (tmp_path / relay.ACCEPTED_FILE).write_text("SHA256:x")

    def lives(number: int) -> tuple[float, list[str]]:
        if number == 0:
            return 300.0, [f"{relay.ACTIVATED} 5", said]
        return (20.0, ["ConnectError"]) if number == 1 else (2.0, [relay.NOT_ACTIVATED])

    started = nodes(monkeypatch, clock, lives)
    with pytest.raises(AuthenticationError, match="does not know this key"):
        relay.run_client(settings(tmp_path, 900.0), "SHA256:x", clock, None)  # type: ignore[arg-type]
    assert len(started) == 3


def test_a_key_that_is_let_in_again_has_its_grace_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    (tmp_path / relay.ACCEPTED_FILE).write_text("SHA256:x")
    lines = {0: [f"{relay.ACTIVATED} 5", relay.THROWN_OUT], 1: [f"{relay.ACTIVATED} 6", "killed"]}
    started = nodes(monkeypatch, clock, lambda number: (90.0, lines.get(number, [relay.NOT_ACTIVATED])))
    with pytest.raises(AuthenticationError):
        relay.run_client(settings(tmp_path, 900.0), "SHA256:x", clock, None)  # type: ignore[arg-type]
    assert len(started) > 3


def test_h33_a_key_that_was_rotated_under_a_running_relay_is_told_by_its_own_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    keyring.new_deployment_key(tmp_path / "keys", "a")
    place = dataclasses.replace(settings(tmp_path, 900.0), key=tmp_path / "keys" / "a")
    used: list[str] = []

    def start(_: object, fingerprint: str, seen: list[str], wedged: object, activated: object) -> object:
        del wedged
        used.append(fingerprint)
        if len(used) == 1:
            activated.set()  # type: ignore[attr-defined]
            seen.append(relay.GAVE_UP)
            keyring.new_deployment_key(tmp_path / "keys", "a", rotate=True)
        else:
            seen.append(relay.NOT_ACTIVATED)
        return SimpleNamespace(pid=1, stop=lambda: None, poll=lambda: 0)

    monkeypatch.setattr(relay, "_start_node", start)
    monkeypatch.setattr(relay, "_watch", lambda *_: False)
    first = relay._fingerprint(place.key)
    with pytest.raises(AuthenticationError, match="does not know this key") as caught:
        relay.run_client(place, first, clock, None)  # type: ignore[arg-type]
    second = relay._fingerprint(place.key)
    assert used == [first, second]
    assert second != first
    assert second in str(caught.value)


def test_h33_the_grace_of_a_restart_belongs_to_the_key_that_was_accepted_last(tmp_path: Path) -> None:
    for fingerprint in ("SHA256:old", "SHA256:old", "SHA256:new"):
        relay.note_accepted(tmp_path, fingerprint)
        assert (tmp_path / relay.ACCEPTED_FILE).read_text() == fingerprint
