"""What every command shares: `--json`, one object on stdout, logs on stderr, overrides."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fedlora.errors import ConfigError, FedLoraError
from fedlora.figures import finite

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; logs go to stderr.")
]
ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Dotted overrides, for example privacy.target_epsilon=3."),
]
OverlayOption = Annotated[
    list[str] | None,
    typer.Option("--overlay", "-f", help="A further YAML file over CONFIG; may be repeated, later ones win."),
]

LEVELS = ("debug", "info", "warning", "error", "critical")
INTERRUPTED = 130
INTERNAL_ERROR = 1
USAGE_ERROR = 2


def emit(result: Mapping[str, Any], *, as_json: bool, text: str) -> None:
    """Print a command's result: one JSON object, or its text."""
    if as_json:
        sys.stdout.write(
            json.dumps(finite({"ok": True, **result}), ensure_ascii=False, allow_nan=False) + "\n"
        )
    else:
        sys.stdout.write(text if text.endswith("\n") or text == "" else text + "\n")
    sys.stdout.flush()


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return the JSON object of an error: class, exit code, message and, if any, the list of problems."""
    code = error.exit_code if isinstance(error, FedLoraError) else INTERNAL_ERROR
    record: dict[str, Any] = {"error": type(error).__name__, "exit_code": code, "message": str(error)}
    if isinstance(error, ConfigError):
        record["problems"] = list(error.problems)
    return {"ok": False, **record}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message and the record's `fields`; never data."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, "fields", None)
        if isinstance(fields, Mapping):
            line.update(finite(fields))
        if record.exc_info is not None and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
        return json.dumps(line, ensure_ascii=False)


def setup_logging(*, json_lines: bool = False, level: str | None = None) -> None:
    """Send the `fedlora` loggers to stderr; `FEDLORA_LOG_FORMAT=json` and `FEDLORA_LOG_LEVEL` decide too."""
    handler = logging.StreamHandler(sys.stderr)
    if json_lines or os.environ.get("FEDLORA_LOG_FORMAT", "") == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("fedlora")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(_level(level))


def _level(given: str | None) -> str:
    """Return the level of `--log-level`, else of `FEDLORA_LOG_LEVEL`, else INFO.

    Raises:
        ConfigError: if it is none that exists.
    """
    source = "--log-level" if given else "FEDLORA_LOG_LEVEL"
    text = given or os.environ.get("FEDLORA_LOG_LEVEL", "") or "info"
    if text.lower() not in LEVELS:
        raise ConfigError(f"{source}: got {text!r}; allowed: {', '.join(LEVELS)}")
    return text.upper()
