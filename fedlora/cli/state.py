"""State files of the roles, read by `fedlora status`; nothing private is in them."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedlora.cli.files import PUBLIC, write_file
from fedlora.errors import DeploymentError
from fedlora.files import ends_in_a_cut_line
from fedlora.procfs import process_start

_LOG = logging.getLogger(__name__)
STATE_FILE = "state.json"


class StateFile:
    """One role's state: written at every change, in one step."""

    def __init__(self, folder: Path, role: str) -> None:
        """Name the folder and the role."""
        self.path = folder / STATE_FILE
        pid = os.getpid()
        self._fields: dict[str, Any] = {"role": role, "pid": pid, "pid_start": process_start(pid)}
        self._fields["started"] = time.time()

    def update(self, **fields: Any) -> None:
        """Change fields and write the file.

        Raises:
            DeploymentError: if it cannot be written.
        """
        self._fields.update(fields)
        self._fields["updated"] = time.time()
        text = json.dumps(self._fields, indent=1, default=str) + "\n"
        write_file(self.path, text.encode(), mode=PUBLIC, replace=True)


def read_state(folder: Path) -> Mapping[str, Any] | None:
    """Return the state of a folder with `alive` (does the process still run), or None if there is none."""
    try:
        record = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    return {**record, "alive": _alive(record.get("pid"), record.get("pid_start"))}


def _alive(pid: object, start: object) -> bool:
    """Return whether a process still runs and is the one that started then, not a later one with its id."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    now = process_start(pid)
    if now is not None and start is not None and now != start:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class AuditLog:
    """Append-only JSON lines, each synced to disk before the next thing happens; no data, no gradients."""

    def __init__(self, path: Path | None) -> None:
        """Open the file (0600); None keeps nothing. A line that a power failure cut stays, closed by a new line.

        Raises:
            DeploymentError: if it cannot be opened.
        """
        self._handle: int | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            if ends_in_a_cut_line(self._handle):
                os.write(self._handle, b"\n")
        except OSError as error:
            raise DeploymentError(f"audit log {path}: cannot be opened ({error.strerror})") from None

    def write(self, what: str, **fields: Any) -> None:
        """Append one entry.

        Raises:
            DeploymentError: if it cannot be written; what was written of it is taken back.
        """
        if self._handle is None:
            return
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "what": what, **fields}
        line = (json.dumps(record, default=str, ensure_ascii=False) + "\n").encode()
        try:
            size = os.fstat(self._handle).st_size
            if os.write(self._handle, line) < len(line):
                os.ftruncate(self._handle, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._handle)
        except OSError as error:
            raise DeploymentError(f"audit log: {what}: cannot be written ({error.strerror})") from None

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def note_change(state: StateFile, audit: AuditLog, what: str, status: str, **fields: Any) -> None:
    """Write a change of status to state file and audit log; a full disk is logged and stops nothing."""
    writes = (partial(state.update, status=status, **fields), partial(audit.write, what, **fields))
    for write in writes:
        try:
            write()
        except DeploymentError as error:
            _LOG.error("%s", error)
