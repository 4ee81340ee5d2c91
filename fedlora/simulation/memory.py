"""How much memory a simulation will need, and how many clients fit into one cohort; known before the first round.

Activations are measured: one pass over random public records counts what autograd keeps. The rest follows from
shapes. No private record is looked at, so a plan tells nothing about anybody.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from fedlora.config.schema import FedLoraConfig
from fedlora.files import replace_text
from fedlora.mechanisms.noise import OsNoise
from fedlora.simulation.machine_memory import free_bytes
from fedlora.simulation.trim import resident_bytes
from fedlora.training.cohort import ClientJob, CohortEngine
from fedlora.training.groups import public_records
from fedlora.training.session import Workbench

PLAN_FILE: Final = "plan.json"
_RECORDS: Final = 2
_BACKWARD: Final = 1.5
"""Peak of a pass as a multiple of what its forward keeps (measured: 1.2 for a 6-layer encoder of width 384, 1.9 for
two layers of width 16)."""
_STATE_COPIES: Final = 6
"""Float32 copies of a client's values beside its optimiser state: values, start, sum, noise, update, payload."""
_USABLE: Final = 0.8
"""Part of the free memory that is planned with; allocators and the records themselves take the rest."""
_DEVIATIONS: Final = 4.0
"""A Poisson draw exceeds its mean by so many standard deviations once in 30 000 draws."""
_MB: Final = 1e6


@dataclass(frozen=True)
class MemoryPlan:
    """PUBLIC. What a run will need, in bytes, and how many clients train together.

    Attributes:
        device: "cpu" or "cuda".
        workers: number of workers.
        clients: most clients that one worker gets in a round.
        cohort: clients that one worker trains together.
        chosen_by: "memory" (all that fit), "configuration" or "earlier part of this run".
        base: resident memory of a worker before it trains (on a GPU: the base model).
        state: adapter values, sums, noise and optimiser state of one client.
        record: one record's activations at the configured length.
        records: records of one client in a step, on average.
        client: memory of one client more in a cohort.
        worker: memory of a worker at its largest step.
        free: memory that one worker may use; None where it is not known.
    """

    device: str
    workers: int
    clients: int
    cohort: int
    chosen_by: str
    base: int
    state: int
    record: int
    records: int
    client: int
    worker: int
    free: int | None

    def line(self) -> str:
        """Return the plan in one line."""
        room = "of an unknown amount" if self.free is None else f"of {self.free / _MB:.0f} MB free for each"
        over = self.free is not None and self.worker > self.free
        return (
            f"memory: {self.workers} worker{'s' * (self.workers != 1)} ({self.device}), {self.base / _MB:.0f} MB each"
            f" + {self.client / _MB:.1f} MB a client ({self.records} records of {self.record / _MB:.2f} MB): "
            f"{self.cohort} of {self.clients} clients at once, up to {self.worker / _MB:.0f} MB {room}"
            + (" (may not fit: cohorts and passes are then halved)" if over else "")
        )


@dataclass(frozen=True)
class ClientNeed:
    """PUBLIC. What training needs: fixed bytes per client, bytes per record, records per client and step.

    Attributes:
        most: records in one pass at most (`training.micro_batch_size`); None for no limit.
    """

    state: int
    record: int
    records: int
    most: int | None = None

    def cohort(self, clients: int) -> int:
        """Return the bytes that so many clients need at once, with a large Poisson draw."""
        mean = clients * self.records
        drawn = mean + _DEVIATIONS * math.sqrt(mean)
        if self.most is not None:
            drawn = min(drawn, self.most)
        return math.ceil(clients * self.state + drawn * self.record)

    def fitting(self, free: int, most: int) -> int:
        """Return how many clients fit, between 1 and `most`."""
        low, high = 1, max(1, most)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cohort(middle) <= free else (low, middle - 1)
        return low


def measure_need(bench: Workbench) -> ClientNeed:
    """Measure what one client needs, on random public records of the configured length."""
    config = bench.config
    records = public_records(bench.task, _RECORDS, config.data.max_length or bench.task.window)
    kept = _kept_bytes(bench, records)
    trained = sum(value.size for value in bench.initial_payload().blocks.values()) * 4
    copies = _STATE_COPIES + (2 if config.training.optimizer.kind in ("adam", "adamw") else 1)
    return ClientNeed(
        state=trained * copies,
        record=math.ceil(_BACKWARD * kept / _RECORDS),
        records=max(1, math.ceil(config.training.expected_batch_size)),
        most=config.training.micro_batch_size,
    )


def _kept_bytes(bench: Workbench, records: Sequence[Any]) -> int:
    """Return the bytes that autograd keeps for a pass over some records, parameters left out."""
    own = {value.untyped_storage().data_ptr() for value in _frozen(bench.adapted.model)}
    seen: dict[int, int] = {}

    def keep(value: torch.Tensor) -> torch.Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return value

    engine = CohortEngine(bench.adapted, bench.mechanism, bench.task, bench.config)
    job = ClientJob("public", lambda: records, OsNoise())
    with torch.random.fork_rng(), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        engine.train(bench.initial_payload(), [job], 1)
    return sum(seen.values())


def _frozen(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def plan_memory(
    bench: Workbench, clients: int, workers: int, free: int | None, earlier: int | None = None
) -> MemoryPlan:
    """Decide how many clients train together.

    Args:
        bench: the loaded base model with its resolved configuration.
        clients: most clients that one worker gets in a round.
        workers: number of workers.
        free: bytes that one worker may use, its base model included; None where they are not known.
        earlier: cohort of an earlier part of the same run, which a resumed run keeps.
    """
    config, device = bench.config, bench.adapted.device.type
    need = measure_need(bench)
    base = resident_bytes() if device == "cpu" else _model_bytes(bench)
    asked = config.simulation.cohort
    if asked != "auto":
        cohort, chosen_by = min(int(asked), clients), "configuration"
    elif earlier is not None:
        cohort, chosen_by = min(earlier, clients), "earlier part of this run"
    else:
        cohort, chosen_by = clients if free is None else need.fitting(free - base, clients), "memory"
    return MemoryPlan(
        device=device,
        workers=workers,
        clients=clients,
        cohort=max(1, cohort),
        chosen_by=chosen_by,
        base=base,
        state=need.state,
        record=need.record,
        records=need.records,
        client=need.state + need.records * need.record,
        worker=base + need.cohort(max(1, cohort)),
        free=free,
    )


def clients_of_a_worker(config: FedLoraConfig, shares: Sequence[int]) -> int:
    """Return the most clients that one worker can get in a round.

    Args:
        config: `federation.clients_per_round` says how many are sampled.
        shares: clients that live at each worker.
    """
    asked = config.federation.clients_per_round
    if asked == "all":
        return max(shares)
    if isinstance(asked, int):
        return min(max(shares), asked)
    mean = asked * max(shares)
    return min(max(shares), math.ceil(mean + _DEVIATIONS * math.sqrt(mean)) + 1)


def free_memory_here(workers: int, device: str, gpus_per_worker: float) -> int | None:
    """Return the bytes that each of some workers on this machine may use; None where nothing tells.

    Args:
        workers: workers on this machine.
        device: "cpu" or "cuda".
        gpus_per_worker: share of a GPU that each gets.
    """
    if device == "cuda":
        share = min(1.0, gpus_per_worker) if gpus_per_worker > 0 else 1.0
        free, _ = torch.cuda.mem_get_info()
        return int(_USABLE * free * share)
    here = free_bytes()
    return None if here is None else int(_USABLE * here / workers)


def _model_bytes(bench: Workbench) -> int:
    return sum(value.numel() * value.element_size() for value in _frozen(bench.adapted.model))


# -- the run folder ---------------------------------------------------------------------------------


def write_plan(folder: Path, plan: MemoryPlan, halved: Mapping[int, int]) -> dict[str, Any]:
    """Write `plan.json`: the plan, and the cohort of every worker whose memory ran out all the same."""
    content = {**asdict(plan), "halved": {str(node): cohort for node, cohort in halved.items()}}
    replace_text(folder / PLAN_FILE, json.dumps(content, indent=1) + "\n")
    return content


def earlier_cohort(folder: Path) -> int | None:
    """Return the cohort that an earlier part of a run ended with; None if it did not come so far."""
    try:
        found = json.loads((folder / PLAN_FILE).read_text(encoding="utf-8"))
        return min([int(found["cohort"]), *(int(one) for one in found["halved"].values())])
    except (OSError, ValueError, KeyError, TypeError):
        return None
