"""The run folder: everything that one needs to read, repeat or continue a run."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import math
import os
import platform
import sys
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from omegaconf import OmegaConf

import fedlora
from fedlora.cli.common import JsonLines
from fedlora.config import config_container
from fedlora.config.schema import FedLoraConfig
from fedlora.errors import FileAccessError
from fedlora.files import write_durably
from fedlora.ledger import Ledger
from fedlora.simulation.settings import RoundRecord
from fedlora.specs.paid import paid_specifications

_PACKAGES: Final = (
    "torch",
    "transformers",
    "peft",
    "flwr",
    "ray",
    "numpy",
    "opacus",
    "dp-accounting",
    "omegaconf",
    "pydantic",
)


def unwritable(path: Path, error: OSError) -> FileAccessError:
    """Say which file could not be written and why; a full disk's own error names none."""
    return FileAccessError(
        f"{path}: cannot be written ({error.strerror or error}); the last checkpoint is whole: free space or give "
        "the right to write, then go on with --resume"
    )


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part.

    Raises:
        FileAccessError: if it cannot be written; nothing is left of it then.
    """
    try:
        write_durably(path, data)
    except OSError as error:
        raise unwritable(path, error) from error


def plain(value: Any) -> Any:
    """Return JSON-ready values; infinite numbers become the text "inf", NaN None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return str(value) if isinstance(value, Path) else value


def log_to_folder(folder: Path) -> None:
    """Write this process's log to `server.log` of a run folder too.

    Flower keeps a ServerApp's output to itself: without this nobody would read why a node was left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "server.log")
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    json_lines = os.environ.get("FEDLORA_LOG_FORMAT", "") == "json"
    handler.setFormatter(JsonLines() if json_lines else logging.Formatter(text))
    for name in ("fedlora", "server", "strategies"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("FEDLORA_LOG_LEVEL", "INFO").upper())


class RunFolder:
    """Files of one run."""

    def __init__(self, path: Path) -> None:
        """Create the folder if it is not there."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.metrics_path = path / "metrics.jsonl"

    def write_config(self, config: FedLoraConfig) -> None:
        """Write the resolved configuration as YAML; it can be run again as it is."""
        text = OmegaConf.to_yaml(OmegaConf.create(config_container(config)))
        write_atomically(self.path / "config.yaml", text.encode())

    def write_json(self, name: str, content: Any) -> None:
        """Write one JSON file."""
        text = json.dumps(plain(content), indent=2, allow_nan=False)
        write_atomically(self.path / name, text.encode() + b"\n")

    def write_environment(self) -> None:
        """Write versions of everything that numbers depend on."""
        versions: dict[str, str | None] = {}
        for name in _PACKAGES:
            try:
                versions[name] = version(name)
            except PackageNotFoundError:
                versions[name] = None
        self.write_json(
            "environment.json",
            {
                "fedlora": fedlora.__version__,
                "python": sys.version.split()[0],
                "platform": platform.platform(),
                "cpus": os.cpu_count(),
                "packages": versions,
            },
        )

    def keep_rounds_up_to(self, last: int, newest: Mapping[str, Any] | None = None) -> None:
        """Drop metric lines after a round (a resumed run writes them again).

        Args:
            last: newest round to keep.
            newest: that round's record from its checkpoint; written if a crash came before its line.
        """
        kept = {}
        lines = self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the last line of a killed run may be cut
            if isinstance(record.get("round"), int) and record["round"] <= last:
                kept[record["round"]] = line
        if newest is not None and last not in kept:
            kept[last] = json.dumps(newest, allow_nan=False)
        if kept:
            write_atomically(self.metrics_path, "".join(f"{line}\n" for line in kept.values()).encode())
        else:
            self.metrics_path.unlink(missing_ok=True)

    def rounds(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`, after `keep_rounds_up_to` those of the rounds that stand."""
        lines = self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []
        return [json.loads(line) for line in lines]

    def append(self, record: RoundRecord) -> None:
        """Append one round to `metrics.jsonl`.

        Raises:
            FileAccessError: if it cannot be written; what was written of the line is taken back.
        """
        line = json.dumps(plain(record), allow_nan=False) + "\n"
        try:
            with self.metrics_path.open("ab", buffering=0) as stream:
                size = stream.seek(0, os.SEEK_END)
                if stream.write(line.encode()) < len(line.encode()):
                    stream.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise unwritable(self.metrics_path, error) from error


def write_ledger(
    folder: Path, ledger: Ledger, config: FedLoraConfig, clients: Collection[str]
) -> float | None:
    """Write what every client's account has spent, with the conditions, as `ledger.json`.

    Args:
        folder: run folder.
        ledger: the clients' ledger.
        config: resolved configuration; its data set's accounts are written.
        clients: the run's clients.

    Returns:
        The largest epsilon of these clients, or None if none has an account.
    """
    reports = []
    for account in ledger.accounts():
        if account.dataset == config.data.name and account.client in clients:
            report = dataclasses.asdict(ledger.report(account, with_rounds=False))
            report.pop("rounds", None)
            reports.append(report)
    text = json.dumps(plain({"dataset": config.data.name, "accounts": reports}), indent=2, allow_nan=False)
    write_atomically(folder / "ledger.json", text.encode() + b"\n")
    paid = paid_specifications(ledger, config.data.name, clients)
    if paid:
        text = json.dumps({"specifications": paid}, indent=2, allow_nan=False)
        write_atomically(folder / "specifications.json", text.encode() + b"\n")
    return max((float(one["epsilon"]) for one in reports), default=None)
