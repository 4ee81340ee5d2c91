"""`fedlora init`: a commented configuration and sample data in a new folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Annotated

import typer

from fedlora.cli.common import JsonOption, emit
from fedlora.cli.files import PUBLIC, write_file
from fedlora.errors import DeploymentError

app = typer.Typer(
    help="Write a commented configuration and sample data.", rich_markup_mode=None, add_completion=False
)

TOPICS = {
    "sport": ["the striker scored twice", "the match ended in a draw", "she won the final in three sets"],
    "business": ["shares fell after the report", "the bank raised its forecast", "the merger was approved"],
    "technology": [
        "the new phone has a faster chip",
        "the update fixes a security flaw",
        "the network was down",
    ],
    "weather": ["rain is expected tomorrow", "the storm moved north", "temperatures will drop at night"],
}
TAILS = ["on monday", "in the north", "again this year", "before noon", "for the second time", "last week"]

RUN_YAML = """\
# One run of fedlora. The same file simulates it (`fedlora simulate`) and deploys it (`fedlora server`).
# Any key can be replaced on the command line: fedlora simulate run.yaml privacy.target_epsilon=3
schema: 1
run:
  name: first-run
  seed: 42                # data order and initialisation only; privacy noise never comes from a seed
  dir: runs/
model:
  name_or_path: sentence-transformers/all-MiniLM-L6-v2   # any transformers model, or a local folder
  task: sequence-classification
adapter:
  rank: 8
  lora_alpha: 8           # with orthonormal rows of lora_A an entry of lora_B moves the weights by 1
  init: orthonormal
  target_modules: [query, value]
  modules_to_save: [classifier]   # the new head is trained, clipped and noised too
  head_start: typical     # a new head starts large enough for the adapters to learn from the first round
  head_input: centered    # it does not spend its budget on what all inputs have in common
data:
  name: sample-news       # the data set's name in the privacy ledger
  source: {kind: file, paths: [data/records.jsonl]}
  columns: {text: text, label: label}
  labels: [business, sport, technology, weather]
  max_length: 32
  partition: {kind: column, column: site}   # simulation only: one client per site
  public_eval: {source: {kind: file, paths: [data/public.jsonl]}}
mechanism: {kind: lora_fa}        # none | factor | lora_fa | prism | noisy_projection | dp_sgd
privacy:
  unit: record            # record: noise at each client, the server is not trusted; client; none
  adjacency: add_or_remove
  target_epsilon: 8.0     # or noise_multiplier; the other one is derived and shown
  target_delta: 1.0e-3
  max_grad_norm: 0.3      # the clipping norm
  group_weights: auto     # weights of head and adapters in that norm, from public random records
  budget: {epsilon: 8.0, delta: 1.0e-3, on_exhausted: refuse}   # over all runs on this data set
  noise_source: os
training:
  expected_batch_size: 25 # public; the sampling rate is expected_batch_size / nominal_records
  nominal_records: 100    # public, about what a client has; never the exact private count
  steps_per_round: 1
  optimizer: {kind: sgd, lr: 1.0}   # clients send plain noised steps; moments live at the server
federation:
  rounds: 30
  clients_per_round: all
  min_replies: 2
  aggregation: {kind: mean_b}
  # eps: about the mean's noise; head_rates: the head steps at the rate of its inputs' norm
  server_optimizer: {kind: adam, lr: 5.0e-2, beta1: 0.9, beta2: 0.99, eps: 1.5e-3, head_rates: auto}
deployment: {superlink: "127.0.0.1:8000"}
"""

NO_PRIVACY_YAML = """\
# An overlay: fedlora simulate run.yaml --overlay no-privacy.yaml
run: {name: no-privacy}
privacy: {unit: none}
"""

SITE_YAML = """\
# One site's own file, read by `fedlora trainer` only; the server never sees it and cannot change it.
schema: 1
site:
  name: site-1
  identity_key: keys/identity.pem     # fedlora keys new keys site-1
socket: {path: run/trainer.sock, token_file: run/trainer.token}
data:
  name: sample-news                   # what is spent is counted under this name
  source: {kind: file, paths: [data/site-1.jsonl]}
  columns: {text: text, label: label}
ledger: {url: ledger.db, secret_file: keys/ledger.secret}
budget: {epsilon: 8.0, delta: 1.0e-3, adjacency: add_or_remove, unit: record, on_exhausted: refuse}
policy:                               # what a server may ask for; checked before a record is read
  mechanisms: [lora_fa]
  min_noise_multiplier: 0.3
  max_rounds: 100
  max_steps_per_round: 5
  base_models: []                     # sha256 fingerprints from `fedlora check`; [] allows any
  target_modules: [query, value, classifier]
operations: {audit_log: audit.jsonl}
"""


def sample_rows(count: int, seed: int) -> list[dict[str, str]]:
    """Return invented news lines with topic and site."""
    draw = random.Random(seed)  # noqa: S311 - invented sample text, nothing private
    rows = []
    for number in range(count):
        topic = draw.choice(sorted(TOPICS))
        text = f"{draw.choice(TOPICS[topic])} {draw.choice(TAILS)}"
        rows.append({"text": text, "label": topic, "site": f"site-{number % 3 + 1}"})
    return rows


def _jsonl(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    as_json: JsonOption = False,
) -> None:
    """Write run.yaml, an overlay, a site's file and sample data into a folder.

    Example: fedlora init my-federation
    """
    if folder.exists() and any(folder.iterdir()):
        raise DeploymentError(f"{folder}: is not empty; give a new folder, so that nothing is overwritten")
    rows = sample_rows(300, 1)
    files = {
        "run.yaml": RUN_YAML.encode(),
        "no-privacy.yaml": NO_PRIVACY_YAML.encode(),
        "site.yaml": SITE_YAML.encode(),
        "data/records.jsonl": _jsonl(rows),
        "data/public.jsonl": _jsonl(sample_rows(80, 2)),
        ".gitignore": b"runs/\nkeys/\ncerts/\nrun/\n*.db*\n*-state/\n",
    }
    for site in ("site-1", "site-2", "site-3"):
        files[f"data/{site}.jsonl"] = _jsonl([row for row in rows if row["site"] == site])
    for name, content in files.items():
        write_file(folder / name, content, mode=PUBLIC)
    text = (
        f"Wrote {len(files)} files. Next: cd {folder} && fedlora check run.yaml && fedlora simulate run.yaml"
    )
    emit({"folder": str(folder), "files": sorted(files)}, as_json=as_json, text=text)
