"""Run folders that are damaged, unfinished or failed: named, or shown with what is known, never a wrong word."""

from __future__ import annotations

import html
import json
import re

import pytest
from simulation_helpers import configuration
from typer.testing import CliRunner

from fedlora.cli.compare import app as compare_app
from fedlora.errors import DataError, FedLoraError
from fedlora.report.compare import comparison, render_comparison
from fedlora.report.conditions import conditions_line
from fedlora.report.html import lower, number, upper
from fedlora.report.page import derived, render
from fedlora.report.run_data import read_run
from fedlora.simulation.run import simulate


@pytest.fixture(scope="module")
def finished(tiny_world, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    return simulate(configuration(tiny_world, runs, privacy={"noise_source": "os"}), in_process=True).folder


@pytest.fixture
def folder(finished, tmp_path):
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "ledger.json",
        "ledger-mirror.json",
        "partition.json",
        "environment.json",
    ):
        (tmp_path / name).write_bytes((finished / name).read_bytes())
    return tmp_path


def _round(**changes):
    def damage(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        lines[-1] = json.dumps({**json.loads(lines[-1]), **changes})
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    return damage


def _file(name, content):
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / name).write_bytes(raw)


DAMAGE = {
    "bytes": (_file("metrics.jsonl", b"\xff\xfe\n{}"), "line 1"),
    "a list for a round": (_file("metrics.jsonl", b"[1]\n"), "line 1"),
    "no round number": (_file("metrics.jsonl", b'{"a": 1}\n'), "'round': is missing"),
    "text for a round number": (_round(round="x"), "'round'"),
    "a round below zero": (_round(round=-1), "'round'"),
    "no JSON number": (_round(metrics={"accuracy": float("nan")}), "not JSON"),
    "no finite number": (_round(epsilon=float("inf")), "not JSON"),
    "a number beyond all figures": (_round(metrics={"accuracy": 10**400}), "a number is needed"),
    "a list for metrics": (_round(metrics=[1]), "'metrics': an object is needed"),
    "text for seconds": (_round(seconds={"clients": "x"}), "'seconds'"),
    "less than no time": (_round(seconds={"clients": -1.0}), "a number >= 0"),
    "a list for refusals": (_round(refused=["a"]), "'refused'"),
    "text for bytes": (_round(bytes_up="x"), "'bytes_up'"),
    "text for diagnostics": (_round(diagnostics="x"), "'diagnostics'"),
    "a list of epsilons": (_round(epsilon_by_client=[1]), "'epsilon_by_client'"),
    "a list for a summary": (_file("summary.json", [1]), "summary.json"),
    "text for a statement": (_file("summary.json", {"statement": "x"}), "'statement'"),
    "text for a delta": (_file("summary.json", {"statement": {"delta": "x"}}), "'delta'"),
    "truth for an epsilon": (_file("summary.json", {"epsilon": True}), "'epsilon'"),
    "text for warnings": (_file("summary.json", {"warnings": "x"}), "'warnings'"),
    "depth without end": (_file("summary.json", b'{"a":' * 100_000), "summary.json"),
    "text for events": (_file("ledger-mirror.json", {"c": {"events": "x"}}), "'events'"),
    "text for steps": (_file("ledger-mirror.json", {"c": {"events": [{"steps": "x"}]}}), "'steps'"),
    "a list for a client": (_file("ledger-mirror.json", {"c": [1]}), "ledger-mirror.json"),
    "text for accounts": (_file("ledger.json", {"accounts": "xyz"}), "'accounts'"),
    "text for a budget": (_file("ledger.json", {"accounts": [{"budget": "x"}]}), "'budget'"),
    "text for a count": (_file("partition.json", {"clients": {"a": {"b": "x"}}}), "partition.json"),
    "text for an audit's conditions": (_file("audit-x.json", {"conditions": "x"}), "'conditions'"),
    "no number of an audit": (_file("audit-x.json", b'{"lower_bound": NaN}'), "audit-x.json"),
    "text for a specification": (_file("specifications.json", {"specifications": [3]}), "specifications"),
    "a list for the environment": (_file("environment.json", [1]), "environment.json"),
}


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_damage_is_named(folder, name):
    damage, said = DAMAGE[name]
    damage(folder)
    with pytest.raises(DataError, match=re.escape(said)):
        read_run(folder)


def test_what_is_merely_odd_is_shown(folder):
    """Infinite figures are text in JSON; half a surrogate pair can be told but not written."""
    _round(epsilon="inf", epsilon_by_client={"client-0000": "inf"})(folder)
    summary = {**json.loads((folder / "summary.json").read_text()), "epsilon": "inf", "run_id": "\ud800x"}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "config.yaml").write_bytes(b"\xff\xfe")
    (folder / "audit-x.json").mkdir()
    page = render(read_run(folder))
    assert page.encode("utf-8")
    assert ">inf<" in page
    assert render_comparison([read_run(folder)] * 2).encode("utf-8")


# -- runs without an end ----------------------------------------------------------------------------------------


def _texts(page):
    sections = re.findall(r"<section>.*?</section>", page, re.S)
    showing = [one for one in sections if "epsilon" in one and "pre>" not in one]
    return [html.unescape(re.sub(r"<[^>]*>", " ", one)) for one in showing]


WORDS = ("record", "add_or_remove", "the server included", "0.0001", "best", "Poisson")


@pytest.mark.parametrize("summary", [None, {"status": "failed", "error": "DiskFull", "message": "no room"}])
def test_the_epsilon_of_a_run_without_an_end_keeps_its_meaning(folder, summary):
    """What it means stands in the configuration; it is no run without privacy."""
    (folder / "ledger-mirror.json").unlink()
    (folder / "ledger.json").unlink()
    if summary is None:
        (folder / "summary.json").unlink()
    else:
        (folder / "summary.json").write_text(json.dumps(summary))
    data = read_run(folder)
    largest = max(line["epsilon"] for line in data.rounds if line.get("epsilon") is not None)
    assert data.epsilon == derived(data)["epsilon"] == largest
    page = render(data)
    assert "largest epsilon of a client, so far" in page
    assert "no privacy" not in page
    texts = _texts(page)
    assert len(texts) >= 3
    for text in texts:
        for word in WORDS:
            assert word in text, (word, text[:200])
    (row,) = comparison([data])
    assert row["epsilon"] == largest
    assert all(word in row["epsilon_means"] for word in WORDS)
    assert row["status"] == ("not ended" if summary is None else "failed")
    if summary is not None:
        assert "DiskFull: no room" in page


@pytest.mark.parametrize("written", [True, False], ids=["no rounds", "no file of rounds"])
def test_a_private_run_that_failed_before_its_first_round_is_not_called_one_without_privacy(folder, written):
    (folder / "metrics.jsonl").write_text("") if written else (folder / "metrics.jsonl").unlink()
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "error": "E", "message": "m"}))
    for name in ("ledger-mirror.json", "ledger.json"):
        (folder / name).unlink()
    page = render(read_run(folder))
    assert "No epsilon is known: no round has said one yet" in page
    assert "no privacy guarantee" not in page
    assert "not known" in page


def test_a_private_run_that_ended_without_an_epsilon_is_not_trusted(folder):
    summary = {**json.loads((folder / "summary.json").read_text()), "epsilon": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "states no epsilon: take it as one that has no privacy guarantee" in render(read_run(folder))


def test_no_statement_is_not_no_privacy():
    assert conditions_line({}) == "what it means is not stated"


# -- rounding ---------------------------------------------------------------------------------------------------


def test_no_epsilon_is_shown_below_its_value(folder):
    for value, shown in ((7.99949, "8"), (7.9991, "8"), (2.00001, "2.001"), (0.12341, "0.1235")):
        assert number(upper(value)) == shown
    assert number(lower(2.9999)) == "2.999"
    assert number(upper(None)) == "-"
    summary = {**json.loads((folder / "summary.json").read_text()), "epsilon": 7.12341}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "audit-x.json").write_text(
        json.dumps({"attack": "x", "claimed_epsilon": 3.00001, "lower_bound": 1.99999})
    )
    page = render(read_run(folder))
    assert "epsilon 7.124:" in page
    assert ">7.12341<" in page
    assert ">3.001<" in page
    assert ">1.999<" in page
    assert ">7.124<" in render_comparison([read_run(folder)])


# -- the command ------------------------------------------------------------------------------------------------


def test_names_in_a_run_folder_do_not_steer_a_terminal(folder):
    summary = {
        **json.loads((folder / "summary.json").read_text()),
        "run_id": "\x1b[2Jgone\x07",
        "epsilon": 1.00000001,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    result = CliRunner().invoke(compare_app, [str(folder)])
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "run=?[2Jgone?" in result.output
    assert "epsilon=1.00001" in result.output


def test_a_metric_cannot_take_the_place_of_a_runs_epsilon(folder):
    summary = json.loads((folder / "summary.json").read_text())
    summary["metrics"] = {"epsilon": 0.001, "accuracy": 0.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    (row,) = comparison([read_run(folder)])
    assert row["epsilon"] == summary["epsilon"]
    assert row["accuracy"] == 0.5


def test_other_folders_end_with_an_error_of_their_own(tmp_path):
    result = CliRunner().invoke(compare_app, [str(tmp_path)])
    assert isinstance(result.exception, FedLoraError)
