"""The server's mirror, end to end: real sites with ledgers and identity keys, the real ServerApp, real packets."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from deploy_helpers import RUN, SITE, write_model, write_rows
from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedlora.cli.keyring import new_identity_key
from fedlora.config import config_from_container
from fedlora.config.trainer import load_trainer
from fedlora.errors import LedgerIntegrityError, TooFewRepliesError
from fedlora.ledger import Account, open_ledger
from fedlora.ledger.keyfile import load_secret
from fedlora.ledger.receipts import SignedReceipt, sign_receipt
from fedlora.simulation.identity import SERVER_NODE, assume_identity, number_message
from fedlora.simulation.messages import from_record, to_record
from fedlora.simulation.prepare import complete
from fedlora.simulation.settings import RunResult, ServerSettings
from fedlora.training.port import Packet
from fedlora.training.service_site import Site, build_site, load_identity

NAMES = ("site-a", "site-b")
Change = Callable[[str, Packet], Packet | None]


class SitesGrid(Grid):
    """Flower's grid over sites of this process; `change` sees every answer of a round (None loses it)."""

    def __init__(self, sites: dict[int, Site], change: Change | None = None) -> None:
        assume_identity(7, SERVER_NODE)
        self.sites, self.change, self.sent = sites, change, 0
        self.asked: list[dict[str, Any]] = []

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> tuple[int, ...]:
        return tuple(self.sites)

    def push_messages(self, messages: Any) -> Any:
        raise NotImplementedError

    def pull_messages(self, message_ids: Any) -> Any:
        raise NotImplementedError

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Message]:
        replies = []
        for message in messages:
            self.sent += 1
            number_message(message, f"m{self.sent}")
            site = self.sites[message.metadata.dst_node_id]
            packet = from_record(message.content)
            answer: Packet | None = site.port().exchange(packet)
            if packet.header.get("op") == "round":
                self.asked.append({"site": site.config.site.name, **packet.header})
                if self.change is not None and answer is not None:
                    answer = self.change(site.config.site.name, answer)
            if answer is None:
                replies.append(Message(Error(code=5, reason="connection lost"), reply_to=message))
            else:
                replies.append(Message(to_record(answer), reply_to=message))
        return replies


class World:
    """Folders of two sites and a server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        write_model(root / "model")
        write_rows(root / "public.jsonl", 10, 9)
        for number, name in enumerate(NAMES):
            folder = root / name
            new_identity_key(folder / "keys" / "identity.pem")
            write_rows(folder / "records.jsonl", 40 + number, number)
            (folder / "site.yaml").write_text(SITE.format(name=name, socket=folder / "run", rounds=20))

    def site(self, name: str, *overrides: str) -> Site:
        file = self.root / name / "site.yaml"
        return build_site(load_trainer(file, overrides).config, file)

    def run(
        self,
        run_id: str,
        *,
        rounds: int = 2,
        change: Change | None = None,
        prepare: Callable[[Site], None] | None = None,
        replies: int = 1,
        resume: bool = False,
    ) -> tuple[RunResult, SitesGrid]:
        import server.app

        public, runs = self.root / "public.jsonl", self.root / "runs"
        text = RUN.format(
            runs=runs, model=self.root / "model", public=public, rounds=rounds, timeout=30.0, port=1,
            expected=2, replies=replies,
        )  # fmt: skip
        container = yaml.safe_load(text.replace("1.0e-4", "0.0001"))
        prepared = complete(config_from_container(container))
        settings = ServerSettings(prepared.config, run_id, runs / run_id, resume, bench=prepared.bench)
        sites = {10 + number: self.site(name) for number, name in enumerate(NAMES)}
        try:
            for site in sites.values():
                if prepare is not None:
                    prepare(site)
            grid = SitesGrid(sites, change)
            return server.app.run(grid, settings), grid
        finally:
            for site in sites.values():
                site.ledger.close()

    def spent(self, name: str) -> Any:
        folder = self.root / name
        secret = load_secret(folder / "keys" / "ledger.secret")
        with open_ledger(folder / "ledger.db", secret=secret, read_only=True) as ledger:
            return ledger.report(Account(name, "words-2026"))

    def receipts(self, result: RunResult, name: str) -> dict[str, Any]:
        table = json.loads((result.folder / "ledger-receipts.json").read_text())
        found: dict[str, Any] = table[f"{name}/words-2026"]
        return found

    def backup(self, name: str, where: str) -> None:
        shutil.copytree(self.root / name, self.root / where)

    def put_back(self, name: str, where: str) -> None:
        shutil.rmtree(self.root / name)
        shutil.copytree(self.root / where, self.root / name)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def flags(result: RunResult, name: str) -> list[str]:
    table = json.loads((result.folder / "ledger-receipts.json").read_text())
    return [flag["code"] for flag in table[f"{name}/words-2026"]["flags"]]


def test_the_mirror_recomputes_what_the_sites_ledgers_say(world: World) -> None:
    first, _ = world.run("one")
    second, grid = world.run("two", rounds=1)
    for name in NAMES:
        report = world.spent(name)
        found = world.receipts(second, name)
        assert found["epsilon"] == pytest.approx(report.epsilon)
        assert found["epsilon_claimed"] == pytest.approx(found["epsilon_from_receipts"])
        assert (found["flags"], found["unanswered"], found["head"]) == ([], [], report.head)
    assert second.epsilon == pytest.approx(world.spent("site-a").epsilon)
    assert second.epsilon > first.epsilon
    assert [text for text in second.warnings if "client" in text] == []
    heads = {asked["site"]: asked["known"][asked["site"]]["head"] for asked in grid.asked}
    assert all(len(head) == 80 for head in heads.values()), "the first request of a run already carries heads"


def test_an_old_backup_put_back_is_refused_before_anything_is_read(world: World) -> None:
    world.run("one", rounds=1)
    world.backup("site-a", "monday")  # ledger, anchor, kept replies and keys: whole and valid in itself
    world.run("two", rounds=1)
    spent = world.spent("site-a").num_events
    world.put_back("site-a", "monday")
    assert world.spent("site-a").num_events < spent
    before = world.spent("site-a").num_events
    result, _ = world.run("three", rounds=1)
    line = json.loads((result.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert "the server knows a newer head" in line["refused"]["site-a"]
    assert line["accepted"] == 1
    assert world.spent("site-a").num_events == before, "nothing was reserved on the old copy"
    assert any("site-a: no receipt for round 1" in text for text in result.warnings)
    assert result.epsilon > world.spent("site-b").epsilon * 0.999


def test_an_old_backup_used_by_a_site_that_does_not_look_is_flagged(world: World) -> None:
    world.run("one", rounds=1)
    world.backup("site-a", "monday")
    world.run("two", rounds=2)
    true = world.spent("site-a")
    world.put_back("site-a", "monday")

    def blind(site: Site) -> None:
        witness: Any = site.trainer._witness
        witness.check = lambda known: None

    result, _ = world.run("three", rounds=1, prepare=blind)
    assert "rollback" in flags(result, "site-a")
    assert "missing-events" in flags(result, "site-a")
    assert flags(result, "site-b") == []
    assert any("site-a: rollback" in text for text in result.warnings)
    saved = json.loads((result.folder / "summary.json").read_text())
    assert any("rollback" in text for text in saved["warnings"])
    assert world.spent("site-a").epsilon < true.epsilon
    assert result.epsilon > true.epsilon, "the server's higher figure stands"


def test_another_ledger_begun_anew_is_refused(world: World) -> None:
    """By the site's own key first; where its register is gone too, by what the server knows."""
    world.run("one", rounds=1)
    for path in (world.root / "site-a").glob("ledger.db*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(LedgerIntegrityError, match="begun a ledger before"):
        world.site("site-a")
    (world.root / "site-a" / "keys" / "ledger.secret.ledgers").unlink()
    with pytest.raises(TooFewRepliesError):
        world.run("two", rounds=3, replies=2)
    lines = (world.root / "runs" / "two" / "metrics.jsonl").read_text().splitlines()
    assert all("newer head" in json.loads(line)["refused"]["site-a"] for line in lines[1:])


def test_h20_a_lost_reply_is_told_later_and_a_last_one_counts_as_spent(world: World) -> None:
    lost = {"site-a": {1}, "site-b": {3}}

    def change(name: str, answer: Packet) -> Packet | None:
        return None if answer.header["round"] in lost[name] else answer

    result, grid = world.run("one", rounds=3, change=change)
    told = {(one["site"], one["round"]): one["known"][one["site"]]["missing"] for one in grid.asked}
    assert told[("site-a", 2)] == [1]
    assert told[("site-a", 3)] == []
    assert world.receipts(result, "site-a")["unanswered"] == []
    assert world.receipts(result, "site-b")["unanswered"] == [["one", 3]]
    for name in NAMES:
        assert world.receipts(result, name)["epsilon"] == pytest.approx(world.spent(name).epsilon)
    assert any("site-b: no receipt for round 3" in text for text in result.warnings)


def forge(key: Ed25519PrivateKey, data: dict[str, Any], **change: Any) -> dict[str, Any]:
    receipt = dataclasses.replace(SignedReceipt.from_json(data).receipt, **change)
    return sign_receipt(receipt, key).to_json()


@pytest.mark.parametrize(
    ("lie", "code"),
    [
        ({"epsilon": 0.01}, "lower-epsilon"),
        pytest.param({"num_events": 1, "epsilon": 0.01}, "missing-events", marks=pytest.mark.long),
        pytest.param(
            {"event": '{"kind":"gaussian","noise_multiplier":90.0}'}, "event-differs", marks=pytest.mark.long
        ),
        pytest.param({"delta": 0.01}, "terms-changed", marks=pytest.mark.long),
        pytest.param({"ledger_id": "0" * 32}, "another-ledger", marks=pytest.mark.long),
    ],
)
def test_a_site_that_lies_with_its_own_key_is_flagged_and_the_higher_figure_stands(
    world: World, lie: dict[str, Any], code: str
) -> None:
    world.run("zero", rounds=1)
    key = load_identity(world.root / "site-a" / "keys" / "identity.pem")

    def change(name: str, answer: Packet) -> Packet:
        reply = answer.header["replies"][0]
        if name == "site-a":
            reply["ledger_receipts"] = [forge(key, one, **lie) for one in reply["ledger_receipts"]]
            reply["epsilon"] = lie.get("epsilon", reply["epsilon"])
        return answer

    result, _ = world.run("one", rounds=2, change=change)
    assert code in flags(result, "site-a")
    assert flags(result, "site-b") == []
    assert any(f"site-a: {code}" in text for text in result.warnings)
    assert result.epsilon >= world.spent("site-b").epsilon * (1 - 1e-9)


@pytest.mark.parametrize(
    "fault",
    [
        "other client",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("foreign key", "broken", "none")),
    ],
)
def test_receipts_of_others_and_missing_ones_are_flagged_and_counted_as_spent(
    world: World, fault: str
) -> None:
    stranger = Ed25519PrivateKey.generate()
    world.run("zero", rounds=1)
    b_key = load_identity(world.root / "site-b" / "keys" / "identity.pem")

    def change(name: str, answer: Packet) -> Packet:
        reply = answer.header["replies"][0]
        if name == "site-a":
            good = reply["ledger_receipts"]
            made = {
                "foreign key": lambda: [forge(stranger, one) for one in good],
                "other client": lambda: [forge(b_key, one, client="site-b", epsilon=9.0) for one in good],
                "broken": lambda: [{**one, "signature": "00"} for one in good],
                "none": lambda: [],
            }
            reply["ledger_receipts"] = made[fault]()
        return answer

    result, _ = world.run("one", rounds=1, change=change)
    code = {
        "foreign key": "key-changed",
        "other client": "foreign-receipt",
        "broken": "bad-signature",
        "none": "unsigned",
    }[fault]
    assert code in flags(result, "site-a")
    assert flags(result, "site-b") == [], "nobody can say anything in another one's name"
    found = world.receipts(result, "site-a")
    assert found["unanswered"] == [["one", 1]]
    assert found["epsilon"] == pytest.approx(world.spent("site-a").epsilon)


def test_a_refusal_for_the_budget_is_not_counted_as_spent(world: World) -> None:
    file = world.root / "site-a" / "site.yaml"
    file.write_text(file.read_text().replace("epsilon: 20.0", "epsilon: 2.1"))
    lost = {
        ("site-a", 2)
    }  # told with the refusal of round 3, which must not hide that nothing was spent there

    def change(name: str, answer: Packet) -> Packet | None:
        return None if (name, answer.header["round"]) in lost else answer

    result, _ = world.run("one", rounds=4, change=change)
    found = world.receipts(result, "site-a")
    assert found["unanswered"] == []
    assert found["epsilon"] == pytest.approx(world.spent("site-a").epsilon)
    assert found["epsilon"] <= 2.1


def test_a_mirror_that_cannot_be_written_stops_the_run_before_anything_is_sent(world: World) -> None:
    from fedlora.errors import LedgerError

    (world.root / "runs" / "ledger-mirror.sqlite").mkdir(parents=True)
    with pytest.raises(LedgerError, match="mirror"):
        world.run("one", rounds=1)
    assert not (world.root / "site-a" / "records.read").exists()


def test_the_sites_anchor_can_lie_elsewhere(world: World) -> None:
    site = world.site("site-a", "ledger.anchor=elsewhere/ledger.anchor")
    site.ledger.close()
    folder = world.root / "site-a"
    assert (folder / "elsewhere" / "ledger.anchor").is_file()
    assert not (folder / "ledger.db.anchor").exists()


def test_the_records_fingerprint_is_kept_and_a_renamed_data_set_is_seen(world: World) -> None:
    world.run("one", rounds=1)
    file = world.root / "site-a" / "site.yaml"
    file.write_text(file.read_text().replace("name: words-2026", "name: words-again"))
    write_rows(world.root / "site-b" / "records.jsonl", 50, 77)
    world.run("two", rounds=1)
    assert any("charged as site-a/words-again too" in text for text in world.spent("site-a").conditions)
    assert any("records changed" in text for text in world.spent("site-b").conditions)
