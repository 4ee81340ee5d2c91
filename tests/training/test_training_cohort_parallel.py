"""Two processes train one logical batch: the same result as one process, one batch, one noise."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1] / "mechanisms"), str(HERE.parent)]


def train(rank: int, size: int, meeting: str, out) -> None:
    sys.path[:0] = [str(HERE.parents[1] / "mechanisms"), str(HERE.parent)]
    import test_training_cohort as cohort

    from fedlora.mechanisms.noise import SeededNoise
    from fedlora.training.cohort import ClientJob, CohortEngine
    from fedlora.training.cohort_parallel import DataParallel

    torch.set_num_threads(1)
    both, payload = cohort.engine("bert")
    group = None
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        group = DataParallel(both.mechanism)
    engine = CohortEngine(both.adapted, both.mechanism, both._passes._task, both.config, group)
    jobs = cohort.jobs("bert", cohort.DRAWS)
    if rank > 0:  # other processes must neither draw records nor noise

        def never(*_):
            raise AssertionError("drew twice")

        class Silent(SeededNoise):
            gaussians = never

        jobs = [ClientJob(job.client, never, Silent(1, "x", 1)) for job in jobs]
    updates = engine.train(payload, jobs, 3)
    out.put((rank, [dict(u.payload.blocks) for u in updates], [(u.event.key(), u.steps) for u in updates]))
    if size > 1:
        dist.destroy_process_group()


@pytest.mark.long
def test_two_processes_give_what_one_gives(tmp_path):
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    workers = [
        context.Process(target=train, args=(rank, 2, str(tmp_path / "meeting"), out)) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    train(0, 1, "", out)
    results = [out.get(timeout=240) for _ in range(3)]
    for worker in workers:
        worker.join(60)
    reference = results[0]
    for _, updates, facts in results[1:]:
        assert facts == reference[2]
        for mine, theirs in zip(updates, reference[1], strict=True):
            for name, value in theirs.items():
                assert np.allclose(mine[name], value, rtol=1e-4, atol=1e-5)
