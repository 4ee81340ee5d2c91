"""Fingerprints, overlaps, people with several records, and what may leave a client."""

from __future__ import annotations

import math
import random
from collections import Counter
from pathlib import Path

import pytest
from chance import energy_bounds
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_helpers import BUDGET, SECRET, SITE, ask, spend

from fedlora.accounting import GaussianEvent, NonPrivateEvent, PoissonGaussianEvent, epsilon_of
from fedlora.errors import (
    DataError,
    LedgerError,
    PrivacyParameterError,
    UnsupportedCombinationError,
    UnsupportedEventError,
)
from fedlora.ledger import (
    Account,
    Ledger,
    bound_contributions,
    filter_metrics,
    find_overlaps,
    fingerprint_records,
    metric_event,
    noise_metric,
    person_event,
    sketch_records,
)

ROWS = st.lists(st.binary(max_size=6), max_size=8)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 100))
def test_fingerprint_does_not_depend_on_order(rows: list[bytes], seed: int) -> None:
    mixed = list(rows)
    random.Random(seed).shuffle(mixed)
    assert fingerprint_records(rows, SECRET) == fingerprint_records(mixed, SECRET)


@settings(max_examples=100, deadline=None)
@given(first=ROWS, second=ROWS)
def test_fingerprint_tells_multisets_apart(first: list[bytes], second: list[bytes]) -> None:
    same = fingerprint_records(first, SECRET) == fingerprint_records(second, SECRET)
    assert same is (Counter(first) == Counter(second))


def test_fingerprint_needs_the_key() -> None:
    rows = [b"a", b"b"]
    assert fingerprint_records(rows, SECRET) != fingerprint_records(rows, SECRET[::-1])
    with pytest.raises(LedgerError):
        fingerprint_records(["text"], SECRET)  # type: ignore[list-item]


@pytest.mark.parametrize(("shared", "size"), [(1, 4096), (7, 4096), (3, 5)])
def test_h18_overlap_between_clients_is_reported(shared: int, size: int) -> None:
    common = [b"common-%d" % i for i in range(shared)]
    sketches = {
        f"client-{c}": sketch_records(
            [*(b"%d-%d" % (c, i) for i in range(50)), *(common if c < 2 else [])], SECRET, size=size
        )
        for c in range(4)
    }
    overlaps = find_overlaps(sketches)
    if size > 50:
        assert [(item.first, item.second, item.shared, item.exact) for item in overlaps] == [
            ("client-0", "client-1", shared, True)
        ]
    assert all(item.shared <= shared for item in overlaps)


def people(heavy: int, light: int) -> list[str]:
    return ["u1"] * heavy + [f"p{i}" for i in range(light)]


@pytest.mark.parametrize(("heavy", "light", "bound"), [(40, 10, 1), (40, 10, 3), (2, 5, 2)])
def test_h18_records_of_a_person_are_bounded(heavy: int, light: int, bound: int) -> None:
    groups = people(heavy, light)
    chosen = bound_contributions(groups, max_records=bound, secret=SECRET)
    counts = Counter(groups[position] for position in chosen.kept)
    assert counts["u1"] == min(heavy, bound)
    assert sum(counts.values()) == min(heavy, bound) + light
    assert chosen.unit == "person"
    assert "per person" in chosen.statement


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 3), st.integers(0, 5))
def test_h18_leaving_one_person_out_changes_only_that_person(
    groups: list[int], bound: int, person: int
) -> None:
    kept = bound_contributions(groups, max_records=bound, secret=SECRET).kept
    rest = [(i, group) for i, group in enumerate(groups) if group != person]
    kept_rest = bound_contributions([group for _, group in rest], max_records=bound, secret=SECRET).kept
    assert {i for i in kept if groups[i] != person} == {rest[i][0] for i in kept_rest}


def test_h18_report_says_per_record_without_a_key_and_per_person_with_one(ledger: Ledger) -> None:
    import dataclasses

    spend(ledger, 1)
    assert "the guarantee is per record, not per person" in ledger.report(SITE).conditions
    other = Account("site-1", "by-person")
    spend(ledger, 1, account=other, budget=dataclasses.replace(BUDGET, unit="person"))
    report = ledger.report(other)
    assert report.unit == "person"
    assert not any("not per person" in text for text in report.conditions)


@pytest.mark.parametrize("bound", [0, -1, True, 1.5])
def test_a_contribution_bound_out_of_range_is_refused(bound: object) -> None:
    with pytest.raises(DataError):
        bound_contributions(["a"], max_records=bound, secret=SECRET)  # type: ignore[arg-type]


def test_contribution_bounds_fail_closed() -> None:
    with pytest.raises(DataError, match="record 1"):
        bound_contributions(["a", None], max_records=1, secret=SECRET)
    with pytest.raises(UnsupportedCombinationError):
        bound_contributions(["a"], max_records=2, secret=SECRET, adjacency="replace_one")
    with pytest.raises(UnsupportedEventError):
        person_event(GaussianEvent(1.0), 2, adjacency="replace_one")
    with pytest.raises(UnsupportedEventError):
        person_event(NonPrivateEvent(), 2)
    assert person_event(NonPrivateEvent(), 1) == NonPrivateEvent()


@pytest.mark.parametrize(("sigma", "rate", "most"), [(2.0, 0.05, 2), (4.0, 0.1, 4), (8.0, 0.02, 8)])
def test_a_person_costs_at_least_the_mixture_over_sampled_records(
    sigma: float, rate: float, most: int
) -> None:
    """The exact worst case with aligned gradients: sensitivity j with Binomial(k, q) weight."""
    sensitivities = list(range(most + 1))
    weights = [math.comb(most, j) * rate**j * (1 - rate) ** (most - j) for j in sensitivities]
    mixture = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma, [float(j) for j in sensitivities], weights, value_discretization_interval=1e-3
    ).self_compose(50)
    exact = mixture.get_epsilon_for_delta(1e-5)
    claimed = epsilon_of(person_event(PoissonGaussianEvent(sigma, rate), most).times(50), 1e-5).epsilon
    alone = epsilon_of(PoissonGaussianEvent(sigma, rate).times(50), 1e-5).epsilon
    assert claimed >= exact * (1 - 1e-2)
    assert exact > alone


def test_a_person_with_one_record_costs_what_a_record_costs() -> None:
    event = PoissonGaussianEvent(1.0, 0.1)
    assert person_event(event, 1) == event
    two = person_event(event, 2)
    assert isinstance(two, PoissonGaussianEvent)
    assert two.noise_multiplier == 0.5
    assert 0.19 <= two.sample_rate <= 0.19 * (1 + 1e-9)
    accountant = pld_privacy_accountant.PLDAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(0.19, dp_event.GaussianDpEvent(0.5)))
    assert epsilon_of(two, 1e-5).epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-2)


METRICS = {"loss": 0.31, "accuracy": 1.0, "num-examples": 2, "steps": 4, "epsilon": 1.2, "ledger_head": "ab"}


def test_h19_private_metrics_stay_on_the_client() -> None:
    out = filter_metrics(METRICS)
    assert dict(out.sent) == {"steps": 4, "epsilon": 1.2, "ledger_head": "ab"}
    assert out.withheld == ("accuracy", "loss", "num-examples")


def test_h19_metrics_sent_in_the_clear_are_listed_as_outside(ledger: Ledger) -> None:
    out = filter_metrics(METRICS, mode="outside")
    assert dict(out.sent) == METRICS
    assert out.conditions == ("outside the guarantee: accuracy, loss, num-examples leave the client exact",)
    spend(ledger, 1, assumptions=out.conditions)
    assert out.conditions[0] in ledger.report(SITE).conditions


def test_h19_noised_metrics_are_charged(ledger: Ledger) -> None:
    event = metric_event(20.0)
    spend(ledger, 1, steps=2)
    spend(ledger, 1, run_id="run-1/metrics", event=event, steps=1)
    both = epsilon_of([(ask(1).event, 2), (event, 1)], BUDGET.delta).epsilon
    assert ledger.report(SITE).epsilon == pytest.approx(both)


def test_h19_other_modes_and_parameters_are_refused() -> None:
    for mode in ("noised", "", "on"):
        with pytest.raises(UnsupportedCombinationError):
            filter_metrics(METRICS, mode=mode)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PrivacyParameterError):
            noise_metric([0.5], bound=1.0, noise_multiplier=bad, divisor=1.0)
        with pytest.raises(PrivacyParameterError):
            noise_metric([0.5], bound=bad, noise_multiplier=1.0, divisor=1.0)
    with pytest.raises(PrivacyParameterError):
        metric_event(0.0)
    assert dict(filter_metrics(METRICS, private=False).sent) == METRICS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, -5.0, 2.0])
def test_h19_one_record_moves_a_metric_by_at_most_its_bound(value: float) -> None:
    def total(values: list[float]) -> float:
        return noise_metric(values, bound=2.0, noise_multiplier=1.0, divisor=1.0, normal=lambda: 0.0)

    assert abs(total([0.5, 1.5, value]) - total([0.5, 1.5])) <= 2.0


def _variance(scale: float, draws: int) -> float:
    values = [noise_metric([], bound=3.0, noise_multiplier=2.0 * scale, divisor=2.0) for _ in range(draws)]
    return sum(value * value for value in values) / draws


def test_metric_noise_has_the_declared_scale_and_the_test_sees_five_percent() -> None:
    """A scale that is 5 % off lies eight deviations beyond the bound: it is missed once in 10^14."""
    draws = 40_000
    low, high = energy_bounds(draws)
    assert low < _variance(1.0, draws) / 9.0 < high
    assert _variance(1.05, draws) / 9.0 > high
    assert _variance(0.95, draws) / 9.0 < low


def test_sketch_sizes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(LedgerError):
        sketch_records([b"a"], SECRET, size=0)
    assert sketch_records([b"a", b"a"], SECRET).hashes == sketch_records([b"a"], SECRET).hashes
    assert tmp_path.exists()


@pytest.mark.parametrize("other", [Account("site-1", "news-2027"), Account("site-9", "news-2026")])
def test_records_under_a_second_name_are_said_in_both_reports(ledger: Ledger, other: Account) -> None:
    """A data set that is renamed starts a new account: the fingerprint shows that the figures add up."""
    spend(ledger, 1)
    ledger.note_fingerprint(SITE, "a" * 64)
    ledger.note_fingerprint(SITE, "a" * 64)
    spend(ledger, 1, account=other)
    assert not any("add up" in text for text in ledger.report(other).conditions)
    ledger.note_fingerprint(other, "a" * 64)
    for one, two in ((SITE, other), (other, SITE)):
        text = f"the same records are charged as {two.client}/{two.dataset} too: the figures add up"
        assert text in ledger.report(one).conditions
    assert ledger.verify().entries == len(list(ledger.entries()))
    with pytest.raises(LedgerError):
        ledger.note_fingerprint(SITE, "a" * 65)


def test_a_fingerprint_before_the_first_charge_makes_no_account_to_spend_from(ledger: Ledger) -> None:
    ledger.note_fingerprint(SITE, "b" * 64)
    with pytest.raises(LedgerError, match="not in this ledger"):
        ledger.report(SITE)
    spend(ledger, 1)
    assert ledger.report(SITE).num_events == 4
