"""What a worker may use of the driver's reservations: each once, for the event and at most the steps reserved."""

from __future__ import annotations

import pytest

from fedlora.accounting import PoissonGaussianEvent
from fedlora.errors import LedgerError
from fedlora.ledger.types import Account, Budget, Reservation, ReserveRequest
from fedlora.training.charging import Grant, GrantKeeper

ACCOUNT = Account("a", "d")
BUDGET = Budget(8.0, 1e-5, "add_or_remove", "record", "best", "lifetime", "refuse")
EVENT = PoissonGaussianEvent(1.0, 0.1)


def request(
    *, event: PoissonGaussianEvent = EVENT, steps: int = 3, client: str = "a", server_round: int = 1
) -> ReserveRequest:
    return ReserveRequest(Account(client, "d"), BUDGET, "run", server_round, event, steps)


def keeper(granted: int = 3) -> GrantKeeper:
    made = GrantKeeper()
    made.hand_over([Grant(Reservation(1, ACCOUNT, "run", 1, EVENT, granted, 3), None)])
    return made


def test_a_grant_is_used_once_only() -> None:
    grants = keeper()
    (answer,) = grants.reserve([request()])
    assert isinstance(answer, Reservation)
    with pytest.raises(LedgerError, match="nothing was reserved"):
        grants.reserve([request()])


def test_grants_of_an_earlier_message_are_gone() -> None:
    grants = keeper()
    grants.hand_over([])
    with pytest.raises(LedgerError, match="nothing was reserved"):
        grants.reserve([request()])


@pytest.mark.parametrize("other", [{"client": "b"}, {"server_round": 2}])
def test_a_grant_serves_its_client_and_round_only(other: dict[str, object]) -> None:
    with pytest.raises(LedgerError, match="nothing was reserved"):
        keeper().reserve([request(**other)])  # type: ignore[arg-type]


@pytest.mark.parametrize("event", [PoissonGaussianEvent(0.9, 0.1), PoissonGaussianEvent(1.0, 0.11)])
def test_a_grant_for_another_event_is_refused(event: PoissonGaussianEvent) -> None:
    with pytest.raises(LedgerError, match="another event"):
        keeper().reserve([request(event=event)])


def test_a_grant_of_fewer_steps_is_what_runs_and_one_of_more_is_refused() -> None:
    (answer,) = keeper(granted=2).reserve([request()])
    assert isinstance(answer, Reservation)
    assert answer.steps == 2
    with pytest.raises(LedgerError, match="more steps"):
        keeper(granted=4).reserve([request()])
