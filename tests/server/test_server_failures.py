"""What ends a run before its first round is in the run folder: class, message, exit code."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlora.cli.serving_files import forget_failure
from fedlora.errors import FedLoraError, TooFewRepliesError
from server import app as server_app
from server.finish import record_failure
from server.folder import log_to_folder
from server.from_context import folder_from_context


def summary(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("error", "name", "code", "text"),
    [
        (TooFewRepliesError("clients: 1 of 3 needed are online"), "TooFewRepliesError", 51, "1 of 3"),
        (RuntimeError("a record's text"), "RuntimeError", 1, "RuntimeError at"),
    ],
)
def test_a_run_that_never_began_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, name: str, code: int, text: str
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(server_app, "build_server", fails)
    with pytest.raises(type(error)):
        server_app.run(None, SimpleNamespace(folder=tmp_path / "run"))  # type: ignore[arg-type]
    found = summary(tmp_path / "run")
    assert (found["status"], found["error"], found["exit_code"]) == ("failed", name, code)
    assert text in str(found["message"])
    assert "a record's text" not in str(found["message"])


def test_settings_that_cannot_be_read_are_told_too(tmp_path: Path) -> None:
    run_config = {"config": "none.yaml", "run-dir": str(tmp_path), "run-id": "r1", "resume": False}
    context = SimpleNamespace(run_config=run_config, run_id=12345)
    with pytest.raises(FedLoraError):
        server_app.app._main(None, context)  # type: ignore[misc]
    assert summary(tmp_path / "r1")["error"] == "ConfigError"
    assert folder_from_context(SimpleNamespace(run_config={})) is None  # type: ignore[arg-type]


def test_an_earlier_starts_failure_is_forgotten_and_a_result_is_not(tmp_path: Path) -> None:
    record_failure(tmp_path, RuntimeError("x"))
    forget_failure(tmp_path)
    assert not (tmp_path / "summary.json").exists()
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    forget_failure(tmp_path)
    assert summary(tmp_path) == {"status": "finished"}
    forget_failure(tmp_path / "none")


@pytest.fixture
def quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("fedlora", "server", "strategies")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        for handler in logger.handlers:
            if handler not in handlers:
                handler.close()
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.usefixtures("quiet")
def test_the_servers_log_is_in_the_run_folder_also_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDLORA_LOG_FORMAT", "json")
    log_to_folder(tmp_path / "run")
    logging.getLogger("server.roster").warning("node %s runs another version", 7)
    line = json.loads((tmp_path / "run" / "server.log").read_text())
    assert (line["level"], line["message"]) == ("warning", "node 7 runs another version")
