"""A node answers for the clients that the allow-list gives it, and for no others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedlora
from fedlora.names import ENV_ROSTER
from fedlora.simulation.messages import to_record
from fedlora.training.port import Hello, pack_hello
from server.roster import Roster, allowed_clients


def announced(roster: Roster, node: int, *clients: str) -> dict[int, tuple[str, ...]]:
    content = to_record(pack_hello(Hello(clients, fedlora.__version__)))
    message = SimpleNamespace(
        metadata=SimpleNamespace(src_node_id=node), has_error=lambda: False, content=content
    )
    roster._take(message)  # type: ignore[arg-type]
    return dict(roster.clients)  # type: ignore[arg-type]


@pytest.fixture
def roster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Roster:
    (tmp_path / "roster.json").write_text(json.dumps({"7": ["ward-1", "ward-2"], "8": ["site-b"]}))
    monkeypatch.setenv(ENV_ROSTER, str(tmp_path / "roster.json"))
    return Roster(None, None)  # type: ignore[arg-type]


def test_a_node_answers_for_its_own_clients(roster: Roster) -> None:
    assert announced(roster, 7, "ward-1", "ward-2") == {7: ("ward-1", "ward-2")}


@pytest.mark.parametrize("clients", [("site-b",), ("ward-1", "site-b"), ("ward-3",)])
def test_a_node_that_announces_others_clients_is_left_out(roster: Roster, clients: tuple[str, ...]) -> None:
    assert announced(roster, 7, *clients) == {}
    assert announced(roster, 8, "site-b") == {8: ("site-b",)}


def test_an_unknown_node_or_a_damaged_file_allows_nobody(roster: Roster, tmp_path: Path) -> None:
    assert announced(roster, 9, "ward-1") == {}
    for content in ("", "[]", '{"7": 3}'):
        (tmp_path / "roster.json").write_text(content)
        assert allowed_clients(7) == frozenset()


def test_without_an_allow_list_nothing_is_restricted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_ROSTER, raising=False)
    assert allowed_clients(7) is None
