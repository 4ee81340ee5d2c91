"""Canary clients stay below the claim of client-level runs, and notice planted faults of the server's release."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_helpers import make_bench, make_client_bench, write_model
from typer.testing import CliRunner

from fedlora.aggregation import round as round_module
from fedlora.aggregation.client_privacy import ClientMetric, ClientRelease
from fedlora.audit.client import ClientAudit
from fedlora.audit.client_canaries import CanaryClients
from fedlora.audit.client_checks import run_client_checks
from fedlora.audit.faults import ScaledNoise
from fedlora.audit.gradient import GradientAudit
from fedlora.config import save_resolved
from fedlora.errors import AggregationError, AuditFailedError, UnsupportedCombinationError
from fedlora.mechanisms.noise import OsNoise

HALF = partial(ScaledNoise, 0.5, OsNoise())
SHARES = {"noise_at": "clients", "honest_clients": 4}
CASES: dict[str, dict[str, Any]] = {
    "mean_b": {},
    "tangent": {"mechanism": "prism", "aggregation": "tangent"},
    "sampled": {"clients_per_round": 0.25},
    "replace-one": {"adjacency": "replace_one", "noise_multiplier": 4.0},
    "adaptive": {"clipping": "adaptive-quantile", "quantile_noise_multiplier": 10.0},
    "shares": SHARES,
}
CANARIES = 12_000
CAUGHT = 60_000  # as `fedlora audit` takes: half the noise showed in 48 of 48 tries, at 1.3 times the claim or more


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("audit-client") / "model")


@pytest.mark.parametrize(("case", "repeats"), [("mean_b", 2), ("tangent", 2), ("sampled", 0), ("shares", 0)])
def test_a_sound_client_level_release_stays_below_its_claim(model, case, repeats):
    verdict = ClientAudit(make_client_bench(model, **CASES[case]), canaries=CANARIES).run(repeats=repeats)
    assert verdict.attack == "client-canary"
    assert verdict.verdict == ("passed" if repeats else "weak attack"), verdict
    assert 0.0 < verdict.lower_bound <= verdict.claimed_epsilon
    assert verdict.figures["one_run_bound"] <= verdict.claimed_epsilon
    assert verdict.conditions["unit"] == "client"
    assert {"adjacency", "adversary", "accountant", "sampling"} <= set(verdict.conditions)


@pytest.mark.parametrize("case", ["mean_b", "sampled", "adaptive", "shares"])
def test_half_the_noise_of_a_client_level_release_is_caught(model, case):
    bench = make_client_bench(model, **CASES[case])
    assert ClientAudit(bench, canaries=CAUGHT, noise=HALF).run(repeats=0).verdict == "failed"


@pytest.mark.parametrize("case", ["mean_b", "shares"])
def test_a_missing_clip_of_whole_updates_is_caught_twice(model, case, monkeypatch):
    bench = make_client_bench(model, **CASES[case])
    original = ClientMetric.clip
    monkeypatch.setattr(ClientMetric, "clip", lambda self, blocks, bound: original(self, blocks, 1e9))
    assert ClientAudit(bench, canaries=CANARIES).run(repeats=0).verdict == "failed"
    assert [one.name for one in run_client_checks(bench) if not one.passed] == ["whole updates are clipped"]


def test_an_attack_under_much_noise_is_called_weak(model):
    verdict = ClientAudit(make_client_bench(model, noise_multiplier=40.0), canaries=2_000).run(repeats=2)
    assert verdict.verdict == "weak attack"


@pytest.mark.parametrize("case", ["mean_b", "tangent"])
def test_canary_updates_are_orthonormal_in_the_servers_metric(model, case):
    bench = make_client_bench(model, **CASES[case])
    start = bench.initial_payload()
    canaries = CanaryClients(start, bench.layout, limit=10_000, seed=0)
    metric = ClientMetric(start)
    seen = []
    for number in range(canaries.size):
        update = metric.update_of(canaries.update(number, 1.0).blocks)
        assert metric.norm(update) == pytest.approx(1.0, abs=1e-5)
        seen.append(canaries.read(update))
    assert np.allclose(np.stack(seen), np.eye(canaries.size), atol=1e-5)
    free = sum(s.rank * (s.out_features + s.in_features - s.rank) for s in start.modules.values())
    values = sum(s.rank * s.out_features for s in start.modules.values())
    extras = sum(int(np.prod(shape)) for shape in bench.layout.extra.values())
    assert canaries.size == extras + (free if case == "tangent" else values)


# -- self-checks: what an attack on one release cannot see ------------------------------------------------


def _by_count(self, source):
    mean, clip = _release(self, source)
    scale = self._plan.expected_clients / max(1, self._count)
    return {name: block * scale for name, block in mean.items()}, clip


def _skipped(self, source):
    mean, clip = _release(self, source)
    return ({name: 0.0 * block for name, block in mean.items()} if self._count == 0 else mean), clip


def _late(self, release, plan):
    mean, self._clip = release.release(self._noise)
    self._charge(plan.event)
    return self.mode.apply(mean), plan.event


def _noised_by_the_sum(change):
    """A release whose noise is changed by the sum, or whose sum is, before they are added."""

    def released(self, source):
        noise = self._metric.noise(
            self._shapes, self._plan.noise_multiplier * self._plan.clipping_norm, source
        )
        length = self._metric.norm(self._sum)
        mean = {
            name: change(block, noise[name], length) / self._plan.expected_clients
            for name, block in self._sum.items()
        }
        return mean, self._plan.clipping_norm

    return released


_release, _add = ClientRelease.release, round_module.Aggregator.add


def _again(self, client, payload, weight=1.0):
    self._accepted.pop(client, None)
    return _add(self, client, payload, weight)


@pytest.mark.parametrize(
    ("where", "what", "fault", "check"),
    [
        (ClientRelease, "release", _by_count, "the divisor is public"),
        (ClientRelease, "release", _skipped, "rounds without answers"),
        (round_module.Aggregator, "_finish_private", _late, "rounds without answers"),
        (round_module.Aggregator, "add", _again, "whole updates are clipped"),
        (
            ClientRelease,
            "release",
            _noised_by_the_sum(lambda total, noise, length: total + noise * (0.5 if length > 1.0 else 1.0)),
            "noise is added as it is",
        ),
        (
            ClientRelease,
            "release",
            _noised_by_the_sum(lambda total, noise, length: total + np.clip(noise, -2.0, 2.0)),
            "noise is added as it is",
        ),
        (
            ClientRelease,
            "release",
            _noised_by_the_sum(lambda total, noise, length: total + noise.astype(np.float16)),
            "noise is added as it is",
        ),
        (
            ClientRelease,
            "release",
            _noised_by_the_sum(lambda total, noise, length: total.astype(np.float16) + noise),
            "noise is added as it is",
        ),
    ],
    ids=[
        "divisor",
        "empty",
        "late-charge",
        "a client that answers twice",
        "half the noise beside a long sum",
        "noise cut off",
        "noise of 16 bits",
        "a sum of 16 bits",
    ],
)
def test_client_checks_catch_what_one_release_cannot_show(model, monkeypatch, where, what, fault, check):
    bench = make_client_bench(model)
    assert all(one.passed for one in run_client_checks(bench))
    monkeypatch.setattr(where, what, fault)
    failed = [one.name for one in run_client_checks(bench) if not one.passed]
    assert any(name.startswith(check) for name in failed), failed


@pytest.mark.parametrize("case", sorted(CASES))
def test_client_checks_pass_for_every_release(model, case):
    found = run_client_checks(make_client_bench(model, **CASES[case]))
    assert len(found) == 4
    assert all(one.passed for one in found), found


def test_shares_that_open_with_too_few_honest_clients_fail_a_check(model, monkeypatch):
    bench = make_client_bench(model, **CASES["shares"])
    monkeypatch.setattr(
        round_module.Aggregator, "authorize_sum", lambda self, clients: setattr(self, "_charged", True)
    )
    (failed,) = [one for one in run_client_checks(bench) if not one.passed]
    assert "were opened" in failed.detail


def test_each_audit_names_the_other_for_another_unit(model):
    with pytest.raises(UnsupportedCombinationError, match="--attack gradient"):
        ClientAudit(make_bench(model))
    with pytest.raises(UnsupportedCombinationError, match="--attack client"):
        GradientAudit(make_client_bench(model))
    assert run_client_checks(make_bench(model)) == []


def test_a_canary_that_the_server_refuses_ends_the_audit(model, monkeypatch):
    monkeypatch.setattr(
        round_module.Aggregator, "add", lambda self, client, payload: self.reject(client, "no")
    )
    audit = ClientAudit(make_client_bench(model), canaries=200)
    with pytest.raises(AggregationError, match="refused a canary: no"):
        audit.run(repeats=0)


# -- the command ------------------------------------------------------------------------------------------


def _audit(model: Path, tmp_path: Path, *options: str, canaries: int = CANARIES, **case: Any) -> Any:
    from fedlora.cli.audit import app

    save_resolved(make_client_bench(model, **case).config, tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text("")
    return CliRunner().invoke(app, [str(tmp_path), "--json", "--canaries", str(canaries), *options])


def test_the_quick_audit_of_a_client_level_run_attacks_with_canary_clients(model, tmp_path):
    result = _audit(model, tmp_path, "--repeats", "5", "--strict")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert [one["attack"] for one in said["audits"]] == ["client-canary"]
    assert {"whole updates are clipped", "the divisor is public"} <= {
        one["name"] for one in said["selfchecks"]
    }
    assert json.loads((tmp_path / "audit-client-canary.json").read_text()) == said["audits"][0]


def test_the_audit_of_a_client_level_run_with_half_the_noise_ends_with_its_own_code(
    model, tmp_path, monkeypatch
):
    original = ClientMetric.noise
    monkeypatch.setattr(
        ClientMetric, "noise", lambda self, names, stddev, source: original(self, names, 0.5 * stddev, source)
    )
    result = _audit(model, tmp_path, "--repeats", "0", canaries=CAUGHT)
    assert result.exit_code == AuditFailedError.exit_code
    assert json.loads(result.stdout)["audits"][0]["verdict"] == "failed"


# -- long -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("case", sorted(CASES))
def test_no_false_alarm_in_twenty_client_level_audits(model, case):
    audit = ClientAudit(make_client_bench(model, **CASES[case]), canaries=20_000)
    plan = audit.plan()
    assert all(audit.bound(audit.attack(plan), plan) <= plan.claimed_epsilon for _ in range(20))


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", sorted(CASES))
def test_client_level_audits_pass_over_three_seeds(model, case, seed):
    verdict = ClientAudit(make_client_bench(model, seed=seed, **CASES[case])).run(repeats=10)
    assert verdict.verdict == "passed", verdict
