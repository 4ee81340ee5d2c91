"""The trainer: policy, reservation before reading, refusal by name, repeated rounds, nothing private outside."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_helpers import World, make_world

from fedlora.config.resolve import config_hash
from fedlora.errors import PolicyRefusedError, PrivacyError
from fedlora.ledger import Account
from fedlora.mechanisms.noise import SeededNoise
from fedlora.training import trainer as trainer_module
from fedlora.training.drawing import make_job
from fedlora.training.policy import Policy
from fedlora.training.replies import release_digest
from fedlora.training.requests import ClientReply, RoundReply
from fedlora.training.selfcheck import check_noise, run_selfchecks
from fedlora.training.session import Parts, bind
from fedlora.wire.fingerprint import payload_fingerprint


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("trainer"))


def statuses(reply: RoundReply) -> dict[str, str]:
    return {one.client: one.status for one in reply.replies}


def errors(reply: RoundReply) -> dict[str, str]:
    return {one.client: str((one.error or {}).get("error")) for one in reply.replies if one.error}


def test_a_round_trains_charges_and_commits(world: World, tmp_path: Path) -> None:
    trainer, shelf, ledger = world.trainer(tmp_path)
    reply = trainer.handle(world.request(1))
    assert statuses(reply) == {"client-0000": "ok", "client-0001": "ok"}
    one = reply.replies[0]
    assert one.payload is not None
    assert one.epsilon == pytest.approx(ledger.report(Account("client-0000", "words-2026")).epsilon)
    assert [row.state for row in ledger.rounds(Account("client-0000", "words-2026"))] == ["committed"]
    assert shelf.opened == ["client-0000", "client-0001"]


def test_h11_the_second_round_still_trains(world: World, tmp_path: Path) -> None:
    trainer, _, _ = world.trainer(tmp_path)
    payload = world.bench.initial_payload()
    prints = [payload_fingerprint(payload)]
    for number in (1, 2, 3):
        reply = trainer.handle(world.request(number, payload=payload))
        assert reply.replies[0].payload is not None
        payload = reply.replies[0].payload
        prints.append(payload_fingerprint(payload))
    assert len(set(prints)) == 4


@pytest.mark.parametrize("factor", [0.5, 0.9, 0.999])
def test_beyond_the_budget_every_client_refuses_before_data_is_read(
    world: World, tmp_path: Path, factor: float
) -> None:
    one_round = world.epsilon_of_rounds(1)
    trainer, shelf, ledger = world.trainer(tmp_path, budget=one_round * factor)
    reply = trainer.handle(world.request(1, budget=one_round * factor))
    assert statuses(reply) == {"client-0000": "refused", "client-0001": "refused"}
    assert set(errors(reply).values()) == {"BudgetExceededError"}
    assert shelf.opened == []
    assert shelf.loads == 0
    assert all(one.payload is None for one in reply.replies)
    assert [row.state for row in ledger.rounds(Account("client-0000", "words-2026"))] == []


def test_a_refusal_of_one_client_does_not_touch_the_others(world: World, tmp_path: Path) -> None:
    budget = world.epsilon_of_rounds(1) * 1.01
    trainer, _, _ = world.trainer(tmp_path, budget=budget)
    trainer.handle(world.request(1, clients=("client-0000",), budget=budget))
    reply = trainer.handle(world.request(2, budget=budget))
    assert statuses(reply) == {"client-0000": "refused", "client-0001": "ok"}


@pytest.mark.parametrize("replies", ["memory", "ledger"])
def test_a_repeated_round_gets_the_same_bytes(world: World, tmp_path: Path, replies: str) -> None:
    trainer, _, ledger = world.trainer(tmp_path, replies=replies)
    first = trainer.handle(world.request(1))
    again = trainer.handle(world.request(1))
    for left, right in zip(first.replies, again.replies, strict=True):
        assert left.payload is not None
        assert right.payload is not None
        assert payload_fingerprint(left.payload) == payload_fingerprint(right.payload)
    assert len(ledger.rounds(Account("client-0000", "words-2026"))) == 1


@pytest.mark.parametrize("replies", ["memory", "ledger"])
@pytest.mark.parametrize(("mechanism", "sent_again"), [("lora_fa", True), ("factor", False)])
def test_a_kept_reply_is_not_sent_for_another_global_adapter_where_it_means_nothing(
    world: World, tmp_path: Path, replies: str, mechanism: str, sent_again: bool
) -> None:
    """A server that lost its newest checkpoint asks again with another adapter; lora_B of one lora_A fits any."""
    trainer, _, _ = world.trainer(tmp_path, replies=replies)
    bench = bind(
        world.variant(mechanism=mechanism), Parts(world.bench.base, world.bench.task, world.bench.adapted)
    )
    start = bench.initial_payload()
    other = replace(start, blocks={name: block + 1 for name, block in start.blocks.items()})
    changes = {} if mechanism == "lora_fa" else {"mechanism": mechanism}
    first = trainer.handle(world.request(1, payload=start, **changes))
    same = trainer.handle(world.request(1, payload=start, **changes))
    changed = trainer.handle(world.request(1, payload=other, **changes))
    assert [release_digest(one) for one in same.replies] == [release_digest(one) for one in first.replies]
    assert set(statuses(changed).values()) == {"ok" if sent_again else "refused"}
    assert sent_again or set(errors(changed).values()) == {"DuplicateRoundError"}


def test_a_repeated_round_without_kept_replies_is_refused(world: World, tmp_path: Path) -> None:
    trainer, _, _ = world.trainer(tmp_path, replies="none")
    trainer.handle(world.request(1))
    again = trainer.handle(world.request(1))
    assert set(errors(again).values()) == {"DuplicateRoundError"}
    assert all(one.payload is None for one in again.replies)


def test_h20_a_trainer_that_restarts_sends_the_committed_reply(world: World, tmp_path: Path) -> None:
    first_trainer, _, ledger = world.trainer(tmp_path, replies="ledger")
    first = first_trainer.handle(world.request(1))
    second_trainer, shelf, _ = world.trainer(tmp_path, replies="ledger", ledger=ledger)
    again = second_trainer.handle(world.request(1))
    assert shelf.opened == []
    for left, right in zip(first.replies, again.replies, strict=True):
        assert left.payload is not None
        assert right.payload is not None
        assert payload_fingerprint(left.payload) == payload_fingerprint(right.payload)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": "seeded-test-only"}, "allow_seeded_noise"),
        ({"unit": "none"}, "allow_no_privacy"),
        ({"mechanism": "factor"}, "policy.mechanisms"),
        ({"sigma": 0.5}, "min_noise_multiplier"),
    ],
)
def test_the_sites_policy_refuses_before_anything_is_read(
    world: World, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    policy = Policy(mechanisms=frozenset({"lora_fa"}), min_noise_multiplier=0.9)
    trainer, shelf, _ = world.trainer(tmp_path, policy=policy)
    reply = trainer.handle(world.request(1, **changes))
    assert set(statuses(reply).values()) == {"refused"}
    assert message in str((reply.replies[0].error or {})["message"])
    assert shelf.loads == 0


@pytest.mark.parametrize("what", ["rounds", "steps"])
def test_more_rounds_or_steps_than_allowed_are_refused(world: World, tmp_path: Path, what: str) -> None:
    policy = (
        Policy(max_rounds=2, max_steps_per_round=1) if what == "rounds" else Policy(max_steps_per_round=1)
    )
    trainer, shelf, _ = world.trainer(tmp_path, policy=policy)
    request = world.request(3) if what == "rounds" else world.request(1, steps=2)
    reply = trainer.handle(request)
    assert set(statuses(reply).values()) == {"refused"}
    assert shelf.loads == 0


def test_a_configuration_that_claims_less_than_it_spends_is_refused(world: World, tmp_path: Path) -> None:
    trainer, shelf, _ = world.trainer(tmp_path)
    derived = world.config.derived
    assert derived is not None
    lying = world.config.model_copy(update={"derived": derived.model_copy(update={"epsilon": 0.1})})
    request = world.request(1)
    from dataclasses import replace

    from fedlora.config import config_container

    request = replace(request, config=config_container(lying), config_hash=config_hash(lying))
    reply = trainer.handle(request)
    assert set(statuses(reply).values()) == {"failed"}
    assert "claims" in str((reply.replies[0].error or {})["message"])
    assert shelf.loads == 0


@pytest.mark.parametrize("field", ["config_hash", "config"])
def test_a_tampered_configuration_is_refused(world: World, tmp_path: Path, field: str) -> None:
    from dataclasses import replace

    trainer, shelf, _ = world.trainer(tmp_path)
    request = world.request(1)
    if field == "config_hash":
        request = replace(request, config_hash="0" * 64)
    else:
        changed = json.loads(json.dumps(dict(request.config)))
        changed["privacy"]["noise_multiplier"] = 0.01
        request = replace(request, config=changed)
    reply = trainer.handle(request)
    assert set(statuses(reply).values()) == {"failed"}
    assert shelf.loads == 0


def test_h03_another_base_model_is_refused_by_fingerprint(world: World, tmp_path: Path) -> None:
    from dataclasses import replace

    trainer, shelf, _ = world.trainer(tmp_path)
    request = world.request(1)
    request = replace(request, payload=replace(request.payload, base_fingerprint="0" * 64))
    reply = trainer.handle(request)
    assert "base model" in str((reply.replies[0].error or {})["message"])
    assert shelf.loads == 0


def test_unknown_and_doubled_clients_are_named(world: World, tmp_path: Path) -> None:
    trainer, _, _ = world.trainer(tmp_path)
    reply = trainer.handle(world.request(1, clients=("client-0000", "stranger")))
    assert statuses(reply) == {"client-0000": "ok", "stranger": "failed"}
    reply = trainer.handle(world.request(2, clients=("client-0000", "client-0000")))
    assert set(statuses(reply).values()) == {"failed"}


class _Engine:
    """Wraps the engine and lies about one thing."""

    def __init__(self, engine: Any, change: str) -> None:
        self._engine, self._change = engine, change

    def train(self, payload: Any, jobs: Sequence[Any], steps: int, first: int) -> list[Any]:
        from dataclasses import replace

        from fedlora.accounting import PoissonGaussianEvent

        updates = self._engine.train(payload, jobs, steps, first)
        if self._change == "steps":
            return [replace(one, steps=one.steps + 1) for one in updates]
        if self._change == "event":
            return [replace(one, event=PoissonGaussianEvent(9.0, 0.2)) for one in updates]
        return []


@pytest.mark.parametrize("change", ["steps", "event", "missing"])
def test_h41_a_mismatch_of_what_ran_and_what_was_reserved_releases_nothing(
    world: World, tmp_path: Path, change: str
) -> None:
    trainer, _, ledger = world.trainer(tmp_path)
    trainer.prepare(world.config, config_hash(world.config))
    session = trainer._session
    assert session is not None
    session.engine = _Engine(session.engine, change)
    reply = trainer.handle(world.request(1))
    assert set(statuses(reply).values()) == {"refused"}
    assert set(errors(reply).values()) == {"AccountingError"}
    assert all(one.payload is None for one in reply.replies)
    assert reply.reduced is None
    # the reservation stays spent
    assert [row.state for row in ledger.rounds(Account("client-0000", "words-2026"))] == ["reserved"]
    assert ledger.report(Account("client-0000", "words-2026")).epsilon > 0


def test_h13_a_crash_in_training_stays_spent(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _, ledger = world.trainer(tmp_path)

    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("the patient is called Ada")

    monkeypatch.setattr(trainer_module, "make_job", crash)
    reply = trainer.handle(world.request(1))
    assert set(statuses(reply).values()) == {"failed"}
    assert "Ada" not in json.dumps([dict(one.error or {}) for one in reply.replies])
    assert ledger.report(Account("client-0000", "words-2026")).epsilon == pytest.approx(
        world.epsilon_of_rounds(1)
    )


def test_h19_nothing_private_is_in_replies_or_logs(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    trainer, _, _ = world.trainer(tmp_path)
    reply = trainer.handle(world.request(1))
    assert dict(reply.timings) == {}, "durations tell batch sizes"
    for one in reply.replies:
        assert one.payload is not None
        assert dict(one.payload.notes) == {}
        public = {name for name in ClientReply.__dataclass_fields__ if getattr(one, name) is not None}
        assert public == {"client", "status", "payload", "event", "steps", "epsilon", "ledger_head"}
    for word in ("red", "green", "warm", "cold"):
        assert f" {word} " not in caplog.text


def test_a_receipt_binds_the_release(world: World, tmp_path: Path) -> None:
    claims: list[Any] = []

    def sign(claim: Any) -> Any:
        claims.append(dict(claim))
        return {"signature": "x"}

    trainer, _, _ = world.trainer(tmp_path, sign=sign)
    reply = trainer.handle(world.request(1))
    assert reply.replies[0].receipt == {"signature": "x"}
    assert claims[0]["round"] == 1
    assert claims[0]["ledger_head"] == reply.replies[0].ledger_head


def test_h23_two_clients_with_the_same_records_send_different_noise(world: World, tmp_path: Path) -> None:
    trainer, _, _ = world.trainer(tmp_path, same_records=True)
    reply = trainer.handle(world.request(1, reduce=False))
    left, right = reply.replies
    assert left.payload is not None
    assert right.payload is not None
    name = next(iter(left.payload.blocks))
    assert not np.allclose(left.payload.blocks[name], right.payload.blocks[name])


def test_a_node_sums_its_clients_where_it_may(world: World, tmp_path: Path) -> None:
    trainer, _, _ = world.trainer(tmp_path)
    reply = trainer.handle(world.request(1, reduce=True))
    assert reply.reduced is not None
    assert reply.reduced_clients == ("client-0000", "client-0001")
    assert all(one.payload is None and one.status == "ok" for one in reply.replies)


def test_the_selfchecks_hold_and_see_faults(world: World) -> None:
    checks = {one.name: one for one in run_selfchecks(world.bench)}
    assert all(one.passed for one in checks.values()), checks
    assert not check_noise(SeededNoise(1, "a", 1)).passed


@pytest.mark.parametrize("fault", ["batch-normalised", "clip-off"])
def test_the_selfchecks_catch_planted_faults(
    world: World, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    import dataclasses

    bench = world.bench
    if fault == "batch-normalised":
        task = type(bench.task)
        original = task.per_record_loss

        def coupled(self: Any, model: Any, batch: Any) -> Any:
            losses = original(self, model, batch)
            return losses * len(losses) / 3.0

        monkeypatch.setattr(task, "per_record_loss", coupled)
    else:
        privacy = dataclasses.replace(bench.mechanism.privacy, max_grad_norm=1e6)
        mechanism = dataclasses.replace(bench.mechanism, privacy=privacy)
        bench = dataclasses.replace(bench, mechanism=mechanism)
    assert not all(one.passed for one in run_selfchecks(bench))


def test_a_failed_selfcheck_stops_a_session_before_anything_is_charged(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: Any) -> None:
        raise PrivacyError("self-check: planted fault")

    monkeypatch.setattr(trainer_module, "require_selfchecks", fails)
    trainer, shelf, ledger = world.trainer(tmp_path)
    reply = trainer.handle(world.request(1))
    assert set(statuses(reply).values()) == {"refused"}
    assert shelf.opened == []
    assert list(ledger.accounts()) == []


def test_h14_shuffled_batches_are_refused_at_the_trainer_too(world: World) -> None:
    training = world.config.training.model_copy(update={"sampling": "shuffle"})
    config = world.config.model_copy(update={"training": training})
    with pytest.raises(PolicyRefusedError, match="poisson"):
        make_job(config, "client-0000", [], world.request(1), 1)


@pytest.mark.parametrize("allowed", [("a" * 64,), ("a" * 64, "b" * 64), ()])
def test_a_base_model_that_the_site_did_not_name_is_refused(
    world: World, tmp_path: Path, allowed: tuple[str, ...]
) -> None:
    trainer, shelf, ledger = world.trainer(tmp_path, policy=Policy(base_fingerprints=frozenset(allowed)))
    reply = trainer.handle(world.request(1))
    assert set(statuses(reply).values()) == {"refused"}
    assert "base_fingerprints" in str((reply.replies[0].error or {})["message"])
    assert (shelf.opened, list(ledger.accounts())) == ([], [])
