"""H34: what a round puts on the wire is what was predicted, for every mode, compression and with secure sums."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_strategies_rounds import FakeGrid, Normals, play

from fedlora.accounting import NonPrivateEvent, PoissonGaussianEvent
from fedlora.aggregation import Aggregator, RoundRules, build_mode
from fedlora.config import config_container, config_from_container, config_hash
from fedlora.training.predicted import clients_of_a_round, predict_round
from fedlora.training.requests import ClientReply, RoundReply
from fedlora.training.sampling import OsCoins
from fedlora.training.secure import SecureDesk, withhold
from fedlora.wire import AdapterLayout, AdapterPayload, ModuleSpec, expected_blocks, predict_size
from strategies import ClientSampler, FedLoraStrategy, RunFacts

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = AdapterLayout(
    {
        f"encoder.layer.{i}.attention.self.{x}": ModuleSpec(96, 64, 4, 2.0)
        for i in range(3)
        for x in ("query", "value")
    },
    {"classifier|weight": (3, 96), "classifier|bias": (3,)},
    "f" * 64,
)
MECHANISMS = {"mean_b": "lora_fa", "tangent": "prism"}
MODES = ["mean_b", "tangent", "product", "stack", "aligned", "factor_mean"]


@pytest.fixture(scope="module")
def tools():
    sys.path.insert(0, str(ROOT / "tests" / "simulation"))
    try:
        import simulation_helpers
    finally:
        sys.path.pop(0)
    return simulation_helpers


def configured(tools, kind, compression="none", *, secure=False, private=True):
    raw = tools.container(Path("/world"), Path("/runs"))
    raw["federation"] |= {
        "aggregation": {"kind": kind},
        "compression": compression,
        "secure_aggregation": secure,
    }
    raw["mechanism"] = {"kind": MECHANISMS.get(kind, "factor" if private else "none")}
    if not private:
        raw["privacy"] = {"unit": "none"}
    return config_from_container(raw)


def payload(kind, seed):
    rng = np.random.default_rng(seed)
    shapes = expected_blocks(LAYOUT.modules, LAYOUT.extra, kind)
    blocks = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    recipe = "a" * 64 if kind == "lora_b" else None
    return AdapterPayload(kind, blocks, dict(LAYOUT.modules), recipe, LAYOUT.base_fingerprint)


class Node:
    """Answers with random updates and with all that a site's trainer states about its ledger."""

    def __init__(self, config, uplink, event):
        self.config, self.uplink, self.event, self.desk = config, uplink, event, SecureDesk()

    def secure(self, packet):
        return self.desk.handle(packet)

    def handle(self, request):
        replies = tuple(
            ClientReply(
                client,
                "ok",
                replace(payload(self.uplink, 5), recipe=request.payload.recipe),
                event=self.event.to_json(),
                steps=1,
                epsilon=3.0471528394,
                ledger_head="17:" + "ab" * 48,
            )
            for client in request.clients
        )
        if request.withhold:
            replies = withhold(self.desk, request, self.config, replies)
        return RoundReply(request.run_id, request.server_round, replies)


def recorded(config, clients):
    mode = build_mode(config.federation)
    down = payload(mode.downlink, 1)
    event = PoissonGaussianEvent(1.0, 0.2)
    agg = Aggregator(mode, LAYOUT, down.recipe, RoundRules(min_replies=2), noise=Normals(0))
    facts = RunFacts(
        "tiny-20260101-000000",
        config_container(config),
        config_hash(config),
        1,
        5.0,
        config.federation.compression,
    )
    sampler = ClientSampler("all", 3, lambda r: OsCoins())
    roster = {10 + n: [name] for n, name in enumerate(clients)}
    strategy = FedLoraStrategy(facts, agg, sampler, down, roster)
    grid = FakeGrid({node: Node(config, mode.uplink, event) for node in roster})
    play(strategy, grid)
    record = strategy.rounds[-1]
    assert record.accepted == tuple(clients)
    return record, predict_round(config, LAYOUT, down, mode.uplink, event, clients)


@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
@pytest.mark.parametrize("kind", MODES)
def test_h34_every_mode_and_compression_within_ten_percent(tools, kind, compression):
    config = configured(tools, kind, compression)
    record, predicted = recorded(config, [f"client-{i:03d}" for i in range(4)])
    assert record.wire_bytes_down == pytest.approx(4 * predicted.down, rel=0.1)
    assert record.wire_bytes_up == pytest.approx(4 * predicted.up, rel=0.1)
    assert predicted.up >= predict_size(LAYOUT, build_mode(config.federation).uplink, compression).numbers


@pytest.mark.parametrize("clients", [3, 12])
@pytest.mark.parametrize("kind", ["mean_b", "tangent"])
def test_h34_secure_sums_within_ten_percent_with_their_masking_steps(tools, kind, clients):
    config = configured(tools, kind, secure=True)
    record, predicted = recorded(config, [f"client-{i:03d}" for i in range(clients)])
    assert record.wire_bytes_down == pytest.approx(clients * predicted.down, rel=0.1)
    assert record.wire_bytes_up == pytest.approx(clients * predicted.up, rel=0.1)
    uplink = build_mode(config.federation).uplink
    assert record.wire_bytes_up >= clients * predict_size(LAYOUT, uplink).numbers


@pytest.mark.parametrize(("asked", "names"), [("all", 40), (7, 7), (0.25, 10)])
def test_a_rounds_clients_are_those_that_are_asked(tools, asked, names):
    raw = tools.container(Path("/world"), Path("/runs"))
    raw["federation"] |= {"clients_per_round": asked, "min_replies": 1}
    raw["data"]["partition"]["clients"] = 40
    assert len(clients_of_a_round(config_from_container(raw), 40)) == names


@pytest.mark.parametrize(
    ("kind", "compression", "private"),
    [
        ("mean_b", "none", True),
        ("tangent", "bf16", True),
        ("product", "int8", True),
        ("stack", "none", False),
    ],
)
def test_h34_a_real_round_within_ten_percent(tools, tmp_path, kind, compression, private):
    from fedlora.simulation.prepare import complete, make_federation
    from fedlora.simulation.run import simulate

    world = tools.make_world(tmp_path / "world")
    raw = config_container(configured(tools, kind, compression, private=private))
    changes = tools.container(world, tmp_path / "runs")
    raw["run"], raw["model"], raw["data"] = changes["run"], changes["model"], changes["data"]
    raw["data"]["partition"] = {"kind": "quantity", "clients": 1}
    raw["federation"] |= {"rounds": 1, "min_replies": 1}
    config = config_from_container(raw)
    result = simulate(config, in_process=True)
    line = tools.metric_lines(result.folder)[-1]
    bench = complete(make_federation(config).config).bench
    start = bench.initial_payload()
    predicted = predict_round(
        bench.config, bench.layout, start, bench.mechanism.uplink, bench.event, ["client-0"]
    )
    assert line["bytes_down"] == pytest.approx(predicted.down, rel=0.1)
    assert line["bytes_up"] == pytest.approx(predicted.up, rel=0.1)


def test_events_of_runs_without_privacy_are_counted_too(tools):
    config = configured(tools, "product", private=False)
    names = ["client-000"]
    predicted = predict_round(config, LAYOUT, payload("factors", 0), "factors", NonPrivateEvent(), names)
    assert predicted.up > predict_size(LAYOUT, "factors").numbers
    assert predicted.clients == 1
