"""The command's frame: help, exit codes, one line for mistakes, one JSON object, logs on stderr."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedlora import errors
from fedlora.cli import main as frame
from fedlora.cli.common import describe_error, emit
from fedlora.errors import BudgetExceededError, ConfigError, FedLoraError
from fedlora.figures import finite


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert frame.main(["init", "p"]) == 0
    monkeypatch.chdir(tmp_path / "p")
    return tmp_path / "p"


def installed() -> list[str]:
    return [name for name, (module, _) in frame.COMMANDS.items() if frame._exists(module)]


def test_the_root_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fedlora.cli.main import main; main(['--help']);"
        "print([m for m in ('torch','flwr','ray','scipy','transformers','pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    for name in ("init", "check", "server", "client", "trainer", "certs", "keys", "status"):
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("name", ["init", "check", "server", "client", "trainer", "certs", "keys", "status"])
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"fedlora {name}" in text.replace("Usage: fedlora", "", 1)
    assert "\\[" not in text


def test_no_command_without_a_module_is_listed() -> None:
    assert set(installed()) >= {"init", "check", "server", "client", "trainer", "certs", "keys", "status"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nope"], 2),
        (["check"], 2),
        (["check", "none.yaml"], ConfigError.exit_code),
        (["keys", "allow", "a.json", "x", "none.pub"], 70),
        (["certs", "show", "nowhere"], 70),
        (["status", "nowhere"], 70),
        (["trainer", "none.yaml"], ConfigError.exit_code),
        (["server", "none.yaml"], ConfigError.exit_code),
        (
            [
                "client",
                "--superlink",
                "x:1",
                "--ca",
                "none",
                "--key",
                "none",
                "--trainer-socket",
                "s",
                "--token",
                "t",
            ],
            70,
        ),
    ],
)
def test_a_users_mistake_is_one_message_with_its_exit_code(
    arguments: list[str],
    code: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert frame.main(arguments) == code
    plain = capsys.readouterr()
    assert "Traceback" not in plain.err + plain.out
    assert plain.err.startswith("fedlora: ")
    assert frame.main([*arguments, "--json"]) == code
    shown = capsys.readouterr().out
    record = json.loads(shown)
    assert (record["ok"], record["exit_code"]) == (False, code)


def test_problems_of_a_configuration_come_one_by_one_in_json(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    code = frame.main(
        ["check", "run.yaml", "--static", "--json", "adapter.rank=x", "privacy.unit=record", "run.nme=1"]
    )
    record = json.loads(capsys.readouterr().out)
    assert code == ConfigError.exit_code
    assert [one.split(":")[0] for one in record["problems"]] == ["adapter.rank", "run.nme"]


def test_check_shows_precedence_and_gives_one_object(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert frame.main(["check", "run.yaml", "--static", "--json", "federation.rounds=5"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["config"]["federation"]["rounds"] == 5
    assert record["predicted"]["steps_per_client_at_most"] == 5
    assert any("federation.rounds = 5 from command line, over 30" in line for line in record["overridden"])


def test_the_files_of_init_are_usable_and_nothing_is_overwritten(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in ([], ["--deployment"], ["-f", "no-privacy.yaml"]):
        assert frame.main(["check", "run.yaml", "--static", *more]) == 0
    assert frame.main(["keys", "new", "keys", "site-1"]) == 0
    assert frame.main(["trainer", "site.yaml", "--check", "--json"]) == 0
    assert frame.main(["init", str(project)]) == errors.DeploymentError.exit_code


def test_exit_codes_differ_by_class_and_are_documented() -> None:
    found: dict[int, list[type]] = {}
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, FedLoraError):
            found.setdefault(value.exit_code, []).append(value)
    assert all(len(classes) == 1 for classes in found.values())
    assert not {0, 2, 130} & set(found)


def test_an_unexpected_error_shows_no_traceback_and_no_more_than_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def main(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("first line\nsecret second line")

    monkeypatch.setattr("typer.main.get_command", lambda app: Broken())
    assert frame.main(["x", "--json"]) == 1
    captured = capsys.readouterr()
    assert "second line" not in captured.err + captured.out
    assert "FEDLORA_TRACEBACK" in captured.err


def test_errors_keep_their_figures_and_json_is_strict(capsys: pytest.CaptureFixture[str]) -> None:
    record = describe_error(BudgetExceededError("over", spent=1.0, projected=2.0, budget=1.5))
    assert record["exit_code"] == 25
    assert finite({"a": float("inf"), "b": [float("nan"), 1.0]}) == {"a": "inf", "b": ["nan", 1.0]}
    emit({"x": float("inf")}, as_json=True, text="")
    assert json.loads(capsys.readouterr().out) == {"ok": True, "x": "inf"}


@pytest.mark.parametrize("how", ["option", "environment"])
def test_an_unknown_log_level_is_one_line_with_the_levels(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["certs", "show", "nowhere"]
    if how == "option":
        arguments = ["--log-level", "loud", *arguments]
    else:
        monkeypatch.setenv("FEDLORA_LOG_LEVEL", "loud")
    assert frame.main(arguments) == ConfigError.exit_code
    message = capsys.readouterr().err
    assert "'loud'; allowed: debug, info, warning, error" in message
    assert message.count("\n") == 1


def test_the_root_help_has_an_example_and_the_default_log_level(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Example: fedlora init" in text
    assert "FEDLORA_LOG_LEVEL, else info" in " ".join(text.split())


def test_a_short_option_means_the_same_in_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    meanings: dict[str, set[str]] = {}
    for name in installed():
        assert frame.main([name, "--help"]) == 0
        for short, long in re.findall(r"^  (-\w), (--[\w-]+)", capsys.readouterr().out, re.MULTILINE):
            meanings.setdefault(short, set()).add(long)
    assert meanings["-o"] == {"--output"}
    assert meanings["-f"] == {"--overlay"}


def test_the_servers_port_has_no_default_that_is_no_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.main(["server", "--help"]) == 0
    assert "[default: 0]" not in capsys.readouterr().out
