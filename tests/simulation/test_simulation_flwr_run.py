"""`flwr run .`: the second way into the same simulation, and that a deployment never takes it."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_files
from ports import reserved_port
from simulation_helpers import configuration, container, metric_lines

import fedlora
from fedlora.cli.bundle import app_files
from fedlora.config import config_container
from fedlora.config.resolve import config_hash
from fedlora.errors import ConfigError, SimulationError, TrainerUnreachableError
from fedlora.ledger import load_secret, open_ledger
from fedlora.simulation import flower, flower_node
from fedlora.simulation.appdir import code_hash
from fedlora.simulation.flower_plan import read_plan
from fedlora.simulation.messages import to_record
from fedlora.simulation.prepare import complete, make_federation
from fedlora.simulation.run import simulate
from fedlora.training.port import (
    Hello,
    Packet,
    PacketPort,
    failure_packet,
    hello_packet,
    pack_hello,
    pack_request,
    unpack_hello,
    unpack_reply,
)
from fedlora.training.requests import RoundRequest
from fedlora.wire.fingerprint import payload_fingerprint
from server.from_context import settings_from_context
from server.roster import Roster

ROOT = Path(__file__).resolve().parents[2]
APP_FILE = str(ROOT / "client" / "app.py")
SEEDED = {"federation": {"rounds": 2}}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FEDLORA_TRAINER_SOCKET", "FEDLORA_TRAINER_TOKEN_FILE", "FEDLORA_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    yield
    flower_node.close_runs()
    torch.set_num_threads(threads)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process pass for a worker of Flower's simulation engine."""
    monkeypatch.setattr(flower, "in_ray_actor", lambda: True)


def write_config(world: Path, root: Path, **changes: Any) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "run.yaml"
    path.write_text(yaml.safe_dump(container(world, root / "runs", **changes)))
    return path


def context(run_config: dict[str, Any], number: int | None = 0, nodes: int = 2) -> Context:
    node_config = {} if number is None else {"partition-id": number, "num-partitions": nodes}
    return Context(
        run_id=77,
        node_id=9000 + (number or 0),
        node_config=node_config,
        state=RecordDict(),
        run_config=run_config,
    )


def port(run_config: dict[str, Any], number: int = 0, nodes: int = 2) -> PacketPort:
    return flower.port_of(context(run_config, number, nodes), APP_FILE)


def request(path: Path, own: tuple[str, ...], server_round: int = 1, **changes: Any) -> RoundRequest:
    plan = read_plan({"config": str(path)}, 77, ROOT)
    prepared = complete(make_federation(plan.config).config)
    values: dict[str, Any] = {
        "run_id": plan.run_id,
        "server_round": server_round,
        "config": config_container(prepared.config),
        "config_hash": config_hash(prepared.config),
        "payload": prepared.bench.initial_payload(),
        "clients": own,
        "steps": 1,
    }
    return RoundRequest(**{**values, **changes})


# -- nodes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_every_client_lives_at_one_node(world: Path, tmp_path: Path, engine: None, nodes: int) -> None:
    settings = {"config": str(write_config(world, tmp_path)), "simulate": True}
    hellos = [unpack_hello(port(settings, number, nodes).exchange(hello_packet())) for number in range(nodes)]
    lists = [client for hello in hellos for client in hello.clients]
    assert sorted(lists) == sorted(make_federation(configuration(world, tmp_path)).parts)
    assert {hello.facts["app"] for hello in hellos} == {code_hash(ROOT)}
    assert len(flower_node._RUNS) == 1


def test_a_node_more_than_clients_has_none(world: Path, tmp_path: Path, engine: None) -> None:
    settings = {"config": str(write_config(world, tmp_path)), "simulate": True}
    assert unpack_hello(port(settings, 5, 6).exchange(hello_packet())).clients == ()


def test_a_round_is_charged_once_in_the_shared_ledger(world: Path, tmp_path: Path, engine: None) -> None:
    path = write_config(world, tmp_path)
    node = port({"config": str(path), "simulate": True})
    own = tuple(unpack_hello(node.exchange(hello_packet())).clients)
    asked = pack_request(request(path, own))
    first = unpack_reply(node.exchange(asked))
    assert [one.status for one in first.replies] == ["ok"] * len(own)
    flower_node.close_runs()  # the round is repeated in another process
    again = unpack_reply(port({"config": str(path), "simulate": True}).exchange(asked))
    assert [one.status for one in again.replies] == ["refused"] * len(own)
    epsilons = ledger_epsilons(tmp_path / "runs")
    assert set(epsilons) == set(own)
    assert {one.epsilon for one in first.replies} == set(epsilons.values())


def test_optimiser_state_follows_the_client_to_another_process(
    world: Path, tmp_path: Path, engine: None
) -> None:
    path = write_config(world, tmp_path)
    settings = {"config": str(path), "simulate": True}
    stays = port(settings)
    own = tuple(unpack_hello(stays.exchange(hello_packet())).clients)[:1]
    for number in (1, 2):
        stays.exchange(pack_request(request(path, own, number)))
    flower_node.close_runs()
    moved = unpack_reply(port(settings).exchange(pack_request(request(path, own, 3))))
    flower_node.close_runs()
    twin = write_config(world, tmp_path / "twin")
    stays = port({**settings, "config": str(twin)})
    for number in (1, 2, 3):
        last = unpack_reply(stays.exchange(pack_request(request(twin, own, number))))
    there, here = moved.replies[0].payload, last.replies[0].payload
    assert there is not None
    assert here is not None
    assert payload_fingerprint(there) == payload_fingerprint(here)
    flower_node.close_runs()
    without = write_config(world, tmp_path / "without")  # the power twin: lost state gives another update
    node = port({**settings, "config": str(without)})
    lost = unpack_reply(node.exchange(pack_request(request(without, own, 3)))).replies[0].payload
    assert lost is not None
    assert payload_fingerprint(lost) != payload_fingerprint(here)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"clients": ("client-9999",)}, "DataError"),
        ({"run_id": "another"}, "ConfigError"),
        ({"config": {"data": {}, "run": {"seed": 3}}}, "ConfigError"),
    ],
)
def test_foreign_requests_are_refused_before_anything_is_charged(
    world: Path, tmp_path: Path, engine: None, changes: dict[str, Any], expected: str
) -> None:
    path = write_config(world, tmp_path)
    node = port({"config": str(path), "simulate": True})
    own = tuple(unpack_hello(node.exchange(hello_packet())).clients)
    answer = node.exchange(pack_request(request(path, own, **changes)))
    assert (answer.header["op"], answer.header["error"]) == ("failure", expected)
    assert ledger_epsilons(tmp_path / "runs") == {}


# -- the server's side ------------------------------------------------------------------------------


@pytest.mark.parametrize("clients", [3, 4, 5])
def test_the_server_waits_for_every_client_and_makes_the_ledger(
    world: Path, tmp_path: Path, clients: int
) -> None:
    path = write_config(world, tmp_path, data={"partition": {"kind": "quantity", "clients": clients}})
    settings = settings_from_context(context({"config": str(path), "simulate": True}, None))
    assert len(settings.expect or ()) == clients
    assert settings.app_hash == code_hash(ROOT)
    assert settings.folder == tmp_path / "runs" / "tiny-flwr-77"
    assert ledger_epsilons(tmp_path / "runs") == {}


def test_without_the_key_the_rules_of_deployments_hold(world: Path, tmp_path: Path) -> None:
    path = write_config(world, tmp_path)  # its noise is seeded
    for key in ({}, {"simulate": False}):
        with pytest.raises(ConfigError, match="noise_source"):
            settings_from_context(context({"config": str(path), **key}, None))


def announce(roster: Roster, packet: Packet) -> int:
    reply: Any = SimpleNamespace(
        metadata=SimpleNamespace(src_node_id=7), has_error=lambda: False, content=to_record(packet)
    )
    roster._take(reply)
    return roster.count()


@pytest.mark.parametrize("facts", [{"app": "b" * 64}, {"app": None}, {}])
def test_a_node_with_other_code_or_of_a_real_site_ends_a_simulation(facts: dict[str, Any]) -> None:
    roster = Roster(None, None, "a" * 64)  # type: ignore[arg-type]
    with pytest.raises(SimulationError, match="other code"):
        announce(roster, pack_hello(Hello(("c",), fedlora.__version__, None, facts)))
    assert announce(roster, pack_hello(Hello(("c",), fedlora.__version__, None, {"app": "a" * 64}))) == 1


def test_a_node_that_cannot_be_set_up_ends_a_simulation_at_once() -> None:
    roster = Roster(None, None, "a" * 64)  # type: ignore[arg-type]
    with pytest.raises(SimulationError, match="absolute run-dir"):
        announce(roster, failure_packet(ConfigError("run-dir: give an absolute run-dir")))
    real = Roster(None, None)  # type: ignore[arg-type]
    assert announce(real, failure_packet(ConfigError("x"))) == 0  # a deployment goes on without it


def test_the_bundle_of_a_deployment_has_no_such_key() -> None:
    bundled = tomllib.loads(app_files(ROOT)["pyproject.toml"].decode())["tool"]["flwr"]["app"]["config"]
    assert "simulate" not in bundled
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert own == {**bundled, "simulate": False}


def test_the_checkout_builds_into_a_bundle_of_the_app_alone() -> None:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    found = [name for name in names if name and (ROOT / name).is_file()]
    if not found:  # no checkout: the app's own files and the library must do
        found = [one.relative_to(ROOT).as_posix() for one in ROOT.glob("[a-z]*/**/*.py")] + ["pyproject.toml"]
    content, _ = build_fab_from_files({name: ROOT / name for name in found})
    with zipfile.ZipFile(io.BytesIO(content)) as bundle:
        packed = {name for name in bundle.namelist() if name.endswith(".py")}
    wanted = {name for name in found if name.split("/")[0] in ("client", "server", "strategies")}
    assert packed == {name for name in wanted if name.endswith(".py")}


# -- a deployment never simulates -------------------------------------------------------------------


@pytest.mark.parametrize("key", [{}, {"simulate": False}, {"simulate": True}])
def test_without_the_engine_there_is_no_trainer(world: Path, tmp_path: Path, key: dict[str, Any]) -> None:
    settings = {"config": str(write_config(world, tmp_path)), **key}
    with pytest.raises(TrainerUnreachableError, match="FEDLORA_TRAINER_SOCKET"):
        flower.port_of(context(settings), APP_FILE)
    assert flower_node._RUNS == {}


@pytest.mark.parametrize("key", [{}, {"simulate": False}])
def test_without_the_key_there_is_no_trainer(
    world: Path, tmp_path: Path, engine: None, key: dict[str, Any]
) -> None:
    settings = {"config": str(write_config(world, tmp_path)), **key}
    with pytest.raises(TrainerUnreachableError, match="simulate=true"):
        flower.port_of(context(settings), APP_FILE)
    assert flower_node._RUNS == {}


@pytest.mark.parametrize("node_config", [None, (2, 2), (-1, 2)])
def test_without_a_partition_there_is_no_trainer(
    world: Path, tmp_path: Path, engine: None, node_config: Any
) -> None:
    settings = {"config": str(write_config(world, tmp_path)), "simulate": True}
    asked = context(settings, None) if node_config is None else context(settings, *node_config)
    with pytest.raises(TrainerUnreachableError, match="FEDLORA_TRAINER_SOCKET"):
        flower.port_of(asked, APP_FILE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FEDLORA_TRAINER_SOCKET", "/nowhere/trainer.sock"),
        ("FEDLORA_TRAINER_SOCKET", ""),
        ("FEDLORA_TRAINER_TOKEN_FILE", "/x"),
    ],
)
def test_a_sites_relay_never_simulates(
    world: Path, tmp_path: Path, engine: None, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    settings = {"config": str(write_config(world, tmp_path)), "simulate": True}
    try:
        found: Any = flower.port_of(context(settings), APP_FILE)
    except TrainerUnreachableError:
        found = None
    assert not hasattr(found, "trainer")
    assert flower_node._RUNS == {}


@pytest.mark.parametrize("value", ["true", 1, "yes"])
def test_the_key_is_a_boolean(value: Any) -> None:
    with pytest.raises(ConfigError, match="allowed true, false"):
        flower.asks_to_simulate({"simulate": value})


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({}, {"run-dir": "runs"}, "absolute run-dir"),
        ({}, {"resume": True}, "--resume RUN"),
        ({"data": {"partition": None}}, {}, "data.partition"),
        ({"deployment": {"expected_clients": 9}}, {}, "expected_clients"),
        ({"federation": {"secure_aggregation": True, "compression": "none"}}, {}, "secure_aggregation"),
        ({}, {"overrides": "run.seed='3"}, "close the quotes"),
        ({}, {"config": "nowhere.yaml"}, "absolute path"),
        ({}, {"config": ""}, "no 'config'"),
    ],
)
def test_what_does_not_fit_is_refused(
    world: Path, tmp_path: Path, changes: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    path = write_config(world, tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        read_plan({"config": str(path), **more}, 77, ROOT)


# -- the real command -------------------------------------------------------------------------------


def ledger_epsilons(runs: Path) -> dict[str, float]:
    with open_ledger(runs / "ledger.sqlite", secret=load_secret(runs / "ledger.key")) as book:
        return {one.client: book.report(one, with_rounds=False).epsilon for one in book.accounts()}


def processes_of(home: Path) -> list[int]:
    """Return the processes that were started with this FLWR_HOME."""
    mark = f"FLWR_HOME={home}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def end_all(home: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_of(home):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + 10
        while processes_of(home) and time.monotonic() < deadline:
            time.sleep(0.2)


@pytest.fixture
def flwr_home(tmp_path: Path) -> Iterator[Path]:
    home = tmp_path / "flwr-home"
    home.mkdir()
    try:
        yield home
    finally:
        end_all(home)
    assert processes_of(home) == []


def flwr_run(home: Path, settings: str, nodes: int) -> subprocess.CompletedProcess[str]:
    """Run the documented command from an empty folder."""
    scripts = sysconfig.get_path("scripts")
    environment = {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(reserved_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
    }
    command = shutil.which("flwr", path=environment["PATH"])
    assert command is not None, f"no flwr beside {sys.executable}"
    empty = home / "empty"
    empty.mkdir(exist_ok=True)
    return subprocess.run(
        [
            *(command, "run", str(ROOT), "local", "--stream", "--run-config", settings),
            *("--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"),
        ],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.long
def test_flwr_run_spends_what_the_ray_grid_spends(world: Path, tmp_path: Path, flwr_home: Path) -> None:
    twin = simulate(configuration(world, tmp_path / "grid" / "runs", **SEEDED))
    path = write_config(world, tmp_path / "flower")
    settings = f"simulate=true config='{path}' overrides='federation.rounds=2'"
    done = flwr_run(flwr_home, settings, nodes=3)
    log = done.stdout + done.stderr
    runs = tmp_path / "flower" / "runs"
    folders = [one for one in runs.glob("tiny-flwr-*") if one.is_dir()]
    assert len(folders) == 1, log
    summary = json.loads((folders[0] / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", 2), log
    assert [line["accepted"] for line in metric_lines(folders[0])[1:]] == [4, 4], log
    grid = ledger_epsilons(tmp_path / "grid" / "runs")
    assert ledger_epsilons(runs) == grid
    assert summary["epsilon"] == twin.epsilon == max(grid.values())
    assert summary["metrics"]["loss"] == pytest.approx(twin.metrics["loss"], rel=1e-5)
    told = json.loads((folders[0] / "ledger.json").read_text())
    assert {one["account"]["client"]: one["epsilon"] for one in told["accounts"]} == grid
