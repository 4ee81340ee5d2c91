"""The same job with `fedlora simulate` and with `flwr run`, one after the other on this machine.

    OMP_NUM_THREADS=1 python benchmarks/simulation_flower.py [--clients 100] [--rounds 10] [--workers 2]
    OMP_NUM_THREADS=1 python benchmarks/simulation_flower.py --device cuda --clients 64 --batch 4 --steps 5

A two-layer model of width 16, so that overhead is all; ledger and Poisson batches are on. `flwr run` gets one
SuperNode for each client, as Flower counts clients, and as many Ray actors as `fedlora simulate` has workers. The test
noise source makes both results comparable: losses within 1e-5, epsilon equal.

On a GPU the model is an encoder of MiniLM's size (random weights, bfloat16, 64 tokens, rank 8) and noise comes from the
operating system, so that losses differ by it. `fedlora simulate` has one worker, which trains all clients in a cohort;
`flwr run` gets `--actors` Ray actors that share the GPU. One line of JSON:

- rounds: client-rounds per second over all rounds but the first (which loads models and encodes records);
- whole: the same over the command's wall time, start and end included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "simulation"))

import yaml
from simulation_helpers import container, merge, metric_lines, write_model, write_rows

from fedlora.cli.processes import free_port

ROOT = Path(__file__).resolve().parents[1]


GPU_JOB: dict[str, Any] = {
    "model": {"device": "cuda", "dtype": "bfloat16"},
    "adapter": {"rank": 8, "lora_alpha": 16.0},
    "data": {"max_length": 64},
    "privacy": {"noise_source": "os"},
    "simulation": {"workers": 1, "ray": {"gpus_per_worker": 1.0}},
}
MINILM = {"hidden": 384, "layers": 6, "heads": 12, "intermediate": 1536, "positions": 512}
RECORDS = 40
"""Of a client, on average."""


def write_world(root: Path, asked: argparse.Namespace) -> None:
    """Write the model, every client's records and the public ones."""
    gpu = asked.device == "cuda"
    write_model(root / "model", **(MINILM if gpu else {}))
    words = (70, 90) if gpu else (3, 8)  # cut to 64 tokens
    write_rows(root / "train.jsonl", RECORDS * asked.clients, 1, words)
    write_rows(root / "public.jsonl", RECORDS, 2, words)


def write_job(root: Path, name: str, asked: argparse.Namespace) -> Path:
    """Write one side's configuration; both differ in the run folder only."""
    public = {"source": {"kind": "file", "paths": [str(root / "public.jsonl")]}, "every_rounds": asked.rounds}
    values = container(
        root,
        root / name / "runs",
        data={
            "partition": {"kind": "quantity", "clients": asked.clients},
            "public_eval": public,
            "labels": ["cold", "warm"],
        },
        training={"expected_batch_size": asked.batch, "steps_per_round": asked.steps},
        federation={"rounds": asked.rounds},
        simulation={"workers": asked.workers},
    )
    if asked.device == "cuda":
        values = merge(values, GPU_JOB)
    path = root / name / "run.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(values))
    return path


def environment(**more: str) -> dict[str, str]:
    """Return a quiet environment with one thread for each process."""
    quiet = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)]),
    }
    return {**os.environ, **quiet, **more}


def with_fedlora(path: Path) -> float:
    """Run `fedlora simulate`; return its wall time."""
    command = [sys.executable, "-m", "fedlora.cli.main", "simulate", str(path), "--quiet", "--json"]
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def with_flower(path: Path, home: Path, asked: argparse.Namespace) -> float:
    """Run `flwr run` with a SuperLink of its own, and end that; return the command's wall time."""
    home.mkdir()
    empty = home / "empty"
    empty.mkdir()
    port = str(free_port())
    variables = environment(FLWR_HOME=str(home), FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port)
    command = shutil.which("flwr", path=variables["PATH"])
    if command is None:
        raise SystemExit("flwr: not installed beside this Python")
    settings = f"simulate=true config='{path}'"
    federation = f"num-supernodes={asked.clients} client-resources-num-cpus=1"
    if asked.device == "cuda":
        federation += f" client-resources-num-gpus={1 / asked.actors}"
    whole = [command, "run", str(ROOT), "local", "--stream", "--run-config", settings, "--federation-config"]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [*whole, federation], cwd=empty, env=variables, capture_output=True, text=True, check=False
        )
        wall = time.perf_counter() - started
    finally:
        end_all(home)
    if done.returncode != 0:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return wall


def end_all(home: Path) -> None:
    """End the processes that were started with this FLWR_HOME."""
    mark = f"FLWR_HOME={home}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def figures(runs: Path, asked: argparse.Namespace, wall: float) -> dict[str, Any]:
    """Return one side's speed and result."""
    folder = next(one for one in runs.iterdir() if one.is_dir())
    lines = [line for line in metric_lines(folder) if line["round"] > 1]
    if [line["accepted"] for line in lines] != [asked.clients] * (asked.rounds - 1):
        raise SystemExit(f"{folder}: not every client answered in every round")
    summary = json.loads((folder / "summary.json").read_text())
    seconds = sum(value for line in lines for name, value in line["seconds"].items() if name != "evaluate")
    return {
        "wall_seconds": wall,
        "whole": asked.clients * asked.rounds / wall,
        "later_round_seconds": seconds / len(lines),
        "rounds": asked.clients * len(lines) / seconds,
        "loss": summary["metrics"]["loss"],
        "epsilon": summary["epsilon"],
    }


def main() -> None:
    """Run both and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2, help="of `fedlora simulate` on a CPU")
    parser.add_argument("--batch", type=int, default=8, help="expected records of a client's step")
    parser.add_argument("--steps", type=int, default=1, help="of a client in a round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--actors", type=int, default=8, help="of `flwr run` on a GPU")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_world(root, asked)
        ours, theirs = write_job(root, "fedlora", asked), write_job(root, "flower", asked)
        mine = figures(ours.parent / "runs", asked, with_fedlora(ours))
        flower = figures(theirs.parent / "runs", asked, with_flower(theirs, root / "home", asked))
    close = abs(mine["loss"] - flower["loss"]) <= 1e-5 * abs(flower["loss"])
    print(
        json.dumps(
            {
                "fedlora": mine,
                "flower": flower,
                "times_rounds": mine["rounds"] / flower["rounds"],
                "times_whole": mine["whole"] / flower["whole"],
                "equal_losses": close,  # only under the test noise source
                "equal_epsilon": mine["epsilon"] == flower["epsilon"],
            }
        )
    )


if __name__ == "__main__":
    main()
