"""A person with several records: from the configuration through the trainer to the epsilon of the person."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution

from fedlora.accounting import PoissonGaussianEvent
from fedlora.config import config_container, config_from_container
from fedlora.config.schema import FedLoraConfig
from fedlora.errors import ConfigError, DataError
from fedlora.ledger import Account, LedgerReport, load_secret, open_ledger, person_key
from fedlora.simulation.run import simulate

WORDS = ["red", "blue", "green", "fast", "slow", "big", "small", "up", "down"]
SIGMA, RATE, ROUNDS, DELTA = 4.0, 0.1, 4, 1e-4


def _model(folder: Path) -> Path:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    vocabulary = {word: index for index, word in enumerate([*names.values(), "[MASK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **names).save_pretrained(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = BertConfig(vocab_size=len(vocabulary), max_position_embeddings=40, **sizes)
        BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("people")
    _model(root / "model")
    draw = random.Random(3)
    lines = []
    for number in range(80):  # person p0 wrote 40 of the 80 records
        text = " ".join(draw.choice(WORDS) for _ in range(4)) + f" {number}"
        person = "p0" if number % 2 else f"p{number}"
        lines.append({"text": text, "label": "warm" if number % 3 else "cold", "user": person})
    (root / "rows.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return root


def values(world: Path, runs: Path, **privacy: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "run": {"name": "people", "seed": 3, "dir": str(runs)},
        "model": {"name_or_path": str(world / "model"), "task": "sequence-classification", "device": "cpu"},
        "adapter": {"rank": 2, "lora_alpha": 4.0, "target_modules": ["query", "value"]},
        "data": {
            "source": {"kind": "file", "paths": [str(world / "rows.jsonl")]},
            "columns": {"text": "text", "label": "label"},
            "max_length": 16,
            "name": "words-2026",
            "partition": {"kind": "quantity", "clients": 2},
        },
        "mechanism": {"kind": "lora_fa"},
        "privacy": {
            "unit": "record",
            "adjacency": "add_or_remove",
            "noise_multiplier": SIGMA,
            "target_delta": DELTA,
            "max_grad_norm": 1.0,
            "group_weights": "equal",
            "budget": {"epsilon": 50.0, "delta": DELTA, "on_exhausted": "refuse"},
            "noise_source": "os",
            **privacy,
        },
        "training": {
            "expected_batch_size": 4,
            "nominal_records": 40,
            "steps_per_round": 1,
            "optimizer": {"kind": "sgd", "lr": 0.01},
        },
        "federation": {"rounds": ROUNDS, "min_replies": 1, "aggregation": {"kind": "mean_b"}},
    }


def config(world: Path, runs: Path, **privacy: Any) -> FedLoraConfig:
    return config_from_container(values(world, runs, **privacy))


def reports(runs: Path) -> list[LedgerReport]:
    secret = load_secret(runs / "ledger.key")
    with open_ledger(runs / "ledger.sqlite", secret=secret, read_only=True) as ledger:
        return [ledger.report(account) for account in ledger.accounts()]


def by_hand(most: int) -> float:
    """Epsilon of ROUNDS steps for k records: any of them drawn moves the sum by at most k C."""
    accountant = pld_privacy_accountant.PLDAccountant()
    rate = 1.0 - (1.0 - RATE) ** most
    step = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(SIGMA / most))
    accountant.compose(dp_event.SelfComposedDpEvent(step, ROUNDS))
    return float(accountant.get_epsilon(DELTA))


def exact(most: int) -> float:
    """Lower bound of epsilon for k aligned records: the sum moves by j C with the binomial probability of j draws."""
    weights = [math.comb(most, j) * RATE**j * (1 - RATE) ** (most - j) for j in range(most + 1)]
    found = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        SIGMA,
        [float(j) for j in range(most + 1)],
        weights,
        pessimistic_estimate=False,
        value_discretization_interval=1e-4,
    )
    return float(found.self_compose(ROUNDS).get_epsilon_for_delta(DELTA))


@pytest.mark.parametrize("most", [1, 2, 4])
def test_h18_a_run_charges_what_a_person_costs(world: Path, tmp_path: Path, most: int) -> None:
    result = simulate(config(world, tmp_path, group_by="user", max_records_per_group=most), in_process=True)
    for report in reports(tmp_path):
        assert report.unit == "person"
        assert f"at most {most} records of each person are used" in report.conditions
        assert report.epsilon == pytest.approx(by_hand(most), rel=2e-2)
        assert report.epsilon >= exact(most)
        assert report.epsilon == pytest.approx(result.epsilon)
        event = json.loads(report.rounds[0].event_json)
        assert event["noise_multiplier"] == SIGMA / most
    assert result.statement["unit"] == "each person's records"
    if most > 1:
        assert result.epsilon > 1.2 * by_hand(1), "the person's figure must not be the record's"


def test_h18_the_target_is_met_for_the_person_not_for_the_record(world: Path, tmp_path: Path) -> None:
    asked = config(
        world, tmp_path, noise_multiplier=None, target_epsilon=2.0, group_by="user", max_records_per_group=3
    )
    result = simulate(asked, in_process=True)
    assert 1.9 < result.epsilon <= 2.0 * (1 + 1e-6)
    sigma = result.statement["noise_multiplier"]
    alone = pld_privacy_accountant.PLDAccountant()
    step = dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(sigma))
    alone.compose(dp_event.SelfComposedDpEvent(step, ROUNDS))
    assert alone.get_epsilon(DELTA) < 1.0


def test_h18_no_person_has_more_records_than_the_bound(world: Path, tmp_path: Path) -> None:
    from fedlora.simulation.prepare import make_federation

    for most in (1, 3):
        made = make_federation(config(world, tmp_path, group_by="user", max_records_per_group=most))
        people = made.rows.column("user")
        for index in made.parts.values():
            owners = [people[int(place)] for place in index]
            assert max(owners.count(person) for person in set(owners)) <= most


def test_h18_people_at_several_clients_are_reported(world: Path, tmp_path: Path) -> None:
    result = simulate(config(world, tmp_path, group_by="user"), in_process=True)
    assert any("1 people sit at several of 2 clients" in text for text in result.warnings)
    assert all(any("the figures add up" in text for text in one.conditions) for one in reports(tmp_path))
    saved = json.loads((result.folder / "summary.json").read_text())
    assert saved["warnings"] == list(result.warnings)


def test_h18_records_at_one_client_only_are_not_reported(world: Path, tmp_path: Path) -> None:
    result = simulate(config(world, tmp_path), in_process=True)
    assert not any("add up" in text for text in result.warnings)
    report = reports(tmp_path)[0]
    assert report.unit == "record"
    assert "the guarantee is per record, not per person" in report.conditions


@pytest.mark.parametrize(
    "change",
    [
        {"privacy": {"adjacency": "replace_one"}},
        {"mechanism": {"kind": "noisy_projection"}},
    ],
)
def test_h18_several_records_are_refused_where_no_bound_is_known(
    world: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    made = values(world, tmp_path, group_by="user", max_records_per_group=2, **change.pop("privacy", {}))
    with pytest.raises(ConfigError, match="max_records_per_group"):
        config_from_container({**made, **change})
    made["privacy"]["max_records_per_group"] = 1
    if "mechanism" not in change:
        config_from_container({**made, **change})


def test_h18_the_charge_fails_closed_where_the_rules_were_passed_by(world: Path, tmp_path: Path) -> None:
    from fedlora.errors import UnsupportedEventError
    from fedlora.training.charging import charged_event

    asked = config(world, tmp_path, group_by="user", max_records_per_group=2)
    forced = asked.model_copy(
        update={"privacy": asked.privacy.model_copy(update={"adjacency": "replace_one"})}
    )
    with pytest.raises(UnsupportedEventError):
        charged_event(forced, PoissonGaussianEvent(1.0, 0.1))
    assert config_container(forced)["privacy"]["adjacency"] == "replace_one"


@pytest.mark.parametrize("value", [None, "", "  ", math.nan])
def test_a_record_without_a_person_is_refused(value: object) -> None:
    from fedlora.data import bound_groups
    from fedlora.ledger import bound_contributions

    groups = ["a", value, "b"]
    with pytest.raises(DataError, match="record 1"):
        bound_contributions(groups, max_records=1, secret=bytes(32))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="record 1"):
        bound_groups(groups, np.arange(3), 1)


def test_one_person_written_in_several_ways_is_one_person() -> None:
    from fedlora.data import bound_groups
    from fedlora.ledger import bound_contributions

    groups = [7, 7.0, "7", " 7 ", 7.5]
    assert len({person_key(one, 0) for one in groups}) == 2
    assert len(bound_contributions(groups, max_records=1, secret=bytes(32)).kept) == 2
    assert len(bound_groups(groups, np.arange(5), 1)) == 2


def test_one_person_written_in_several_ways_is_not_shared_out_over_an_edge_sites_clients(
    tmp_path: Path,
) -> None:
    from fedlora.config.schema import DataConfig, FileSource, FilesPartition
    from fedlora.config.trainer import SiteDataConfig
    from fedlora.data import load_rows
    from fedlora.training.edge import edge_clients

    def clients(*users: object) -> list[str]:
        paths = [tmp_path / f"{number}.jsonl" for number, _ in enumerate(users)]
        for path, user in zip(paths, users, strict=True):
            path.write_text(json.dumps({"text": "red", "user": user}) + "\n")
        source = FileSource(kind="file", paths=tuple(map(str, paths)))
        partition = FilesPartition(kind="files")
        data = SiteDataConfig(source=source, name="people", group_by="user", partition=partition)
        return sorted(edge_clients(load_rows(DataConfig(source=source, name="people")), data))

    assert clients(7, "8") == ["0", "1"]
    for other in (7.0, "7", " 7 "):
        with pytest.raises(DataError, match="1 people"):
            clients(7, other)


def test_accounts_of_people_and_records_are_never_mixed(world: Path, tmp_path: Path) -> None:
    from fedlora.errors import TooFewRepliesError

    simulate(config(world, tmp_path), in_process=True)
    with pytest.raises(TooFewRepliesError):
        simulate(config(world, tmp_path, group_by="user", max_records_per_group=2), in_process=True)
    refused = [
        text
        for path in tmp_path.glob("*/metrics.jsonl")
        for line in path.read_text().splitlines()
        for text in json.loads(line)["refused"].values()
    ]
    assert refused
    assert all("unit: got 'person', ledger has 'record'" in text for text in refused)
    assert {report.account for report in reports(tmp_path)} == {
        Account("client-0000", "words-2026"),
        Account("client-0001", "words-2026"),
    }
