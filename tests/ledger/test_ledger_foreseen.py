"""What the next round will ask for is worked out ahead: the same figures, earlier, and nothing is charged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from ledger_helpers import BUDGET, EVENT, SECRET, SITE, spend

from fedlora.accounting import GaussianEvent
from fedlora.ledger import Account, open_ledger, projection


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every epsilon that had to be worked out, and every decision about a budget."""
    seen: list[str] = []
    for name in ("epsilon_of", "within_budget"):
        true = getattr(projection, name)

        def counted(*args: Any, _name: str = name, _true: Any = true, **more: Any) -> Any:
            seen.append(_name)
            return _true(*args, **more)

        monkeypatch.setattr(projection, name, counted)
    return seen


def test_the_next_round_finds_its_figures_ready(tmp_path: Path, asked: list[str]) -> None:
    with open_ledger(tmp_path / "a.db", secret=SECRET) as ledger:
        spend(ledger)
        ledger.report(SITE)
        for _ in range(6):
            ledger.foresee()
            asked.clear()
            spend(ledger)
            ledger.report(SITE)
            assert asked == []
    assert EVENT.chargeable


def test_looking_ahead_changes_no_figure_no_entry_and_no_decision(tmp_path: Path) -> None:
    tight = dataclasses.replace(BUDGET, epsilon=3.0)
    other = GaussianEvent(7.0)
    seen = []
    for ahead in (False, True):
        decisions: list[Any] = []
        with open_ledger(tmp_path / f"{ahead}.db", secret=SECRET) as ledger:
            for number in range(40):
                try:
                    spend(
                        ledger,
                        number,
                        budget=tight,
                        event=other if number % 3 == 2 else EVENT,
                        steps=1 + number % 2,
                    )
                    decisions.append("granted")
                except Exception as error:
                    decisions.append(f"{type(error).__name__}: {error}")
                if ahead:
                    before = ledger.head()
                    ledger.foresee()
                    assert ledger.head() == before
                report = ledger.report(SITE)
                decisions.append((report.epsilon, report.left, report.num_events))
        seen.append(decisions)
    assert seen[0] == seen[1]
    assert any("BudgetExceededError" in str(one) for one in seen[0])


def test_what_is_looked_at_ahead_is_bounded(tmp_path: Path, asked: list[str]) -> None:
    with open_ledger(tmp_path / "many.db", secret=SECRET) as ledger:
        for number in range(3 * projection.FORESEEN):
            account = Account(f"site-{number}", "news")
            spend(ledger, account=account, event=GaussianEvent(10.0 + number))
        asked.clear()
        ledger.foresee()
        assert asked.count("epsilon_of") == projection.FORESEEN
        asked.clear()
        ledger.foresee()
        assert asked == []
