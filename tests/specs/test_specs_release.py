"""DP-S-PAVE from data: charged as one joint release before a record is read; used to start and to group runs."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from fedlora.accounting import PaveEvent, PaveLayer, PoissonGaussianEvent, epsilon_of
from fedlora.cli.main import main
from fedlora.config import config_from_container
from fedlora.errors import (
    BudgetExceededError,
    ConfigError,
    DataError,
    LayoutMismatchError,
    PrivacyError,
    UnsupportedEventError,
)
from fedlora.ledger import open_ledger
from fedlora.ledger.types import Account, Budget, Refusal, ReserveRequest
from fedlora.specs import shelves
from fedlora.specs.entries import read_entry, write_entry
from fedlora.specs.groups import cluster, group_specification, write_overlays
from fedlora.specs.intrinsic import IntrinsicConditions, analyse_intrinsic
from fedlora.specs.release import Label, check_configuration, release_specification
from fedlora.specs.runs import describe_run, run_statement
from fedlora.specs.shelves import local_trainer
from fedlora.specs.types import PrivacyStatement, Specification, statement_from_event

SECRET = b"0123456789abcdef0123456789abcdef"
CLIENT = "client-0001"
DELTA = 1e-4


@pytest.fixture(scope="module")
def helpers():
    folder = str(Path(__file__).parents[1] / "simulation")
    sys.path.insert(0, folder)
    try:
        import simulation_helpers
    finally:
        sys.path.remove(folder)
    return simulation_helpers


@pytest.fixture(scope="module")
def world(helpers, tmp_path_factory):
    return helpers.make_world(tmp_path_factory.mktemp("spec-world"))


@pytest.fixture
def values(helpers, world, tmp_path):
    """Plain values of a specification's configuration: 4 layers, 3 steps at rate .2."""
    made = helpers.container(world, tmp_path / "runs")
    made["adapter"] |= {"modules_to_save": [], "freeze_head": True}
    made["data"]["labels"] = ["cold", "warm"]
    made["mechanism"] = {"kind": "lora_fa", "per_layer_clip": True}
    made["privacy"] |= {
        "noise_multiplier": 4.0, "target_delta": DELTA, "noise_source": "os",
        "budget": {"epsilon": 50.0, "delta": DELTA, "on_exhausted": "refuse"},
    }  # fmt: skip
    made["training"] = {
        "expected_batch_size": 8, "nominal_records": 40, "steps_per_round": 3,
        "optimizer": {"kind": "sgd", "lr": 0.1},
    }  # fmt: skip
    made["federation"] |= {"rounds": 1, "min_replies": 1}
    return made


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(tmp_path / "ledger.sqlite", secret=SECRET) as book:
        yield book


def release(values, ledger, name="task-a", client=CLIENT, target="label"):
    config = config_from_container(values)
    return release_specification(
        config, Label(name), client, lambda resolved: local_trainer(resolved, client, ledger, target)
    )


def report_of(ledger, client=CLIENT):
    return ledger.report(Account(client, "words-2026"))


def joint_event(sigma=4.0, layers=4, rate=0.2):
    return PoissonGaussianEvent(sigma / math.sqrt(layers), rate)


# --- what is charged and stated -----------------------------------------------------------------------


def test_a_specification_is_charged_as_one_joint_release_of_all_layers(values, ledger):
    done = release(values, ledger)
    (row,) = report_of(ledger).rounds
    assert json.loads(row.event_json) == joint_event().to_json()
    assert (row.steps_charged, row.state) == (3, "committed")
    assert row.run_id.startswith("specification:task-a:")
    want = epsilon_of(joint_event().times(3), DELTA).epsilon
    said = done.specification.privacy
    assert said.epsilon == pytest.approx(want, rel=1e-9)
    assert done.account_epsilon == pytest.approx(want, rel=1e-9)
    assert said.epsilon > epsilon_of(PoissonGaussianEvent(4.0, 0.2).times(3), DELTA).epsilon
    assert (said.guarantee, said.unit, said.adjacency, said.num_events) == (
        "dp",
        "record",
        "add_or_remove",
        3,
    )
    assert "server included" in said.adversary
    assert "Poisson" in said.sampling
    assert any("4 layers" in text for text in said.conditions)
    assert any("public" in text for text in said.conditions)


def test_the_stated_epsilon_agrees_with_an_independent_accountant(values, ledger):
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    said = release(values, ledger).specification.privacy
    oracle = PLDAccountant(value_discretization_interval=1e-4)
    oracle.compose(dp_event.PoissonSampledDpEvent(0.2, dp_event.GaussianDpEvent(2.0)), 3)
    assert said.epsilon == pytest.approx(oracle.get_epsilon(DELTA), rel=2e-3)
    assert said.epsilon >= oracle.get_epsilon(DELTA) - 3e-4


def test_nothing_is_read_before_its_cost_is_durable(values, ledger, monkeypatch):
    seen = []

    def spy(data):
        seen.append([row.state for row in report_of(ledger).rounds])
        raise DataError("unreadable")

    monkeypatch.setattr(shelves, "load_rows", spy)
    with pytest.raises(DataError, match="trainer's own log"):
        release(values, ledger)
    assert seen == [["reserved"]]
    spent = report_of(ledger)
    assert spent.epsilon == pytest.approx(epsilon_of(joint_event().times(3), DELTA).epsilon, rel=1e-9)


def test_beyond_the_budget_nothing_is_read(values, ledger, monkeypatch):
    values["privacy"]["budget"]["epsilon"] = 0.5
    monkeypatch.setattr(shelves, "load_rows", lambda data: pytest.fail("records were read"))
    with pytest.raises(BudgetExceededError) as caught:
        release(values, ledger)
    assert caught.value.exit_code == BudgetExceededError.exit_code


def test_a_repeated_release_gives_the_same_bytes_and_costs_nothing(values, ledger):
    first, again = release(values, ledger), release(values, ledger)
    np.testing.assert_array_equal(first.specification.vector, again.specification.vector)
    assert len(report_of(ledger).rounds) == 1
    other = release(values, ledger, name="task-b")
    assert not np.array_equal(first.specification.vector, other.specification.vector)
    assert len(report_of(ledger).rounds) == 2
    values["training"]["steps_per_round"] = 4
    release(values, ledger)
    assert [row.steps_charged for row in report_of(ledger).rounds] == [3, 3, 4]


def test_a_kept_reply_of_another_request_is_not_taken_for_the_release(values, ledger):
    from dataclasses import replace

    from fedlora.errors import LedgerError

    class Other:
        """Answers as a ledger would that keeps a release with less noise under the same name."""

        def __init__(self, inner):
            self.inner = inner

        def handle(self, request):
            whole = self.inner.handle(request)
            event = PoissonGaussianEvent(0.1, 0.2).to_json()
            return replace(whole, replies=tuple(replace(one, event=event) for one in whole.replies))

    with pytest.raises(LedgerError, match="another release"):
        release_specification(
            config_from_container(values),
            Label("x"),
            CLIENT,
            lambda resolved: Other(local_trainer(resolved, CLIENT, ledger, "label")),
        )


def test_without_a_ledger_a_private_specification_is_refused(values):
    with pytest.raises(PrivacyError, match="charged before data is read"):
        release(values, None)


def test_seeded_noise_and_no_privacy_claim_nothing(values, ledger):
    values["privacy"]["noise_source"] = "seeded-test-only"
    said = release(values, ledger).specification.privacy
    assert (said.guarantee, said.epsilon) == ("none", None)
    assert "NO PRIVACY" in said.conditions[0]
    values["privacy"] = {"unit": "none"}
    assert release(values, None, name="open").specification.privacy.guarantee == "none"


def test_a_persons_records_are_bounded_and_stated(values, ledger):
    values["privacy"]["group_by"] = "user"
    assert release(values, ledger).specification.privacy.unit == "person"


@pytest.mark.parametrize(
    ("section", "change", "key"),
    [
        ("mechanism", {"per_layer_clip": False}, "per_layer_clip"),
        ("adapter", {"init": "kaiming"}, "adapter.init"),
        ("adapter", {"freeze_head": False}, "freeze_head"),
        ("adapter", {"init_from": "somewhere"}, "init_from"),
        ("federation", {"rounds": 2}, "federation.rounds"),
        ("data", {"labels": None}, "data.labels"),
    ],
)
def test_a_configuration_that_gives_no_comparable_specification_is_refused(values, section, change, key):
    values[section] |= change
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        check_configuration(config_from_container(values))


def test_a_bad_name_is_refused_before_anything_is_spent(values, ledger):
    for name in ("../x", "a\n", ""):
        with pytest.raises(DataError):
            release(values, ledger, name=name)
    assert ledger.accounts() == [] or not list(ledger.accounts())


def test_the_constant_target_reads_no_label(values, ledger, world, tmp_path):
    lines = [json.loads(line) for line in (world / "train.jsonl").read_text().splitlines()]
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({"text": one["text"]}) + "\n" for one in lines))
    values["data"] |= {
        "labels": None, "columns": {"text": "text"}, "source": {"kind": "file", "paths": [str(bare)]},
        "public_eval": None,
    }  # fmt: skip
    values["model"]["num_labels"] = 1
    done = release(values, ledger, target="constant")
    assert done.specification.privacy.guarantee == "dp"


def test_a_site_pays_by_its_own_rules(values, world, tmp_path, monkeypatch):
    site = {
        "schema": 1,
        "site": {"name": "clinic-a"},
        "data": {
            "name": "notes-2026",
            "source": {"kind": "file", "paths": [str(world / "train.jsonl")]},
            "columns": {"text": "text", "label": "label"},
        },
        "budget": {
            "epsilon": 20.0, "delta": DELTA, "adjacency": "add_or_remove", "unit": "record", "on_exhausted": "refuse",
        },
        "policy": {
            "mechanisms": ["lora_fa"], "units": ["record"], "min_noise_multiplier": 2.0, "max_rounds": 5,
            "max_steps_per_round": 10, "base_models": [],
        },
        "socket": {"path": "trainer.sock", "token_file": "token"},
        "ledger": {"url": "site.sqlite"},
    }  # fmt: skip
    (tmp_path / "site.yaml").write_text(json.dumps(site))
    (tmp_path / "spec.yaml").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path)
    assert main(["dock", "spec", "spec.yaml", "--site", "site.yaml", "--output", "a.json", "--json"]) == 0
    assert read_entry(tmp_path / "a.json").name == "clinic-a"
    refused = [
        "dock",
        "spec",
        "spec.yaml",
        "privacy.noise_multiplier=1.0",
        "--site",
        "site.yaml",
        "--name",
        "b",
    ]
    assert main(refused) == 26  # the policy's least noise
    refused[3] = "privacy.noise_multiplier=3.0"  # 4 layers, each clipped alone: 1.5 for the joint release
    assert main(refused) == 26
    assert not (tmp_path / "b.json").exists()


# --- the intrinsic mode ---------------------------------------------------------------------------------

HOLD = dict.fromkeys((one.name for one in dataclasses.fields(IntrinsicConditions)), True)


@pytest.mark.parametrize("condition", sorted(HOLD))
@pytest.mark.parametrize("value", [False, None, 1])
def test_the_intrinsic_analysis_is_refused_for_each_condition(condition, value):
    with pytest.raises(UnsupportedEventError, match="refused"):
        analyse_intrinsic(IntrinsicConditions(**{**HOLD, condition: value}), [PaveLayer(8, 8, 0.01)], 1e-5)


def test_the_intrinsic_figure_is_conditional_and_equals_the_reference():
    report = analyse_intrinsic(IntrinsicConditions(**HOLD), [PaveLayer(8, 8, 0.01)], 1e-5)
    assert report.epsilon == pytest.approx(0.26, abs=0.01)
    assert any("never pays" in text for text in report.conditions)


def test_the_intrinsic_event_pays_for_nothing(ledger):
    event = PaveEvent((PaveLayer(8, 8, 0.01),))
    request = ReserveRequest(
        Account("a", "d"), Budget(8.0, DELTA, adjacency="replace_one"), "run", 1, event, 1
    )
    (answer,) = ledger.reserve([request])
    assert isinstance(answer, Refusal)
    assert answer.reason == "unsupported-event"
    with pytest.raises(UnsupportedEventError):
        statement_from_event(
            event, DELTA, adjacency="replace_one", accountant="best", unit="record", adversary="all", sampling="none"
        )  # fmt: skip


# --- use in a federation -----------------------------------------------------------------------------------


def run_values(helpers, world, tmp_path, **changes):
    made = helpers.container(world, tmp_path / "runs")
    made["privacy"] |= {
        "target_delta": DELTA, "noise_source": "os",
        "budget": {"epsilon": 50.0, "delta": DELTA, "on_exhausted": "refuse"},
    }  # fmt: skip
    made["federation"] |= {"rounds": 2, "min_replies": 1}
    return helpers.merge(made, changes)


def test_the_specification_and_the_run_add_up_in_the_clients_budget(values, helpers, world, tmp_path):
    from fedlora.simulation.clients_ledger import open_clients_ledger
    from fedlora.simulation.run import simulate

    config = config_from_container(values)
    book = open_clients_ledger(config, None)
    release_specification(config, Label("mine"), CLIENT, lambda c: local_trainer(c, CLIENT, book, "label"))
    book.close()
    result = simulate(config_from_container(run_values(helpers, world, tmp_path)), in_process=True)
    accounts = {
        one["account"]["client"]: one
        for one in json.loads((result.folder / "ledger.json").read_text())["accounts"]
    }
    with open_ledger(
        tmp_path / "runs/ledger.sqlite", secret=(tmp_path / "runs/ledger.key").read_bytes()
    ) as book:
        rows = book.report(Account(CLIENT, "words-2026")).rounds
    from fedlora.accounting import Event

    events = [(Event.from_json(json.loads(row.event_json)), row.steps_charged) for row in rows]
    assert len(events) == 3
    both = epsilon_of(events, DELTA).epsilon
    run_only = epsilon_of(events[1:], DELTA).epsilon
    assert accounts[CLIENT]["epsilon"] == pytest.approx(both, rel=1e-6)
    assert accounts["client-0000"]["epsilon"] == pytest.approx(run_only, rel=1e-6)
    assert both > run_only
    paid = json.loads((result.folder / "specifications.json").read_text())
    assert [one["client"] for one in paid["specifications"]] == [CLIENT]
    assert paid["specifications"][0]["epsilon"] == pytest.approx(
        epsilon_of(joint_event().times(3), DELTA).epsilon, rel=1e-6
    )


def test_the_report_shows_the_risks_of_paid_specifications_with_their_assumptions(
    values, helpers, world, tmp_path
):
    from fedlora.report.page import embedded_data, render
    from fedlora.report.run_data import read_run
    from fedlora.simulation.clients_ledger import open_clients_ledger
    from fedlora.simulation.run import simulate

    values["privacy"]["noise_multiplier"] = 60.0
    config = config_from_container(values)
    book = open_clients_ledger(config, None)
    release_specification(config, Label("mine"), CLIENT, lambda c: local_trainer(c, CLIENT, book, "label"))
    book.close()
    result = simulate(config_from_container(run_values(helpers, world, tmp_path)), in_process=True)
    data = read_run(result.folder)
    (row,) = embedded_data(data)["specification_risks"]
    epsilon = row["epsilon"]
    assert row["risk_paper"] == pytest.approx(math.expm1(epsilon) + DELTA)
    assert row["risk_tight"] == pytest.approx((math.expm1(epsilon) + 2 * DELTA) / (math.exp(epsilon) + 1))
    assert row["risk_tight"] < row["risk_paper"] < 1
    page = render(data)
    for text in ("Risks of the specifications", "Theorem 4.2", "Theorem 4.3", "assumes"):
        assert text in page
    path = result.folder / "specifications.json"
    for bad in ("inf", None, True, -1):
        content = json.loads(path.read_text())
        content["specifications"][0]["epsilon"] = bad
        path.write_text(json.dumps(content))
        assert embedded_data(read_run(result.folder))["specification_risks"][0]["risk_tight"] == 1.0
    path.unlink()
    assert "Risks of the specifications" not in render(read_run(result.folder))


def test_each_group_trains_its_own_adapter_and_starts_from_its_match(helpers, world, tmp_path):
    from fedlora.simulation.run import simulate
    from fedlora.training.starting import read_adapter

    base = run_values(helpers, world, tmp_path)
    base["data"]["labels"] = ["cold", "warm"]
    first = simulate(config_from_container(base), in_process=True, run_id="first")
    done = {}
    for name, members in (("a", ["client-0000", "client-0002"]), ("b", ["client-0001"])):
        group = helpers.merge(
            base, {"federation": {"members": members}, "adapter": {"init_from": str(first.folder)}}
        )
        done[name] = simulate(config_from_container(group), in_process=True, run_id=name)
        lines = helpers.metric_lines(done[name].folder)
        assert [line["asked"] for line in lines[1:]] == [len(members)] * 2
        assert lines[0]["adapter"] == helpers.metric_lines(first.folder)[-1]["adapter"]
    left, right = (read_adapter(done[name].folder) for name in "ab")
    assert any(not np.array_equal(left.blocks[block], right.blocks[block]) for block in left.blocks)
    accounts = json.loads((done["b"].folder / "ledger.json").read_text())["accounts"]
    assert [one["account"]["client"] for one in accounts] == ["client-0001"]
    unknown = helpers.merge(base, {"federation": {"members": ["nobody"]}})
    with pytest.raises(ConfigError, match="nobody"):
        simulate(config_from_container(unknown), in_process=True)
    other = helpers.merge(base, {"run": {"seed": 4}, "adapter": {"init_from": str(first.folder)}})
    with pytest.raises(LayoutMismatchError, match="recipe"):
        simulate(config_from_container(other), in_process=True)


def test_a_start_without_privacy_is_told_beside_the_epsilon(helpers, world, tmp_path):
    from fedlora.training.starting import starting_warnings

    base = run_values(helpers, world, tmp_path)
    start = tmp_path / "start"
    start.mkdir()
    private = config_from_container(helpers.merge(base, {"adapter": {"init_from": str(start)}}))
    assert "does not cover" in starting_warnings(private)[0]
    (start / "summary.json").write_text(json.dumps({"statement": {"privacy": "differential privacy"}}))
    assert starting_warnings(private) == ()
    assert starting_warnings(config_from_container(base)) == ()


@pytest.mark.parametrize("place", ["runs/a privacy.target_epsilon=90", "a;b", "$(x)", "a\nb", ""])
def test_a_path_from_an_entry_cannot_add_to_a_command_line(place):
    from fedlora.specs.dock import Match
    from fedlora.specs.runs import checked_adapter

    found = Match("m", 1.0, "MIT", PrivacyStatement("none"), {"adapter": place, "adapter_sha256": "0"})
    with pytest.raises(DataError):
        checked_adapter(found)


def test_a_head_comes_along_only_with_the_same_labels(helpers, world, tmp_path):
    from fedlora.simulation.prepare import complete
    from fedlora.simulation.run import simulate
    from fedlora.training.starting import read_adapter, starting_payload

    base = run_values(helpers, world, tmp_path)
    base["data"]["labels"] = ["cold", "warm"]
    first = simulate(config_from_container(base), in_process=True, run_id="first")
    given = read_adapter(first.folder)
    for labels, same in ((["cold", "warm"], True), (["warm", "cold"], False)):
        values = helpers.merge(
            base, {"data": {"labels": labels}, "adapter": {"init_from": str(first.folder)}}
        )
        bench = complete(config_from_container(values)).bench
        got, fresh = starting_payload(bench), bench.initial_payload()
        for name, block in got.blocks.items():
            adapted = name.rpartition("|")[0] in got.modules
            np.testing.assert_array_equal(block, (given if adapted or same else fresh).blocks[name])


def test_the_commands_work_together(values, helpers, world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(json.dumps(values))
    run = run_values(helpers, world, tmp_path)
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    assert main(["simulate", "run.yaml", "--in-process", "--quiet", "--json"]) == 0
    folder = json.loads(capsys.readouterr().out)["folder"]
    for number in range(3):
        client = ["--client", f"client-000{number}"]
        assert main(["dock", "spec", "spec.yaml", *client, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["privacy"]["epsilon"] == said["epsilon"]
        assert said["account_epsilon"] > said["epsilon"]  # the run before is in the same account
    model = ["--kind", "model", "--name", "model-a", "--adapter", folder, "--licence", "MIT"]
    assert main(["dock", "spec", "spec.yaml", "--client", "client-0003", *model]) == 0
    assert "epsilon" in capsys.readouterr().out
    assert main(["dock", "add", "dock.sqlite", "model-a.json"]) == 0
    capsys.readouterr()
    assert main(["dock", "match", "dock.sqlite", "client-0000.json", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["matches"]
    assert (found["name"], found["licence"]) == ("model-a", "MIT")
    assert main(["dock", "start", "dock.sqlite", "client-0000.json"]) == 0
    assert capsys.readouterr().out.strip() == f"adapter.init_from={folder}"
    specs = [f"client-000{number}.json" for number in range(3)]
    assert (
        main(["dock", "groups", *specs, "-k", "2", "--output", "groups", "--dock", "dock.sqlite", "--json"])
        == 0
    )
    groups = json.loads(capsys.readouterr().out)["groups"]
    assert sorted(name for one in groups for name in one["members"]) == [Path(s).stem for s in specs]
    assert (
        main(["simulate", "run.yaml", "--overlay", groups[0]["file"], "--in-process", "--quiet", "--json"])
        == 0
    )
    capsys.readouterr()
    (Path(folder) / "adapter.flr").write_bytes(b"another file")
    assert main(["dock", "start", "dock.sqlite", "client-0000.json"]) == DataError.exit_code


def test_a_runs_own_adapter_is_described_without_spending(helpers, world, tmp_path):
    from fedlora.simulation.run import simulate

    result = simulate(
        config_from_container(run_values(helpers, world, tmp_path)), in_process=True, run_id="r"
    )
    made = describe_run(result.folder, Label("r", "model", "MIT"))
    assert made.privacy.epsilon == pytest.approx(result.epsilon)
    assert made.metadata["adapter"] == str(result.folder)
    summary = result.folder / "summary.json"
    content = json.loads(summary.read_text())
    for change in (
        {"epsilon": None},
        {"epsilon": "inf"},
        {"statement": {"privacy": "NO PRIVACY: seeded test noise"}},
    ):
        summary.write_text(json.dumps({**content, **change}))
        assert run_statement(result.folder).guarantee == "none"


# --- groups ---------------------------------------------------------------------------------------------------


def spec_of(name, vector):
    unit = np.asarray(vector, np.float32) / np.linalg.norm(vector)
    return Specification(
        name, unit.astype(np.float32), "task", "base", "recipe", "none", PrivacyStatement("none"), "MIT"
    )


def test_clustering_finds_planted_groups_behind_a_common_direction():
    rng = np.random.default_rng(0)
    common, centres = 3 * rng.standard_normal(64), rng.standard_normal((3, 64))
    made = [spec_of(f"c{i:02d}", common + centres[i % 3] + 0.3 * rng.standard_normal(64)) for i in range(24)]
    groups = cluster(made, 3)
    assert {frozenset(int(n[1:]) % 3 for n in one.members) for one in groups} == {
        frozenset({0}), frozenset({1}), frozenset({2}),
    }  # fmt: skip
    assert groups == cluster(list(reversed(made)), 3)
    near = group_specification(groups[0], made)
    assert near.vector @ made[int(groups[0].members[0][1:])].vector > 0.9


def test_clustering_gives_every_group_a_member_and_refuses_what_it_cannot_compare(tmp_path):
    same = [spec_of(f"c{i}", np.ones(4)) for i in range(5)]
    groups = cluster(same, 5)
    assert sorted(len(one.members) for one in groups) == [1] * 5
    paths = write_overlays(tmp_path, groups, "p")
    assert json.loads(paths[0].read_text())["federation"]["members"] == list(groups[0].members)
    for bad in (0, 6):
        with pytest.raises(DataError):
            cluster(same, bad)
    with pytest.raises(DataError, match="one name"):
        cluster([same[0], same[0]], 1)
    with pytest.raises(DataError, match="cannot be grouped"):
        cluster([same[0], dataclasses.replace(same[1], recipe="other")], 1)


def test_entries_on_disk_round_trip_and_are_checked(tmp_path):
    made = spec_of("c", np.arange(1, 9))
    write_entry(tmp_path / "c.json", made)
    again = read_entry(tmp_path / "c.json")
    np.testing.assert_array_equal(again.vector, made.vector)
    (tmp_path / "big.json").write_text(" " * 70_000)
    for name in ("big.json", "none.json"):
        with pytest.raises(DataError):
            read_entry(tmp_path / name)


# --- one name, other releases ------------------------------------------------------------------------------


def test_another_target_is_another_release(values, ledger):
    """The kept bytes of a label release were once handed out as a constant one of the same name."""
    values["data"]["labels"] = None
    values["model"]["num_labels"] = 1
    values["data"]["columns"]["label"] = "number"
    lines = [json.loads(line) for line in Path(values["data"]["source"]["paths"][0]).read_text().splitlines()]
    numbered = Path(values["run"]["dir"]).parent / "numbered.jsonl"
    numbered.write_text(
        "".join(json.dumps({**one, "number": float(len(one["text"]))}) + "\n" for one in lines)
    )
    values["data"] |= {"source": {"kind": "file", "paths": [str(numbered)]}, "public_eval": None}
    made = {}
    for target in ("label", "constant"):
        made[target] = release_specification(
            config_from_container(values),
            Label("same"),
            CLIENT,
            lambda resolved, target=target: local_trainer(resolved, CLIENT, ledger, target),
            target,
        ).specification
    assert not np.array_equal(made["label"].vector, made["constant"].vector)
    assert [made[target].metadata["target"] for target in made] == ["label", "constant"]
    assert len(report_of(ledger).rounds) == 2


def test_a_misspelt_path_costs_nothing(values, ledger):
    values["data"]["source"]["paths"] = ["nowhere/at-all.jsonl"]
    with pytest.raises(DataError, match="matches no file"):
        release(values, ledger)
    assert not list(ledger.accounts())


def test_a_start_is_not_taken_from_an_entry_of_another_target(tmp_path):
    from fedlora.specs.dock import Dock
    from fedlora.specs.runs import best_start

    dock = Dock(tmp_path / "d.sqlite")
    near, far = np.ones(4), np.array([1.0, 1.0, 1.0, -1.0])
    facts = {"adapter": "runs/x", "adapter_sha256": "0"}
    for name, vector, target in (("described", near, "run"), ("same", far, "constant")):
        dock.add(
            dataclasses.replace(spec_of(name, vector), kind="model", metadata={**facts, "target": target})
        )
    query = dataclasses.replace(spec_of("q", near), metadata={"target": "constant"})
    assert [one.name for one in dock.match(query)] == ["described", "same"]
    assert best_start(dock, query).name == "same"
    with pytest.raises(DataError, match="target"):
        best_start(dock, dataclasses.replace(query, metadata={"target": "label"}))
    dock.close()


def test_a_run_that_went_on_from_another_one_shows_that_one_too(values, tmp_path):
    stated = {
        "privacy": "differential privacy", "delta": 1e-5, "unit": "one record", "adjacency": "add_or_remove",
        "adversary": "anyone", "accountant": "best", "sampling_assumption": "Poisson",
    }  # fmt: skip

    def run(name, epsilon, start, **changes):
        folder = tmp_path / name
        folder.mkdir()
        summary = {"epsilon": epsilon, "rounds": 3, "statement": {**stated, **changes}}
        (folder / "summary.json").write_text(json.dumps(summary))
        config = json.loads(json.dumps(values))
        config["adapter"]["init_from"] = start
        (folder / "config.yaml").write_text(json.dumps(config))
        return folder

    first = run("first", 5.0, None)
    assert (run_statement(first).epsilon, run_statement(first).num_events) == (5.0, 3)
    second = run("second", 2.0, str(first), delta=1e-6)
    assert (run_statement(second).epsilon, run_statement(second).delta) == (5.0, 1e-5)
    assert any("first" in text for text in run_statement(second).conditions)
    bare = run("bare", 2.0, None, privacy="none")
    for start in (str(bare), str(tmp_path / "gone"), str(run("third", 2.0, str(bare)))):
        assert run_statement(run(f"from-{Path(start).name}", 2.0, start)).guarantee == "none"
    (first / "config.yaml").unlink()
    assert run_statement(first).guarantee == "none"
