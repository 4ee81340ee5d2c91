"""`--push` against a hub of our own on this machine: what is created, what arrives, what a refusal says."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_export_peft import FACTS, make_bench, trained_payload

from fedlora.adapters.export import export_adapter

PUSH = """
import json, sys
from fedlora.adapters.export import push_folder
from fedlora.errors import ExportError
from pathlib import Path
try:
    print(push_folder(Path(sys.argv[1]), "me/model", private=sys.argv[2] == "private"))
except ExportError as error:
    print("refused:", error)
"""
TOKEN = "hf_secret_token_of_the_test"


@dataclass
class Hub:
    """Speaks the hub's upload protocol and remembers what came."""

    refuse: bool = False
    created: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    address: str = ""

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        where = path.partition("?")[0]
        if self.refuse:
            return 403, {"error": "no"}
        if where == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.address}/me/model", "id": "me/model"}
        if where == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if where.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            modes = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]
            return 200, {"files": modes}
        if where.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return 200, {
                "commitUrl": f"{self.address}/me/model/commit/1",
                "commitOid": "1" * 40,
                "success": True,
            }
        if "/revision/" in where or where == "/api/models/me/model":
            return 200, {"id": "me/model", "sha": "0" * 40, "siblings": [], "private": True, "tags": []}
        if "/tree/" in where:
            return 200, []
        return 404, {"error": f"unknown {where}"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            self._send(*state.answer(self.path, self.rfile.read(size)))

        def do_GET(self) -> None:
            self._send(*state.answer(self.path, b""))

        def _send(self, status: int, content: Any) -> None:
            state.tokens.add(str(self.headers.get("Authorization")))
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def push(folder: Path, hub: Hub, how: str | list[str] = "private") -> str:
    mine = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    home = {
        "HF_HOME": str(folder.parent / "hf"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "127.0.0.1",
    }
    words = [PUSH, str(folder), how] if isinstance(how, str) else [PUSH_COMMAND, *how]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | mine | home,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert TOKEN not in done.stdout + done.stderr
    return done.stdout.strip()


def test_push_creates_a_private_repository_with_card_and_adapter(tmp_path: Path, hub: Hub) -> None:
    bench = make_bench(tmp_path / "base", "llama", ["q_proj"], model={"task": "instruction"})
    report = export_adapter(bench, trained_payload(bench), tmp_path / "out", facts=FACTS)
    said = push(tmp_path / "out", hub)
    assert said.startswith(hub.address), said
    assert hub.created[0].get("visibility") == "private" or hub.created[0].get("private") is True
    assert (hub.created[0]["organization"], hub.created[0]["name"]) == ("me", "model")
    assert set(report.files) <= set(hub.files)
    for name in report.files:
        if name not in ("adapter_config.json", "tokenizer_config.json"):
            assert hub.files[name] == (tmp_path / "out" / name).read_bytes()
    for name, content in hub.files.items():
        assert str(tmp_path).encode() not in content, name
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "base"
    card = hub.files["README.md"].decode()
    for stated in (
        "3.25",
        "1e-05",
        "add_or_remove",
        "one record",
        "Poisson",
        "the server included",
        "Licences",
    ):
        assert stated in card, stated
    assert f"Bearer {TOKEN}" in hub.tokens
    hub.created.clear()
    push(tmp_path / "out", hub, "public")
    assert hub.created[0].get("visibility") == "public" or hub.created[0].get("private") is False


def test_a_refusal_is_one_line_and_the_export_stays(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("x")
    hub.refuse = True
    said = push(tmp_path / "out", hub)
    assert said.startswith("refused: export --push: the hub refused 'me/model'")
    assert "hf auth login" in said
    assert "\n" not in said
    assert (tmp_path / "out" / "README.md").exists()


PUSH_COMMAND = """
import sys
from fedlora.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def finished_run(where: Path, **sections: Any) -> Path:
    """Write what a run leaves behind: configuration, adapter, summary."""
    from fedlora.config.resolve import save_resolved
    from fedlora.training.port import Packet, encode_packet
    from fedlora.wire.codec import to_arrays

    bench = make_bench(where / "base", "llama", ["q_proj"], model={"task": "instruction"}, **sections)
    header, arrays = to_arrays(trained_payload(bench))
    run = where / "run"
    save_resolved(bench.config, run / "config.yaml")
    (run / "adapter.flr").write_bytes(encode_packet(Packet({"payload": header}, arrays)))
    summary = {
        "status": "finished",
        "epsilon": 3.25049,
        "rounds": 5,
        "metrics": {"perplexity": 9.5, "loss": None},
    }
    (run / "summary.json").write_text(json.dumps(summary | {"statement": {}, "warnings": []}))
    return run


def test_export_push_of_a_run_sends_a_card_that_says_everything_and_no_path_or_record(
    tmp_path: Path, hub: Hub
) -> None:
    run = finished_run(
        tmp_path, data={"description": "Notes of two clinics,\nwritten 2025.", "license": "CC BY 4.0"}
    )
    done = push(run, hub, ["export", str(run), "--push", "me/model", "--json"])
    written = json.loads(done)
    assert written["pushed"].startswith(hub.address)
    assert written["card_lacks"] == ["the base model's licence"]
    card = hub.files["README.md"].decode()
    stated = {
        "epsilon (largest over clients) | 3.251": "rounded up",
        "delta | 1e-05": "delta",
        "unit | one record": "unit",
        "adjacency | add_or_remove": "adjacency",
        "adversary | anyone who sees all updates, the server included": "adversary",
        "accountant | best": "accountant",
        "Poisson sampling at the public rate 0.1": "assumption",
        "Notes of two clinics, written 2025.": "data description",
        "data (notes-2026): CC BY 4.0": "data licence",
        "base model: not stated": "base licence",
        "loss | not available": "metrics without a value",
    }
    assert not [name for text, name in stated.items() if text not in card], card
    for name, content in hub.files.items():
        assert b"/secret/place" not in content, name
        assert str(tmp_path).encode() not in content, name


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--push", "not a name"], 62, "OWNER/NAME"),
        (["--push", "name-alone"], 62, "OWNER/NAME"),
        (["--push", "a/b/c"], 62, "OWNER/NAME"),
        (["--push", "../../etc/passwd"], 62, "OWNER/NAME"),
        (["--public"], 2, "--push"),
        (["--dtype", "bfloat16"], 2, "--merged"),
    ],
)
def test_options_that_cannot_work_end_before_anything_is_loaded(
    options: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedlora.cli.main import main

    assert main(["export", str(tmp_path / "nowhere"), *options]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("what", ["adapter.flr", "summary.json"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty", "foreign"])
def test_a_damaged_run_folder_never_exports_a_private_looking_card(
    what: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedlora.cli.main import main
    from fedlora.training.port import Packet, encode_packet

    run = finished_run(tmp_path)
    whole = (run / what).read_bytes()
    foreign = encode_packet(Packet({"other": 1}, {})) if what == "adapter.flr" else b"[1, 2]"
    damaged = {"cut": whole[: len(whole) // 2], "garbage": b"\xff" * 50, "empty": b"", "foreign": foreign}
    (run / what).write_bytes(damaged[damage])
    code = main(["export", str(run), "--json"])
    capsys.readouterr()
    if what == "adapter.flr":
        assert code == 62
        assert not (run / "adapter").exists()
    else:
        assert code == 0
        card = (run / "adapter" / "README.md").read_text()
        assert "do not treat the model as private" in card
        assert "summary cannot be read" in card


def test_a_run_that_failed_says_so_on_its_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fedlora.cli.main import main

    run = finished_run(tmp_path)
    (run / "summary.json").write_text(json.dumps({"status": "failed", "error": "X", "message": "y"}))
    assert main(["export", str(run)]) == 0
    assert "does not say yet: data.description, data.license" in capsys.readouterr().out
    card = (run / "adapter" / "README.md").read_text()
    assert "the run did not finish: its status is failed" in card
    assert "do not treat the model as private" in card
    (run / "summary.json").unlink()
    assert main(["export", str(run), "--merged"]) == 0
    assert "it did not finish" in (run / "merged" / "README.md").read_text()
    assert json.loads((run / "merged" / "fedlora.json").read_text())["epsilon"] is None
