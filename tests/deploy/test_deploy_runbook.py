"""The runbook's commands, taken out of docs/deployment.md and executed as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from deploy_helpers import ROOT
from ports import reserved_port

RUNBOOK = ROOT / "docs" / "deployment.md"


def blocks(kind: str) -> str:
    """Return the commands of all blocks of one kind, in their order."""
    found = re.findall(rf"^```bash {kind}\n(.*?)^```", RUNBOOK.read_text(), re.MULTILINE | re.DOTALL)
    assert found, kind
    return "\n".join(found)


def execute(script: str, folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run commands with a `fedlora` that is this checkout's."""
    shims = folder / "bin"
    shims.mkdir(exist_ok=True)
    shim = shims / "fedlora"
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedlora.cli.main "$@"\n')
    shim.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def test_the_preparation_works_as_it_is_written(tmp_path: Path) -> None:
    done = execute(blocks("runbook"), tmp_path, 500)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    home = tmp_path / "federation"
    for site in ("site-1", "site-2", "site-3"):
        assert f"{site}: allowed" in done.stdout
        assert (home / site / "keys" / f"{site}.pub").exists()
        assert f"name: {site}" in (home / site / "site.yaml").read_text()
        assert f'"{site}"' in (home / site / "records.jsonl").read_text()
    assert (home / "certs" / "server.crt").exists()


@pytest.mark.long
def test_the_whole_runbook_trains_a_federation(tmp_path: Path) -> None:
    assert execute(blocks("runbook"), tmp_path, 500).returncode == 0
    home = tmp_path / "federation"
    port = str(reserved_port())
    start = blocks("start").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    rest = "federation.rounds=2 deployment.expected_clients=3"
    server = f"fedlora server run.yaml {rest} --port {port} "
    start = start.replace("fedlora server run.yaml ", server).replace(
        "\nwait\n", "\nwait %1 || true\nkill %2 %3 %4 || true\nwait\n"
    )
    (tmp_path / "bin").rename(home / "bin")
    done = execute(start, home, 580)
    assert "finished" in done.stdout, done.stdout[-1500:] + done.stderr[-3000:]
    shown = execute(blocks("status"), home, 200)
    assert shown.returncode == 0, shown.stderr[-1500:]
    assert "status finished" in shown.stdout
    assert "news" in shown.stdout


@pytest.mark.parametrize("name", ["deployment.md", "security.md", "configuration.md"])
def test_every_command_and_option_in_the_documents_exists(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    used = set(
        re.findall(r"fedlora ((?:keys|certs|budget) \w+|server|client|trainer|check|init|status)\b", text)
    )
    for command in used:
        done = subprocess.run(
            [sys.executable, "-m", "fedlora.cli.main", *command.split(), "--help"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, command
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "docs" / target).exists() or target == "ledger.md", target
