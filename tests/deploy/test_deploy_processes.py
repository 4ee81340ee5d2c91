"""Child processes: started, watched, restarted when wedged, and never left behind."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ports import reserved_port

from fedlora.cli import client as relay
from fedlora.cli.files import require_private, write_file
from fedlora.cli.processes import (
    Child,
    StopSignals,
    child_environment,
    free_port,
    port_is_free,
    script,
)
from fedlora.cli.serving import SILENT_SECONDS, ServerRole
from fedlora.cli.serving_files import ended_with, last_line, read_json
from fedlora.cli.state import AuditLog, StateFile, read_state
from fedlora.config.schema import NoPrivacy
from fedlora.errors import (
    BudgetExceededError,
    CheckpointError,
    ConfigError,
    DeploymentError,
    FolderInUseError,
)
from fedlora.procfs import descendants


def child(tmp_path: Path, code: str, lines: list[str] | None = None) -> Child:
    made = Child(
        "test",
        [sys.executable, "-c", code],
        environment=child_environment({"X": "1"}, tmp_path / "home"),
        folder=tmp_path / "empty",
        log=tmp_path / "log",
        on_line=None if lines is None else lines.append,
    )
    made.start()
    return made


def all_read(made: Child) -> None:
    """Wait until a child that has ended was read to its end; `wait` gives its reader two seconds."""
    assert made._reader is not None
    made._reader.join(120)


def test_output_goes_to_the_log_and_to_the_callback(tmp_path: Path) -> None:
    lines: list[str] = []
    made = child(
        tmp_path, "import os; print(os.getcwd()); print(os.environ['FLWR_TELEMETRY_ENABLED'])", lines
    )
    assert made.wait(120) == 0
    all_read(made)
    assert lines == [str((tmp_path / "empty").resolve()), "0"]
    assert (tmp_path / "log").read_text().splitlines() == lines


def has_ended(pid: int) -> bool:
    """Whether a process runs no more; its parent may not have asked for its status yet, or may do so right now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def first_line(lines: list[str]) -> str:
    """Wait for a child's first line."""
    deadline = time.monotonic() + 120
    while not lines and time.monotonic() < deadline:
        time.sleep(0.05)
    return lines[0]


def test_stopping_ends_the_whole_family_even_one_that_ignores_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True);"
        "print('up', flush=True); time.sleep(600)"
    )
    lines: list[str] = []
    made = child(tmp_path, code, lines)
    first_line(lines)
    family = [made.pid, *descendants(made.pid or 0)]
    assert len(family) == 2
    made.stop(seconds=0.5)
    assert all(has_ended(pid) for pid in family)


def test_a_wedged_supernode_is_ended_and_a_healthy_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "WEDGED_SECONDS", 0.2)
    made = child(tmp_path, "import time; time.sleep(600)")
    stop, wedged = StopSignals(), threading.Event()
    looked: list[int] = []

    def look() -> None:
        looked.append(1)
        if len(looked) == 3:
            stop.event.set()

    assert relay._watch(made, stop, None, wedged, look) is True
    assert len(looked) == 3
    stop.event.clear()
    wedged.set()
    assert relay._watch(made, stop, None, wedged, lambda: None) is False
    made.stop(seconds=1.0)
    assert relay._watch(made, stop, None, threading.Event(), lambda: None) is False


def test_the_environment_is_quiet_and_trusts_no_proxy_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setenv("FLWR_OIDC_ENABLED", "1")
    found = child_environment({}, tmp_path)
    assert "FORWARDED_ALLOW_IPS" not in found
    assert "FLWR_OIDC_ENABLED" not in found
    assert found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert "127.0.0.1" in found["NO_PROXY"]


def test_a_missing_program_is_named() -> None:
    with pytest.raises(DeploymentError, match="flower-nothing"):
        script("flower-nothing")


def test_a_port_in_use_is_told_from_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not port_is_free("127.0.0.1", taken.getsockname()[1])
    assert port_is_free("127.0.0.1", reserved_port())
    assert 0 < free_port() < 65536


def test_state_and_audit_files(tmp_path: Path) -> None:
    state = StateFile(tmp_path, "server")
    state.update(status="running", round=3)
    found = read_state(tmp_path)
    assert found is not None
    assert (found["alive"], found["round"], found["pid"]) == (True, 3, os.getpid())
    assert read_state(tmp_path / "none") is None
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.write("round", round=1)
    audit.write("round", round=2)
    audit.close()
    entries = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [entry["round"] for entry in entries] == [1, 2]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0


def test_small_files_are_written_in_one_step_and_never_overwritten_by_mistake(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a" / "b", b"one")
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(DeploymentError, match="exists already"):
        write_file(path, b"two")
    assert path.read_bytes() == b"one"
    write_file(path, b"two", replace=True)
    assert path.read_bytes() == b"two"
    path.chmod(0o640)
    with pytest.raises(DeploymentError, match="chmod 600"):
        require_private(path, "key")
    assert [entry.name for entry in path.parent.iterdir()] == ["b"]


def test_damaged_run_files_are_read_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert last_line(tmp_path / "m") == {}
    (tmp_path / "m").write_text('{"round": 1}\n{"round": 2}\n')
    assert last_line(tmp_path / "m") == {"round": 2}
    assert read_json(tmp_path / "none") == {}


def test_an_error_of_the_servers_process_keeps_its_exit_code() -> None:
    error = ended_with(BudgetExceededError, "all clients refused")
    assert (error.exit_code, str(error)) == (25, "all clients refused")
    assert ended_with(ConfigError, "x").exit_code == 10


def test_what_a_killed_process_leaves_behind_is_ended(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time;"
        "made = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True);"
        "print(made.pid, flush=True); time.sleep(600)"
    )
    lines: list[str] = []
    made = child(tmp_path, code, lines)
    orphan = int(first_line(lines))
    assert made.poll() is None
    os.kill(made.pid or 0, 9)
    assert made.wait(60) == -9
    assert not has_ended(orphan)
    made.stop(seconds=1.0)
    assert has_ended(orphan)


class Role(ServerRole):
    """A server's role whose SuperLink has died once."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self._answered = time.monotonic()
        self._child = SimpleNamespace(poll=lambda: -9)  # type: ignore[assignment]
        self._state = SimpleNamespace(update=lambda **fields: self.started.append(f"state {fields}"))  # type: ignore[assignment]

    def _again(self, why: str) -> None:
        self.started.append(why)

    def _start_superlink(self) -> None:
        self.started.append("superlink")
        self._child = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]

    def _sync_keys(self) -> None:
        raise DeploymentError("no answer")


def test_a_server_that_stays_starts_a_dead_superlink_again() -> None:
    role, waits = Role(), iter([False, False, True])
    role._stay(SimpleNamespace(wait=lambda seconds: next(waits)), "finished")  # type: ignore[arg-type]
    assert role.started[1:3] == ["SuperLink ended", "superlink"]


def test_a_superlink_that_runs_and_answers_nothing_is_ended_in_bounded_time() -> None:
    role, stopped = Role(), []
    role._answered = time.monotonic() - SILENT_SECONDS + 50
    role._child = SimpleNamespace(poll=lambda: -9 if stopped else None, stop=lambda: stopped.append(1))  # type: ignore[assignment]
    waits = iter([False, False, False, True])
    role._stay(SimpleNamespace(wait=lambda seconds: next(waits)), "finished")  # type: ignore[arg-type]
    assert not stopped
    role._answered = time.monotonic() - SILENT_SECONDS - 1
    waits = iter([False, False, True])
    role._stay(SimpleNamespace(wait=lambda seconds: next(waits)), "finished")  # type: ignore[arg-type]
    assert stopped
    assert role.started[-3:-1] == ["SuperLink ended", "superlink"]


def test_two_servers_on_one_state_folder(tmp_path: Path) -> None:
    """A second `fedlora server` on a state folder is refused; the folder is free once the first has ended."""
    plan: Any = SimpleNamespace(
        check=lambda: None, state=tmp_path / "state", run_dir=tmp_path / "runs", stay=False,
        config=SimpleNamespace(
            run=SimpleNamespace(name="run"), privacy=NoPrivacy(unit="none"), mechanism=SimpleNamespace(kind="none")
        ),
    )  # fmt: skip
    first = ServerRole(plan, app_dir=tmp_path, resume=False, new=False)
    with pytest.raises(FolderInUseError, match=r"--state .*in use by process"):
        ServerRole(plan, app_dir=tmp_path, resume=True, new=False)
    first._shut_down()
    with pytest.raises(CheckpointError, match="unfinished"):
        ServerRole(plan, app_dir=tmp_path, resume=False, new=False)
    ServerRole(plan, app_dir=tmp_path, resume=True, new=False)._shut_down()
