"""Secure aggregation: exact sums, dropouts at every step, what the server sees, tampering, replays."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from aggregation_cases import LAYOUT, random_payload
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedlora.aggregation.secagg_blocks import encoding_for, update_shapes, update_vector, vector_blocks
from fedlora.aggregation.secagg_client import ClientKeys, SecAggClient, SecAggPlan
from fedlora.aggregation.secagg_field import PRIME, FixedPoint, combine_shares, share_secret
from fedlora.aggregation.secagg_keys import agree, mask_of, new_private, public_of, seal, unseal
from fedlora.aggregation.secagg_round import STEPS, SecAggNode, secure_sum
from fedlora.aggregation.secagg_server import SecAggServer, neighbours
from fedlora.errors import (
    AuthenticationError,
    NonFinitePayloadError,
    PrivacyParameterError,
    StaleRoundError,
    TooFewRepliesError,
)

COUNT = 50


def make_plan(clients=6, bits=32, server_round=1, **changes):
    return SecAggPlan("run", server_round, FixedPoint(4.0, clients, bits), **changes)


def vectors(clients, seed=0):
    rng = np.random.default_rng(seed)
    return {f"c{i:02d}": rng.uniform(-3, 3, COUNT).astype(np.float32) for i in range(clients)}


def network(plan, data, *, lost=(), spy=None, **node_options):
    """One node per client; `lost` holds (client, step) pairs that never answer."""
    nodes = {client: SecAggNode(plan, data.__getitem__, **node_options) for client in data}

    def exchange(step, questions):
        answers = {}
        for client, body in questions.items():
            gone = any(c == client and STEPS.index(s) <= STEPS.index(step) for c, s in lost)
            if not gone:
                answers.update(nodes[client].handle(step, {client: body}))
        if spy is not None:
            spy(step, questions, answers)
        return answers

    return exchange


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clients", [3, 6, 11])
def test_the_sum_is_exact_up_to_the_stated_error(clients, bits):
    data, plan = vectors(clients), make_plan(clients, bits)
    total, used = secure_sum(network(plan, data), plan, list(data), COUNT)
    assert used == tuple(data)
    exact = sum(v.astype(np.float64) for v in data.values())
    assert np.abs(total - exact).max() <= clients * plan.encoding.max_error
    assert plan.encoding.max_error < (1e-7 if bits == 32 else 1e-13)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("lost", [["c01"], ["c00", "c05"]])
def test_dropouts_at_every_step(step, lost):
    data, plan = vectors(8), make_plan(8)
    exchange = network(plan, data, lost=[(client, step) for client in lost])
    total, used = secure_sum(exchange, plan, list(data), COUNT)
    inside = [c for c in data if c not in lost or step in ("confirm", "unmask")]
    assert used == tuple(inside)
    exact = sum(data[c].astype(np.float64) for c in inside)
    assert np.abs(total - exact).max() <= 8 * plan.encoding.max_error


def test_dropouts_at_different_steps_of_one_round():
    data, plan = vectors(12), make_plan(12)
    lost = [("c00", "keys"), ("c03", "shares"), ("c07", "masked"), ("c11", "unmask")]
    total, used = secure_sum(network(plan, data, lost=lost), plan, list(data), COUNT)
    assert used == tuple(c for c in data if c not in ("c00", "c03", "c07"))
    assert np.abs(total - sum(data[c].astype(float) for c in used)).max() <= 12 * plan.encoding.max_error


@pytest.mark.parametrize("step", ["masked", "unmask"])
def test_too_many_dropouts_open_nothing(step):
    data, plan = vectors(6), make_plan(6)
    lost = [(client, step) for client in list(data)[:4]]
    with pytest.raises(TooFewRepliesError):
        secure_sum(network(plan, data, lost=lost), plan, list(data), COUNT)


@pytest.mark.parametrize("degree", [6, 10])
def test_a_sparse_graph_gives_the_same_sum(degree):
    data, plan = vectors(24), make_plan(24)
    lost = [("c04", "masked"), ("c13", "unmask")]
    total, used = secure_sum(network(plan, data, lost=lost), plan, list(data), COUNT, degree)
    assert "c04" not in used
    assert np.abs(total - sum(data[c].astype(float) for c in used)).max() <= 24 * plan.encoding.max_error
    graph = neighbours(plan, list(data), degree)
    assert all(len(near) == degree for near in graph.values())
    assert all(name in graph[peer] for name, near in graph.items() for peer in near)
    assert graph != neighbours(make_plan(24, server_round=2), list(data), degree)


def test_the_server_sees_uniform_vectors_and_never_both_shares_of_anyone():
    data, plan = vectors(5), make_plan(5)
    data = {client: np.zeros(65_536, dtype=np.float32) for client in data}
    seen, shares = {}, {}

    def spy(step, questions, answers):
        if step == "masked":
            seen.update({client: body["vector"].copy() for client, body in answers.items()})
        if step == "unmask":
            for body in answers.values():
                for kind in ("seeds", "keys"):
                    for target in body[kind]:
                        shares.setdefault(target, set()).add(kind)

    exchange = network(plan, data, lost=[("c02", "masked")], spy=spy)
    total, _ = secure_sum(exchange, plan, list(data), 65_536)
    assert np.abs(total).max() <= 5 * plan.encoding.max_error
    for (
        vector
    ) in seen.values():  # the masks differ every time: five of these stay below one false alarm in 10 million
        assert stats.kstest(vector / 2.0**32, "uniform").pvalue > 1e-8
    assert all(len(kinds) == 1 for kinds in shares.values())
    assert shares["c02"] == {"keys"}


def test_masks_are_fresh_each_round_and_never_from_a_shared_seed():
    data, seen = vectors(3), []
    for server_round in (1, 1, 2):
        plan = make_plan(3, server_round=server_round)
        secure_sum(
            network(
                plan,
                data,
                spy=lambda s, q, a: seen.append(a["c00"]["vector"].copy()) if s == "masked" else None,
            ),
            plan,
            list(data),
            COUNT,
        )
    for i in range(3):
        for j in range(i):
            assert (seen[i] == seen[j]).mean() < 0.1


def test_no_step_is_answered_twice_and_lists_may_not_contradict():
    data, plan = vectors(3), make_plan(3)
    clients = {c: SecAggClient(c, plan) for c in data}
    keys = {c: client.keys() for c, client in clients.items()}
    with pytest.raises(StaleRoundError):
        clients["c00"].keys()
    sealed = {c: cl.shares([k for n, k in keys.items() if n != c]) for c, cl in clients.items()}
    for c, client in clients.items():
        client.masked({p: s[c] for p, s in sealed.items() if p != c}, data[c])
    for answered, dropped in (
        (["c00", "c01"], ["c01", "c02"]),
        (["c00", "c01"], []),
        (["c01", "c02"], ["c00"]),
    ):
        fresh = clients["c00"]
        with pytest.raises((StaleRoundError, TooFewRepliesError)):
            fresh.unmask(answered, dropped)
        fresh._step = 3
    clients["c01"].unmask(["c00", "c01", "c02"], [])
    with pytest.raises(StaleRoundError):
        clients["c01"].unmask(["c00", "c01"], ["c02"])


def test_altered_or_misrouted_shares_are_not_opened():
    key, other = new_private(), new_private()
    shared = agree(key, public_of(other), b"x")
    assert shared == agree(other, public_of(key), b"x")
    assert shared != agree(other, public_of(key), b"y")
    blob = seal(shared, b"secret", b"to c1")
    assert unseal(shared, blob, b"to c1") == b"secret"
    flipped = blob[:-1] + bytes([blob[-1] ^ 1])
    for bad, context in ((flipped, b"to c1"), (blob, b"to c2"), (blob[:5], b"to c1")):
        with pytest.raises(AuthenticationError):
            unseal(shared, bad, context)
    with pytest.raises(AuthenticationError):
        agree(key, bytes(32), b"x")


def test_a_client_with_an_altered_share_drops_out_and_the_round_goes_on():
    data, plan = vectors(6), make_plan(6)
    inner = network(plan, data)

    def exchange(step, questions):
        if step == "masked":
            hurt = dict(questions["c02"]["sealed"])
            hurt["c00"] = hurt["c00"][:-2] + ("00" if hurt["c00"][-2:] != "00" else "01")
            questions = {**questions, "c02": {"sealed": hurt}}
        return inner(step, questions)

    total, used = secure_sum(exchange, plan, list(data), COUNT)
    assert used == tuple(c for c in data if c != "c02")
    assert np.abs(total - sum(data[c].astype(float) for c in used)).max() <= 6 * plan.encoding.max_error


def test_signed_keys_stop_a_server_that_puts_its_own_between():
    data, plan = vectors(4), make_plan(4)
    identities = {c: Ed25519PrivateKey.generate() for c in data}

    def verify(client, message, signature):
        try:
            identities[client].public_key().verify(signature, message)
        except Exception:
            return False
        return True

    clients = {c: SecAggClient(c, plan, sign=identities[c].sign, verify=verify) for c in data}
    keys = {c: client.keys() for c, client in clients.items()}
    assert clients["c01"].shares([keys[c] for c in data if c != "c01"])
    fake = ClientKeys("c02", public_of(new_private()), public_of(new_private()), keys["c02"].signature)
    with pytest.raises(AuthenticationError, match="c02"):
        clients["c00"].shares([keys["c01"], fake, keys["c03"]])


def test_non_finite_updates_are_not_sent():
    data, plan = vectors(5), make_plan(5)
    for value in (np.nan, np.inf):
        broken = {**data, "c01": np.full(COUNT, value, dtype=np.float32)}
        _, used = secure_sum(network(plan, broken), plan, list(broken), COUNT)
        assert "c01" not in used
    with pytest.raises(NonFinitePayloadError):
        plan.encoding.encode(np.array([np.nan], dtype=np.float32), np.random.default_rng())


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=32), st.integers(2, 9), st.data())
def test_any_threshold_many_shares_restore_and_fewer_do_not(secret, holders, data):
    threshold = data.draw(st.integers(2, holders))
    points = data.draw(st.lists(st.integers(1, 10**6), min_size=holders, max_size=holders, unique=True))
    shares = share_secret(secret, points, threshold)
    some = data.draw(st.permutations(points))[:threshold]
    assert combine_shares({p: shares[p] for p in some}, threshold, len(secret)) == secret
    with pytest.raises(TooFewRepliesError):
        combine_shares({p: shares[p] for p in some[:-1]}, threshold, len(secret))
    assert all(0 <= share < PRIME for share in shares.values())


def test_altered_shares_do_not_restore_the_secret():
    shares = share_secret(b"\x01" * 32, [1, 2, 3, 4], 3)
    shares[2] = (shares[2] + 1) % PRIME
    with contextlib.suppress(PrivacyParameterError):
        assert combine_shares(shares, 3, 32) != b"\x01" * 32


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clients", [2, 100, 5000])
def test_sums_at_the_limit_do_not_wrap(bits, clients):
    encoding = FixedPoint(1.5, clients, bits)
    rng = np.random.default_rng(0)
    for value in (1.5, -1.5, 99.0):
        one = encoding.encode(np.array([value], dtype=np.float32), rng)
        total = (one.astype(np.uint64) * clients).astype(encoding.dtype)
        expected = clients * math.copysign(min(abs(value), 1.5), value)
        assert encoding.decode(total)[0] == pytest.approx(expected, rel=1e-5)


def test_stochastic_rounding_of_the_encoding_is_unbiased():
    encoding = FixedPoint(1.0, 2**22, 32)
    values = np.full(200_000, 0.3001, dtype=np.float32)
    mean = encoding.decode(encoding.encode(values, np.random.default_rng(0))).mean()
    assert abs(mean - float(values[0])) < 5 * encoding.max_error / np.sqrt(200_000)
    assert abs(np.rint(0.3001 * encoding.scale) / encoding.scale - 0.3001) > 5 * encoding.max_error / np.sqrt(
        200_000
    )


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_encodings_fail_closed(limit):
    with pytest.raises(PrivacyParameterError):
        FixedPoint(limit, 4)
    with pytest.raises(PrivacyParameterError):
        FixedPoint(1.0, 0)


def test_masks_are_the_chacha_stream_and_streams_of_equal_keys_agree():
    one, two = (mask_of(b"k" * 32, n, np.dtype(np.uint32)) for n in (5000, 100))
    assert (one[:100] == two).all()
    assert mask_of(b"k" * 32, 0, np.dtype(np.uint32)).size == 0
    assert stats.kstest(one / 2.0**32, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("kind", ["lora_b", "tangent"])
def test_updates_survive_the_way_through_one_vector(kind):
    current = random_payload("lora_b" if kind == "lora_b" else "frames", 0)
    sent = {f"c{i:02d}": random_payload(kind, i) for i in range(4)}
    data = {client: update_vector(payload, current) for client, payload in sent.items()}
    shapes = update_shapes(LAYOUT, kind)
    count = sum(math.prod(shape) for shape in shapes.values())
    plan = SecAggPlan("run", 1, encoding_for(10.0, 4))
    total, _ = secure_sum(network(plan, data), plan, list(data), count)
    blocks = vector_blocks(total, shapes)
    for name in shapes:
        base = current.blocks[name].astype(float) if kind == "lora_b" else 0.0
        exact = sum(p.blocks[name].astype(float) - base for p in sent.values())
        np.testing.assert_allclose(blocks[name], exact, atol=4 * plan.encoding.max_error + 1e-5)


def test_strangers_and_repeats_are_not_added():
    plan = make_plan(3)
    server = SecAggServer(plan, COUNT)
    data = vectors(3)
    clients = {c: SecAggClient(c, plan) for c in data}
    questions = server.take_keys([client.keys() for client in clients.values()])
    routed = server.take_shares({c: clients[c].shares(keys) for c, keys in questions.items()})
    vector = clients["c00"].masked(routed["c00"], data["c00"])
    server.take_masked("c00", vector)
    for client, bad in (
        ("c00", vector),
        ("zz", vector),
        ("c01", vector[:-1]),
        ("c02", vector.astype(np.uint64)),
    ):
        with pytest.raises(Exception, match="client"):
            server.take_masked(client, bad)


@pytest.mark.parametrize("clients", [4, 5, 9])
def test_more_clients_than_the_encoding_holds_are_refused(clients):
    data = vectors(clients)
    plan = make_plan(3)
    with pytest.raises(Exception, match="wrap"):
        secure_sum(network(plan, data), plan, list(data), COUNT)


# -- with the aggregator -----------------------------------------------------------------------------------


def secure_round(kind, *, honest=None, charge=None, clients=5, lost=()):
    from aggregation_cases import aggregator

    from fedlora.aggregation import ClientPlan, RoundRules, clip_and_share

    class Normals:
        private = False

        def __init__(self, seed):
            self.rng = np.random.default_rng(seed)

        def normal(self, shape):
            return self.rng.standard_normal(shape)

    down, up = ("lora_b", "lora_b") if kind == "mean_b" else ("frames", "tangent")
    current = random_payload(down, 0)
    private = None
    if honest is not None:
        private = ClientPlan(1.0, 1.0, 5.0, None, noise_at="clients", honest_clients=honest)
    agg = aggregator(
        kind,
        rules=RoundRules(min_replies=3),
        plan=private,
        noise=Normals(0),
        charge=charge or (lambda e: None),
    )
    agg.begin(current)
    sent = {f"c{i:02d}": random_payload(up, i) for i in range(clients)}
    if private is not None:
        sent = {c: clip_and_share(p, current, private, Normals(i)) for i, (c, p) in enumerate(sent.items())}
    data = {c: update_vector(p, current) for c, p in sent.items()}
    shapes = update_shapes(LAYOUT, up)
    count = sum(math.prod(shape) for shape in shapes.values())
    plan = SecAggPlan("run", 1, encoding_for(12.0, clients))
    exchange = network(plan, data, lost=lost)
    total, used = secure_sum(exchange, plan, list(data), count, before_open=agg.authorize_sum)
    return current, sent, agg.finish_sum(used, vector_blocks(total, shapes))


@pytest.mark.parametrize("kind", ["mean_b", "tangent"])
@pytest.mark.parametrize("lost", [[], [("c01", "masked")], [("c02", "shares"), ("c00", "unmask")]])
def test_a_secure_round_gives_the_plain_mean(kind, lost):
    from aggregation_cases import run

    current, sent, result = secure_round(kind, lost=lost, clients=9)
    gone = {c for c, step in lost if step != "unmask"}
    plain = run(kind, current, {c: p for c, p in sent.items() if c not in gone})
    assert result.accepted == plain.accepted
    for name in ("score|weight",):
        np.testing.assert_allclose(result.payload.blocks[name], plain.payload.blocks[name], atol=1e-5)


@pytest.mark.parametrize("kind", ["mean_b", "tangent"])
def test_shares_of_noise_are_charged_before_the_sum_is_opened(kind):
    events = []
    _, _, result = secure_round(kind, honest=4, charge=events.append)
    assert [result.event] == events
    assert all(np.isfinite(b).all() for b in result.payload.blocks.values())


@pytest.mark.parametrize("lost", [["c01", "c03"], ["c00", "c02"]])
def test_fewer_answers_than_honest_clients_stay_hidden_and_uncharged(lost):
    events = []
    with pytest.raises(TooFewRepliesError, match="honest"):
        secure_round("mean_b", honest=4, charge=events.append, lost=[(c, "masked") for c in lost], clients=5)
    assert events == []


def test_a_refused_charge_keeps_the_sum_hidden():
    from fedlora.errors import BudgetExceededError

    def refuse(event):
        raise BudgetExceededError("over", spent=1.0, projected=2.0, budget=1.5)

    with pytest.raises(BudgetExceededError):
        secure_round("tangent", honest=3, charge=refuse)
