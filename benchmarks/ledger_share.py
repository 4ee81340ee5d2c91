"""CPU share of the ledger in a simulation: reserve, projected epsilon, standing and commit against everything else.

    python benchmarks/ledger_share.py examples/demo/demo.yaml federation.rounds=5

All nodes run in this process, so that one clock (CPU time of the process) sees both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedlora.config import load_config
from fedlora.simulation.run import simulate
from fedlora.simulation.spending import Spending


def timed(spent: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call with its CPU seconds added to a list."""

    def wrapped(*arguments: Any, **named: Any) -> Any:
        started = time.process_time()
        try:
            return call(*arguments, **named)
        finally:
            spent.append(time.process_time() - started)

    return wrapped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    ledger: list[float] = []
    Spending.reserve = timed(ledger, Spending.reserve)  # type: ignore[method-assign]
    Spending.commit = timed(ledger, Spending.commit)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(arguments.config, [*arguments.overrides, f"run.dir={folder}"])
        ends: list[float] = []
        result = simulate(
            config, in_process=True, progress=lambda record: ends.append(time.process_time()) or None,
            ledger=Path(folder) / "ledger.sqlite",
        )  # fmt: skip
    rounds, total, spent = result.rounds, ends[-1] - ends[0], sum(ledger)
    clients = config.data.partition.clients if hasattr(config.data.partition, "clients") else None
    report = {
        "rounds": rounds,
        "clients": clients,
        "cpu_seconds_of_rounds": round(total, 3),
        "cpu_seconds_of_ledger": round(spent, 4),
        "share": round(spent / total, 5),
        "ledger_ms_per_round": [round(1e3 * one, 2) for one in ledger],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
