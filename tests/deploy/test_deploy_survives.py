"""Three sites in network namespaces, TLS and keys, a dozen rounds, every fault once: the long end-to-end test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from deploy_netns import usable
from deploy_story import DEADLINE, ROUNDS, SITES, Story
from test_deploy_e2e import true_epsilon_of

from fedlora.errors import AuthenticationError

pytestmark = [pytest.mark.long, pytest.mark.network, pytest.mark.timeout(2400)]
STEPS = 2


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    if not usable():
        pytest.skip("network namespaces need root and iproute2")
    told = Story(tmp_path_factory.mktemp("survives"))
    try:
        told.tell()
        yield told
    finally:
        told.close()


def rounds_charged(story: Story, site: str) -> list[int]:
    """The rounds that a site's own ledger holds."""
    return [number for number, _, _ in story.charged(site)]


def test_the_run_ends_with_every_round_once(story: Story) -> None:
    server = story.made.processes["server-again"]
    assert server.returncode == 0, story.made.log("server-again")[-2000:]
    assert [line["round"] for line in story.made.rounds_done()] == list(range(ROUNDS + 1))
    assert len([path for path in (story.made.root / "runs").iterdir() if path.is_dir()]) == 1


def test_another_version_is_left_out_and_another_base_model_refuses_by_name(story: Story) -> None:
    assert "runs fedlora 0.0.9" in story.server_log()
    first = next(entry for entry in story.audit("site-b") if entry["round"] == 1)
    assert first["status"] == "failed"
    assert first["error"]["error"] == "LayoutMismatchError"
    assert "site loaded" in first["error"]["message"]
    assert 1 not in rounds_charged(story, "site-b")
    assert story.facts["round 1"]["accepted"] == 2


def test_a_superlink_that_dies_is_started_again_under_running_nodes(story: Story) -> None:
    audit = (story.made.root / "server-state" / "audit.jsonl").read_text()
    assert "SuperLink ended" in audit
    assert story.facts["superlink restart"]["status"] == "ok"


def test_h20_cut_before_the_upload_the_round_goes_on_and_the_site_is_charged(story: Story) -> None:
    line = story.facts["cut before"]
    assert (line["status"], line["accepted"]) == ("ok", 2)
    assert line["seconds"]["clients"] < DEADLINE + 15
    assert line["round"] in rounds_charged(story, "site-a")


def test_h20_cut_during_the_upload_the_half_reply_is_not_used(story: Story) -> None:
    assert story.facts["sent when cut during"] == (True, False)
    assert not story.facts["whole when cut during"]
    line = story.facts["cut during"]
    assert (line["status"], line["accepted"]) == ("ok", 2)
    assert line["round"] in rounds_charged(story, "site-a")


def test_h20_cut_after_the_upload_the_reply_counts_once_on_both_sides(story: Story) -> None:
    assert story.facts["sent when cut after"] is False
    line = story.facts["cut after"]
    assert (line["status"], line["accepted"]) == ("ok", 3)
    assert rounds_charged(story, "site-a").count(line["round"]) == 1


def test_a_killed_client_and_a_slow_one_cost_the_round_nothing_but_their_updates(story: Story) -> None:
    for fault, site in (("client killed", "site-b"), ("slow client", "site-c")):
        line = story.facts[fault]
        assert (line["status"], line["accepted"]) == ("ok", 2)
        assert line["seconds"]["clients"] < DEADLINE + 15
        assert line["round"] in rounds_charged(story, site)
    assert any("no answer in time" in str(why) for why in story.facts["slow client"]["failed"].values())


def test_h35_a_server_killed_while_aggregating_goes_on_from_the_last_good_checkpoint(story: Story) -> None:
    newest, number = story.facts["newest checkpoint"]
    assert newest == f"round-{number - 1:06d}.ckpt"
    assert f"resumed after round {number - 2}" in story.server_log()
    again, after = story.facts["asked again"], story.facts["server killed"]
    assert (again["round"], again["status"], again["accepted"]) == (number - 1, "skipped", 0)
    assert ["one release per round" in why for why in again["refused"].values()] == [True] * len(SITES)
    assert (after["round"], after["status"], after["accepted"]) == (number, "ok", 3)
    for site in SITES:
        rounds = rounds_charged(story, site)
        assert len(rounds) <= ROUNDS + 1
        assert len(set(rounds)) == len(rounds)


def test_a_full_disk_trains_nothing_and_sends_nothing(story: Story) -> None:
    number = story.facts["disk full"]["round"]
    full = [entry for entry in story.audit("site-b") if entry["round"] == number]
    assert full[0]["status"] != "ok"
    assert story.facts["charged while full"] == 0
    assert story.facts["disk full"]["accepted"] == 2
    assert max(rounds_charged(story, "site-b")) > number


def test_h33_a_revoked_key_ends_its_client_in_one_line(story: Story) -> None:
    process = story.made.processes["site-c"]
    story.until("the client's end", lambda: process.poll() is not None)
    assert process.returncode == AuthenticationError.exit_code, story.made.log("site-c")[-2000:]
    assert len([line for line in story.made.log("site-c").splitlines() if line.startswith("fedlora: ")]) == 1


def test_every_site_trains_from_the_same_adapter_in_every_round(story: Story) -> None:
    lines = story.lines()
    for site in SITES:
        last = {entry["round"]: entry["adapter"] for entry in story.audit(site)}
        for number, adapter in last.items():
            assert adapter == lines[number - 1]["adapter"], (site, number)
    assert story.trained("site-a", ROUNDS)
    assert story.trained("site-b", ROUNDS)


def test_ledgers_match_the_truth(story: Story) -> None:
    for site in SITES:
        rows = story.charged(site)
        released = {entry["round"] for entry in story.audit(site) if entry["status"] == "ok"}
        assert released <= {number for number, _, _ in rows}
        assert all(steps == STEPS for _, _, steps in rows)
        truth = true_epsilon_of(1.0, STEPS * len(rows))
        assert story.facts[f"epsilon {site}"] == pytest.approx(truth, rel=0.02)
        assert story.facts[f"epsilon {site}"] >= truth * (1 - 1e-3)


def test_every_site_takes_part_again_after_its_fault(story: Story) -> None:
    faults = {"site-a": "cut after", "site-b": "client killed", "site-c": "slow client"}
    for site, fault in faults.items():
        answered = {entry["round"] for entry in story.audit(site) if entry["status"] == "ok"}
        assert max(answered) > story.facts[fault]["round"], site
    for fault in ("after the faults", "disk again"):
        assert (story.facts[fault]["status"], story.facts[fault]["accepted"]) == ("ok", 3)
