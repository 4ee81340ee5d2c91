"""A site's rules and records: nothing is read before it is allowed, and nothing beyond the rules is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from deploy_helpers import RUN, SITE, write_model, write_rows

from fedlora.cli.keyring import new_identity_key
from fedlora.config import FedLoraConfig, config_from_container
from fedlora.config.resolve import config_hash
from fedlora.config.trainer import load_trainer
from fedlora.errors import AuthenticationError, DataError, PolicyRefusedError
from fedlora.training.service_site import SiteRules, SiteShelf, build_site, site_signer
from fedlora.training.session import build_workbench, noise_alone


def run_config(**changes: Any) -> FedLoraConfig:
    text = RUN.format(runs="r", model="m", public="p", rounds=2, timeout=10.0, port=1, expected=1, replies=1)
    container = yaml.safe_load(text.replace("1.0e-4", "0.0001"))
    for key, value in changes.items():
        *path, last = key.split("__")
        node = container
        for part in path:
            node = node[part]
        node[last] = value
    return config_from_container(container)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    write_rows(tmp_path / "records.jsonl", 30, 1)
    new_identity_key(tmp_path / "keys" / "identity.pem")
    file = tmp_path / "site.yaml"
    file.write_text(SITE.format(name="site-a", socket=tmp_path / "run", rounds=20))
    return file


def rules(site: Path, *overrides: str) -> SiteRules:
    config = load_trainer(site, overrides).config
    return SiteRules.from_site(config.policy, config.data.group_by)


def test_a_run_within_the_rules_is_served(site: Path) -> None:
    rules(site).check_config(run_config())
    rules(site).check_round(2, 4)


NO_PRIVACY = {
    "privacy": {"unit": "none"},
    "mechanism": {"kind": "none"},
    "federation__aggregation": {"kind": "product"},
}
REFUSED: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "another mechanism": (
        [],
        {"mechanism": {"kind": "prism"}, "federation__aggregation": {"kind": "tangent"}},
        "mechanisms",
    ),
    "less noise": ([], {"privacy__noise_multiplier": 0.89}, "min_noise_multiplier"),
    "noise not yet derived": (
        [],
        {"privacy__noise_multiplier": None, "privacy__target_epsilon": 3.0},
        "min_noise_multiplier",
    ),
    "no privacy": (
        ["policy.mechanisms=[lora_fa,none]", "policy.units=[record,client]"],
        NO_PRIVACY,
        "privacy",
    ),
    "seeded noise": ([], {"privacy__noise_source": "seeded-test-only"}, "noise"),
    "more rounds": ([], {"federation__rounds": 21}, "max_rounds"),
    "other modules": (["policy.target_modules=[query]"], {}, "target_modules"),
    "all modules": (
        ["policy.target_modules=[query,value,classifier]"],
        {"adapter__target_modules": "all-linear"},
        "target_modules",
    ),
    "a whole part of the model beside all linear layers": (
        ["policy.target_modules=[all-linear]"],
        {"adapter__target_modules": "all-linear", "adapter__modules_to_save": ["encoder", "classifier"]},
        "encoder",
    ),
    "a higher rate": (["policy.max_sample_rate=0.1"], {}, "max_sample_rate"),
    "a model's own code": ([], {"model__trust_remote_code": True}, "remote"),
    "per person here, per record there": (["data.group_by=user", "budget.unit=person"], {}, "group_by"),
    "per record here, per person there": ([], {"privacy__group_by": "user"}, "group_by"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_requests_beyond_the_sites_rules_are_refused_by_name(site: Path, name: str) -> None:
    overrides, changes, word = REFUSED[name]
    with pytest.raises(PolicyRefusedError, match=word):
        rules(site, *overrides).check_config(run_config(**changes))


def test_steps_and_base_models_are_bounded(site: Path) -> None:
    with pytest.raises(PolicyRefusedError, match="steps"):
        rules(site).check_round(1, 5)
    with pytest.raises(PolicyRefusedError, match="round"):
        rules(site).check_round(21, 1)
    strict = rules(site, f"policy.base_models=['{'a' * 64}']")
    strict.check_base("a" * 64)
    with pytest.raises(PolicyRefusedError, match="base"):
        strict.check_base("b" * 64)


PROJECTION = {"kind": "noisy_projection", "projection_source": "client", "head_max_grad_norm": 1.0}
UNSEEN: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "a head that the model finds by itself": (
        ["policy.target_modules=[query,value]"],
        {"adapter__modules_to_save": []},
        "would train classifier",
    ),
    "a head with little noise of its own": (
        ["policy.mechanisms=[noisy_projection]"],
        {
            "mechanism": {**PROJECTION, "head_noise_multiplier": 0.1},
            "federation__aggregation": {"kind": "product"},
        },
        "joint release",
    ),
    "layers clipped alone": ([], {"mechanism": {"kind": "lora_fa", "per_layer_clip": True}}, "joint release"),
}


@pytest.mark.parametrize("name", list(UNSEEN))
def test_what_only_the_loaded_model_shows_is_refused_before_a_record_is_read(
    site: Path, tmp_path: Path, name: str
) -> None:
    overrides, changes, word = UNSEEN[name]
    config = run_config(model__name_or_path=str(write_model(tmp_path / "model")), **changes)
    built = build_site(load_trainer(site, overrides).config, site)
    (tmp_path / "records.jsonl").unlink()
    with pytest.raises(PolicyRefusedError, match=word):
        built.trainer.prepare(config, config_hash(config))
    built.ledger.close()


def test_a_head_with_enough_noise_and_a_named_head_are_served(site: Path, tmp_path: Path) -> None:
    config = run_config(
        model__name_or_path=str(write_model(tmp_path / "model")),
        mechanism={**PROJECTION, "head_noise_multiplier": 4.0},
        federation__aggregation={"kind": "product"},
    )
    overrides = ["policy.mechanisms=[noisy_projection]", "policy.target_modules=[query,value,classifier]"]
    built = build_site(load_trainer(site, overrides).config, site)
    bench = build_workbench(config)
    rules(site, *overrides).check_trained(bench.layout)
    rules(site, *overrides).check_joint_noise(config, noise_alone(bench))
    built.ledger.close()


class Rows(list[dict[str, Any]]):
    """Rows that tell when they were read."""

    def subset(self, chosen: Any) -> Rows:
        return Rows([self[int(place)] for place in chosen])


class Task:
    """Stands for a task: encodes nothing."""

    def encode(self, row: object) -> object:
        return row


def test_nothing_is_read_before_a_client_is_opened() -> None:
    reads: list[int] = []

    def load() -> Rows:
        reads.append(1)
        return Rows([{"text": "x"}] * 5)

    shelf = SiteShelf("site-a", load, None, None)  # type: ignore[arg-type]
    assert list(shelf.clients()) == ["site-a"]
    assert reads == []
    task = Task()
    assert len(shelf.open("site-a", task)) == 5  # type: ignore[arg-type]
    shelf.open("site-a", task)  # type: ignore[arg-type]
    assert reads == [1]
    with pytest.raises(DataError, match="does not live"):
        shelf.open("site-b", task)  # type: ignore[arg-type]


def test_an_edge_site_has_several_clients_and_bounds_each_persons_records() -> None:
    rows = Rows([{"ward": str(n % 2)} for n in range(10)])

    def split(_: object) -> dict[str, Any]:
        return {"ward-0": np.arange(0, 10, 2), "ward-1": np.arange(1, 10, 2)}

    shelf = SiteShelf("edge", lambda: rows, split, lambda _, index: index[:2])  # type: ignore[arg-type, return-value]
    assert list(shelf.clients()) == ["ward-0", "ward-1"]
    assert len(shelf.open("ward-1", Task())) == 2  # type: ignore[arg-type]


def edge(site: Path, rows: list[dict[str, Any]], *overrides: str) -> list[str]:
    """The clients of a site that holds these rows."""
    (site.parent / "records.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    built = build_site(load_trainer(site, overrides).config, site)
    built.ledger.close()
    return list(built.shelf.clients())


PEOPLE = ["data.group_by=user", "budget.unit=person", "data.partition={kind: column, column: ward}"]


def test_a_person_at_two_logical_clients_is_refused_without_a_name(site: Path) -> None:
    rows = [{"text": "x", "label": "warm", "ward": f"w{n % 2}", "user": f"u{n}"} for n in range(6)]
    assert edge(site, rows, *PEOPLE) == ["w0", "w1"]
    moved = [*rows, {"text": "y", "label": "warm", "ward": "w1", "user": "u0"}]
    with pytest.raises(DataError, match="1 people") as caught:
        edge(site, moved, *PEOPLE)
    assert "u0" not in str(caught.value)
    assert edge(site, moved, PEOPLE[2]) == ["w0", "w1"]  # per record every record counts for itself


def test_clients_of_files_keep_their_names_when_the_folder_moves(site: Path, tmp_path: Path) -> None:
    for folder in ("here", "there"):
        for name in ("ward-1", "ward-2"):
            (tmp_path / folder).mkdir(exist_ok=True)
            write_rows(tmp_path / folder / f"{name}.jsonl", 5, 1)
        files = [f"data.source.paths=[{folder}/*.jsonl]", "data.partition={kind: files}"]
        assert edge(site, [], *files) == ["ward-1", "ward-2"]
    with pytest.raises(DataError, match="two files are called ward-1"):
        edge(site, [], "data.source.paths=[here/*.jsonl,there/*.jsonl]", "data.partition={kind: files}")


def test_a_site_is_built_with_its_own_ledger_terms_and_reads_nothing(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedlora.training.service_site.load_rows", lambda config: pytest.fail("records were read")
    )
    built = build_site(load_trainer(site).config, site)
    hello = built.trainer.hello()
    assert tuple(hello.clients) == ("site-a",)
    assert hello.identity is not None
    assert len(hello.identity) == 64
    assert built.ledger.accounts() == ()
    built.ledger.close()
    assert (site.parent / "keys" / "ledger.secret").stat().st_mode & 0o077 == 0


def test_receipts_are_signed_by_the_identity_key_and_a_readable_key_is_refused(tmp_path: Path) -> None:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    path = new_identity_key(tmp_path / "identity.pem").with_suffix("")
    sign, public = site_signer(path)
    receipt = sign({"round": 1, "client": "a"})
    text = json.dumps(receipt["claim"], sort_keys=True, separators=(",", ":"))
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    key.verify(bytes.fromhex(receipt["signature"]), b"fedlora-reply-v1\n" + text.encode())
    with pytest.raises(InvalidSignature):
        key.verify(
            bytes.fromhex(receipt["signature"]), b"fedlora-reply-v1\n" + text.replace("1", "2").encode()
        )
    path.chmod(0o644)
    with pytest.raises(AuthenticationError, match="chmod 600"):
        site_signer(path)
    with pytest.raises(AuthenticationError, match="fedlora keys new"):
        site_signer(tmp_path / "none.pem")
