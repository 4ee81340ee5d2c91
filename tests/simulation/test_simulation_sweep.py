"""Sweeps: what is tried, resuming, early stopping, one ledger, table and plot."""

from __future__ import annotations

import csv
import io
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from simulation_helpers import container

from fedlora.accounting import PoissonGaussianEvent, epsilon_of
from fedlora.cli.main import main
from fedlora.cli.sweep import parse_grid, parse_ranges, parse_seeds
from fedlora.config import load_config
from fedlora.errors import ConfigError
from fedlora.simulation.clients_ledger import largest_spending
from fedlora.simulation.settings import RoundRecord
from fedlora.simulation.sweep import (
    MedianRule,
    SweepPlan,
    TrialResult,
    finished_trials,
    plan_trials,
    run_sweep,
)
from fedlora.simulation.sweep_report import plot_svg, points, table_csv, table_text


def write_config(world: Path, root: Path, **changes: Any) -> str:
    path = root / "run.yaml"
    values = container(world, root / "runs", federation={"rounds": 2}, **changes)
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_a_grid_combines_everything_and_draws_repeat() -> None:
    plan = SweepPlan("x", grid={"a": ["1", "2"], "b": ["x", "y", "z"]}, seeds=(1, 2))
    trials = plan_trials(plan)
    assert len(trials) == 12
    assert len({trial.name for trial in trials}) == 12
    drawn = SweepPlan("x", random={"lr": (1e-3, 1e-1, True)}, samples=5, seeds=(1,))
    assert plan_trials(drawn) == plan_trials(drawn)
    values = [float(trial.overrides[0].split("=")[1]) for trial in plan_trials(drawn)]
    assert all(1e-3 <= value <= 1e-1 for value in values)
    assert len(set(values)) == 5


@pytest.mark.parametrize("bad", [(1.0, 1.0, False), (0.0, 1.0, True), (float("nan"), 1.0, False)])
def test_a_malformed_range_is_refused(bad: tuple[float, float, bool]) -> None:
    with pytest.raises(ConfigError, match="range of lr"):
        plan_trials(SweepPlan("x", random={"lr": bad}))


def test_the_command_reads_its_options() -> None:
    assert parse_grid(["a.b=1,2", "c=x"]) == {"a.b": ("1", "2"), "c": ("x",)}
    assert parse_ranges(["lr=1e-3:1e-1:log"]) == {"lr": (1e-3, 1e-1, True)}
    assert parse_seeds("1, 2") == (1, 2)
    lists = parse_grid(["t=[query,value],[query]", "p={a: 4, b: [1,2]}, {a: 2}"])
    assert lists == {"t": ("[query,value]", "[query]"), "p": ("{a: 4, b: [1,2]}", "{a: 2}")}
    for bad in ("a", "=1", "a="):
        with pytest.raises(ConfigError):
            parse_grid([bad])
    for parse, twice in ((parse_grid, ["a=1", "a=2"]), (parse_ranges, ["a=1:2", "a=2:3"])):
        with pytest.raises(ConfigError, match="a: given twice"):
            parse(twice)
    for bad in ("lr=1", "lr=a:b", "lr=1:2:3", "lr=1:2:log:x"):
        with pytest.raises(ConfigError):
            parse_ranges([bad])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": (1, 2, 1)}, "seed 1 occurs twice"),
        ({"grid": {"a": ["1", "1"]}}, "a=1 seed 42 occurs twice"),
        ({"grid": {"a": ["1"]}, "random": {"a": (1.0, 2.0, False)}}, "a has values and a range"),
        ({"grid": {"run.seed": ["1", "2"]}}, "run.seed is set .* use --seeds"),
        ({"random": {"run.dir": (1.0, 2.0, False)}}, "run.dir is set"),
    ],
)
def test_what_would_be_charged_twice_or_have_no_effect_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    """A seed named twice was charged twice and shown as two runs without spread; run.seed changed nothing."""
    with pytest.raises(ConfigError, match=message):
        plan_trials(SweepPlan("x", **changes))


@pytest.mark.parametrize(
    ("metric", "public", "message"),
    [("acuracy", {}, "'acuracy' is not among accuracy, loss"), ("accuracy", None, "public_eval: missing")],
)
def test_a_sweep_that_could_compare_nothing_charges_nothing(
    world: Path, tmp_path: Path, metric: str, public: Any, message: str
) -> None:
    """Every trial ran, spent the budget, and the table was empty."""
    config = write_config(world, tmp_path, data={"public_eval": public})
    [one] = run_sweep(SweepPlan(config, metric=metric), tmp_path / "sweep", in_process=True)
    assert one.status == "failed"
    assert message in one.error
    assert largest_spending(load_config(config)) is None


def test_what_failed_trials_spent_is_in_the_sweeps_ledger_line(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed trial has no epsilon of its own: the line said that nothing was spent."""
    broken = {
        "optimizer": {"kind": "sgd", "lr": 1e38}
    }  # every update overflows: refused after it was paid for
    config = write_config(world, tmp_path, training=broken)
    monkeypatch.setattr("fedlora.simulation.sweep.run_sweep", partial(run_sweep, in_process=True))
    assert main(["sweep", config, "--out", str(tmp_path / "sweep")]) == 80, "nothing finished"
    shown = capsys.readouterr().out
    assert "seed 42 TooFewRepliesError" in shown
    twice = epsilon_of(PoissonGaussianEvent(1.0, 0.2).times(2), 1e-4, adjacency="add_or_remove").epsilon
    assert largest_spending(load_config(config)) == pytest.approx(twice, rel=1e-3)
    assert "it adds up: epsilon 2.2" in shown


def test_a_sweep_whose_file_has_changed_does_not_go_on_with_the_earlier_results(
    world: Path, tmp_path: Path
) -> None:
    """The same command after an edit showed the old table at once, as if it were the new settings'."""
    config = write_config(world, tmp_path)
    run_sweep(SweepPlan(config), tmp_path / "sweep", in_process=True)
    write_config(world, tmp_path, training={"steps_per_round": 2})
    with pytest.raises(ConfigError, match="the file has changed"):
        run_sweep(SweepPlan(config), tmp_path / "sweep", in_process=True)


def test_trials_add_up_in_one_ledger_and_a_sweep_resumes(world: Path, tmp_path: Path) -> None:
    plan = SweepPlan(
        write_config(world, tmp_path), grid={"training.optimizer.lr": ["0.01", "0.1"]}, seeds=(1,)
    )
    out = tmp_path / "sweep"
    results = run_sweep(plan, out, in_process=True)
    assert [one.status for one in results] == ["finished", "finished"]
    assert results[0].epsilon == pytest.approx(results[1].epsilon)
    assert results[1].spent is not None
    assert results[0].spent is not None
    assert results[1].spent > results[0].spent
    lines = (out / "trials.jsonl").read_text().splitlines()
    (out / "trials.jsonl").write_text(lines[0] + "\n" + lines[1][:30])
    seen: list[str] = []
    again = run_sweep(
        plan, out, in_process=True, progress=lambda result, done, total: seen.append(result.name)
    )
    assert seen == [results[1].name], "only the trial whose line was cut runs again"
    assert [one.name for one in again] == [one.name for one in results]


def test_a_sweep_ends_where_the_budget_ends_and_public_data_has_a_ledger_per_trial(
    world: Path, tmp_path: Path
) -> None:
    once = epsilon_of(PoissonGaussianEvent(1.0, 0.2).times(2), 1e-4, adjacency="add_or_remove").epsilon
    tight = {"privacy": {"budget": {"epsilon": 1.02 * once, "delta": 1e-4, "on_exhausted": "refuse"}}}
    for public, expected in ((False, ["finished", "budget-exhausted"]), (True, ["finished", "finished"])):
        root = tmp_path / str(public)
        root.mkdir()
        config = write_config(world, root, data={"marked_public": public}, **tight)
        results = run_sweep(SweepPlan(config, seeds=(1, 2)), root / "sweep", in_process=True)
        assert [one.status for one in results] == expected


def test_a_failing_trial_is_a_result(world: Path, tmp_path: Path) -> None:
    plan = SweepPlan(write_config(world, tmp_path), grid={"adapter.rank": ["2", "-1"]})
    results = run_sweep(plan, tmp_path / "sweep", in_process=True)
    assert [one.status for one in results] == ["finished", "failed"]
    assert results[1].error.startswith("ConfigError: ")
    assert "adapter.rank" in results[1].error, "the problem itself, not only how many there are"


def test_a_trial_that_fails_by_a_foreign_error_is_a_result_without_its_text(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of foreign errors may quote records; the trials after it still run."""
    from fedlora.simulation import run

    plain, left = run.simulate, [RuntimeError("private words"), MemoryError("private words")]

    def broken(*values: Any, **options: Any) -> Any:
        if left:
            raise left.pop(0)
        return plain(*values, **options)

    monkeypatch.setattr(run, "simulate", broken)
    results = run_sweep(
        SweepPlan(write_config(world, tmp_path), seeds=(1, 2, 3)), tmp_path / "sweep", in_process=True
    )
    assert [(one.status, one.error) for one in results] == [
        ("failed", "RuntimeError"), ("failed", "MemoryError"), ("finished", ""),
    ]  # fmt: skip
    assert "private" not in (tmp_path / "sweep" / "trials.jsonl").read_text()


@pytest.mark.parametrize(
    "line", ["12", "[]", "null", '{"name": "x"}', '{"overrides": 3}', '{"name": "a", "over']
)
def test_a_damaged_line_of_a_sweep_is_no_finished_trial(tmp_path: Path, line: str) -> None:
    (tmp_path / "trials.jsonl").write_text(line + "\n")
    assert finished_trials(tmp_path) == {}


def test_another_sweep_does_not_go_on_in_the_same_folder(world: Path, tmp_path: Path) -> None:
    config = write_config(world, tmp_path)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"config": "other"}))
    with pytest.raises(ConfigError, match="another sweep"):
        run_sweep(SweepPlan(config), tmp_path / "sweep", in_process=True)


def test_the_median_rule_stops_the_worst_only(tmp_path: Path) -> None:
    rules = {name: MedianRule(tmp_path, name, "accuracy", True, rounds=9) for name in "abcd"}
    values = {"a": 0.9, "b": 0.8, "c": 0.85, "d": 0.3}
    told = {name: rules[name](RoundRecord(5, "ok", metrics={"accuracy": values[name]})) for name in "abcd"}
    assert told == {"a": False, "b": False, "c": False, "d": True}
    assert rules["d"](RoundRecord(0, "initial", metrics={"accuracy": 0.0})) is False
    assert rules["d"](RoundRecord(6, "ok", metrics=None)) is False


def test_a_trial_below_the_others_ends_and_says_so_unless_its_rounds_are_all_done(
    world: Path, tmp_path: Path
) -> None:
    config = write_config(world, tmp_path, data={"public_eval": {"every_rounds": 1}})
    last = load_config(config).federation.rounds
    for marked, status, rounds in ((1, "below-median", 1), (last, "finished", last)):
        out = tmp_path / f"sweep-{marked}"
        (out / "marks").mkdir(parents=True)
        for other in "abc":
            (out / "marks" / f"{other}.json").write_text(json.dumps({str(marked): 2.0}))
        (trial,) = run_sweep(SweepPlan(config, early_stopping=True), out, in_process=True)
        assert (trial.status, trial.rounds) == (status, rounds), trial.error


def result(name: str, mechanism: str, epsilon: float | None, accuracy: float, seed: int) -> TrialResult:
    return TrialResult(name, (f"e={epsilon}",), seed, "finished", mechanism, {"accuracy": accuracy}, epsilon)


def test_a_trial_that_the_sweep_ended_early_is_not_in_its_configurations_mean() -> None:
    ended = replace(result("2", "lora_fa", 1.0, 0.1, 2), status="below-median", rounds=3)
    results = [result("1", "lora_fa", 1.0, 0.7, 1), ended]
    (only,) = points(results, "accuracy")
    assert (only.mean, only.runs) == (0.7, 1)
    assert table_text(results, "accuracy").splitlines()[-1] == (
        "below-median: e=1.0 seed 2 accuracy 0.1000 after round 3"
    )


def test_table_and_plot_show_spread_over_seeds() -> None:
    results = [
        result("1", "lora_fa", 3.0, 0.7, 1),
        result("2", "lora_fa", 3.0, 0.8, 2),
        result("3", "lora_fa", 8.0, 0.9, 1),
        result("4", "none", None, 0.95, 1),
        TrialResult("5", ("x=<1>",), 1, "failed", error="ConfigError: no"),
    ]
    first = points(results, "accuracy")[0]
    assert (first.mean, first.runs) == (pytest.approx(0.75), 2)
    assert first.spread == pytest.approx(0.0707, abs=1e-3)
    table = table_text(results, "accuracy")
    assert table.splitlines()[1].startswith("none")
    assert "failed: x=<1> seed 1 ConfigError: no" in table
    assert len(table_csv(results).splitlines()) == 6
    diverged = TrialResult("6", ("lr=9",), 2, "finished", "lora_fa", {"accuracy": 0.5}, 3.0)
    assert table_text([*results, diverged], "loss").splitlines()[-1] == "no loss in the end: lr=9 seed 2"
    drawing = ElementTree.fromstring(plot_svg(results, "accuracy"))
    assert len(drawing.findall("{http://www.w3.org/2000/svg}circle")) == 2 + 2
    ElementTree.fromstring(plot_svg([], "accuracy"))


def test_a_sweeps_table_and_plot_say_what_each_epsilon_means():
    means = {
        "delta": 1e-5,
        "unit": "one record, not one person",
        "adjacency": "add_or_remove",
        "adversary": "anyone who sees all updates",
        "accountant": "best",
        "sampling_assumption": "Poisson sampling at the public rate 0.2",
    }
    trial = TrialResult("1", (), 1, "finished", "lora_fa", {"accuracy": 0.5}, 3.0, 4.0, statement=means)
    (row,) = csv.DictReader(io.StringIO(table_csv([trial])))
    assert {name: row[name] for name in means} == {name: str(value) for name, value in means.items()}
    said = "epsilon: " + "; ".join(map(str, means.values()))
    drawn = ElementTree.fromstring(plot_svg([trial], "accuracy", said)).itertext()
    assert said in " ".join(drawn)
    old = TrialResult("1", (), 1, "finished")  # a file of an earlier version
    assert next(csv.DictReader(io.StringIO(table_csv([old]))))["unit"] == ""
