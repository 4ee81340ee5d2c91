"""The strategy over a grid in this process: grouping, refusals, faults, resume, secure sums, Flower's own loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message
from flwr.serverapp import Grid

from fedlora.aggregation import Aggregator, ClientPlan, RoundRules, build_mode, reduce_payloads
from fedlora.config.schema import AggregationConfig, FederationConfig, ServerOptimizerConfig
from fedlora.errors import AggregationError, StaleRoundError, TooFewRepliesError, WireError
from fedlora.simulation.identity import SERVER_NODE, assume_identity, number_message
from fedlora.simulation.messages import from_record, to_record
from fedlora.training.port import LocalPort
from fedlora.training.requests import ClientReply, RoundReply
from fedlora.training.sampling import OsCoins, SeededCoins
from fedlora.training.secure import SecureDesk, withhold
from fedlora.wire import (
    AdapterLayout,
    AdapterPayload,
    ModuleSpec,
    expected_blocks,
    payload_fingerprint,
    predict_size,
)
from strategies import ClientSampler, FedLoraStrategy, RunFacts

SPEC = ModuleSpec(40, 30, 4, 2.0)
LAYOUT = AdapterLayout({"a.q": SPEC, "a.v": SPEC}, {"score|weight": (2, 40)}, "f" * 64)
RECIPE = "a" * 64


def payload_of(kind, seed, scale=0.1):
    rng = np.random.default_rng(seed)
    shapes = expected_blocks(LAYOUT.modules, LAYOUT.extra, kind)
    blocks = {n: (scale * rng.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}
    return AdapterPayload(kind, blocks, dict(LAYOUT.modules), RECIPE, LAYOUT.base_fingerprint)


class Trainer:
    """Answers like a node: each client adds its own seeded step to what came down."""

    def __init__(self, faults=None, kind="lora_b"):
        self.faults, self.kind = faults or {}, kind
        self.seen, self.desk = [], SecureDesk(lambda config, client, r: Normals(sum(client.encode()) + r))

    def hello(self):
        raise NotImplementedError

    def secure(self, packet):
        return self.desk.handle(packet)

    def handle(self, request):
        self.seen.append(request)
        replies = tuple(self._one(client, request) for client in request.clients)
        if request.withhold:
            replies = withhold(self.desk, request, Holder(request), replies)
        answer = RoundReply(request.run_id, request.server_round, replies)
        if request.reduce:
            updates = {r.client: r.payload for r in replies if r.payload is not None}
            total, used, _ = reduce_payloads(updates, LAYOUT, RECIPE, self.kind)
            bare = tuple(replace(r, payload=None) if r.client in used else r for r in replies)
            answer = replace(answer, replies=bare, reduced=total, reduced_clients=used)
        return self.faults.get("reply", lambda a: a)(answer)

    def _one(self, client, request):
        fault = self.faults.get(client)
        if fault == "refused":
            error = {"error": "BudgetExceededError", "message": "budget is spent"}
            return ClientReply(client, "refused", error=error)
        if fault == "failed":
            return ClientReply(client, "failed", error={"error": "X", "message": "internal error"})
        step = payload_of(self.kind, 1000 * request.server_round + int(client[-2:]), 0.05)
        blocks = {n: (request.payload.blocks[n] + b).astype(np.float32) for n, b in step.blocks.items()}
        if fault == "nan":
            blocks["a.v|lora_B"][0, 0] = np.nan
        sent = replace(request.payload, blocks=blocks)
        if fault == "recipe":
            sent = replace(sent, recipe="other")
        event = {"kind": "poisson_gaussian", "noise_multiplier": 1.0, "sample_rate": 0.1}
        return ClientReply(client, "ok", sent, event=event, steps=1, epsilon=0.5)


class Holder:
    """The part of a configuration that the desk reads."""

    def __init__(self, request):
        from types import SimpleNamespace

        from fedlora.config.schema import BudgetConfig, ClientPrivacy, NoPrivacy

        self.federation = SimpleNamespace(secure_aggregation=True)
        self.privacy = NoPrivacy(unit="none")
        if request.config.get("private"):
            self.privacy = ClientPrivacy(
                unit="client",
                adjacency="add_or_remove",
                noise_multiplier=1e-6,
                target_delta=1e-5,
                budget=BudgetConfig(epsilon=1.0, delta=1e-5, on_exhausted="refuse"),
                noise_source="os",
                clipping_norm=1e3,
                noise_at="clients",
                honest_clients=2,
            )


class Normals:
    private = False

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def normal(self, shape):
        return self.rng.standard_normal(shape)


class FakeGrid(Grid):
    def __init__(self, trainers, dead=()):
        assume_identity(7, SERVER_NODE)
        self.trainers, self.dead, self.sent = trainers, set(dead), 0
        self.replay = []

    def set_run(self, run):
        pass

    @property
    def run(self):
        return None

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return tuple(self.trainers)

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            self.sent += 1
            number_message(message, f"m{self.sent}")
            node = message.metadata.dst_node_id
            if node in self.dead:
                replies.append(Message(Error(code=5, reason="node is gone"), reply_to=message))
                continue
            answer = LocalPort(self.trainers[node]).exchange(from_record(message.content))
            replies.append(Message(to_record(answer), reply_to=message))
        return replies + self.replay


def make(
    *,
    clients=6,
    nodes=3,
    asked="all",
    rules=None,
    kind="mean_b",
    secure=False,
    plan=None,
    optimizer=None,
    faults=None,
    compression="none",
    on_reply=None,
    coins=None,
):
    fed = FederationConfig(
        rounds=1,
        min_replies=1,
        aggregation=AggregationConfig(kind=kind),
        server_optimizer=optimizer or ServerOptimizerConfig(),
    )
    charges = []
    agg = Aggregator(
        build_mode(fed),
        LAYOUT,
        RECIPE,
        rules or RoundRules(min_replies=2),
        plan=plan,
        noise=Normals(0),
        charge=charges.append,
    )
    config = {
        "federation": {"secure_aggregation": secure, "compression": compression},
        "private": plan is not None,
    }
    facts = RunFacts("run-1", config, "hash", 1, 5.0, compression)
    up = {"mean_b": "lora_b"}.get(kind, "factors")
    roster = {10 + n: [f"client-{i:02d}" for i in range(n, clients, nodes)] for n in range(nodes)}
    trainers = {node: Trainer(faults, up) for node in roster}
    sampler = ClientSampler(asked, 3, coins or (lambda r: SeededCoins(1, "server", r)))
    strategy = FedLoraStrategy(facts, agg, sampler, payload_of(up, 0), roster, on_reply=on_reply)
    return strategy, FakeGrid(trainers), charges


def play(strategy, grid, server_round=1):
    messages = strategy.configure_train(server_round, ArrayRecord(), ConfigRecord(), grid)
    return strategy.aggregate_train(server_round, grid.send_and_receive(messages))


def expected(strategy_payload, server_round, clients):
    mean = {n: np.zeros_like(b, dtype=float) for n, b in strategy_payload.blocks.items()}
    for client in clients:
        step = payload_of("lora_b", 1000 * server_round + int(client[-2:]), 0.05)
        for n, b in step.blocks.items():
            mean[n] += (strategy_payload.blocks[n] + b).astype(np.float32)
    return {n: b / len(clients) for n, b in mean.items()}


@pytest.mark.parametrize(("clients", "nodes"), [(6, 3), (5, 1), (7, 7)])
def test_one_message_a_node_and_the_exact_mean(clients, nodes):
    strategy, grid, _ = make(clients=clients, nodes=nodes)
    before = strategy.payload
    play(strategy, grid)
    assert grid.sent == nodes
    names = [f"client-{i:02d}" for i in range(clients)]
    for n, b in expected(before, 1, names).items():
        np.testing.assert_allclose(strategy.payload.blocks[n], b, atol=1e-6)
    assert strategy.rounds[-1].accepted == tuple(names)
    seen = [request for trainer in grid.trainers.values() for request in trainer.seen]
    assert all(request.reduce is (len(request.clients) > 1) for request in seen)


def test_h05_round_two_starts_from_round_ones_aggregate_bit_for_bit():
    strategy, grid, _ = make()
    play(strategy, grid)
    first = payload_fingerprint(strategy.payload)
    play(strategy, grid, 2)
    seen = grid.trainers[10].seen[1]
    assert payload_fingerprint(seen.payload) == first
    assert payload_fingerprint(strategy.payload) != first


@pytest.mark.parametrize("fault", ["nan", "recipe", "failed", "refused"])
def test_h06_one_faulty_client_is_named_and_the_round_goes_on(fault):
    strategy, grid, _ = make(faults={"client-03": fault}, nodes=6)
    before = strategy.payload
    play(strategy, grid)
    record = strategy.rounds[-1]
    names = [f"client-{i:02d}" for i in range(6) if i != 3]
    assert record.accepted == tuple(names)
    reasons = record.refused if fault == "refused" else record.rejected
    assert set(reasons) == {"client-03"}
    for n, b in expected(before, 1, names).items():
        np.testing.assert_allclose(strategy.payload.blocks[n], b, atol=1e-6)


def test_every_answer_is_mirrored_even_if_its_update_is_not_used():
    seen = []
    strategy, grid, _ = make(faults={"client-03": "nan"}, on_reply=seen.append, nodes=6)
    play(strategy, grid)
    assert sorted(reply.client for reply in seen) == [f"client-{i:02d}" for i in range(6)]
    assert strategy.rounds[-1].epsilon["client-03"] == 0.5


def test_dead_nodes_are_named_and_too_few_answers_leave_the_adapter():
    strategy, grid, _ = make(rules=RoundRules(min_replies=4))
    grid.dead = {11}
    play(strategy, grid)
    record = strategy.rounds[-1]
    assert set(record.rejected) == {"client-01", "client-04"}
    assert "node 11" in record.rejected["client-01"]
    grid.dead = {11, 12}
    before = payload_fingerprint(strategy.payload)
    with pytest.raises(TooFewRepliesError):
        play(strategy, grid, 2)
    assert payload_fingerprint(strategy.payload) == before
    grid.dead = set()
    play(strategy, grid, 3)
    assert len(strategy.rounds[-1].accepted) == 6


@pytest.mark.parametrize("change", [{"server_round": 9}, {"run_id": "other"}, {"server_round": 0}])
def test_stale_and_foreign_answers_are_dropped(change):
    strategy, grid, _ = make(nodes=6)
    grid.trainers[12].faults = {"reply": lambda answer: replace(answer, **change)}
    play(strategy, grid)
    assert StaleRoundError.__name__ in strategy.rounds[-1].rejected["client-02"]
    assert "client-02" not in strategy.rounds[-1].accepted


def test_replayed_messages_are_dropped():
    strategy, grid, _ = make()
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    first = grid.send_and_receive(messages)
    strategy.aggregate_train(1, [*first, *first])
    assert len(strategy.rounds[-1].accepted) == 6
    grid.replay = list(first)
    play(strategy, grid, 2)
    assert len(strategy.rounds[-1].accepted) <= 6
    with pytest.raises(WireError, match="not configured"):
        strategy.aggregate_train(2, first)


def test_a_node_cannot_answer_for_clients_of_another():
    strategy, grid, _ = make(nodes=6)
    grid.trainers[11].faults = {
        "reply": lambda a: replace(a, replies=tuple(replace(r, client="client-00") for r in a.replies))
    }
    play(strategy, grid)
    record = strategy.rounds[-1]
    assert "client-01" in record.rejected
    assert "client-00" in record.accepted
    assert len(record.accepted) == 5


@pytest.mark.parametrize("garbage", ["nothing", "records", "header"])
def test_garbage_answers_do_not_end_the_round(garbage):
    from flwr.app import RecordDict

    strategy, grid, _ = make(nodes=6)
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    replies = grid.send_and_receive(messages)
    content = {
        "nothing": RecordDict({}),
        "records": RecordDict({"meta": ConfigRecord({"packet-header": "[]"})}),
        "header": RecordDict({"meta": ConfigRecord({"packet-header": "{"})}),
    }[garbage]
    replies[2] = Message(content, reply_to=messages[2])
    strategy.aggregate_train(1, replies)
    assert len(strategy.rounds[-1].accepted) == 5


def test_a_client_at_two_nodes_is_refused():
    strategy, _, _ = make()
    with pytest.raises(WireError, match="client-00"):
        strategy.set_roster({1: ["client-00"], 2: ["client-00"]})


# -- sampling ----------------------------------------------------------------------------------------------


def test_fixed_numbers_repeat_by_round_and_vary_between_rounds():
    names = [f"c{i}" for i in range(50)]
    sampler = ClientSampler(10, 3, lambda r: OsCoins())
    draws = [sampler.draw(r, names) for r in range(1, 6)]
    assert all(len(draw) == 10 for draw in draws)
    assert draws == [sampler.draw(r, list(reversed(names))) for r in range(1, 6)]
    assert len({tuple(d) for d in draws}) == 5
    assert sampler.draw(1, names[:4]) == tuple(names[:4])


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_poisson_client_sampling_has_the_stated_rate(rate):
    names = [f"c{i}" for i in range(400)]
    sampler = ClientSampler(rate, 3, lambda r: OsCoins())
    sizes = [len(sampler.draw(r, names)) for r in range(400)]
    mean, spread = 400 * rate, (400 * rate * (1 - rate)) ** 0.5
    assert abs(np.mean(sizes) - mean) <= 5.5 * spread / 400**0.5  # 4 in 100 million by chance
    assert rate == 1.0 or np.std(sizes) == pytest.approx(spread, rel=0.3)


def test_an_empty_private_round_releases_noise_and_is_charged():
    plan = ClientPlan(1.0, 1.0, 3.0, 0.5)
    strategy, grid, charges = make(plan=plan, asked=1e-12)
    before = payload_fingerprint(strategy.payload)
    play(strategy, grid)
    assert strategy.rounds[-1].asked == ()
    assert len(charges) == 1
    assert payload_fingerprint(strategy.payload) != before


@pytest.mark.parametrize("rate", [None, 0.999999])
def test_a_private_round_that_nobody_answers_releases_noise_and_is_charged(rate):
    """With one client that is there or not, a round without a release would tell which."""
    strategy, grid, charges = make(plan=ClientPlan(1.0, 1.0, 3.0, rate), asked=rate or "all")
    grid.dead = {10, 11, 12}
    before = payload_fingerprint(strategy.payload)
    play(strategy, grid)
    record = strategy.rounds[-1]
    assert len(charges) == 1
    assert record.result is not None
    assert payload_fingerprint(strategy.payload) != before
    assert "no node answered (3 were asked)" in record.silent


def test_a_round_of_shares_that_nobody_answers_opens_nothing():
    plan = ClientPlan(1.0, 1.0, 3.0, None, noise_at="clients", honest_clients=2)
    strategy, grid, charges = make(plan=plan, secure=True)
    grid.dead = {10, 11, 12}
    with pytest.raises(TooFewRepliesError, match="no node answered"):
        play(strategy, grid)
    assert charges == []


def test_a_rounds_coins_are_drawn_once():
    """A second draw would depend on why the first one was not used."""
    strategy, grid, charges = make(plan=ClientPlan(1.0, 1.0, 3.0, 0.5), asked=0.5)
    play(strategy, grid, 1)
    play(strategy, grid, 3)
    for again in (3, 2):
        with pytest.raises(AggregationError, match="drawn once"):
            play(strategy, grid, again)
    assert len(charges) == 2


def test_nobody_takes_the_place_of_a_client_that_is_away():
    strategy, _, _ = make(asked=0.5, clients=12)
    asked, groups = strategy.choose(1, {10, 12})
    here = [client for client in asked if int(client[-2:]) % 3 != 1]
    assert sorted(name for names in groups.values() for name in names) == here


def test_h19_metrics_leave_counts_out_under_client_level_privacy():
    strategy, grid, _ = make(plan=ClientPlan(1.0, 1.0, 3.0, None))
    _, metrics = play(strategy, grid)
    assert set(metrics) == {"residual"}
    assert list(strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), grid)) == []


# -- bytes, resume, Flower's loop ---------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
def test_h34_bytes_on_the_wire_are_the_predicted_ones(compression):
    specs = {f"h.{i}.attn": ModuleSpec(256, 256, 8, 2.0) for i in range(8)}
    big = AdapterLayout(specs, {}, "f" * 64)
    strategy, grid, _ = make(compression=compression, nodes=6)
    play(strategy, grid)
    size = predict_size(LAYOUT, "lora_b", compression)
    record = strategy.rounds[-1]
    assert record.wire_bytes_up >= 6 * size.numbers
    assert record.wire_bytes_up <= 6 * (size.total + 900)
    assert predict_size(big, "lora_b", "int8").total < 0.3 * predict_size(big, "lora_b", "none").total


@pytest.mark.parametrize("optimizer", ["mean", "momentum", "adam"])
@pytest.mark.parametrize("kind", ["mean_b", "product"])
def test_h35_resume_is_bit_exact(kind, optimizer):
    options = {"kind": kind, "optimizer": ServerOptimizerConfig(kind=optimizer, lr=0.5), "asked": 4}
    whole, grid, _ = make(**options)
    for r in range(1, 5):
        play(whole, grid, r)
    first, grid, _ = make(**options)
    for r in range(1, 3):
        play(first, grid, r)
    second, grid, _ = make(**options)
    second.restore(first.payload, first.state())
    for r in range(3, 5):
        play(second, grid, r)
    assert payload_fingerprint(second.payload) == payload_fingerprint(whole.payload)


def test_clients_of_other_ranks_get_their_own_adapter_from_round_two_on():
    strategy, grid, _ = make(kind="product", nodes=2, clients=2)
    small = {m: replace(s, rank=2, scaling=1.0) for m, s in LAYOUT.modules.items()}

    def shrink(answer):
        from fedlora.aggregation import reduce_rank

        replies = []
        for r in answer.replies:
            reduced, _ = reduce_rank(r.payload, 2)
            blocks = {n: b * 2 if n.endswith("lora_B") else b for n, b in reduced.blocks.items()}
            replies.append(replace(r, payload=replace(reduced, modules=small, blocks=blocks)))
        return replace(answer, replies=tuple(replies))

    grid.trainers[11].faults = {"reply": shrink}
    play(strategy, grid)
    grid.trainers[11].faults = {}
    messages = strategy.configure_train(2, ArrayRecord(), ConfigRecord(), grid)
    grid.send_and_receive(messages)
    assert dict(grid.trainers[11].seen[-1].payload.modules) == small
    assert dict(grid.trainers[10].seen[-1].payload.modules) == dict(LAYOUT.modules)


def test_flowers_own_loop_runs_it():
    strategy, grid, _ = make()
    result = strategy.start(grid, strategy.initial_arrays, num_rounds=3, timeout=5)
    assert len(strategy.rounds) == 3
    assert result.train_metrics_clientapp[3]["clients-accepted"] == 6
    total = sum(a.numpy().size for a in result.arrays.values())
    assert total == sum(b.size for b in strategy.payload.blocks.values())


# -- secure aggregation over the grid -------------------------------------------------------------------------


@pytest.mark.parametrize(("clients", "nodes"), [(6, 3), (5, 5), (9, 2)])
def test_secure_rounds_give_the_plain_mean_and_no_single_update(clients, nodes):
    strategy, grid, _ = make(clients=clients, nodes=nodes, secure=True)
    before = strategy.payload
    messages = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid))
    replies = grid.send_and_receive(messages)
    assert all(len(reply.content["adapter"]) == 0 for reply in replies)
    strategy.aggregate_train(1, replies)
    names = [f"client-{i:02d}" for i in range(clients)]
    assert strategy.rounds[-1].accepted == tuple(names)
    for n, b in expected(before, 1, names).items():
        np.testing.assert_allclose(strategy.payload.blocks[n], b, atol=1e-5)


def test_secure_rounds_survive_a_node_that_dies_before_its_masked_vector():
    strategy, grid, _ = make(clients=8, nodes=8, secure=True)
    before = strategy.payload
    inner = grid.trainers[13].secure

    def die(packet):
        if packet.header["step"] == "masked":
            raise RuntimeError("gone")
        return inner(packet)

    grid.trainers[13].secure = die
    play(strategy, grid)
    names = [f"client-{i:02d}" for i in range(8) if i != 3]
    assert strategy.rounds[-1].accepted == tuple(names)
    for n, b in expected(before, 1, names).items():
        np.testing.assert_allclose(strategy.payload.blocks[n], b, atol=1e-5)


def test_secure_rounds_with_shares_of_noise_are_charged_once():
    plan = ClientPlan(1e3, 1e-6, 6.0, None, noise_at="clients", honest_clients=2)
    strategy, grid, charges = make(secure=True, plan=plan)
    before = strategy.payload
    play(strategy, grid)
    assert charges == [plan.event]
    for n, b in expected(before, 1, [f"client-{i:02d}" for i in range(6)]).items():
        np.testing.assert_allclose(strategy.payload.blocks[n], b, atol=2e-2)


def test_the_site_refuses_sums_of_too_few_and_other_rounds():
    from fedlora.aggregation.secagg_client import SecAggPlan
    from fedlora.aggregation.secagg_field import FixedPoint
    from fedlora.errors import PolicyRefusedError
    from fedlora.training.secure import pack_step

    desk = SecureDesk(lambda config, client, r: Normals(0), least_clients=3)
    desk.withhold("run", 1, {}, payload_of("lora_b", 0), None)
    with pytest.raises(PolicyRefusedError):
        desk.handle(pack_step(SecAggPlan("run", 1, FixedPoint(1.0, 4), least_clients=2), "keys", {}))
    with pytest.raises(StaleRoundError):
        desk.handle(pack_step(SecAggPlan("run", 2, FixedPoint(1.0, 4), least_clients=3), "keys", {}))
    good = SecAggPlan("run", 1, FixedPoint(1.0, 4), least_clients=3)
    desk.handle(pack_step(good, "keys", {}))
    with pytest.raises(StaleRoundError):
        desk.handle(pack_step(replace(good, threshold_share=0.9), "shares", {}))
