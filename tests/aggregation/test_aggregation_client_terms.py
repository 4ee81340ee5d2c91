"""What a client-level epsilon rests on, in the server's ledger and in the run's statement."""

from __future__ import annotations

import pytest
from aggregation_cases import federation

from fedlora.accounting import GaussianEvent, PoissonGaussianEvent, epsilon_of
from fedlora.aggregation import ClientPlan
from fedlora.aggregation.client_privacy import client_event
from fedlora.config.client_terms import client_terms
from fedlora.config.schema import BudgetConfig, ClientPrivacy
from fedlora.ledger import Account, load_or_create_secret, open_ledger


def privacy(**changes):
    base = {
        "unit": "client",
        "adjacency": "add_or_remove",
        "noise_multiplier": 1.0,
        "target_delta": 1e-5,
        "budget": BudgetConfig(epsilon=100.0, delta=1e-5, on_exhausted="refuse"),
        "noise_source": "os",
        "clipping_norm": 1.0,
    }
    return ClientPrivacy(**{**base, **changes})


def asked(clients):
    return federation().model_copy(update={"clients_per_round": clients})


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ("all", "no amplification"),
        (5, "no amplification"),
        (0.25, "Poisson sampling of clients at the public rate 0.25"),
    ],
)
def test_client_sampling_is_stated_as_it_is(clients, words):
    assert client_terms(privacy(), asked(clients)).sampling.startswith(words)


@pytest.mark.parametrize(("clients", "public"), [("all", False), (5, True), (0.25, False)])
def test_a_fixed_draw_says_that_its_list_is_public(clients, public):
    assert ("list of clients" in client_terms(privacy(), asked(clients)).neighbour) is public


def test_shares_of_noise_claim_no_amplification_against_the_server_that_draws_the_coins():
    shares = {"noise_at": "clients", "honest_clients": 3}
    plan = ClientPlan(1.0, 1.0, 5.0, 0.25, **shares)
    assert plan.event == GaussianEvent(1.0)
    assert ClientPlan(1.0, 1.0, 5.0, 0.25).event == PoissonGaussianEvent(1.0, 0.25)
    assert client_event(privacy(**shares), asked(0.25)) == GaussianEvent(1.0)
    found = client_terms(privacy(**shares), asked(0.25))
    assert found.sampling.startswith("no amplification")
    assert "server" in found.adversary
    assert "sums only" in found.adversary
    assert any("at least 3 clients" in one for one in found.assumptions)
    assert "becomes zero" in found.neighbour


def test_noise_at_the_server_says_that_the_server_is_trusted():
    found = client_terms(privacy(), asked("all"))
    assert "server sees every update and is trusted" in found.adversary
    assert found.assumptions == ()


def test_replaced_clients_are_neighbours_under_replace_one():
    assert "replaced" in client_terms(privacy(adjacency="replace_one"), asked("all")).neighbour


def test_seeded_noise_is_marked():
    marked = client_terms(privacy(noise_source="seeded-test-only"), asked("all")).conditions()
    assert any("NO PRIVACY" in one for one in marked)


@pytest.mark.parametrize("clients", ["all", 0.25])
@pytest.mark.parametrize("adjacency", ["add_or_remove", "replace_one"])
def test_the_servers_ledger_repeats_the_terms_and_its_epsilon_is_pld_by_hand(tmp_path, adjacency, clients):
    from types import SimpleNamespace

    from server.charging import FEDERATION, ServerCharge

    own = privacy(adjacency=adjacency)
    fed = asked(clients)
    config = SimpleNamespace(privacy=own, federation=fed, data=SimpleNamespace(name="words"))
    secret = load_or_create_secret(tmp_path / "key")
    with open_ledger(tmp_path / "server.sqlite", secret=secret) as ledger:
        charge = ServerCharge(ledger, config, "run")
        event = client_event(own, fed)
        for number in range(1, 6):
            charge.start_round(number)
            charge(event)
        report = ledger.report(Account(FEDERATION, "words"))
    assert set(client_terms(own, fed).conditions()) <= set(report.conditions)
    by_hand = epsilon_of(event.times(5), 1e-5, adjacency=adjacency, accountant="pld").epsilon
    assert report.epsilon == pytest.approx(by_hand, rel=1e-6)
    assert report.unit == "client"
    words = "Poisson: each client" if clients == 0.25 else "none: every client"
    assert report.sampling_assumption.startswith(words)
    assert report.adjacency == adjacency
