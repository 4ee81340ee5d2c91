"""Small faults of every day: a second start, full disks, wrong files, stale states; each one clear and harmless."""

from __future__ import annotations

import datetime
import functools
import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from deploy_helpers import Federation
from test_deploy_processes import all_read
from test_deploy_trainer_socket import Echo, client, place, start

from fedlora.cli import keyring, pki
from fedlora.cli import main as frame
from fedlora.cli.client import ClientSettings, require_certificates
from fedlora.cli.metrics import server_registry
from fedlora.cli.processes import Child, child_environment
from fedlora.cli.serving_files import control_token, make_folder
from fedlora.cli.state import AuditLog, StateFile, note_change, read_state
from fedlora.errors import AuthenticationError, DataError, DeploymentError
from fedlora.procfs import process_start
from fedlora.training.port import Packet
from fedlora.training.service_server import TrainerService, ensure_token

__all__ = ["place"]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def test_a_second_trainer_leaves_the_first_ones_socket_alone(place: Path) -> None:
    first = start(place, Echo())
    second = TrainerService(Echo(), place / "s", ensure_token(place / "token"))
    with pytest.raises(DeploymentError, match="another trainer"):
        second.start()
    second.stop(grace_seconds=0.1)
    assert client(place).exchange(Packet({"op": "still there"})).header == {"op": "still there"}
    first.stop()
    assert not (place / "s").exists()


def test_a_trainer_that_stops_late_leaves_its_successors_socket_alone(place: Path) -> None:
    old = start(place, Echo())
    (place / "s").unlink()
    new = start(place, Echo())
    old.stop(grace_seconds=0.1)
    assert client(place).exchange(Packet({"op": "new"})).header == {"op": "new"}
    new.stop()


def test_work_ahead_starts_when_the_answer_has_left_and_its_failure_harms_nobody(place: Path) -> None:
    answered: threading.Event = threading.Event()
    waited: queue.Queue[bool] = queue.Queue()

    def ahead() -> None:
        waited.put(answered.wait(30))
        raise ValueError("not now")

    service = TrainerService(Echo(), place / "s", ensure_token(place / "token"), after=ahead)
    service.start()
    assert client(place).exchange(Packet({"op": "round"})).header == {"op": "round"}
    answered.set()
    assert waited.get(timeout=60), "the answer waited for the work ahead"
    assert client(place).exchange(Packet({"op": "next"})).header == {"op": "next"}
    service.stop()


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    folder = tmp_path / "certs"
    pki.make_ca(folder)
    pki.issue_server(folder, ["localhost"])
    return folder


def test_a_server_key_of_another_certificate_or_open_to_others_is_refused(
    certs: Path, tmp_path: Path
) -> None:
    pki.check_server_key(certs)
    key = certs / "server.key"
    key.chmod(0o640)  # a volume's own group
    pki.check_server_key(certs)
    key.chmod(0o644)
    with pytest.raises(DeploymentError, match="chmod 600"):
        pki.check_server_key(certs)
    key.chmod(0o600)
    pki.make_ca(tmp_path / "other")
    pki.issue_server(tmp_path / "other", ["localhost"])
    key.write_bytes((tmp_path / "other" / "server.key").read_bytes())
    with pytest.raises(AuthenticationError, match="another certificate"):
        pki.check_server_key(certs)
    for content in (b"", b"-----BEGIN PRIVATE KEY-----\n"):
        key.write_bytes(content)
        with pytest.raises(DeploymentError, match="not a private key"):
            pki.check_server_key(certs)
    key.unlink()
    with pytest.raises(DeploymentError, match="server key"):
        pki.check_server_key(certs)


@pytest.mark.parametrize("name", ["ca.crt", "server.crt"])
def test_a_certificate_file_that_is_none_is_one_clear_error(certs: Path, name: str) -> None:
    (certs / name).write_text("garbage")
    with pytest.raises(DeploymentError, match="not a PEM certificate"):
        pki.check_server_certificate(certs)


def test_an_expired_authority_is_seen_at_the_server(certs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3660)
    with monkeypatch.context() as patched:
        patched.setattr(pki, "_builder", functools.partial(_long_lived, pki._builder))
        pki.issue_server(certs, ["localhost"], replace=True)
    with pytest.raises(AuthenticationError, match="--new-ca"):
        pki.check_server_certificate(certs, later)


def _long_lived(true: Any, *arguments: Any) -> Any:
    return true(*arguments[:-1], 5000)


def test_a_renewal_with_another_authoritys_key_changes_nothing(certs: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in certs.iterdir() if path.name != "ca.key"}
    pki.make_ca(tmp_path / "other")
    for content in ((tmp_path / "other" / "ca.key").read_bytes(), b"", b"garbage"):
        (certs / "ca.key").write_bytes(content)
        with pytest.raises(DeploymentError, match="CA key"):
            pki.issue_server(certs, ["localhost"], replace=True)
    assert before == {path.name: path.read_bytes() for path in certs.iterdir() if path.name != "ca.key"}


@pytest.mark.parametrize(
    "host", ["", "ü.example", "a b", "a..b", "-" * 300, "a/b", "http://a", "a:8000", "a\n"]
)
def test_a_host_that_is_none_is_refused_before_anything_is_written(tmp_path: Path, host: str) -> None:
    assert frame.main(["certs", "init", str(tmp_path / "new"), "--host", host]) == DeploymentError.exit_code
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "host", ["fl.example.org", "*.example.org", "xn--mnchen-3ya.de", "10.0.0.5", "fe80::1", "a_b"]
)
def test_names_and_addresses_are_accepted(certs: Path, host: str) -> None:
    pki.issue_server(certs, [host], replace=True)
    assert host in pki.check_server_certificate(certs).names


def test_a_control_token_open_to_others_or_cut_short_is_refused(tmp_path: Path) -> None:
    token = control_token(tmp_path)
    assert control_token(tmp_path) == token
    path = tmp_path / "control.token"
    path.chmod(0o604)
    with pytest.raises(DeploymentError, match="chmod 600"):
        control_token(tmp_path)
    path.chmod(0o600)
    path.write_text(token[:20])
    with pytest.raises(DeploymentError, match="too short"):
        control_token(tmp_path)


def test_a_key_that_does_not_exist_cannot_be_rotated(tmp_path: Path) -> None:
    keyring.new_deployment_key(tmp_path, "hospital")
    assert frame.main(["keys", "rotate", str(tmp_path), "hospitol"]) == DeploymentError.exit_code
    assert not (tmp_path / "hospitol").exists()
    assert frame.main(["keys", "rotate", str(tmp_path), "hospital"]) == 0


def test_a_key_can_be_rotated_twice_within_a_second_and_every_old_one_is_kept(tmp_path: Path) -> None:
    assert frame.main(["keys", "new", str(tmp_path), "hospital"]) == 0
    seen = [(tmp_path / "hospital").read_bytes()]
    for _ in range(3):
        assert frame.main(["keys", "rotate", str(tmp_path), "hospital"]) == 0
        seen.append((tmp_path / "hospital").read_bytes())
    kept = [path.read_bytes() for path in sorted(tmp_path.glob("hospital.old-*"))]
    assert kept == seen[:-1]


def settings(tmp_path: Path, superlink: str, ca: Path) -> ClientSettings:
    key = tmp_path / "keys" / "a"
    if not key.exists():
        keyring.new_deployment_key(tmp_path / "keys", "a")
    return ClientSettings(superlink, ca, key, tmp_path / "s", tmp_path / "t", tmp_path, 5.0, "127.0.0.1", 0)


@pytest.mark.parametrize("address", ["host", "host:", ":8000", "host:0", "host:65536", "host:٣", "host:-1"])
def test_an_impossible_address_is_refused_at_once(tmp_path: Path, address: str) -> None:
    ca = tmp_path / "ca.crt"
    assert frame.main(["certs", "init", str(tmp_path / "certs"), "--host", "localhost"]) == 0
    ca.write_bytes((tmp_path / "certs" / "ca.crt").read_bytes())
    settings(tmp_path, "host:8000", ca).check()
    with pytest.raises(DeploymentError, match="--superlink"):
        settings(tmp_path, address, ca).check()


@pytest.mark.parametrize("content", [b"", b"not a certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_ca_file_without_a_certificate_is_refused_at_once(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DeploymentError, match="no certificate"):
        require_certificates(content, tmp_path / "ca.crt")


@needs_full
def test_a_full_disk_under_its_log_does_not_stop_a_child(tmp_path: Path) -> None:
    lines: list[str] = []
    made = Child(
        "test",
        [sys.executable, "-c", "for n in range(20000): print('line', n)"],
        environment=child_environment({}, tmp_path / "home"),
        folder=tmp_path / "empty",
        log=FULL,
        on_line=lines.append,
    )
    made.start()
    assert made.wait(240) == 0
    all_read(made)
    assert len(lines) == 20_000


def test_a_child_whose_log_cannot_be_opened_still_runs(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    lines: list[str] = []
    made = Child(
        "test",
        [sys.executable, "-c", "print('up')"],
        environment=child_environment({}, tmp_path / "home"),
        folder=tmp_path / "empty",
        log=tmp_path / "log",
        on_line=lines.append,
    )
    made.start()
    assert made.wait(240) == 0
    all_read(made)
    assert lines == ["up"]


@needs_full
def test_an_audit_line_that_does_not_fit_is_one_clear_error_and_a_relay_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    frame.setup_logging()
    audit = AuditLog(FULL)
    with pytest.raises(DeploymentError, match=r"audit log.*No space left"):
        audit.write("something")
    state = StateFile(tmp_path, "client")
    note_change(state, audit, "client started", "running")
    assert "No space left" in capfd.readouterr().err
    assert read_state(tmp_path) is not None


@pytest.mark.parametrize(
    "make", [lambda p: AuditLog(p / "f" / "audit"), lambda p: make_folder(p / "f" / "x", "--state")]
)
def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path, make: object) -> None:
    (tmp_path / "f").write_text("a file")
    with pytest.raises(DeploymentError, match="cannot be"):
        make(tmp_path)  # type: ignore[operator]


def test_a_later_process_with_the_same_id_is_not_taken_for_the_role(tmp_path: Path) -> None:
    StateFile(tmp_path, "server").update(status="running")
    found = read_state(tmp_path)
    assert found is not None
    assert found["alive"]
    assert found["pid_start"] == process_start(os.getpid())
    path = tmp_path / "state.json"
    path.write_text(path.read_text().replace(f'"{found["pid_start"]}"', '"1"'))
    again = read_state(tmp_path)
    assert again is not None
    assert not again["alive"]


def test_missing_records_are_found_before_the_trainer_serves(tmp_path: Path) -> None:
    made = Federation(tmp_path, sites=("site-a",))
    made.make_site("site-a", 0)
    site = str(tmp_path / "site-a" / "site.yaml")
    assert frame.main(["trainer", site, "--check"]) == 0
    (tmp_path / "site-a" / "records.jsonl").unlink()
    assert frame.main(["trainer", site, "--check"]) == DataError.exit_code
    made.stop()


def test_a_stopped_trainer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedlora.cli.trainer import RunningTrainer
    from fedlora.config.trainer import load_trainer

    made = Federation(tmp_path, sites=("site-a",))
    made.make_site("site-a", 0)
    site = tmp_path / "site-a" / "site.yaml"
    running = RunningTrainer(load_trainer(site, (), ()).config, site)
    running.start()
    assert frame.main(["status", str(made.place("site-a"))]) == 0
    assert "status running" in capsys.readouterr().out
    running.close()
    state = made.place("site-a") / "state.json"
    state.write_text(state.read_text().replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
    assert frame.main(["status", str(made.place("site-a"))]) == 0
    assert "not running (pid 999999999), status stopped" in capsys.readouterr().out
    made.stop()


def test_status_tells_whether_a_relay_is_connected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = StateFile(tmp_path, "client")
    for connected, text in ((False, "not connected"), (True, ", connected")):
        state.update(status="running", connected=connected)
        assert frame.main(["status", str(tmp_path)]) == 0
        assert text in capsys.readouterr().out
        assert frame.main(["status", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["roles"][0]["connected"] is connected


def test_every_metric_of_the_server_has_a_type_and_a_help_text() -> None:
    registry = server_registry("no privacy")
    for name in ("fedlora_round", "fedlora_round_accepted", "fedlora_round_asked", "fedlora_round_epsilon"):
        registry.set(name, 1.0)
    registry.add("fedlora_restarts_total")
    text = registry.text()
    assert "untyped" not in text
    assert all(len(line.split(" ", 3)[3]) > 10 for line in text.splitlines() if line.startswith("# HELP"))
