"""Before a run whose epsilon rests on Poisson draws of clients, the server's own draws are checked."""

from __future__ import annotations

import itertools
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_server_randomness import UNITS
from test_server_randomness import config as plain_config

from fedlora.config import FedLoraConfig
from fedlora.errors import AggregationError, PrivacyParameterError, SensitivityMismatchError
from fedlora.training.drawcheck import Table, faults_of, table_sizes
from fedlora.training.sampling import OsCoins, SeededCoins
from server import draws, setup
from server.draws import check_client_draws, claimed_rate, client_sampler, require_client_draws
from strategies.fedlora_strategy import FedLoraStrategy
from strategies.sampling import ClientSampler

RATES = (0.02, 0.1, 0.25, 0.5, 0.8)
_SEEDS: Any = None


@pytest.fixture(autouse=True)
def _same_draws(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults draw other numbers in each sampler, and the same in each run of a test.

    So do the operating system's coins: a sound sampler is refused at one start in a million, which is too often for a
    test that must not fail by chance.
    """
    monkeypatch.setattr(sys.modules[__name__], "_SEEDS", itertools.count(1))
    coins = np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
    monkeypatch.setattr(
        OsCoins, "words", lambda self, count: coins.integers(0, 2**64, count, dtype=np.uint64)
    )


def config(rate: Any = 0.25, least: int = 3, **privacy: Any) -> FedLoraConfig:
    made = plain_config({**UNITS["client"], "noise_source": "os"})
    changed = {"clients_per_round": rate, "min_replies": least}
    terms: Any = made.privacy
    update = {
        "federation": made.federation.model_copy(update=changed),
        "privacy": terms.model_copy(update=privacy),
    }
    return made.model_copy(update=update)


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-3, *RATES, 0.999])
def test_the_runs_own_draws_pass(rate: float) -> None:
    found = check_client_draws(config(rate))
    assert found.passed, found.detail
    assert f"of {rate:.4g}" in found.detail


def test_the_check_is_cheap() -> None:
    took = []
    for rate in (1e-3, 0.25):
        started = time.process_time()
        check_client_draws(config(rate))
        took.append(time.process_time() - started)
    assert max(took) < 0.6, took  # 0.2 s, with room for a machine that is half as fast


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rate": "all"}, "no amplification"),
        ({"rate": 5}, "no amplification"),
        ({"rate": 1.0}, "no amplification"),
        ({"noise_at": "clients", "honest_clients": 2}, "no amplification"),
        ({"noise_source": "seeded-test-only"}, "no privacy"),
    ],
)
def test_where_no_claim_rests_on_the_draw_nothing_is_checked(changes: dict[str, Any], said: str) -> None:
    found = check_client_draws(config(**changes))
    assert found.passed
    assert said in found.detail


def test_a_record_level_run_claims_nothing_for_draws_of_clients() -> None:
    assert claimed_rate(plain_config({**UNITS["record"], "noise_source": "os"})) is None


# -- planted faults ------------------------------------------------------------------------------------------


class _Sampler:
    """A sampler with a fault, that has what the strategy and the check ask for."""

    def __init__(self, made: FedLoraConfig) -> None:
        self.rate, self.least = float(made.federation.clients_per_round), made.federation.min_replies
        self.random, self.kept = np.random.default_rng(next(_SEEDS)), None
        self.coins: Callable[[int], Any] = lambda number: OsCoins()

    def draw(self, server_round: int, clients: Sequence[str]) -> tuple[str, ...]:
        known = sorted(clients)
        return tuple(known[at] for at in self.pick(len(known), server_round))

    def poisson(self, count: int) -> Any:
        return np.flatnonzero(self.random.random(count) < self.rate)

    def pick(self, count: int, number: int) -> Any:
        raise NotImplementedError


class FixedSize(_Sampler):
    def pick(self, count: int, number: int) -> Any:
        return self.random.choice(count, max(1, round(count * self.rate)), replace=False)


class RandomSizeNoRepeats(_Sampler):
    """Passes over shuffled clients, in pieces of random sizes."""

    left: Any = ()

    def size(self, count: int) -> int:
        return int(self.random.binomial(count, self.rate))

    def pick(self, count: int, number: int) -> Any:
        size = self.size(count)
        if len(self.left) < size:
            self.left = self.random.permutation(count)
        piece, self.left = self.left[:size], self.left[size:]
        return piece


class Shuffled(RandomSizeNoRepeats):
    """The same in pieces of one size."""

    def size(self, count: int) -> int:
        return max(1, round(count * self.rate))


class TwiceTheRate(_Sampler):
    def pick(self, count: int, number: int) -> Any:
        return np.flatnonzero(self.random.random(count) < min(1.0, 2.0 * self.rate))


class HalfMore(_Sampler):
    def pick(self, count: int, number: int) -> Any:
        return np.flatnonzero(self.random.random(count) < 1.15 * self.rate)


class Repeated(_Sampler):
    def pick(self, count: int, number: int) -> Any:
        self.kept = self.poisson(count) if self.kept is None else self.kept
        return self.kept


class RepeatedOnce(_Sampler):
    """Each draw serves two rounds."""

    def pick(self, count: int, number: int) -> Any:
        if number % 2:
            self.kept = self.poisson(count)
        return self.kept


class EmptyAgain(_Sampler):
    def pick(self, count: int, number: int) -> Any:
        found = self.poisson(count)
        while len(found) == 0:
            found = self.poisson(count)
        return found


class FewAgain(_Sampler):
    """Draws again, once, where fewer than `min_replies` clients were drawn."""

    def pick(self, count: int, number: int) -> Any:
        found = self.poisson(count)
        return found if len(found) >= self.least else self.poisson(count)


class Together(_Sampler):
    """One coin for all."""

    def pick(self, count: int, number: int) -> Any:
        return np.arange(count if self.random.random() < self.rate else 0)


class Pairs(_Sampler):
    """One coin for two neighbours."""

    def pick(self, count: int, number: int) -> Any:
        return np.flatnonzero(np.repeat(self.random.random(-(-count // 2)) < self.rate, 2)[:count])


class FarPairs(_Sampler):
    """One coin for two clients that are far apart."""

    def pick(self, count: int, number: int) -> Any:
        half = -(-count // 2)
        return np.flatnonzero(np.tile(self.random.random(half) < self.rate, 2)[:count])


class Favourites(_Sampler):
    """Some clients twice as often, others never."""

    def pick(self, count: int, number: int) -> Any:
        rates = np.where(np.arange(count) < count // 2, min(1.0, 2.0 * self.rate), 0.0)
        return np.flatnonzero(self.random.random(count) < rates)


class Rested(_Sampler):
    """Nobody is asked twice running."""

    def pick(self, count: int, number: int) -> Any:
        found = self.poisson(count)
        self.kept, before = found, self.kept
        return found if before is None else np.setdiff1d(found, before)


class SeededByRound(_Sampler):
    def pick(self, count: int, number: int) -> Any:
        self.random = np.random.default_rng([7, number])
        return self.poisson(count)


class SeededOnce(_Sampler):
    def __init__(self, made: FedLoraConfig) -> None:
        super().__init__(made)
        self.random = np.random.default_rng(7)

    def pick(self, count: int, number: int) -> Any:
        return self.poisson(count)


class SaysSeeded(_Sampler):
    def __init__(self, made: FedLoraConfig) -> None:
        super().__init__(made)
        self.coins = lambda number: SeededCoins(1, "x", number)

    def pick(self, count: int, number: int) -> Any:
        return self.poisson(count)


class Twice(_Sampler):
    """One client has two messages."""

    def pick(self, count: int, number: int) -> Any:
        found = self.poisson(count)
        return [*found, *found[:1]]


FAULTS = [
    (FixedSize, "variance of sizes"),
    (Shuffled, "variance of sizes"),
    (RandomSizeNoRepeats, ""),
    (TwiceTheRate, "drawn"),
    (HalfMore, "drawn"),
    (Repeated, "drawn twice running"),
    (RepeatedOnce, "drawn twice running"),
    (EmptyAgain, "draws of nobody 0 times"),
    (FewAgain, "draws of fewer than 3"),
    (Together, "variance of sizes"),
    (Pairs, "neighbours together"),
    (FarPairs, ""),
    (Favourites, "members' shares"),
    (SeededByRound, "coins are seeded"),
    (SeededOnce, "coins are seeded"),
    (SaysSeeded, "coins are seeded"),
    (Twice, "asked twice in a round"),
]


@pytest.mark.parametrize("rate", [0.02, 0.25, 0.5])
@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=[one[0].__name__ for one in FAULTS])
def test_draws_that_are_not_poisson_are_refused(fault: Any, said: str, rate: float) -> None:
    if fault is RandomSizeNoRepeats and rate == 0.5:  # two pieces a pass: both halves of a coin's sequence
        rate = 0.1
    for _ in range(3):
        found = check_client_draws(config(rate), fault)
        assert not found.passed
        assert said in found.detail


@pytest.mark.parametrize("rate", [0.25, 0.5])
def test_clients_that_rest_after_a_round_are_seen(rate: float) -> None:
    assert "drawn twice running 0 times" in check_client_draws(config(rate), Rested).detail  # type: ignore[arg-type]


def test_a_rate_that_is_twice_a_thousandth_is_refused() -> None:
    assert not check_client_draws(config(1e-3), TwiceTheRate).passed  # type: ignore[arg-type]


# -- faults of the strategy that uses the draw ---------------------------------------------------------------


def _replaced(self: FedLoraStrategy, number: int, online: Any) -> Any:
    """Those who are away are replaced by others who are there."""
    asked, groups = _choose(self, number, online)
    away = sum(self._home[client] not in online for client in asked)
    free = [client for client, node in self._home.items() if node in online and client not in asked]
    for client in np.random.default_rng().permutation(free)[:away].tolist():
        groups.setdefault((self._home[client], "None"), []).append(client)
    return asked, groups


def _only_there(self: FedLoraStrategy, number: int, online: Any) -> Any:
    """As many as the law says of all clients are drawn from those who are there."""
    there = [client for client, node in self._home.items() if node in online]
    size = np.random.default_rng().binomial(len(self._home), float(self.sampler.asked))
    asked = np.random.default_rng().permutation(there)[:size].tolist()
    groups: dict[Any, list[str]] = {}
    for client in asked:
        groups.setdefault((self._home[client], "None"), []).append(client)
    return tuple(asked), groups


def _until_somebody(self: FedLoraStrategy, number: int, online: Any) -> Any:
    """Another round's coins where nobody who is there was drawn."""
    found = _choose(self, number, online)
    while not found[1]:
        self.sampler._drawn.clear()
        found = _choose(self, number, online)
    return found


_choose = FedLoraStrategy.choose


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("fault", [_replaced, _only_there, _until_somebody])
def test_a_strategy_that_changes_the_draw_is_refused(
    fault: Any, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FedLoraStrategy, "choose", fault)
    assert not check_client_draws(config(rate)).passed


def test_a_draw_again_under_the_same_round_ends_the_run() -> None:
    sampler = client_sampler(config())
    sampler.draw(1, ["a", "b"])
    with pytest.raises(AggregationError, match="got round 1 after round 1; a round's coins are drawn once"):
        sampler.draw(1, ["a", "b"])


# -- the start -----------------------------------------------------------------------------------------------


def test_a_failed_check_ends_the_start_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = config()
    require_client_draws(made)
    broken: Any = lambda self, number, clients: tuple(sorted(clients)[:16])  # noqa: E731
    monkeypatch.setattr(ClientSampler, "draw", broken)
    monkeypatch.setattr(setup, "build_workbench", lambda config: pytest.fail("nothing is loaded"))
    settings: Any = SimpleNamespace(config=made, bench=None)
    with pytest.raises(SensitivityMismatchError, match=r"clients are Poisson draws .*nothing is trained"):
        setup.build_server(settings, None)  # type: ignore[arg-type]


def test_a_rate_without_a_draw_is_no_question_for_the_check() -> None:
    for rate in (0.0, 1.0, float("nan")):
        with pytest.raises(PrivacyParameterError, match="needs one in"):
            faults_of([Table("many", np.zeros((2, 2), dtype=bool))], rate)
    assert table_sizes(0.25, 1000, 3) == {"many": 64, "few": 4, "least": 12}
    assert table_sizes(1e-5, 1000, 3) == {"many": 1000, "few": 1000}
    assert faults_of([], 0.5) == []


# -- no false alarm ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.02, 0.5])
def test_a_hundredth_of_the_level_is_kept_with_room(rate: float) -> None:
    """At a chance of 1 % for a start at most; bounds that hold for every number of draws keep well below it."""
    random, alarms = np.random.default_rng(11), 0
    sizes = table_sizes(rate, 500, 3)
    for _ in range(60):
        tables = [Table(name, random.random((256, size)) < rate, 3) for name, size in sizes.items()]
        alarms += bool(faults_of(tables, rate, 0.01))
    assert alarms <= 4  # binomial(60, .01) goes above 4 with probability 3e-4; seeded, so never by chance


@pytest.mark.long
@pytest.mark.parametrize("rate", [1e-3, *RATES])
def test_no_false_alarm_in_five_hundred_starts(rate: float) -> None:
    made = config(rate)
    found = [check_client_draws(made) for _ in range(500)]
    assert all(one.passed for one in found), [one.detail for one in found if not one.passed]


def test_the_checks_of_server_and_trainer_judge_alike() -> None:
    assert draws.faults_of is faults_of
