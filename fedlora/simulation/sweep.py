"""Sweeps: many configurations as Ray tasks, one core (or a share of a GPU) each; resumable.

Every trial is a whole simulation in one process. Trials spend from the ledger that `fedlora simulate` uses with the
same configuration, so that sweeps and runs over one data set add up; only data that is marked public gets a ledger
per trial.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedlora.config import load_config
from fedlora.config.resolve import config_hash
from fedlora.errors import ConfigError, FedLoraError
from fedlora.files import FolderLock, ends_in_a_cut_line, replace_text
from fedlora.simulation.clients_ledger import ledger_file
from fedlora.simulation.settings import RoundRecord
from fedlora.simulation.terminations import check_stopped, terminations

_LOG = logging.getLogger(__name__)
_OWN: Final = {
    "run.seed": "use --seeds",
    "run.dir": "use --out, and run.dir in the file for the ledger",
    "run.name": "trials are named after what they change",
}


@dataclass(frozen=True)
class SweepPlan:
    """PUBLIC. What to try.

    Attributes:
        config: YAML file that every trial starts from.
        grid: dotted key to the values to combine.
        random: dotted key to (low, high, logarithmic); drawn anew for each sample.
        samples: number of random draws per grid point; 1 without random keys.
        seeds: experiment seeds; each point runs once per seed.
        seed: seed of the random draws (public).
        metric: metric to compare and to stop early by.
        larger_is_better: direction of the metric.
        early_stopping: end trials below the median of the others at the same round.
        overlays: further YAML files.
    """

    config: str
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    random: Mapping[str, tuple[float, float, bool]] = field(default_factory=dict)
    samples: int = 1
    seeds: Sequence[int] = (42,)
    seed: int = 0
    metric: str = "accuracy"
    larger_is_better: bool = True
    early_stopping: bool = False
    overlays: Sequence[str] = ()


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    overrides: tuple[str, ...]
    seed: int


BELOW_MEDIAN: Final = "below-median"


@dataclass(frozen=True)
class TrialResult:
    """PUBLIC. How a trial ended.

    Attributes:
        status: as a run's (`RunResult.status`), "failed", or `BELOW_MEDIAN` where the sweep itself ended it early.
        epsilon: what this trial alone costs a client, from its own events.
        spent: largest epsilon in the clients' ledger after it (earlier trials included).
        statement: what both mean: unit, adjacency, adversary, delta, accountant, sampling; empty in files of earlier
            versions.
        error: set if it could not run.
    """

    name: str
    overrides: tuple[str, ...]
    seed: int
    status: str
    mechanism: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    epsilon: float | None = None
    spent: float | None = None
    statement: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 0
    folder: str = ""
    error: str = ""


def plan_trials(plan: SweepPlan) -> list[Trial]:
    """Return every trial, in a fixed order.

    Raises:
        ConfigError: if a range is malformed, there are no seeds, a key is the sweep's own or is varied twice, or a
            trial occurs twice (each is charged).

    Example:
        >>> len(plan_trials(SweepPlan("x", grid={"a": ["1", "2"]}, seeds=(1, 2, 3))))
        6
    """
    if not plan.seeds or plan.samples < 1:
        raise ConfigError("sweep: needs at least one seed and one sample")
    _check_keys(plan)
    for key, (low, high, logarithmic) in plan.random.items():
        fine = math.isfinite(low) and math.isfinite(high) and low < high and (low > 0 or not logarithmic)
        if not fine:
            raise ConfigError(
                f"sweep: range of {key} is {low}:{high}; allowed: low < high, above 0 if logarithmic"
            )
    generator = np.random.Generator(np.random.Philox(plan.seed))
    keys = list(plan.grid)
    trials: list[Trial] = []
    for values in itertools.product(*(plan.grid[key] for key in keys)):
        fixed = tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        for _ in range(plan.samples if plan.random else 1):
            drawn = tuple(f"{key}={_draw(generator, *plan.random[key]):.6g}" for key in plan.random)
            for seed in plan.seeds:
                overrides = (*fixed, *drawn)
                text = json.dumps([overrides, seed])
                trials.append(Trial(hashlib.sha256(text.encode()).hexdigest()[:12], overrides, seed))
    for twice in [trial for trial, number in Counter(trials).items() if number > 1]:
        raise ConfigError(
            f"sweep: {' '.join((*twice.overrides, f'seed {twice.seed}'))} occurs twice, and every trial is "
            "charged; name each value and seed once"
        )
    return trials


def _check_keys(plan: SweepPlan) -> None:
    for key in (*plan.grid, *plan.random):
        if key in _OWN:
            raise ConfigError(f"sweep: {key} is set for each trial by the sweep itself; {_OWN[key]}")
    both = sorted(set(plan.grid) & set(plan.random))
    if both:
        raise ConfigError(f"sweep: {both[0]} has values and a range; choose one of them")


def _draw(generator: np.random.Generator, low: float, high: float, logarithmic: bool) -> float:
    if logarithmic:
        return float(math.exp(generator.uniform(math.log(low), math.log(high))))
    return float(generator.uniform(low, high))


class MedianRule:
    """Stops a trial that is worse than the median of the other trials at the same round.

    Args:
        folder: where trials leave their marks.
        name: this trial.
        metric: what is compared.
        larger_is_better: direction.
        rounds: of the run; a trial that has done them all is not stopped.
        least_others: number of other trials needed before anything is stopped.
    """

    def __init__(
        self, folder: Path, name: str, metric: str, larger_is_better: bool, rounds: int, least_others: int = 3
    ) -> None:
        """Create the folder."""
        self._folder, self._name, self._metric = folder, name, metric
        self._sign = 1.0 if larger_is_better else -1.0
        self._rounds, self._least = rounds, least_others
        self._mine: dict[str, float] = {}
        self.stopped = False
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, record: RoundRecord) -> bool:
        """Leave this round's mark; return True if the trial should end."""
        if record.round == 0 or not record.metrics or self._metric not in record.metrics:
            return False
        value = self._sign * record.metrics[self._metric]
        self._mine[str(record.round)] = value
        path = self._folder / f"{self._name}.json"
        replace_text(path, json.dumps(self._mine))
        others = [
            json.loads(other.read_text()).get(str(record.round))
            for other in self._folder.glob("*.json")
            if other.stem != self._name
        ]
        known = [one for one in others if one is not None]
        enough = len(known) >= self._least and record.round < self._rounds
        self.stopped = enough and value < statistics.median(known)
        return self.stopped


def run_trial(plan: SweepPlan, trial: Trial, out: str, shared: str) -> TrialResult:
    """Run one trial in this process; a failure is a result, not an exception.

    Args:
        plan: the sweep.
        trial: what to run.
        out: folder of the sweep.
        shared: the ledger for data that is not marked public.
    """
    from fedlora.simulation.run import simulate

    folder = Path(out)
    try:
        fixed = (f"run.seed={trial.seed}", f"run.dir={folder / 'runs'}", f"run.name=trial-{trial.name}")
        config = load_config(plan.config, (*trial.overrides, *fixed), plan.overlays)
        if config.data.public_eval is None:
            raise ConfigError("data.public_eval: missing; without public records there is nothing to compare")
        rule: MedianRule | None = None
        if plan.early_stopping:
            better, rounds = plan.larger_is_better, config.federation.rounds
            rule = MedianRule(folder / "marks", trial.name, plan.metric, better, rounds)
        public = config.data.marked_public
        ledger = folder / "ledgers" / f"{trial.name}.sqlite" if public else Path(shared)
        result = simulate(config, in_process=True, progress=partial(_watch, plan, rule), ledger=ledger)
    except FedLoraError as error:
        text = " ".join(line.strip() for line in str(error).splitlines())
        return TrialResult(
            trial.name, trial.overrides, trial.seed, "failed", error=f"{type(error).__name__}: {text}"
        )
    except Exception as error:  # its class alone: messages of foreign errors may quote records
        _LOG.warning("trial %s: failed (%s)", trial.name, type(error).__name__)
        return TrialResult(trial.name, trial.overrides, trial.seed, "failed", error=type(error).__name__)
    return TrialResult(
        name=trial.name,
        overrides=trial.overrides,
        seed=trial.seed,
        status=BELOW_MEDIAN if rule and rule.stopped else result.status,
        mechanism=config.mechanism.kind,
        metrics=dict(result.metrics or {}),
        epsilon=result.statement.get("epsilon_from_this_runs_events"),
        spent=result.epsilon,
        statement=dict(result.statement),
        rounds=result.rounds,
        folder=str(result.folder),
    )


def _watch(plan: SweepPlan, rule: MedianRule | None, record: RoundRecord) -> bool:
    """Refuse a metric that the task does not give, while nothing is charged yet; then apply the rule, if any."""
    if record.round == 0 and plan.metric not in (record.metrics or {}):
        raise ConfigError(
            f"sweep: metric {plan.metric!r} is not among {', '.join(sorted(record.metrics or {}))}; choose one of them"
        )
    return rule is not None and rule(record)


def finished_trials(out: Path) -> dict[str, TrialResult]:
    """Return the trials that an earlier, interrupted sweep completed."""
    path = out / "trials.jsonl"
    found: dict[str, TrialResult] = {}
    if not path.exists():
        return found
    for line in path.read_text().splitlines():
        try:
            record = json.loads(line)
            result = TrialResult(**{**record, "overrides": tuple(record["overrides"])})
        except (ValueError, TypeError, KeyError):
            continue  # the last line of a killed sweep may be cut
        if result.status != "failed":
            found[result.name] = result
    return found


def run_sweep(
    plan: SweepPlan,
    out: Path,
    *,
    parallel: int | None = None,
    gpus_per_trial: float = 0.0,
    cpus_per_trial: float = 1.0,
    progress: Callable[[TrialResult, int, int], None] | None = None,
    in_process: bool = False,
) -> list[TrialResult]:
    """Run every trial that is not finished yet.

    Args:
        plan: what to try.
        out: folder of the sweep; running it again goes on.
        parallel: trials at once; as many as the cores hold where None.
        gpus_per_trial: share of a GPU for each trial.
        cpus_per_trial: cores (or a share of one) for each trial.
        progress: called after each trial with the result, how many are done, and how many there are.
        in_process: one after the other in this process, without Ray.

    Returns:
        One result per trial, in the plan's order.

    Raises:
        ConfigError: if the folder holds another sweep, or one that began with another configuration.
        FolderInUseError: if another process works on the same sweep.
    """
    out.mkdir(parents=True, exist_ok=True)
    with terminations(), FolderLock(out, "sweep folder"):
        return _run_waiting(plan, out, parallel, (cpus_per_trial, gpus_per_trial), progress, in_process)


def _run_waiting(
    plan: SweepPlan,
    out: Path,
    parallel: int | None,
    share: tuple[float, float],
    progress: Callable[[TrialResult, int, int], None] | None,
    in_process: bool,
) -> list[TrialResult]:
    settings = load_config(plan.config, (), plan.overlays)
    text = json.dumps({**asdict(plan), "config_hash": config_hash(settings)}, sort_keys=True)
    known = out / "sweep.json"
    if known.exists() and known.read_text() != text:
        raise ConfigError(
            f"sweep: {out} holds another sweep (other options, or the file has changed since); choose another "
            "folder, or repeat the same command on the same file"
        )
    trials = plan_trials(plan)
    replace_text(known, text)
    done = finished_trials(out)
    waiting = [trial for trial in trials if trial.name not in done]
    shared = str(ledger_file(settings).absolute())

    def note(result: TrialResult) -> None:
        done[result.name] = result
        _append(out / "trials.jsonl", json.dumps(asdict(result), allow_nan=False))
        if progress is not None:
            progress(result, len(done), len(trials))

    if in_process:
        for trial in waiting:
            check_stopped()
            note(run_trial(plan, trial, str(out), shared))
    elif waiting:
        _run_on_ray(plan, waiting, (out, shared), parallel, share, note)
    return [done[trial.name] for trial in trials]


def _append(path: Path, line: str) -> None:
    """Append one line; one that a killed sweep left cut does not swallow it."""
    with path.open("a+b") as stream:
        begin = "\n" if ends_in_a_cut_line(stream.fileno()) else ""
        stream.write(f"{begin}{line}\n".encode())


def _run_on_ray(
    plan: SweepPlan,
    waiting: Sequence[Trial],
    places: tuple[Path, str],
    parallel: int | None,
    share: tuple[float, float],
    note: Callable[[TrialResult], None],
) -> None:
    import ray

    from fedlora.simulation.cluster import connect, disconnect

    (out, shared), (cpus, gpus) = places, share
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    fitting = math.floor(cores / cpus) if cpus > 0 else cores
    slots = max(1, min(fitting, len(waiting)) if parallel is None else parallel)
    ray_config = load_config(plan.config, (), plan.overlays).simulation.ray
    cluster = connect(ray_config, math.ceil(cpus * slots), gpus * slots, out.name)
    environment = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
    task: Any = ray.remote(run_trial)
    task = task.options(num_cpus=cpus, num_gpus=gpus, max_retries=0, runtime_env={"env_vars": environment})
    try:
        queue = list(waiting)
        running: dict[Any, Trial] = {}
        while queue or running:
            check_stopped()
            while queue and len(running) < slots:
                trial = queue.pop(0)
                running[task.remote(plan, trial, str(out), shared)] = trial
            finished, _ = ray.wait(list(running), num_returns=1, timeout=5.0)
            for reference in finished:
                note(_result_of(reference, running.pop(reference)))
    finally:
        disconnect(cluster)


def _result_of(reference: Any, trial: Trial) -> TrialResult:
    import ray

    try:
        result: TrialResult = ray.get(reference)
    except ray.exceptions.RayError as error:
        reason = type(getattr(error, "cause", None) or error).__name__
        return TrialResult(trial.name, trial.overrides, trial.seed, "failed", error=reason)
    return result
