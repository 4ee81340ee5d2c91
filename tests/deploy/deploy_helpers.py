"""A whole federation on the loopback: tiny model, sites with data, keys, certificates, processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ports import reserved_port

from fedlora.cli import keyring, pki
from fedlora.cli.processes import end_all
from fedlora.procfs import descendants

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["red", "blue", "green", "fast", "slow", "big", "small", "up", "down", "left", "right", "old", "new"]


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write a random BERT with a word-level tokenizer; the same bytes for the same seed."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, seed: int, wards: tuple[str, ...] = ()) -> Path:
    """Write rows whose label is told by the first word; with wards each row names one."""
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        words = [draw.choice(WORDS) for _ in range(6)]
        row = {"text": " ".join(words), "label": "warm" if words[0] in WORDS[:6] else "cold"}
        if wards:
            row["ward"] = wards[number % len(wards)]
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n")
    return path


RUN = """\
schema: 1
run: {{name: demo, seed: 1, dir: {runs}}}
model: {{name_or_path: {model}, task: sequence-classification, num_labels: 2}}
adapter: {{rank: 2, lora_alpha: 4, target_modules: [query, value], modules_to_save: [classifier]}}
data:
  source: {{kind: file, paths: [{public}]}}
  columns: {{text: text, label: label}}
  labels: [cold, warm]
  max_length: 16
  name: words-2026
  public_eval: {{source: {{kind: file, paths: [{public}]}}}}
mechanism: {{kind: lora_fa}}
privacy:
  unit: record
  adjacency: add_or_remove
  noise_multiplier: 1.0
  target_delta: 1.0e-4
  max_grad_norm: 1.0
  group_weights: equal
  budget: {{epsilon: 20.0, delta: 1.0e-4, on_exhausted: refuse}}
  noise_source: os
training:
  expected_batch_size: 8
  nominal_records: 64
  steps_per_round: 2
  optimizer: {{kind: sgd, lr: 0.1}}
federation:
  rounds: {rounds}
  clients_per_round: all
  min_replies: {replies}
  round_timeout_seconds: {timeout}
  aggregation: {{kind: mean_b}}
deployment: {{superlink: "127.0.0.1:{port}", expected_clients: {expected}}}
"""

SITE = """\
schema: 1
site: {{name: {name}, identity_key: keys/identity.pem}}
socket: {{path: {socket}/s, token_file: {socket}/token}}
data:
  source: {{kind: file, paths: [records.jsonl]}}
  columns: {{text: text, label: label}}
  name: words-2026
ledger: {{url: ledger.db, secret_file: keys/ledger.secret}}
budget: {{epsilon: 20.0, delta: 1.0e-4, adjacency: add_or_remove, unit: record, on_exhausted: refuse}}
policy:
  mechanisms: [lora_fa]
  min_noise_multiplier: 0.9
  max_rounds: {rounds}
  max_steps_per_round: 4
  base_models: []
operations: {{audit_log: audit.jsonl}}
"""


@dataclass
class Federation:
    """Folders, files and running processes of one test federation."""

    root: Path
    rounds: int = 2
    timeout: float = 300.0
    replies: int = 2
    sites: tuple[str, ...] = ("site-a", "site-b", "site-c")
    wards: dict[str, tuple[str, ...]] = field(default_factory=dict)
    port: int = field(default_factory=reserved_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def make(self) -> Federation:
        """Write model, data, certificates, keys, configurations."""
        model = write_model(self.root / "model")
        public = write_rows(self.root / "public.jsonl", 40, 99)
        pki.make_ca(self.root / "certs")
        pki.issue_server(self.root / "certs", ["localhost", "127.0.0.1"])
        run = RUN.format(
            runs=self.root / "runs",
            model=model,
            public=public,
            rounds=self.rounds,
            timeout=self.timeout,
            replies=self.replies,
            port=self.port,
            expected=sum(len(self.wards.get(site, (site,))) for site in self.sites),
        )
        (self.root / "run.yaml").write_text(run)
        allow = keyring.AllowList(self.root / "allow.json", {})
        for number, name in enumerate(self.sites):
            self.make_site(name, number)
            allow.allow(name, self.root / name / "keys" / f"{name}.pub", clients=self.wards.get(name, ()))
        allow.save()
        return self

    def make_site(self, name: str, number: int) -> Path:
        """Write one site's folder (its socket lies in a short path of its own)."""
        folder = self.root / name
        folder.mkdir()
        keyring.new_deployment_key(folder / "keys", name)
        keyring.new_identity_key(folder / "keys" / "identity.pem")
        wards = self.wards.get(name, ())
        write_rows(folder / "records.jsonl", 60 + number, number, wards)
        place = self.place(name)
        place.mkdir(mode=0o700, exist_ok=True)
        text = SITE.format(name=name, socket=place, rounds=max(20, self.rounds))
        if wards:  # an edge site: each ward is a logical client with a budget of its own
            text = text.replace(
                "  name: words-2026\n", "  name: words-2026\n  partition: {kind: column, column: ward}\n"
            )
        (folder / "site.yaml").write_text(text)
        return folder

    def start(
        self, name: str, *arguments: str, before: tuple[str, ...] = (), path: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start one fedlora command in the root folder; output goes to NAME.log.

        `before` is a command that runs it (a namespace, another user); `path` goes first in PYTHONPATH.
        """
        places = os.pathsep.join(part for part in (path, str(ROOT)) if part)
        environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        log = (self.root / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "fedlora.cli.main", *arguments],
            cwd=self.root,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        self.processes[name] = process
        return process

    def place(self, name: str) -> Path:
        """Return the folder of a site's socket and token (Unix sockets need short paths)."""
        return Path("/tmp") / f"fl-{os.getpid()}-{self.port}-{name[-6:]}"

    def start_server(self, *more: str) -> subprocess.Popen[bytes]:
        """Start the server."""
        return self.start("server", "server", "run.yaml", *more)

    def start_site(self, name: str, port: int | None = None) -> subprocess.Popen[bytes]:
        """Start one site's client together with its trainer; `port` may be a proxy's."""
        site = f"{name}/site.yaml"
        connection = ["--superlink", f"127.0.0.1:{port or self.port}", "--ca", "certs/ca.crt"]
        own = ["--key", f"{name}/keys/{name}", "--state", f"{name}/state", "--with-trainer", site]
        return self.start(name, "client", *connection, *own)

    def start_halves(self, name: str) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
        """Start one site's trainer and relay as two commands, `NAME-trainer` and `NAME`."""
        place = self.place(name)
        trainer = self.start(f"{name}-trainer", "trainer", f"{name}/site.yaml")
        connection = ["--superlink", f"127.0.0.1:{self.port}", "--ca", "certs/ca.crt"]
        own = ["--key", f"{name}/keys/{name}", "--state", f"{name}/state"]
        door = ["--trainer-socket", str(place / "s"), "--token", str(place / "token")]
        wait_for("the trainer's token", (place / "token").exists, 180, self)
        return trainer, self.start(name, "client", *connection, *own, *door)

    def log(self, name: str) -> str:
        """Return the log of one command."""
        return (self.root / f"{name}.log").read_text(errors="replace")

    def state(self) -> dict[str, Any]:
        """Return the server's state file."""
        try:
            return json.loads((self.root / "server-state" / "state.json").read_text())
        except (OSError, ValueError):
            return {}

    def run_folder(self) -> Path:
        """Return the folder of the only run."""
        return next(path for path in (self.root / "runs").iterdir() if path.is_dir())

    def rounds_done(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        found = sorted((self.root / "runs").glob("*/metrics.jsonl")) if (self.root / "runs").exists() else []
        return whole_records(found[-1]) if found else []

    def kill(self, name: str) -> None:
        """End one command and everything below it with SIGKILL, as a power cut does."""
        process = self.processes[name]
        family: dict[int, None] = {}
        # Held first: what starts between a look and a kill would live on without a parent.
        while new := [pid for pid in (process.pid, *descendants(process.pid)) if pid not in family]:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            family |= dict.fromkeys(new)
        for pid in family:
            _signal(pid, signal.SIGKILL)
        process.wait(60)

    def stop(self) -> None:
        """End everything."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 20
        for process in self.processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                end_all([process.pid, *descendants(process.pid)])
        for place in Path("/tmp").glob(f"fl-{os.getpid()}-{self.port}-*"):
            for file in place.iterdir():
                file.unlink()
            place.rmdir()


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def whole_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON-lines file that another process is writing: a line counts once it has its end."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


class Wire:
    """A TCP proxy in user space whose wire can be cut and mended; TLS passes through untouched."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._cut = threading.Event()
        self._pairs: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Drop every connection and let no new one through."""
        self._cut.set()
        for stream in self._pairs:
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                stream.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def mend(self) -> None:
        """Let connections through again."""
        self._cut.clear()

    def close(self) -> None:
        """Stop for good."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self._cut.is_set():
                    raise OSError("cut")
                far = socket.create_connection(("127.0.0.1", self._target), timeout=10)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._pairs += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (data := source.recv(65536)) and not self._cut.is_set():
                sink.sendall(data)
        for stream in (source, sink):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


def wait_for(what: str, condition: Any, seconds: float, federation: Federation | None = None) -> Any:
    """Poll until a condition is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.25)
    logs = ""
    if federation is not None:
        for log in sorted(federation.root.rglob("*.log")):
            logs += f"\n--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    raise AssertionError(f"{what}: not within {seconds} s{logs}")
