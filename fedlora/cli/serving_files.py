"""Small helpers of the server's role: paths, tokens, files of a run."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlora import errors
from fedlora.cli.files import PUBLIC, read_file, require_private, write_file
from fedlora.config import FedLoraConfig, config_container, config_from_container
from fedlora.config.tracking import absolute_tracking
from fedlora.errors import CheckpointError, DeploymentError, FedLoraError


@dataclass
class RunFile:
    """The run in progress, kept on disk so that a new process can go on with it."""

    path: Path
    run_id: str = ""
    finished: bool = True
    fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, state: Path) -> RunFile:
        """Read the file; a missing one means that nothing is in progress."""
        path = state / "run.json"
        try:
            record = json.loads(path.read_text())
            return cls(path, str(record["run_id"]), bool(record["finished"]), dict(record.get("fields", {})))
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError):
            raise CheckpointError(f"{path}: cannot be read; give --new to start another run") from None

    def write(self) -> None:
        """Write the file durably."""
        record = {"run_id": self.run_id, "finished": self.finished, "fields": self.fields}
        write_file(self.path, (json.dumps(record) + "\n").encode(), mode=PUBLIC, replace=True)


def absolute_sources(config: FedLoraConfig) -> FedLoraConfig:
    """Return a copy whose file paths are absolute: the ServerApp runs in another folder."""
    container = config_container(config)
    _absolute(container["data"]["source"])
    evaluation = container["data"].get("public_eval")
    if evaluation is not None and evaluation.get("source") is not None:
        _absolute(evaluation["source"])
    model = container["model"]
    if Path(model["name_or_path"]).is_dir():
        model["name_or_path"] = str(Path(model["name_or_path"]).resolve())
    container["tracking"]["mlflow"] = absolute_tracking(container["tracking"]["mlflow"])
    return config_from_container(container, deployment=True)


def _absolute(source: dict[str, Any]) -> None:
    if source.get("kind") == "file":
        source["paths"] = [str(Path(path).absolute()) for path in source["paths"]]


def control_token(state: Path) -> str:
    """Return the operator's token of a state folder; make it (0600) if there is none.

    Raises:
        DeploymentError: if others may read it, or a crash or a full disk cut it short.
    """
    path = state / "control.token"
    if not path.exists():
        write_file(path, secrets.token_hex(32).encode())
    token = read_file(path, "control token", "give it to the server's user").decode(errors="replace").strip()
    require_private(path, "control token", group=True)
    if len(token) < 32:
        raise DeploymentError(
            f"control token {path}: too short; delete the file, the next start makes another"
        )
    return token


def make_folder(path: Path, what: str) -> None:
    """Make a folder, and find out now whether files can be written there.

    Raises:
        DeploymentError: if it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"0" * 4096)
    except OSError as error:
        raise DeploymentError(f"{what} {path}: cannot be written ({error.strerror})") from None


def read_json(path: Path) -> Mapping[str, Any]:
    """Return a JSON object, empty if the file is missing or unreadable."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def last_line(path: Path) -> Mapping[str, Any]:
    """Return the last JSON object of a JSON-lines file, empty if there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 65536))
            lines = stream.read().splitlines()
        found = json.loads(lines[-1]) if lines else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def forget_failure(folder: Path) -> None:
    """Remove an earlier start's failure from a run folder, or it would be taken for the next start's."""
    summary = folder / "summary.json"
    if read_json(summary).get("status") == "failed":
        summary.unlink()


def ended_with(kind: type[FedLoraError], message: str) -> FedLoraError:
    """Build an error of another process's class, so that the exit code is that of its cause."""
    error = kind.__new__(kind)
    Exception.__init__(error, message)
    if isinstance(error, errors.ConfigError):
        error.problems = ()
    return error
