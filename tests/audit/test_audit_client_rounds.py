"""Whole client-level runs of the real server: rounds without a client cost and are noised like any other."""

from __future__ import annotations

import json

import pytest
from audit_helpers import make_client_bench, write_model
from flwr.app import Error, Message
from flwr.serverapp import Grid

from fedlora.config import config_container, config_from_container
from fedlora.config.resolve import derive_noise
from fedlora.errors import SensitivityMismatchError, TooFewRepliesError
from fedlora.ledger import load_or_create_secret, open_ledger
from fedlora.simulation.identity import SERVER_NODE, assume_identity, number_message
from fedlora.simulation.settings import ServerSettings
from fedlora.training.session import bind, load_parts, step_event
from server.app import run
from server.charging import FEDERATION
from strategies.sampling import ClientSampler

ROSTER = {10: ["c-0", "c-1"], 11: ["c-2", "c-3"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("audit-rounds") / "model")


class DeadGrid(Grid):
    """Nodes are online, and no question comes back with an answer."""

    def __init__(self):
        assume_identity(7, SERVER_NODE)
        self.asked = []

    def set_run(self, run):
        pass

    @property
    def run(self):
        return None

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def get_node_ids(self):
        return tuple(ROSTER)

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        found = []
        self.asked.append(len(messages))
        for number, message in enumerate(messages):
            number_message(message, f"m{len(self.asked)}-{number}")
            found.append(Message(Error(code=5, reason="node is gone"), reply_to=message))
        return found


def _settings(model, folder, rate, rounds):
    container = config_container(make_client_bench(model).config)
    del container["derived"]
    container["federation"] |= {"clients_per_round": rate, "rounds": rounds}
    config = config_from_container(container)
    parts = load_parts(config)
    config = derive_noise(config, lambda asked: step_event(asked, parts.adapted.layout))
    bench = bind(config, parts)
    return ServerSettings(config, "run-1", folder / "run-1", clients=ROSTER, bench=bench)


def _charged(settings):
    path = settings.folder.parent / "server-ledger.sqlite"
    ledger = open_ledger(path, secret=load_or_create_secret(path.with_suffix(".key")), create=False)
    try:
        (account,) = ledger.accounts()
        assert account.client == FEDERATION
        return [
            (row.server_round, row.steps_charged) for row in ledger.report(account, with_rounds=True).rounds
        ]
    finally:
        ledger.close()


def _rounds(settings):
    return [json.loads(line) for line in (settings.folder / "metrics.jsonl").read_text().splitlines()]


def test_rounds_that_draw_nobody_are_noised_and_cost_a_round_each(model, tmp_path):
    settings, grid = _settings(model, tmp_path, 1e-9, 4), DeadGrid()
    result = run(grid, settings)
    assert result.status == "finished"
    assert grid.asked == [0, 0, 0, 0]
    assert _charged(settings) == [(number, 1) for number in range(1, 5)]
    lines = _rounds(settings)
    assert [one["status"] for one in lines] == ["initial", "ok", "ok", "ok", "ok"]
    assert len({one["adapter"] for one in lines}) == 5  # each round's noise is in it


def test_rounds_that_nobody_answers_are_noised_and_cost_too_and_three_in_a_row_end_the_run(model, tmp_path):
    settings, grid = _settings(model, tmp_path, 0.999999, 5), DeadGrid()
    with pytest.raises(TooFewRepliesError, match=r"3 rounds in a row .*no node answered \(2 were asked\)"):
        run(grid, settings)
    assert grid.asked == [2, 2, 2]
    assert _charged(settings) == [(1, 1), (2, 1), (3, 1)]
    assert len({one["adapter"] for one in _rounds(settings)}) == 4


def test_a_run_whose_draws_are_not_what_is_claimed_costs_nothing(model, tmp_path, monkeypatch):
    draw = ClientSampler.draw

    def never_nobody(self, server_round, clients):
        found = draw(self, server_round, clients)
        while not found:
            self._drawn.clear()
            found = draw(self, server_round, clients)
        return found

    monkeypatch.setattr(ClientSampler, "draw", never_nobody)
    settings, grid = _settings(model, tmp_path, 0.25, 4), DeadGrid()
    with pytest.raises(
        SensitivityMismatchError, match=r"clients are Poisson draws .*draws of nobody 0 times"
    ):
        run(grid, settings)
    assert grid.asked == []
    assert not list(tmp_path.glob("server-ledger*"))
    assert json.loads((settings.folder / "summary.json").read_text())["exit_code"] == 22
