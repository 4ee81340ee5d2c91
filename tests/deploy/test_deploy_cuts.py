"""H20: the network is cut at the worst moments; what was released is charged, and nothing is trained twice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from deploy_helpers import Federation, Wire, wait_for, whole_records

from fedlora.ledger import Account, load_secret, open_ledger

pytestmark = pytest.mark.long
ROUNDS = 7


def audited(federation: Federation, site: str) -> list[int]:
    """The rounds that a site's trainer has answered, repetitions included."""
    entries = whole_records(federation.root / site / "audit.jsonl")
    return [entry["round"] for entry in entries if entry["what"] == "round"]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Site-a is cut off for 20 s right after it has trained round 2, before its reply is on its way."""
    made = Federation(
        tmp_path_factory.mktemp("cuts"), rounds=ROUNDS, timeout=120.0, sites=("site-a", "site-b"), replies=1
    ).make()
    wire = Wire(made.port)
    try:
        made.start_server()
        made.start_site("site-a", wire.port)
        made.start_site("site-b")
        wait_for("round 2 trained", lambda: 2 in audited(made, "site-a"), 400, made)
        wire.cut()
        time.sleep(20)
        wire.mend()
        server = made.processes["server"]
        wait_for("the run's end", lambda: server.poll() is not None, 500, made)
        yield made
    finally:
        made.stop()
        wire.close()


def test_h20_the_run_ends_and_the_site_is_back(story: Federation) -> None:
    assert story.processes["server"].returncode == 0
    lines = story.rounds_done()
    assert [line["round"] for line in lines] == list(range(ROUNDS + 1))
    assert all(line["status"] == "ok" for line in lines[1:])
    assert max(line["accepted"] for line in lines[3:]) == 2, lines


def test_h20_every_released_round_is_charged_once(story: Federation) -> None:
    folder = story.root / "site-a"
    secret = load_secret(folder / "keys" / "ledger.secret")
    with open_ledger(folder / "ledger.db", secret=secret, read_only=True) as ledger:
        rows = ledger.rounds(Account("site-a", "words-2026"))
    rounds = [row.server_round for row in rows]
    assert set(audited(story, "site-a")) <= set(rounds)
    assert len(set(rounds)) == len(rounds)
    assert 2 in rounds


def test_h20_the_client_never_says_less_than_the_server_counts(story: Federation) -> None:
    summary = json.loads((story.run_folder() / "summary.json").read_text())
    assert summary["epsilon"] >= summary["statement"]["epsilon_from_this_runs_events"] * (1 - 1e-6)
