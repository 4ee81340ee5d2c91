"""Pages of runs with very many clients or rounds stay small and quick; rounds that stand twice are damage."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from fedlora.errors import DataError
from fedlora.report import embedded
from fedlora.report.compare import render_comparison
from fedlora.report.figures import epsilon_curves
from fedlora.report.page import render
from fedlora.report.run_data import RunData, read_run

STATEMENT = {
    "privacy": "differential privacy",
    "unit": "one record",
    "delta": 1e-4,
    "budget": {"epsilon": 9.0},
}


def _run(rounds, **files):
    given = {
        "path": Path("x"),
        "summary": {"run_id": "x", "epsilon": 1.0, "statement": STATEMENT},
        "config": "",
    }
    empty = {"environment": {}, "clients": {}, "ledger": {}, "audits": [], "partition": None}
    return RunData(**{**given, **empty, "rounds": rounds, **files})


def _embedded(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))


def test_a_page_of_ten_thousand_clients_is_small_and_says_what_it_leaves_out():
    """It was 19 MB for 20 rounds."""
    names = [f"client-{i:05d}" for i in range(10_000)]
    told = {
        name: {"events": [{"steps": 2}], "epsilon_reported": 1.0 + i * 1e-4} for i, name in enumerate(names)
    }
    rounds = [
        {"round": number, "asked": 10_000, "accepted": 9_000, "epsilon": 0.1 * number,
         "epsilon_by_client": dict.fromkeys(names, 0.1 * number),
         "refused": dict.fromkeys(names[:1000], "BudgetExceededError")}
        for number in range(1, 21)
    ]  # fmt: skip
    data = _run(rounds, clients=told, partition={"clients": {name: {"a": 3, "b": 4} for name in names}})
    page = render(data)
    found = _embedded(page)
    assert len(page) < 1_000_000
    assert set(found["left_out"]) == {"clients", "rounds", "where"}
    assert "Shown are 500 of 10000 clients" in page
    assert set(found["clients"]) == set(names[-500:])  # those that spent most
    assert set(found["partition"]["clients"]) == set(found["derived"]["clients"]) == set(names[-500:])
    assert found["derived"]["refused_per_round"] == [1000] * 20
    assert found["derived"]["refusals"] == 20_000
    curve = found["derived"]["epsilon_curves"]["curves"]["10000 clients like client-00000"]
    assert curve == pytest.approx([0.1 * number for number in range(1, 21)])
    assert page.count("BudgetExceededError") <= 20 * 2 * embedded.NAMED


def test_curves_of_many_rounds_take_time_in_proportion():
    """They took the square of the number of rounds for each client."""
    names = [f"c{i}" for i in range(50)]
    rounds = [
        {"round": number, "epsilon_by_client": {name: 1e-3 * number + i for i, name in enumerate(names)}}
        for number in range(1, 4001)
    ]
    started = time.process_time()
    _, curves = epsilon_curves(_run(rounds))
    assert time.process_time() - started < 5.0
    assert curves["c49"][0] == 49.001
    assert curves["c49"][-1] == 53.0
    assert len(curves) == 6


def test_curves_hold_their_last_value_and_begin_at_nothing():
    said = [{"a": 1.0}, {"b": 0.5}, {"a": 1.5, "b": "inf"}, {"b": 0.75}]
    rounds = [{"round": i, "epsilon_by_client": one} for i, one in enumerate(said, 1)]
    assert epsilon_curves(_run(rounds)) == (
        [1, 2, 3, 4],
        {"a": [1.0, 1.0, 1.5, 1.5], "b": [0.0, 0.5, 0.5, 0.75]},
    )


@pytest.mark.parametrize("last", [2, 1])
@pytest.mark.parametrize("end", ["\n", ""])
def test_a_round_that_stands_twice_is_damage(tmp_path, last, end):
    """Its bytes, refusals and times would count twice."""
    lines = [json.dumps({"round": number}) for number in (0, 1, 2, last)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + end)
    with pytest.raises(DataError, match=f"round {last} comes after round 2"):
        read_run(tmp_path)


# -- deployments -----------------------------------------------------------------------------------------------


RECEIPTS = {
    "site-d/words": {
        "client": "site-d", "epsilon": 2.4933, "epsilon_claimed": 1.9889, "epsilon_from_receipts": 2.4933,
        "delta": 1e-4, "unanswered": [["x", 3]], "flags": [],
    },
    "site-e/words": {"epsilon": 0.75, "unanswered": [["x", 1]], "flags": []},
}  # fmt: skip


def _rows(page):
    (section,) = re.findall(r"<section><h2>Clients</h2>.*?</section>", page, re.S)
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*?</tr>", section)]
    return section, {row[0]: row for row in rows}


def test_rounds_that_a_site_did_not_answer_are_counted_in_its_row():
    """The row said what the site had told before it fell silent, and what is left was too much."""
    told = {"site-d": {"events": [{"steps": 4}], "epsilon_from_events": 1.9889, "epsilon_reported": 1.9889}}
    data = _run([{"round": 1}, {"round": 2}], clients=told, receipts=RECEIPTS)
    section, rows = _rows(render(data))
    assert rows["client"][-3:] == ["epsilon, by receipts", "budget, the run&#x27;s terms", "left of it"]
    assert rows["site-d"] == ["site-d", "4", "1.989", "1.989", "2.494", "9", "6.506"]
    assert rows["site-e"] == ["site-e", "0", "-", "-", "0.75", "9", "8.25"]  # it never answered at all
    assert "did not answer counted in full" in section
    found = _embedded(render(data))
    assert found["receipts"] == RECEIPTS
    assert found["derived"]["by_receipts"] == {"site-d": 2.4933, "site-e": 0.75}


def test_a_budget_that_is_the_runs_is_not_called_the_sites():
    """A site may allow less than the run asks for, and does not tell."""
    told = {"site-a": {"events": [{"steps": 4}], "epsilon_from_events": 2.0, "epsilon_reported": 2.0}}
    section, rows = _rows(render(_run([{"round": 1}], clients=told)))
    assert rows["client"][-2:] == ["budget, the run&#x27;s terms", "left of it"]
    assert "Each site enforces its own" in section


def test_a_refusals_epsilon_stands_beside_what_it_means():
    """A site's refusal names its spend and its budget."""
    refused = {"site-b": "2 more steps would spend epsilon 2.2607 of 2.1 at delta 0.0001"}
    (plain,) = re.findall(r"<summary>Rounds.*?</section>", render(_run([{"round": 1}])), re.S)
    (told,) = re.findall(
        r"<summary>Rounds.*?</section>", render(_run([{"round": 1, "refused": refused}])), re.S
    )
    assert "per one record" in told
    assert "per one record" not in plain


def test_damaged_receipts_are_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n')
    (tmp_path / "ledger-receipts.json").write_text('{"a/b": {"epsilon": "x"}}')
    with pytest.raises(DataError, match=r"ledger-receipts\.json: 'a/b': 'epsilon': a number is needed"):
        read_run(tmp_path)


@pytest.mark.parametrize("hostile", ["a\u202eb", "a\u2066b", "a\x00b", "a\x1b[2Jb", "a\x9fb"])
def test_names_do_not_turn_around_or_hide_what_stands_beside_them(hostile):
    """A direction override in a client's name reversed the other names in its cell."""
    rounds = [
        {"round": number, "refused": {hostile: hostile}, "metrics": {hostile: 0.1 * number, "x": 0.2 * number},
         "epsilon_by_client": {hostile: float(number)}, "seconds": {hostile: 1.0}}
        for number in range(1, 4)
    ]  # fmt: skip
    told = {hostile: {"events": [], "epsilon_reported": 1.0}}
    data = _run(rounds, clients=told, partition={"clients": {hostile: {hostile: 3}}})
    data = RunData(**{**vars(data), "summary": {**data.summary, "run_id": hostile, "warnings": [hostile]}})
    pages = [render(data), render_comparison([data, data])]
    for page in pages:
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)
        assert "a\ufffd" in page
    assert hostile in _embedded(pages[0])["clients"]  # as it is, escaped
