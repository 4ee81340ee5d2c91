"""Many logical clients on SST-2: start-up, time outside forward, backward and noise, and memory over rounds.

    FEDLORA_DATA=/path/to/data OMP_NUM_THREADS=1 python benchmarks/simulation_scale.py [--clients 10000] [--workers 2]

The demo's model, adapter and mechanism (examples/demo/demo.yaml) on glue/SST-2, a share of the clients in each
round, Poisson batches, real noise, one ledger. Prints one line of JSON:

- start_seconds: from the call to the first request to the workers, their start included;
- overhead: part of the rounds' wall time in which the slower worker was not in forward, backward or noise and the
  driver evaluated nothing (in the first round: the slower of them, since the start is evaluated beside it);
  `idle_too` counts the faster worker's waiting as well;
- memory_mb: resident memory of driver and workers after each round.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from fedlora.cli.processes import descendants
from fedlora.config import load_config
from fedlora.config.schema import FedLoraConfig
from fedlora.simulation import grid as grid_module
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RoundRecord

ROOT = Path(__file__).resolve().parents[1]


def configuration(asked: argparse.Namespace, root: Path) -> FedLoraConfig:
    """Return the demo's configuration with SST-2's sentences dealt out to many clients."""
    data = Path(asked.data) / "glue" / "SST-2"
    if not (data / "train.tsv").is_file():
        raise SystemExit(f"skipped: {data / 'train.tsv'} is not there; set FEDLORA_DATA")
    changes = [
        f"run.dir={root}",
        "run.name=scale",
        f"data.source={{kind: file, paths: ['{data / 'train.tsv'}']}}",
        "data.columns={text: sentence, label: label}",
        "data.name=sst2",
        f"data.partition={{kind: quantity, clients: {asked.clients}}}",
        "data.public_eval=null",
        f"data.public_eval={{source: {{kind: file, paths: ['{data / 'dev.tsv'}']}}, every_rounds: {asked.rounds}}}",
        "training.expected_batch_size=4",
        "training.nominal_records=6",
        f"federation.rounds={asked.rounds}",
        f"federation.clients_per_round={asked.share}",
        "federation.min_replies=2",
        f"simulation.workers={asked.workers}",
    ]
    return load_config(ROOT / "examples" / "demo" / "demo.yaml", changes)


class Watch:
    """Sees the grid's answers and the rounds of one run."""

    def __init__(self) -> None:
        """Wrap what the grid records of each answer."""
        self.started = time.perf_counter()
        self.first_request: float | None = None
        self.inside: dict[int, float] = {}
        self.rounds: list[dict[str, Any]] = []
        self._last = self.started
        self._beside = 0.0
        took, push = grid_module.HostedGrid._took, grid_module.HostedGrid.push_messages

        def took_noted(grid: Any, node: int, answered: Any) -> Any:
            self.inside[node] = self.inside.get(node, 0.0) + sum(answered.seconds.values())
            return took(grid, node, answered)

        def push_noted(grid: Any, messages: Any) -> Any:
            grid._ensure_ready()
            if self.first_request is None:
                self.first_request = self._last = time.perf_counter()
            return push(grid, messages)

        grid_module.HostedGrid._took = took_noted  # type: ignore[method-assign]
        grid_module.HostedGrid.push_messages = push_noted  # type: ignore[method-assign]

    def note(self, record: RoundRecord) -> None:
        """Close a round's account."""
        if record.round == 0:  # evaluated while the first round's clients train
            self._beside = record.seconds.get("evaluate", 0.0)
            return
        self.rounds.append(
            {
                "round": record.round,
                "clients": record.asked,
                "wall": time.perf_counter() - self._last,
                "evaluate": record.seconds.get("evaluate", 0.0),
                "workers": sorted(self.inside.values()),
                "beside": self._beside if record.round == 1 else 0.0,
                "parts": dict(record.seconds),
                "memory_mb": resident_mb(),
            }
        )
        self.inside, self._last = {}, time.perf_counter()


def resident_mb() -> dict[str, float]:
    """Return the resident memory of this process and of the simulation's workers."""
    found = {"driver": _resident(os.getpid())}
    for pid in descendants(os.getpid()):
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"NodeHost" in name:
            found[f"worker-{len(found)}"] = _resident(pid)
    return found


def _resident(pid: int) -> float:
    try:
        return round(
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1
        )
    except OSError:
        return 0.0


def summary(watch: Watch, rounds: list[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Return shares over some rounds; the first one encodes and warms up, and is given apart."""
    wall = sum(one["wall"] for one in rounds)
    slow = sum(max(one["beside"], *one["workers"], 0.0) + one["evaluate"] for one in rounds)
    mean = sum(sum(one["workers"]) / workers + one["evaluate"] for one in rounds)
    return {
        "rounds": len(rounds),
        "wall": wall,
        "clients_per_second": sum(one["clients"] for one in rounds) / wall,
        "overhead": 1.0 - slow / wall,
        "idle_too": 1.0 - mean / wall,
        "driver_ms_per_client": 1e3 * sum(
            one["wall"] - one["parts"]["clients"] - one["evaluate"] for one in rounds
        ) / max(1, sum(one["clients"] for one in rounds)),
    }  # fmt: skip


def main() -> None:
    """Run once and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default=os.environ.get("FEDLORA_DATA", "data"))
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--in-process", action="store_true", help="without Ray (for profiles)")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(asked, Path(folder))
        watch = Watch()
        result = simulate(config, progress=watch.note, in_process=asked.in_process, announce=lines.append)
        end = result.seconds
    workers = 1 if asked.in_process else asked.workers
    print(
        json.dumps(
            {
                "start_seconds": (watch.first_request or 0.0) - watch.started,
                "all_rounds": summary(watch, watch.rounds, workers),
                "after_the_first": summary(watch, watch.rounds[1:], workers),
                "memory_mb": [one["memory_mb"] for one in watch.rounds],
                "round_parts": [one["parts"] for one in watch.rounds],
                "worker_seconds": [one["workers"] for one in watch.rounds],
                "plan": lines,
                "seconds": dict(end),
            }
        )
    )


if __name__ == "__main__":
    main()
