"""State files of the roles, read by `fedlora status`; nothing private is in them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlora.cli.files import PUBLIC, write_file

STATE_FILE = "state.json"


class StateFile:
    """One role's state: written at every change, in one step."""

    def __init__(self, folder: Path, role: str) -> None:
        """Name the folder and the role."""
        self.path = folder / STATE_FILE
        self._fields: dict[str, Any] = {"role": role, "pid": os.getpid(), "started": time.time()}

    def update(self, **fields: Any) -> None:
        """Change fields and write the file."""
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
    return {**record, "alive": _alive(record.get("pid"))}


def _alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
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
        """Open the file (0600); None keeps nothing."""
        self._handle: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, **fields: Any) -> None:
        """Append one entry."""
        if self._handle is None:
            return
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "what": what, **fields}
        os.write(self._handle, (json.dumps(record, default=str, ensure_ascii=False) + "\n").encode())
        os.fsync(self._handle)

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
