"""Wherever a command shows an epsilon, what it means stands beside it."""

from __future__ import annotations

import time

from fedlora.cli import dock_release, metrics, status, sweep, trainer
from fedlora.config.trainer import SiteBudgetConfig
from fedlora.ledger.reports import ADVERSARY
from fedlora.report.conditions import conditions_line
from fedlora.specs.types import PrivacyStatement

STATED = PrivacyStatement(
    "dp",
    epsilon=1.23456,
    delta=1e-5,
    unit="record",
    adjacency="add_or_remove",
    adversary="anyone who sees the file",
    accountant="pld",
    sampling="none",
    num_events=3,
)
LINE = conditions_line(
    {"unit": "one record", "adjacency": "add_or_remove", "delta": 1e-5, "adversary": "all"}
)
WORDS = ("record", "add_or_remove", "anyone who sees the file", "1e-05", "pld", "none")


def test_the_figures_of_a_server_and_a_site_say_what_they_mean():
    assert f"{LINE}." in metrics.server_registry(LINE).text()
    budget = SiteBudgetConfig(
        epsilon=8.0,
        delta=1e-5,
        on_exhausted="refuse",
        adjacency="replace_one",
        unit="person",
        accountant="rdp",
    )
    described = trainer._registry(budget).text()
    for word in (
        "per person",
        "replace_one",
        "delta 1e-05",
        ADVERSARY["person"],
        "accountant rdp",
        "sampling",
    ):
        assert word in described


def test_the_status_of_a_server_says_what_its_epsilon_means():
    role = {"role": "server", "folder": "s", "alive": True, "pid": 1, "updated": time.time(), "epsilon": 1.5}
    assert f"epsilon is {LINE}" in status._line({**role, "epsilon_means": LINE})
    assert "explained by fedlora report RUN" in status._line(role)  # a state file of an earlier version
    assert "epsilon is" not in status._line({**role, "epsilon": None})


def test_a_written_specification_says_what_its_epsilon_means(tmp_path):
    said = dock_release._release_text(tmp_path / "x.json", STATED, 2.0, "clinic-a")
    assert "epsilon 1.2346 " in said
    assert all(word in said for word in WORDS)
    assert "fedlora budget show" in said


def test_what_a_sweep_has_spent_is_rounded_up(monkeypatch):
    monkeypatch.setattr("fedlora.simulation.clients_ledger.largest_spending", lambda _: 1.00001)
    assert sweep._spent(None) == "epsilon 1.001 so far"
    monkeypatch.setattr("fedlora.simulation.clients_ledger.largest_spending", lambda _: None)
    assert sweep._spent(None) == "nothing so far"
