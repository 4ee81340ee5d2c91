"""Secure sums of sites that pin each other: a server that swaps keys or tells two stories gets nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord, ConfigRecord, Message
from test_strategies_rounds import FakeGrid, Trainer, expected, make, payload_of, play

from fedlora.aggregation.secagg_client import SecAggPlan
from fedlora.aggregation.secagg_field import FixedPoint
from fedlora.aggregation.secagg_keys import new_private, public_of
from fedlora.cli.keyring import new_identity_key
from fedlora.config.schema import BudgetConfig, ClientPrivacy
from fedlora.config.trainer import load_trainer
from fedlora.errors import (
    AuthenticationError,
    ConfigError,
    PeerIdentityError,
    PolicyRefusedError,
    TooFewRepliesError,
)
from fedlora.simulation.messages import from_record, to_record
from fedlora.training.packets import Packet, decode_packet, encode_packet
from fedlora.training.pinned import (
    HONEST_BUT_CURIOUS,
    PINNED,
    PinnedIdentities,
    secure_desk,
    sums_hold_against,
)
from fedlora.training.port import SECAGG, serve_packet
from fedlora.training.secure import SecureDesk, pack_step
from fedlora.training.service_site import load_identity

CLIENTS = [f"client-{i:02d}" for i in range(5)]
SITE = {
    "schema": 1,
    "socket": {"path": "s", "token_file": "token"},
    "data": {"source": {"kind": "file", "paths": ["records.jsonl"]}, "name": "words"},
    "ledger": {"url": "ledger.db"},
    "budget": {
        "epsilon": 20.0,
        "delta": 0.0001,
        "adjacency": "add_or_remove",
        "unit": "record",
        "on_exhausted": "refuse",
    },
    "policy": {
        "mechanisms": ["lora_fa"],
        "min_noise_multiplier": 0.9,
        "max_rounds": 20,
        "max_steps_per_round": 4,
        "base_models": [],
    },
}


@pytest.fixture
def sites(tmp_path):
    """One folder a client, with its identity and everybody's public half."""
    for client in CLIENTS:
        new_identity_key(tmp_path / client / "identity.pem")
    pins = {client: str(tmp_path / client / "identity.pem.pub") for client in CLIENTS}
    return {client: write_site(tmp_path, client, pins) for client in CLIENTS}


def write_site(root, client, pins, **sums):
    file = root / client / "site.yaml"
    own = {"name": client, "identity_key": str(root / client / "identity.pem")}
    file.write_text(yaml.safe_dump({**SITE, "site": own, "secure_sums": {"peers": pins, **sums}}))
    return file


def desk_of(file):
    config = load_trainer(file).config
    return secure_desk(config, file, [config.site.name], load_identity(file.parent / "identity.pem"))


class WireGrid(FakeGrid):
    """Every packet crosses a socket's encoding; a hostile server may change secure questions on their way."""

    def __init__(self, trainers, tamper=None):
        super().__init__(trainers)
        self.tamper, self.steps = tamper, []

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            self.sent += 1
            from fedlora.simulation.identity import number_message

            number_message(message, f"m{self.sent}")
            packet = from_record(message.content)
            if packet.header["op"] == SECAGG and self.tamper is not None:
                header = json.loads(json.dumps(packet.header))
                packet = Packet(self.tamper(message.metadata.dst_node_id, header), packet.arrays)
            asked = decode_packet(encode_packet(packet))
            answer = decode_packet(
                encode_packet(serve_packet(self.trainers[message.metadata.dst_node_id], asked))
            )
            self.steps.append((packet.header.get("step"), message.metadata.dst_node_id, answer))
            replies.append(Message(to_record(answer), reply_to=message))
        return replies


def federation(desks, tamper=None):
    strategy, grid, _ = make(clients=len(CLIENTS), nodes=len(CLIENTS), secure=True)
    trainers = {}
    for node, client in zip(sorted(grid.trainers), CLIENTS, strict=True):
        trainers[node] = Trainer()
        trainers[node].desk = desks[client]
    return strategy, WireGrid(trainers, tamper)


def vectors_sent(grid):
    return [answer for step, _, answer in grid.steps if step == "masked" and answer.arrays]


def test_pinned_sites_give_the_plain_mean_over_a_sockets_encoding(sites):
    strategy, grid = federation({client: desk_of(file) for client, file in sites.items()})
    before = strategy.payload
    play(strategy, grid)
    assert strategy.rounds[-1].accepted == tuple(CLIENTS)
    assert {step for step, _, _ in grid.steps if step} == {"keys", "shares", "masked", "confirm", "unmask"}
    for name, block in expected(before, 1, CLIENTS).items():
        np.testing.assert_allclose(strategy.payload.blocks[name], block, atol=1e-5)


def swap(target, forge):
    """Return a server that puts keys of its own in the place of one client's."""
    fake = {"mask": public_of(new_private()).hex(), "seal": public_of(new_private()).hex()}

    def tamper(node, header):
        if header["step"] == "shares":
            for body in header["bodies"].values():
                for keys in body["neighbours"]:
                    if keys["client"] == target:
                        keys.update(fake, signature=forge(keys["signature"]))
        return header

    return tamper


@pytest.mark.parametrize(
    "forge",
    [
        lambda old: old,
        lambda old: "",
        lambda old: Ed25519PrivateKey.generate().sign(b"x").hex(),
    ],
    ids=["old signature", "none", "the server's own"],
)
def test_a_server_that_swaps_keys_is_refused_by_name_and_nothing_leaves(sites, forge):
    desks = {client: desk_of(file) for client, file in sites.items()}
    strategy, grid = federation(desks, swap("client-02", forge))
    before = strategy.payload
    with pytest.raises(TooFewRepliesError):
        play(strategy, grid)
    record = strategy.rounds[-1]
    assert set(record.rejected) >= set(CLIENTS) - {"client-02"}
    for client in set(CLIENTS) - {"client-02"}:
        assert "PeerIdentityError (exit code 73)" in record.rejected[client]
        assert "'client-02'" in record.rejected[client]
    assert vectors_sent(grid) == []
    assert strategy.payload is before


def test_the_same_server_is_not_seen_where_nobody_is_pinned():
    strategy, grid = federation(
        {client: SecureDesk() for client in CLIENTS}, swap("client-02", lambda old: old)
    )
    with pytest.raises(TooFewRepliesError):
        play(strategy, grid)
    shared = [answer.header["bodies"] for step, _, answer in grid.steps if step == "shares"]
    assert all("sealed" in body for bodies in shared for body in bodies.values())


def test_keys_of_another_round_or_client_are_refused(sites):
    taken = {}

    def replay(node, header):
        if header["step"] == "shares":
            for body in header["bodies"].values():
                for keys in body["neighbours"]:
                    old = taken.setdefault(keys["client"], dict(keys))
                    if header["plan"]["round"] == 2:
                        keys.update(old)
        return header

    strategy, grid = federation({client: desk_of(file) for client, file in sites.items()}, replay)
    play(strategy, grid)
    with pytest.raises(TooFewRepliesError):
        play(strategy, grid, 2)
    assert all("PeerIdentityError" in reason for reason in strategy.rounds[-1].rejected.values())


def test_a_client_that_the_server_makes_up_is_refused_by_name(sites, tmp_path):
    pins = {c: str(tmp_path / c / "identity.pem.pub") for c in CLIENTS if c != "client-04"}
    for client in CLIENTS[:4]:
        write_site(tmp_path, client, pins)
    strategy, grid = federation({client: desk_of(file) for client, file in sites.items()})
    with pytest.raises(TooFewRepliesError):
        play(strategy, grid)
    for client in CLIENTS[:4]:
        assert "no identity is pinned for client 'client-04'" in strategy.rounds[-1].rejected[client]
    assert vectors_sent(grid) == []


@pytest.mark.parametrize("honest_about_confirm", [True, False])
def test_a_server_that_tells_two_stories_about_dropouts_opens_nothing(sites, honest_about_confirm):
    """Half of the sites are told that client-04 dropped out: both shares of its secrets would come together."""

    def two_stories(node, header):
        told = header["step"] == "unmask" or (header["step"] == "confirm" and not honest_about_confirm)
        if told and node % 2 == 0:
            for body in header["bodies"].values():
                if "client-04" in body["answered"] and "client-04" not in header["bodies"]:
                    body["answered"] = [c for c in body["answered"] if c != "client-04"]
                    body["dropped"] = ["client-04"]
        return header

    strategy, grid = federation({client: desk_of(file) for client, file in sites.items()}, two_stories)
    with pytest.raises(TooFewRepliesError):
        play(strategy, grid)
    opened = [answer.header["bodies"] for step, _, answer in grid.steps if step == "unmask"]
    revealed = [body["keys"] for bodies in opened for body in bodies.values() if "keys" in body]
    assert all("client-04" not in keys for keys in revealed)


def test_a_server_that_skips_the_confirmation_gets_no_share(sites):
    def skip(node, header):
        if header["step"] == "unmask":
            for body in header["bodies"].values():
                body.pop("confirmed", None)
        return header

    strategy, grid = federation({client: desk_of(file) for client, file in sites.items()}, skip)
    with pytest.raises(TooFewRepliesError):
        play(strategy, grid)
    assert all("signed the same lists" in reason for reason in strategy.rounds[-1].rejected.values())


def test_receipts_and_keys_are_signed_apart(tmp_path):
    key = Ed25519PrivateKey.generate()
    pinned = PinnedIdentities(key, ["a"], {})
    assert pinned.verify("a", b"message", pinned.sign(b"message"))
    assert not pinned.verify("a", b"message", key.sign(b"message"))
    assert not pinned.verify("a", b"message", key.sign(b"fedlora-reply-v1\nmessage"))
    with pytest.raises(PeerIdentityError, match="'b'"):
        pinned.verify("b", b"message", pinned.sign(b"message"))
    with pytest.raises(PeerIdentityError, match="lives here"):
        PinnedIdentities(key, ["a"], {"a": Ed25519PrivateKey.generate().public_key()})


def test_unusable_pins_are_refused_by_name(sites, tmp_path):
    file = sites["client-00"]
    for pin, word in (
        (str(tmp_path / "client-01" / "identity.pem"), "private"),
        ("nowhere.pub", "cannot be read"),
    ):
        write_site(tmp_path, "client-00", {"client-01": pin})
        with pytest.raises(AuthenticationError, match=word) as caught:
            desk_of(file)
        assert "client-01" in str(caught.value)
    raw = yaml.safe_load(file.read_text())
    del raw["site"]["identity_key"]
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=r"secure_sums\.peers"):
        load_trainer(file)


def test_pins_in_hex_and_the_statement_of_the_adversary(sites, tmp_path):
    key = load_identity(tmp_path / "client-01" / "identity.pem")
    file = write_site(tmp_path, "client-00", {"client-01": key.public_key().public_bytes_raw().hex()})
    assert desk_of(file)._verify("client-01", b"m", PinnedIdentities(key, ["client-01"], {}).sign(b"m"))
    assert sums_hold_against(load_trainer(file).config) == PINNED
    bare = write_site(tmp_path, "client-00", {})
    assert sums_hold_against(load_trainer(bare).config) == HONEST_BUT_CURIOUS
    assert desk_of(bare)._verify is None


# -- what a site asks of the server's constants --------------------------------------------------------------


def shares_of_noise(honest):
    return ClientPrivacy(
        unit="client",
        adjacency="add_or_remove",
        noise_multiplier=1.0,
        target_delta=1e-5,
        budget=BudgetConfig(epsilon=1.0, delta=1e-5, on_exhausted="refuse"),
        noise_source="os",
        clipping_norm=1.0,
        noise_at="clients",
        honest_clients=honest,
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"least_clients": 3}, "at least 4"),
        ({"encoding": FixedPoint(1e-6, 5)}, "noise needs"),
        ({"encoding": FixedPoint(1e6, 5)}, "noise needs"),
        ({"encoding": FixedPoint(4.0, 2**20)}, "noise needs"),
    ],
)
def test_constants_that_would_cut_or_drown_shares_of_noise_are_refused(change, word):
    desk = SecureDesk()
    desk.withhold("run", 1, {}, payload_of("lora_b", 0), SimpleNamespace(privacy=shares_of_noise(4)))
    good = SecAggPlan("run", 1, FixedPoint(1.0 + 6.0 / 4**0.5, 5), least_clients=4)
    with pytest.raises(PolicyRefusedError, match=word):
        desk.handle(pack_step(replace(good, **change), "keys", {}))
    desk.handle(pack_step(good, "keys", {}))


def test_a_pinning_site_needs_two_thirds_of_its_neighbours(sites):
    desk = desk_of(sites["client-00"])
    desk.withhold("run", 1, {}, payload_of("lora_b", 0), None)
    plan = SecAggPlan("run", 1, FixedPoint(1.0, 5), threshold_share=0.6)
    with pytest.raises(PolicyRefusedError, match="threshold"):
        desk.handle(pack_step(plan, "keys", {}))
    desk.handle(pack_step(replace(plan, threshold_share=2 / 3), "keys", {}))


def test_a_site_that_refuses_the_constants_is_named_in_the_round(sites, tmp_path):
    file = write_site(tmp_path, "client-00", {}, least_clients=50)
    desks = {client: SecureDesk() for client in CLIENTS} | {"client-00": desk_of(file)}
    strategy, grid = federation(desks)
    messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert strategy.rounds[-1].accepted == tuple(CLIENTS[1:])
    assert "PolicyRefusedError" in strategy.rounds[-1].rejected["client-00"]
