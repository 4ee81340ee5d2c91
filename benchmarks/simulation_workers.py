"""One worker against two, and one bare process against two with the same forward and backward passes.

    OMP_NUM_THREADS=1 python benchmarks/simulation_workers.py [--clients 16] [--rounds 6]

The demo (examples/demo/demo.yaml: news, MiniLM, DP-LoRA-FA) with other numbers of clients and records. All four
measurements train on the same Poisson draws (test noise source); one worker or process uses one thread. Rounds of the
simulation count whole, with messages, ledger, sampling, aggregation and checkpoint (evaluation left out); bare
processes run nothing but passes over prepared batches. Prints one line of JSON; `reached` is the simulation's ratio
over the bare one's.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fedlora.config import config_container, config_from_container, load_config
from fedlora.config.schema import FedLoraConfig
from fedlora.simulation.prepare import complete, make_federation, share_out
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RoundRecord
from fedlora.training.cohort import CohortEngine
from fedlora.training.drawing import coin_source
from fedlora.training.sampling import PoissonSampler
from fedlora.training.shelf import LazyRecords

ROOT = Path(__file__).resolve().parents[1]


def configuration(asked: argparse.Namespace, root: Path, workers: int) -> FedLoraConfig:
    """Return the demo with the asked sizes and repeatable draws."""
    changes = [
        f"run.dir={root / str(workers)}",
        f"data.partition={{kind: quantity, clients: {asked.clients}}}",
        f"data.public_eval.every_rounds={asked.rounds + 1}",
        "privacy.noise_source=seeded-test-only",
        "training.expected_batch_size=8",
        "training.nominal_records=100",
        f"federation.rounds={asked.rounds + 1}",
        "federation.min_replies=2",
        f"simulation.workers={workers}",
    ]
    return load_config(ROOT / "examples" / "demo" / "demo.yaml", changes)


def simulated(config: FedLoraConfig) -> float:
    """Return the seconds of all rounds but the first."""
    spent: list[float] = []

    def note(record: RoundRecord) -> None:
        if record.round > 1:
            spent.append(sum(value for name, value in record.seconds.items() if name != "evaluate"))

    simulate(config, progress=note)
    return sum(spent)


def bare(number: int, total: int, container: dict[str, Any], barrier: Any, answers: Any) -> None:
    """Run this process's share of all rounds' passes over prepared batches; report when it began and ended."""
    torch.set_num_threads(1)
    config = config_from_container(container)
    federation = make_federation(config)
    prepared = complete(federation.config)
    bench = prepared.bench
    passes = CohortEngine(bench.adapted, bench.mechanism, bench.task, prepared.config).passes
    own = sorted(share_out(federation.parts, total)[number])
    records = {name: LazyRecords(federation.rows, federation.parts[name], bench.task) for name in own}
    state = bench.mechanism.stages.open(bench.mechanism, bench.adapted, bench.initial_payload(), len(own))
    rounds = []
    for server_round in range(2, config.federation.rounds + 1):
        draws = []
        for name in own:
            coins = coin_source(config, name, server_round)
            drawn = PoissonSampler(len(records[name]), config.training.sample_rate, coins).draw()
            draws.append(records[name].batch(drawn))
        rounds.append(draws)
    passes.clipped_sums(bench.mechanism, state, rounds[0])
    barrier.wait()
    started = time.time()
    for draws in rounds:
        passes.clipped_sums(bench.mechanism, state, draws)
    answers.put((started, time.time()))


def bare_seconds(config: FedLoraConfig, processes: int) -> float:
    """Return the seconds that so many processes take for all rounds' passes."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(processes), context.Queue()
    container = dict(config_container(config))
    started = [
        context.Process(target=bare, args=(number, processes, container, barrier, answers))
        for number in range(processes)
    ]
    for process in started:
        process.start()
    spans = [answers.get(timeout=280) for _ in started]
    for process in started:
        process.join()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def main() -> None:
    """Measure all four and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        configs = {workers: configuration(asked, root, workers) for workers in (1, 2)}
        alone, both = bare_seconds(configs[1], 1), bare_seconds(configs[1], 2)
        one, two = simulated(configs[1]), simulated(configs[2])
        alone_again, both_again = bare_seconds(configs[1], 1), bare_seconds(configs[1], 2)
    bare_ratio = (alone + alone_again) / (both + both_again)
    print(
        json.dumps(
            {
                "bare_seconds": [alone, alone_again, both, both_again],
                "simulation_seconds": [one, two],
                "bare_ratio": bare_ratio,
                "simulation_ratio": one / two,
                "reached": one / two / bare_ratio,
            }
        )
    )


if __name__ == "__main__":
    main()
