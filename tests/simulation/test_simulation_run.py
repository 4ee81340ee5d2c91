"""Whole simulations of a tiny model in one process: spending, refusal, resume, what a run leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import dp_event, pld
from scipy.stats import binom
from simulation_helpers import configuration, container, metric_lines

from fedlora.config import config_from_container, load_config
from fedlora.errors import CheckpointError, ConfigError, DataError, TooFewRepliesError
from fedlora.ledger import Account, load_secret, open_ledger
from fedlora.simulation.appdir import find_app_dir, load_module
from fedlora.simulation.prepare import chance_of_enough, make_federation
from fedlora.simulation.run import num_workers, simulate


def run(world: Path, runs: Path, **changes: Any) -> Any:
    return simulate(configuration(world, runs, **changes), in_process=True)


def epsilon_by_hand(sigma: float, rate: float, steps: int, delta: float) -> float:
    accountant = pld.PLDAccountant()
    accountant.compose(
        dp_event.SelfComposedDpEvent(
            dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma)), steps
        )
    )
    return float(accountant.get_epsilon(delta))


def reports(runs: Path) -> dict[str, Any]:
    ledger = open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key"), read_only=True)
    with ledger:
        return {account.client: ledger.report(account) for account in ledger.accounts()}


def test_a_run_trains_and_leaves_everything_behind(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path)
    assert (result.status, result.rounds) == ("finished", 4)
    lines = metric_lines(result.folder)
    assert [line["round"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["accepted"] == 4 for line in lines[1:])
    assert len({line["adapter"] for line in lines}) == 5, "every round must change the adapter"
    names = {path.name for path in result.folder.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "ledger.json", "ledger-mirror.json", "environment.json",
                     "summary.json", "adapter", "adapter.flr", "checkpoints"}  # fmt: skip
    assert load_config(result.folder / "config.yaml").privacy.unit == "record"
    assert any("NO PRIVACY" in line for line in result.warnings)


@pytest.mark.parametrize(("rounds", "steps"), [(4, 1), (3, 2), (1, 3)])
def test_h12_epsilon_accumulates_over_rounds(world: Path, tmp_path: Path, rounds: int, steps: int) -> None:
    changes = {"federation": {"rounds": rounds}, "training": {"steps_per_round": steps}}
    result = run(world, tmp_path, **changes)
    expected = epsilon_by_hand(1.0, 0.2, rounds * steps, 1e-4)
    assert result.epsilon == pytest.approx(expected, rel=2e-3)
    assert result.epsilon >= expected - 1e-9
    seen = [line["epsilon"] for line in metric_lines(result.folder)[1:] if line["epsilon"] is not None]
    assert seen == sorted(seen)
    assert seen[-1] == result.epsilon
    for report in reports(tmp_path).values():
        assert sum(row.steps_charged for row in report.rounds) == rounds * steps
        assert all(row.state == "committed" for row in report.rounds)


@pytest.mark.parametrize(("batch", "nominal", "epochs"), [(10, 100, 2), (8, 40, 1), (8, 44, 1)])
def test_h41_the_ledger_counts_the_steps_really_taken(
    world: Path, tmp_path: Path, batch: int, nominal: int, epochs: int
) -> None:
    training = {"expected_batch_size": batch, "nominal_records": nominal, "steps_per_round": None,
                "epochs_per_round": epochs}  # fmt: skip
    run(world, tmp_path, training=training, federation={"rounds": 2})
    per_epoch = -(-nominal // batch)
    for report in reports(tmp_path).values():
        assert sum(row.steps_charged for row in report.rounds) == 2 * epochs * per_epoch


def test_a_second_run_continues_the_spending_and_is_refused_when_the_budget_is_gone(
    world: Path, tmp_path: Path
) -> None:
    once = epsilon_by_hand(1.0, 0.2, 4, 1e-4)
    budget = {"budget": {"epsilon": once * 1.02, "delta": 1e-4, "on_exhausted": "refuse"}}
    first = run(world, tmp_path, privacy=budget)
    assert first.status == "finished"
    second = run(world, tmp_path, privacy=budget)
    assert second.status == "budget-exhausted"
    line = metric_lines(second.folder)[-1]
    assert len(line["refused"]) == 4
    assert line["accepted"] == 0
    assert "epsilon" in next(iter(line["refused"].values()))


def test_a_budget_in_the_middle_lets_the_rounds_before_it_count(world: Path, tmp_path: Path) -> None:
    two = epsilon_by_hand(1.0, 0.2, 2, 1e-4)
    budget = {"budget": {"epsilon": two * 1.01, "delta": 1e-4, "on_exhausted": "refuse"}}
    result = run(world, tmp_path, privacy=budget)
    assert result.status == "budget-exhausted"
    assert [line["accepted"] for line in metric_lines(result.folder)] == [0, 4, 4, 0]
    assert result.epsilon <= two * 1.01


def test_two_seeded_runs_are_bit_identical(world: Path, tmp_path: Path) -> None:
    one, two = run(world, tmp_path / "a"), run(world, tmp_path / "b")
    left, right = metric_lines(one.folder), metric_lines(two.folder)
    assert [line["adapter"] for line in left] == [line["adapter"] for line in right]
    assert (one.folder / "adapter.flr").read_bytes() == (two.folder / "adapter.flr").read_bytes()


@pytest.mark.parametrize("unit", ["os", "seed"])
def test_h23_real_noise_differs_between_runs_and_a_changed_seed_changes_the_rest(
    world: Path, tmp_path: Path, unit: str
) -> None:
    privacy = {"noise_source": "os"} if unit == "os" else {}
    one = run(world, tmp_path / "a", privacy=privacy, federation={"rounds": 1})
    other = {"seed": 4} if unit == "seed" else {}
    two = run(world, tmp_path / "b", privacy=privacy, federation={"rounds": 1}, run=other)
    assert metric_lines(one.folder)[1]["adapter"] != metric_lines(two.folder)[1]["adapter"]


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "server-adam"])
def test_h35_a_resumed_run_is_bit_identical(world: Path, tmp_path: Path, stop: int, optimizer: str) -> None:
    changes: dict[str, Any] = {}
    if optimizer == "server-adam":
        changes = {"training": {"optimizer": {"kind": "sgd", "lr": 0.1}},
                   "federation": {"server_optimizer": {"kind": "adam", "lr": 0.1}}}  # fmt: skip
    whole = run(world, tmp_path / "whole", **changes)
    part = simulate(configuration(world, tmp_path / "part", **changes), in_process=True, stop_after=stop)
    assert part.status == "stopped"
    resumed = simulate(resume=part.folder, in_process=True)
    assert resumed.status == "finished"
    assert resumed.folder == part.folder
    left, right = metric_lines(whole.folder), metric_lines(resumed.folder)
    assert [line["round"] for line in right] == [0, 1, 2, 3, 4]
    assert [line["adapter"] for line in left] == [line["adapter"] for line in right]
    assert [line["epsilon"] for line in left] == [line["epsilon"] for line in right]


def test_h35_a_truncated_checkpoint_costs_one_round(world: Path, tmp_path: Path) -> None:
    whole = run(world, tmp_path / "whole")
    part = simulate(configuration(world, tmp_path / "part"), in_process=True, stop_after=3)
    newest = part.folder / "checkpoints" / "round-000003.ckpt"
    newest.write_bytes(newest.read_bytes()[:-20])
    resumed = simulate(resume=part.folder, in_process=True)
    assert [line["adapter"] for line in metric_lines(whole.folder)] == [
        line["adapter"] for line in metric_lines(resumed.folder)
    ]
    for report in reports(tmp_path / "part").values():
        # rounds charged <= rounds run + 1: round 3 ran twice and is charged twice
        assert sum(row.steps_charged for row in report.rounds) == 5


@pytest.mark.parametrize("mechanism", ["lora_fa", "none"])
def test_h35_a_resumed_run_repeats_its_dropout_masks(world: Path, tmp_path: Path, mechanism: str) -> None:
    """Masks came from the process's own generator; a private run with dropout did not even start."""
    folders = []
    for stop in (None, 2):
        values = container(world, tmp_path / str(stop), adapter={"dropout": 0.3})
        if mechanism == "none":
            values |= {"mechanism": {"kind": "none"}, "privacy": {"unit": "none"}}
            values["federation"]["aggregation"] = {"kind": "product"}
        folders.append(simulate(config_from_container(values), in_process=True, stop_after=stop).folder)
    simulate(resume=folders[1], in_process=True)
    whole, resumed = ([line["adapter"] for line in metric_lines(folder)] for folder in folders)
    assert whole == resumed


@pytest.mark.parametrize("asked", ["all", 2])
def test_h35_an_interrupted_round_beside_a_damaged_checkpoint_keeps_the_optimiser_state(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    """The states of the last two rounds were all that was left; the checkpoint before them asked for a third."""
    changes = {"federation": {"rounds": 5, "clients_per_round": asked}}
    whole = run(world, tmp_path / "whole", **changes)
    loop: Any = load_module(find_app_dir(), "server.loop")
    plain = loop.save

    def interrupted(folder: Path, checkpoint: Any) -> None:
        if checkpoint.round == 4:
            raise KeyboardInterrupt
        plain(folder, checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(world, tmp_path / "part", **changes)
    [folder] = (path for path in (tmp_path / "part").iterdir() if path.is_dir())
    newest = folder / "checkpoints" / "round-000003.ckpt"
    newest.write_bytes(newest.read_bytes()[:-20])
    resumed = simulate(resume=folder, in_process=True)
    assert [line["adapter"] for line in metric_lines(resumed.folder)] == [
        line["adapter"] for line in metric_lines(whole.folder)
    ]


def test_resume_needs_a_run_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.yaml is not there"):
        simulate(resume=tmp_path, in_process=True)


@pytest.mark.parametrize(
    ("mechanism", "aggregation"),
    [("prism", "tangent"), ("factor", "product"), ("factor", "stack"), ("none", "product")],
)
def test_other_mechanisms_run_end_to_end(
    world: Path, tmp_path: Path, mechanism: str, aggregation: str
) -> None:
    changes: dict[str, Any] = {
        "mechanism": {"kind": mechanism},
        "federation": {"rounds": 2, "aggregation": {"kind": aggregation}},
    }
    values = container(world, tmp_path, **changes)
    if mechanism == "none":
        values["privacy"] = {"unit": "none"}
    result = simulate(config_from_container(values), in_process=True)
    assert (result.status, result.rounds) == ("finished", 2)
    assert (result.epsilon is None) == (mechanism == "none")


def test_h24_the_base_model_is_kept_between_rounds(world: Path, tmp_path: Path) -> None:
    import fedlora.training.trainer as trainer_module

    built: list[int] = []
    original = trainer_module.build_workbench

    def counting(config: Any) -> Any:
        built.append(1)
        return original(config)

    trainer_module.build_workbench = counting  # type: ignore[assignment]
    try:
        result = run(world, tmp_path)
    finally:
        trainer_module.build_workbench = original
    assert result.rounds == 4
    assert len(built) == 1


@pytest.mark.parametrize("records", [1, 2, 4])
def test_h16_tiny_clients_send_noise_for_empty_draws_and_are_charged(
    world: Path, tmp_path: Path, records: int
) -> None:
    rows = (world / "train.jsonl").read_text().splitlines()[: 2 * records]
    small = tmp_path / "small.jsonl"
    small.write_text("\n".join(rows) + "\n")
    changes = {
        "data": {
            "source": {"kind": "file", "paths": [str(small)]},
            "partition": {"kind": "quantity", "clients": 2},
        },
        "training": {"expected_batch_size": 1, "nominal_records": 30},
    }
    changes["data"]["labels"] = ["cold", "warm"]
    result = run(world, tmp_path, **changes)
    lines = metric_lines(result.folder)
    assert [line["accepted"] for line in lines[1:]] == [2, 2, 2, 2]
    assert len({line["adapter"] for line in lines}) == 5
    for report in reports(tmp_path).values():
        assert sum(row.steps_charged for row in report.rounds) == 4


def test_h15_the_divisor_does_not_follow_the_record_count(world: Path, tmp_path: Path) -> None:
    from fedlora.simulation.prepare import complete, make_federation

    prepared = complete(make_federation(configuration(world, tmp_path)).config)
    assert prepared.bench.mechanism.privacy.divisor == 8.0
    assert prepared.bench.mechanism.privacy.sample_rate == 0.2


def test_too_few_replies_end_the_run_by_name(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedlora.simulation.run._CHECK_SECONDS", -1.0)  # no record is reached before a draw
    broken = tmp_path / "broken.jsonl"
    rows = (world / "train.jsonl").read_text().splitlines()
    broken.write_text("\n".join(rows[:60] + ['{"text": "red", "label": "warm", "user": 5}'] * 4) + "\n")
    data = {
        "source": {"kind": "file", "paths": [str(broken)]},
        "labels": ["warm", "other"],
        "public_eval": None,
    }
    changes = {"federation": {"min_replies": 4}, "data": data}
    with pytest.raises(TooFewRepliesError, match="rounds in a row"):
        run(world, tmp_path, **changes)
    folder = next(path for path in tmp_path.iterdir() if path.name.startswith("tiny-"))
    assert json.loads((folder / "summary.json").read_text())["status"] == "failed"
    lines = metric_lines(folder)
    assert [line["status"] for line in lines] == ["initial", "skipped", "skipped", "skipped"]
    assert len({line["adapter"] for line in lines}) == 1
    for reason in lines[1]["failed"].values():
        assert "row" not in reason, "file and row stay in the trainer's own log"


def test_a_record_that_does_not_fit_ends_a_run_before_its_first_round(world: Path, tmp_path: Path) -> None:
    data = {"labels": ["warm", "other"], "public_eval": None}
    with pytest.raises(DataError, match="row"):
        run(world, tmp_path, data=data)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [], "no run folder is left"


def test_workers_follow_the_configuration(world: Path, tmp_path: Path) -> None:
    config = configuration(world, tmp_path, simulation={"workers": 3})
    assert num_workers(config, 10) == 3
    assert num_workers(config, 2) == 2
    assert num_workers(configuration(world, tmp_path, simulation={"workers": "auto"}), 1) == 1


def test_a_client_sampled_by_share_may_be_nobody(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path, federation={"clients_per_round": 3, "min_replies": 1})
    assert [line["asked"] for line in metric_lines(result.folder)[1:]] == [3, 3, 3, 3]
    assert Account("client-0000", "words-2026") is not None


def test_the_adapters_card_states_the_runs_epsilon(world: Path, tmp_path: Path) -> None:
    result = run(world, tmp_path, privacy={"noise_source": "os"})
    card = (result.adapter / "README.md").read_text()
    assert f"{result.epsilon:.4g}" in card
    assert "not stated here" not in card


@pytest.mark.parametrize(
    ("asked", "least", "hopeless"),
    [(0.001, 1, True), (1e-9, 1, True), (0.1, 3, True), (0.5, 1, False), (0.25, 3, False), (1.0, 4, False)],
)
def test_a_share_that_hardly_ever_samples_enough_clients_is_refused_before_anything_is_spent(
    world: Path, tmp_path: Path, asked: float, least: int, hopeless: bool
) -> None:
    config = configuration(
        world, tmp_path, federation={"clients_per_round": asked, "min_replies": least, "rounds": 1}
    )
    if not hopeless:
        assert len(make_federation(config).parts) == 4
        return
    with pytest.raises(ConfigError, match="hardly ever be reached"):
        simulate(config, in_process=True)
    assert list(tmp_path.iterdir()) == []


def test_the_chance_of_enough_clients_is_the_binomial_one() -> None:
    for clients, share, least in [(4, 0.001, 1), (10_000, 0.5, 5_000), (10_000, 0.5, 6_000), (3, 0.25, 3)]:
        exact = float(binom.sf(least - 1, clients, share))
        assert chance_of_enough(clients, share, least) == pytest.approx(exact, rel=1e-6, abs=1e-9)


def test_records_of_one_label_are_no_regression_by_accident(world: Path, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_text('{"text": "red", "label": "warm"}\n' * 20)
    data = {"source": {"paths": [str(path)]}}
    with pytest.raises(DataError, match="one label only"):
        run(world, tmp_path / "runs", data=data)
    both = {**data, "labels": ["cold", "warm"]}
    assert run(world, tmp_path / "runs", data=both, federation={"rounds": 1}).status == "finished"
