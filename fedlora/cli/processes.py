"""Start, watch and stop child processes: logs to a file, lines to a callback, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path

import fedlora
from fedlora.errors import DeploymentError
from fedlora.procfs import descendants, process_start

STOP_SECONDS = 15.0
MAX_LOG_BYTES = 50_000_000


def child_environment(extra: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: quiet, nothing installed at run time, own state folder.

    Args:
        extra: further variables.
        home: Flower's state folder (`FLWR_HOME`).
    """
    environment = dict(os.environ)
    for name in ("FLWR_OIDC_ENABLED", "FORWARDED_ALLOW_IPS"):
        environment.pop(name, None)
    scripts = sysconfig.get_path("scripts")
    loopback = "127.0.0.1,localhost,::1"
    proxy = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    environment.update(
        {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([scripts, environment.get("PATH", os.defpath)]),
            "NO_PROXY": ",".join(part for part in (proxy, loopback) if part),
        }
    )
    package = Path(fedlora.__file__).resolve().parent
    if (
        package.parent / "pyproject.toml"
    ).exists():  # a checkout: children run from elsewhere and must find it
        known = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(part for part in (str(package.parent), known) if part)
    environment.update(extra)
    return environment


def script(name: str) -> str:
    """Return the path of an installed command (for example `flower-supernode`).

    Raises:
        DeploymentError: if it is not installed beside this Python.
    """
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.exists():
        raise DeploymentError(
            f"{name}: not installed beside {sys.executable}; run pip install 'flwr[simulation]'"
        )
    return str(path)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Return whether a TCP port can be bound."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class Child:
    """One child process in a session of its own.

    Args:
        name: for messages and the log file's name.
        command: argument list.
        environment: complete environment.
        folder: working directory, empty on purpose where Flower runs.
        log: file that its output is appended to.
        on_line: called with each line of output.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        on_line: Callable[[str], None] | None = None,
    ) -> None:
        """Keep the parts; `start` runs it."""
        self.name, self._command, self._environment = name, list(command), dict(environment)
        self._folder, self._log, self._on_line = folder, log, on_line
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._family: dict[int, str] = {}

    def start(self) -> None:
        """Start the process.

        Raises:
            DeploymentError: if it cannot be started.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._log.parent.mkdir(parents=True, exist_ok=True)
            if self._log.exists() and self._log.stat().st_size > MAX_LOG_BYTES:
                self._log.replace(self._log.with_suffix(self._log.suffix + ".1"))
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise DeploymentError(f"{self.name}: cannot be started ({error.strerror})") from None
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """Return the process id while it is known."""
        return None if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs; while it runs its descendants are remembered.

        What a killed process leaves behind has no parent any more and could not be found later.
        """
        if self._process is None:
            return None
        status = self._process.poll()
        if status is None:
            self._family.update(descendants(self._process.pid))
        return status

    def wait(self, seconds: float) -> int | None:
        """Wait up to so long; return the exit status, or None if it still runs."""
        if self._process is None:
            return None
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if self._reader is not None:
            self._reader.join(timeout=2.0)
        return status

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End the process and everything that it started: first politely, then for good."""
        if self._process is None:
            return
        self.poll()
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        if self.wait(seconds) is None:
            self.poll()
            self._process.kill()
            self.wait(5.0)
        end_all(pid for pid, started in self._family.items() if process_start(pid) == started)

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Pass the output on to its end whatever happens to the log: a pipe nobody reads would stop the child."""
        stream = process.stdout
        if stream is None:
            return
        log: FileIO | None = None
        with contextlib.suppress(OSError):
            log = FileIO(self._log, "a")
        with stream, contextlib.ExitStack() as closing:
            if log is not None:
                closing.enter_context(log)
            for line in stream:
                if log is not None:
                    with contextlib.suppress(OSError):  # a full disk; the next line may fit again
                        log.write(line.encode())
                if self._on_line is not None:
                    self._on_line(line.rstrip("\n"))


def end_all(pids: Iterable[int], seconds: float = 5.0) -> None:
    """End processes by id: SIGTERM, then SIGKILL for what is left."""
    left = {pid: process_start(pid) for pid in pids}
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid, started in left.items():
            if started is not None and process_start(pid) == started:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, sign)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            left = {
                pid: started for pid, started in left.items() if started and process_start(pid) == started
            }
            if not left:
                return
            time.sleep(0.05)


class StopSignals:
    """Turns SIGTERM and SIGINT into an event, for a graceful stop."""

    def __init__(self) -> None:
        """Install the handlers (only possible in the main thread)."""
        self.event = threading.Event()
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGTERM, signal.SIGINT):
                signal.signal(name, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        del number, frame
        self.event.set()

    def wait(self, seconds: float) -> bool:
        """Wait; return whether a stop was asked for."""
        return self.event.wait(seconds)
