"""The images' entry points in clean roots, as their users, with compose's mounts and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deploy_containers import Box, Image, usable
from deploy_helpers import ROOT, write_model

from fedlora.ledger import Account, load_secret, open_ledger

pytestmark = pytest.mark.network
ASK = (
    "from fedlora.training.port import hello_packet, unpack_hello\n"
    "from fedlora.training.service import SocketPort\n"
    "port = SocketPort('/run/fedlora/trainer.sock', '/run/fedlora/trainer.token', connect_seconds=3)\n"
    "print(unpack_hello(port.exchange(hello_packet())).clients)\n"
)
STRANGER = (10099, 10099, ())


class Stack:
    """The files of a federation made by the script, and the boxes of compose's services."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.chmod(0o755)
        self.folder = home / "federation"
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "FEDLORA": f"{sys.executable} -m fedlora.cli.main",
        }
        script = str(ROOT / "deploy" / "scripts" / "new-federation.sh")
        subprocess.run(
            ["bash", script, str(self.folder), "server", "1"],
            env=environment,
            check=True,
            capture_output=True,
        )
        self.folder.chmod(0o755)
        for part in (self.folder / "server", self.folder / "site-1"):
            part.chmod(0o755)
        model = write_model(self.folder / "models" / "tiny")
        for path in (model, *model.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        run = self.folder / "server" / "run.yaml"
        text = run.read_text().replace("sentence-transformers/all-MiniLM-L6-v2", "/models/tiny")
        run.write_text(text.replace("target_epsilon: 8.0", "noise_multiplier: 1.0"))
        self.volumes: dict[str, Path] = {}
        self.services = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]

    def box(self, service: str, network: str | None = None) -> Box:
        """Return a service's box with the volumes that compose gives it."""
        entry = self.services[service]
        name = entry["build"]["dockerfile"].rpartition("Dockerfile.")[2]
        mounts = {}
        for volume in entry["volumes"]:
            source, place, *options = volume.split(":")
            outside = self.home / source if source.startswith("./") else self._volume(source, place, name)
            mounts[":".join([place, *options])] = outside
        made = Box(service, Image.read(name), mounts, self.home, network)
        made.prepare()
        return made

    def _volume(self, source: str, place: str, image: str) -> Path:
        """A named volume takes owner and mode of the place in the first image that mounts it."""
        if source not in self.volumes:
            folder = self.volumes[source] = self.home / f"volume-{source}"
            folder.mkdir()
            text = (ROOT / "deploy" / "docker" / f"Dockerfile.{image}").read_text()
            for owner, group, mode, places in re.findall(
                r"install -d (?:-o (\d+) )?-g (\d+) -m (\d+) ((?:/\S+ ?)+)", text
            ):
                if place in places.split():
                    os.chown(folder, int(owner or 0), int(group))
                    folder.chmod(int(mode, 8))
        return self.volumes[source]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    if not usable():
        pytest.skip("namespaces and other users need root")
    home = Path("/tmp") / f"fl-box-{os.getpid()}"  # pytest's own folders are closed to other users
    home.mkdir()
    try:
        yield Stack(home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def trainer(stack: Stack) -> Iterator[Box]:
    box = stack.box("trainer-1")
    process = box.start()
    deadline = time.monotonic() + 240
    while box.inside(*box.image.health).returncode != 0:
        assert process.poll() is None, box.log()
        assert time.monotonic() < deadline, box.log()
        time.sleep(1.0)
    yield box
    process.terminate()
    process.wait(240)


def test_the_trainer_is_ready_by_its_images_own_health_check(trainer: Box) -> None:
    assert "trainer ready" in trainer.log()
    status = Path(f"/proc/{trainer.processes[0].pid}/status").read_text()
    assert re.search(r"^Uid:\s+10002\s+10002", status, re.MULTILINE)
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)


def test_the_trainer_has_no_network(trainer: Box) -> None:
    done = trainer.inside("python", "-c", "import socket; print([name for _, name in socket.if_nameindex()])")
    assert done.stdout.strip() == "['lo']", done.stderr


def test_socket_and_token_are_for_the_owner_and_one_group(stack: Stack, trainer: Box) -> None:
    for name, mode in (("trainer.sock", 0o660), ("trainer.token", 0o640)):
        found = (stack.volumes["socket-1"] / name).stat()
        assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (10002, 10010, mode)
    assert (stack.volumes["ledger-1"]).stat().st_mode & 0o777 == 0o700
    assert (stack.volumes["ledger-1"] / "ledger.secret").stat().st_mode & 0o077 == 0


def test_the_relays_user_may_ask_the_trainer_and_a_stranger_may_not(stack: Stack, trainer: Box) -> None:
    relay = stack.box("client-1")
    done = relay.run("python", "-c", ASK)
    assert done.stdout.strip() == "('site-1',)", done.stderr
    refused = relay.run("python", "-c", ASK, user=STRANGER)
    assert refused.returncode != 0
    assert "site-1" not in refused.stdout


def test_the_relay_sees_no_data_no_ledger_and_no_identity(stack: Stack, trainer: Box) -> None:
    relay = stack.box("client-1")
    look = "import os; print(sorted(os.listdir('/')), sorted(os.listdir('/config')))"
    done = relay.run("python", "-c", look)
    assert done.returncode == 0, done.stderr
    for name in ("data", "ledger", "models"):
        assert f"'{name}'" not in done.stdout.partition("] [")[0]
    assert done.stdout.strip().endswith("['ca.crt', 'site.key']")


def test_even_with_the_trainers_folders_the_relays_user_could_read_nothing(
    stack: Stack, trainer: Box
) -> None:
    relay_user = stack.box("client-1").image.user
    for path in ("/ledger/ledger.secret", "/ledger/ledger.db", "/config/identity.pem", "/data/records.jsonl"):
        assert trainer.run("cat", path).returncode == 0, path
        assert trainer.run("cat", path, user=relay_user).returncode != 0, path


def test_the_relay_refuses_a_key_that_others_can_read(stack: Stack, trainer: Box) -> None:
    key = stack.folder / "site-1" / "client" / "site.key"
    key.chmod(0o644)
    try:
        process = stack.box("client-1").start()
        assert process.wait(240) == 70
    finally:
        key.chmod(0o600)


@pytest.mark.long
def test_server_relay_and_trainer_train_a_round_by_their_images_commands(stack: Stack, trainer: Box) -> None:
    space = f"fl{os.getpid()}-box"
    subprocess.run(["ip", "netns", "add", space], check=True)
    processes = []
    try:
        subprocess.run(["ip", "-n", space, "link", "set", "lo", "up"], check=True)
        server, relay = stack.box("server", space), stack.box("client-1", space)
        asked = ("federation.rounds=2", "federation.min_replies=1", "deployment.expected_clients=1")
        processes = [server.start(*asked), relay.start()]
        assert processes[0].wait(540) == 0, server.log()[-3000:] + relay.log()[-2000:]
        health = relay.inside(*relay.image.health)
        assert health.returncode == 0, health.stderr
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(240)
        subprocess.run(["ip", "netns", "del", space], check=False)
    run = next(path for path in (stack.volumes["server-state"] / "runs").iterdir() if path.is_dir())
    assert json.loads((run / "summary.json").read_text())["status"] == "finished"
    ledger_folder = stack.volumes["ledger-1"]
    secret = load_secret(ledger_folder / "ledger.secret")
    with open_ledger(ledger_folder / "ledger.db", secret=secret, read_only=True) as ledger:
        rows = ledger.report(Account("site-1", "sample-news")).rounds
    assert [row.server_round for row in rows] == [1, 2]
