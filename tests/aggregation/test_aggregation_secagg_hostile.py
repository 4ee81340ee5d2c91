"""One client that lies in a step of secure aggregation: it is named and left out, or the round fails; never the run."""

from __future__ import annotations

import numpy as np
import pytest
from test_aggregation_secagg import COUNT, make_plan, network, vectors

from fedlora.aggregation.secagg_field import PRIME
from fedlora.aggregation.secagg_round import secure_sum
from fedlora.errors import AggregationError

LIAR = "c02"
LOW_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    (2**255 - 20).to_bytes(32, "little"),
    (2**255 - 19).to_bytes(32, "little"),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
]


def lying(plan, data, step, change, *, lost=()):
    """The honest network, but LIAR's answer to one step is changed by `change`."""
    inner = network(plan, data, lost=lost)

    def exchange(name, questions):
        answers = inner(name, questions)
        if name == step and LIAR in answers:
            answers[LIAR] = change(dict(answers[LIAR]))
        return answers

    return exchange


def total_of(plan, data, exchange):
    reasons = {}
    total, used = secure_sum(exchange, plan, list(data), COUNT, on_refused=reasons.__setitem__)
    return total, used, reasons


def check_rest(plan, data, exchange, word):
    """The sum is that of the others, and the liar is named with a reason."""
    total, used, reasons = total_of(plan, data, exchange)
    assert used == tuple(c for c in data if c != LIAR)
    exact = sum(data[c].astype(np.float64) for c in used)
    assert np.abs(total - exact).max() <= len(data) * plan.encoding.max_error
    assert word in reasons[LIAR]


@pytest.mark.parametrize("which", ["mask", "seal"])
@pytest.mark.parametrize("key", LOW_ORDER, ids=lambda key: key.hex()[:6])
def test_a_key_that_nobody_can_agree_with_costs_its_own_client_only(which, key):
    data, plan = vectors(7), make_plan(7)
    exchange = lying(plan, data, "keys", lambda body: {**body, which: key.hex()})
    check_rest(plan, data, exchange, "key")


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_a_client_that_seals_shares_for_some_neighbours_only_is_left_out(kept):
    """Its masks would stay in the sum, or its secrets could not be restored."""
    data, plan = vectors(7), make_plan(7)
    exchange = lying(
        plan, data, "shares", lambda body: {"sealed": dict(sorted(body["sealed"].items())[:kept])}
    )
    check_rest(plan, data, exchange, "neighbours")


@pytest.mark.parametrize(
    "vector",
    [None, np.zeros(COUNT - 1, np.uint32), np.zeros(COUNT, np.float32), np.zeros(COUNT, np.uint64), "abc"],
    ids=["none", "short", "float32", "uint64", "text"],
)
def test_a_masked_vector_of_another_shape_is_named(vector):
    data, plan = vectors(7), make_plan(7)
    check_rest(plan, data, lying(plan, data, "masked", lambda body: {"vector": vector}), "c02")


@pytest.mark.parametrize("lost", [(), (("c05", "masked"),)], ids=["all answer", "one drops out"])
@pytest.mark.parametrize("wrong", [0, 1, PRIME - 1, 2**600, -5])
def test_wrong_shares_of_others_secrets_do_not_hide_or_change_the_sum(wrong, lost):
    data, plan = vectors(7), make_plan(7)

    def change(body):
        return {name: {peer: hex(wrong) for peer in body[name]} for name in ("seeds", "keys")}

    total, used, reasons = total_of(plan, data, lying(plan, data, "unmask", change, lost=lost))
    exact = sum(data[c].astype(np.float64) for c in used)
    assert LIAR in used
    assert np.abs(total - exact).max() <= 7 * plan.encoding.max_error
    assert "share" in reasons[LIAR]


def test_shares_that_do_not_belong_together_fail_the_round_and_not_the_run():
    """Two liars among seven: what they sealed or reveal cannot be told apart any more; nothing is opened."""
    data, plan = vectors(7), make_plan(7)
    inner = network(plan, data)

    def exchange(name, questions):
        answers = inner(name, questions)
        for client in ("c02", "c03", "c04") if name == "unmask" else ():
            answers[client] = {"seeds": {p: hex(7) for p in answers[client]["seeds"]}, "keys": {}}
        return answers

    with pytest.raises(AggregationError, match="hidden"):
        secure_sum(exchange, plan, list(data), COUNT)


def test_a_dropped_client_whose_announced_key_was_not_its_own_fails_the_round_and_not_the_run():
    data, plan = vectors(7), make_plan(7)
    other = {}

    def change(body):
        return {**body, "mask": other["c00"]}

    inner = network(plan, data, lost=[(LIAR, "masked")])

    def exchange(name, questions):
        answers = inner(name, questions)
        if name == "keys":
            other["c00"] = answers["c00"]["mask"]
            answers[LIAR] = change(answers[LIAR])
        return answers

    with pytest.raises(AggregationError, match=LIAR):
        secure_sum(exchange, plan, list(data), COUNT)


@pytest.mark.parametrize("step", ["keys", "shares", "masked", "unmask"])
@pytest.mark.parametrize(
    "body", [{}, {"extra": 1}, {"sealed": 3}, {"seeds": [], "keys": None}, {"mask": "zz"}]
)
def test_answers_without_the_fields_of_their_step_are_dropouts(step, body):
    data, plan = vectors(7), make_plan(7)
    total, used, _ = total_of(plan, data, lying(plan, data, step, lambda _: body))
    assert (LIAR in used) == (step == "unmask")
    exact = sum(data[c].astype(np.float64) for c in used)
    assert np.abs(total - exact).max() <= 7 * plan.encoding.max_error
