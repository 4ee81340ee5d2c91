"""Faults in a real federation: server killed and resumed, trainer restarted, key revoked while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy_helpers import Federation, wait_for

from fedlora.cli.keyring import AllowList
from fedlora.errors import AuthenticationError
from fedlora.ledger import Account, load_secret, open_ledger

pytestmark = pytest.mark.long
ROUNDS = 4


def charged(federation: Federation, site: str) -> list[int]:
    """The rounds that a site's own ledger holds."""
    folder = federation.root / site
    secret = load_secret(folder / "keys" / "ledger.secret")
    with open_ledger(folder / "ledger.db", secret=secret, read_only=True) as ledger:
        report = ledger.report(Account(site, "words-2026"))
    return [row.server_round for row in report.rounds]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Round 1; kill -9 the server; restart site-a's trainer; resume; revoke site-b; run to the end."""
    made = Federation(
        tmp_path_factory.mktemp("faults"), rounds=ROUNDS, timeout=90.0, sites=("site-a", "site-b"), replies=1
    ).make()
    try:
        made.start_server()
        made.start_halves("site-a")
        made.start_site("site-b")
        wait_for("round 1", lambda: len(made.rounds_done()) >= 2, 400, made)
        made.kill("server")
        made.kill("site-a-trainer")
        made.start("site-a-trainer-again", "trainer", "site-a/site.yaml")
        made.start("server-again", "server", "run.yaml", "--resume", "--stay")
        wait_for("round 2", lambda: len(made.rounds_done()) >= 3, 400, made)
        allow = AllowList.load(made.root / "allow.json")
        allow.revoke("site-b")
        allow.save()
        wait_for("the run's end", lambda: made.state().get("status") == "finished", 500, made)
        site = made.processes["site-b"]  # the server is still there to say why it refuses
        wait_for("the revoked client's end", lambda: site.poll() is not None, 200, made)
        server = made.processes["server-again"]
        server.terminate()
        server.wait(240)
        yield made
    finally:
        made.stop()


def test_h35_a_killed_server_goes_on_at_its_checkpoint(story: Federation) -> None:
    assert story.processes["server-again"].returncode == 0, story.log("server-again")[-2000:]
    assert [line["round"] for line in story.rounds_done()] == list(range(ROUNDS + 1))
    assert len([path for path in (story.root / "runs").iterdir() if path.is_dir()]) == 1


def test_h35_rounds_charged_are_at_most_rounds_run_and_one(story: Federation) -> None:
    rounds = charged(story, "site-a")
    assert len(rounds) <= ROUNDS + 1
    assert len(set(rounds)) == len(rounds)


def test_a_restarted_trainer_takes_part_again_with_the_same_ledger(story: Federation) -> None:
    last = story.rounds_done()[-1]
    assert last["accepted"] >= 1
    assert ROUNDS in charged(story, "site-a")
    assert 1 in charged(story, "site-a")


def test_h33_a_revoked_key_ends_the_client_in_one_line(story: Federation) -> None:
    process = story.processes["site-b"]
    wait_for("the client's end", lambda: process.poll() is not None, 200, story)
    assert process.returncode == AuthenticationError.exit_code, story.log("site-b")
    lines = [line for line in story.log("site-b").splitlines() if line.startswith("fedlora: ")]
    assert len(lines) == 1
    assert story.log("site-b").count("does not know this key") == 1  # at once, not after a restart's grace
    audit = (story.root / "server-state" / "audit.jsonl").read_text()
    assert '"site removed"' in audit


def test_starting_again_without_a_word_is_refused(story: Federation, tmp_path: Path) -> None:
    state = story.root / "server-state" / "run.json"
    state.write_text(state.read_text().replace('"finished": true', '"finished": false'))
    process = story.start("server-third", "server", "run.yaml")
    assert process.wait(240) == 63
    assert "--resume" in story.log("server-third")
