"""A user's mistakes with files and sizes: one line, an exit code of their own, nothing spent."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from fedlora.cli import main as frame
from fedlora.errors import ConfigError, DataError, FileAccessError


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "p"
    assert frame.main(["init", str(folder)]) == 0
    monkeypatch.chdir(folder)
    return folder


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    capsys.readouterr()
    code = frame.main([*arguments, "--json"])
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert (record["ok"], record["exit_code"]) == (False, code)
    assert "Traceback" not in captured.err
    assert "internal error" not in captured.err
    return code, record["message"]


def test_files_that_cannot_be_written_have_an_exit_code_of_their_own(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "text").write_text("x")
    (project / "folder").mkdir()
    for arguments, named in (
        (("check", "run.yaml", "--static", "--save", "/proc/none/x"), "/proc/none"),
        (("check", "run.yaml", "--static", "--save", "folder"), "folder"),
        (("check", "run.yaml", "--static", "--save", "text/x"), "text"),
    ):
        code, message = failed(capsys, *arguments)
        assert code == FileAccessError.exit_code
        assert named in message
        assert ".tmp" not in message


def test_a_full_disk_is_said_plainly(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, message = failed(capsys, "check", "run.yaml", "--static", "--save", "saved.yaml")
    assert code == FileAccessError.exit_code
    assert "free space" in message
    assert [path.name for path in project.iterdir() if path.name.startswith("saved")] == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("federation.min_replies=100", "federation.min_replies"),
        ("federation.clients_per_round=7", "federation.clients_per_round"),
    ],
)
@pytest.mark.parametrize("command", [("check",), ("simulate", "--in-process", "--quiet")])
def test_rounds_that_can_never_finish_are_refused_before_anything_is_spent(
    project: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], override: str, key: str
) -> None:
    name, *options = command
    code, message = failed(capsys, name, "run.yaml", override, *options)
    assert code == ConfigError.exit_code
    assert message.startswith(key)
    assert "3 clients" in message
    assert not (project / "runs" / "ledger.sqlite").exists()


def test_a_path_that_counts_from_another_folder_says_where_it_was_looked_for(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.parent)
    code, message = failed(capsys, "check", "p/run.yaml")
    assert code == DataError.exit_code
    assert str(project.parent) in message


@pytest.mark.parametrize("value", [None, "", "  ", "a\nb", "x" * 257, float("nan")])
def test_a_record_whose_column_names_no_client_is_refused_by_its_number(
    project: Path, capsys: pytest.CaptureFixture[str], value: object
) -> None:
    good = {"text": "a", "label": "sport", "site": "one"}
    lines = [json.dumps(good), json.dumps(good | {"site": value})]
    (project / "data" / "records.jsonl").write_text("\n".join(lines))
    code, message = failed(capsys, "check", "run.yaml")
    assert code == DataError.exit_code
    assert "record 2" in message
    assert "'site' names no client" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ("gauge", "--seed", str(2**63)),
        ("noise", "--stddev", "nan"),
        ("noise", "--stddev", "1e300"),
        ("preconditioned", "--signal", "nan"),
        ("preconditioned", "--signal", "inf"),
        ("preconditioned", "--signal", "1e300"),
        ("moments", "--rank", "1000000000"),
        ("sketch-noise", "--in", "1000000000"),
        *(
            ("sketch-noise", "--norms", norms)
            for norms in ("[true]", "[1e300]", "[1e-300]", "[NaN]", "[]", "{}", f"[1{'0' * 400}]")
        ),
    ],
)
def test_a_diagnosis_refuses_numbers_that_it_cannot_compute_with(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = failed(capsys, "diagnose", *arguments)
    assert code in (2, ConfigError.exit_code)
    assert arguments[1] in message
