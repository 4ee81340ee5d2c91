"""CPU time per client and round outside the cohort engine: messages, ledger, sampling, state, aggregation, checkpoint.

Usage: OMP_NUM_THREADS=1 python benchmarks/simulation_overhead.py [--clients 100] [--rounds 30]

A two-layer model of width 16 makes everything but the overhead small. All nodes run in this process, so that one
clock sees all of it; the ledger is on, noise is real.
Rounds in which records are encoded for the first time are left out.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "simulation"))

from simulation_helpers import configuration, make_world, write_rows

from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RoundRecord
from fedlora.training import cohort


def measure(clients: int, rounds: int, root: Path) -> tuple[float, float]:
    """Return (engine, everything else) in milliseconds of CPU per client and round."""
    make_world(root)
    write_rows(root / "train.jsonl", 40 * clients, 1)
    inside = 0.0
    plain = cohort.CohortEngine.train

    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal inside
        started = time.process_time()
        result = plain(self, *arguments, **named)
        inside += time.process_time() - started
        return result

    marks: dict[int, tuple[float, float]] = {}

    def note(record: RoundRecord) -> None:
        marks[record.round] = (time.process_time(), inside)

    public = {"source": {"kind": "file", "paths": [str(root / "public.jsonl")]}, "every_rounds": rounds + 1}
    data = {
        "partition": {"kind": "quantity", "clients": clients},
        "public_eval": public,
        "labels": ["cold", "warm"],
    }
    config = configuration(
        root, root / "runs", data=data, privacy={"noise_source": "os"}, federation={"rounds": rounds}
    )
    cohort.CohortEngine.train = timed  # type: ignore[method-assign]
    try:
        simulate(config, in_process=True, progress=note)
    finally:
        cohort.CohortEngine.train = plain  # type: ignore[method-assign]
    first, last = rounds // 2, rounds - 1
    each = 1000.0 / (clients * (last - first))
    engine = (marks[last][1] - marks[first][1]) * each
    return engine, (marks[last][0] - marks[first][0]) * each - engine


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        engine, rest = measure(asked.clients, asked.rounds, Path(folder))
    print(f"engine {engine:.3f} ms, everything else {rest:.3f} ms of CPU per client and round")


if __name__ == "__main__":
    main()
