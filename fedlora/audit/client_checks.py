"""Self-checks of a client-level release on public random updates: clip, divisor, empty rounds, order of the charge.

An attack on one release cannot see a round that is skipped because nobody answered, a divisor that counts who did, or a
charge that comes after the noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedlora.aggregation import clip_and_share
from fedlora.aggregation.client_privacy import ClientMetric
from fedlora.aggregation.secagg_blocks import update_vector
from fedlora.audit.canaries import OVERSHOOT
from fedlora.audit.client import Normals, Server, open_server, open_shares
from fedlora.audit.client_canaries import CanaryClients, Float64
from fedlora.config.schema import ClientPrivacy
from fedlora.errors import TooFewRepliesError
from fedlora.mechanisms.noise import NoiseSource, OsNoise
from fedlora.training.checked import SelfCheck
from fedlora.training.lawcheck import TIMES, FixedNoise
from fedlora.training.releasecheck import judge_fresh
from fedlora.training.session import Workbench
from fedlora.wire.payload import AdapterPayload

_ROUNDS = 3
"""Rounds (or shares) of noise that are compared: float32 numbers are the same in three by chance 1 time in 10^14."""
_MOST = 2**40
"""All directions, of which one a block is tried."""
_MANY = 16
"""Clients beside whose long updates the noise must be the same as beside nobody's."""
_SHORT = 0.1
"""Length of updates that are not clipped, in units of the bound, for the first; others are up to 1.75 times as long."""
_WHOLE = "sum|update"
_TOLERANCE = 1e-4
"""Relative; updates travel as float32."""


@dataclass
class _Silent:
    """No noise at all, for checks that compare sums."""

    private: bool = True

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(count, device=device, dtype=dtype)


@dataclass
class _Logged:
    """The operating system's noise, and when it was asked for."""

    events: list[str] = field(default_factory=list)
    private: bool = True

    def gaussians(self, count: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        self.events.append("noise")
        return OsNoise().gaussians(count, device, dtype)


class _Probe:
    """Sums of public updates through the run's own release."""

    def __init__(self, bench: Workbench, privacy: ClientPrivacy) -> None:
        self.bench, self.start = bench, bench.initial_payload()
        self.honest = privacy.honest_clients if privacy.noise_at == "clients" else None
        self.canaries = CanaryClients(self.start, bench.layout, limit=64, seed=bench.config.run.seed)
        self.every = CanaryClients(self.start, bench.layout, limit=_MOST, seed=bench.config.run.seed)
        self.metric = ClientMetric(self.start)

    def one_of_each(self) -> list[int]:
        """Return a canary of each block."""
        return [int(at) for at in np.unique(self.every.labels, return_index=True)[1]]

    def released(
        self, server: Server, updates: list[AdapterPayload], noise: NoiseSource, answers: int = 1
    ) -> dict[str, Float64]:
        """Return the released sum (mean times divisor) of some updates, each sent so many times."""
        plan, aggregator = server.plan, server.aggregator
        aggregator.begin(self.start)
        if self.honest is None:
            for number, update in enumerate(updates):
                for _ in range(answers):
                    aggregator.add(f"check-{number:03d}", update)
            aggregator.finish()
        else:
            everybody = updates + [self.canaries.nobody] * (self.honest - len(updates))
            open_shares(server, self.start, everybody, lambda: noise)
        return {name: np.asarray(block) * plan.expected_clients for name, block in server.mode.heard.items()}


def check_client_clip(bench: Workbench, privacy: ClientPrivacy) -> SelfCheck:
    """Check that one client moves the sum by at most C whatever it sends, how often, and whatever it says beside it.

    Long updates along one direction of every block, and along all of these at once: a clip that leaves out a block, or
    clips each alone, is seen.
    """
    probe = _Probe(bench, privacy)
    worst, bound = 0.0, open_server(bench, _Silent()).plan.clipping_norm
    singles = [probe.every.update(number, OVERSHOOT * bound) for number in probe.one_of_each()]
    for long in [*singles, _together(probe.every.nobody, singles)]:
        server = open_server(bench, _Silent())
        loud = AdapterPayload(**{**vars(long), "notes": {"num_examples": 1000}})
        worst = max(worst, probe.metric.norm(probe.released(server, [loud], _Silent(), answers=2)))
    passed = worst <= bound * (1 + _TOLERANCE)
    return SelfCheck("whole updates are clipped", passed, f"largest move {worst:.4g}, bound {bound:.4g}")


def _together(nobody: AdapterPayload, updates: Sequence[AdapterPayload]) -> AdapterPayload:
    """Return the sum of several clients' changes as one client's update."""
    blocks = {
        name: (start + sum(one.blocks[name] - start for one in updates)).astype(np.float32)
        for name, start in nobody.blocks.items()
    }
    return replace(nobody, blocks=blocks)


def check_divisor(bench: Workbench, privacy: ClientPrivacy) -> SelfCheck:
    """Check that the divisor does not follow who answered: two clients' sum is the sum of each one's."""
    probe = _Probe(bench, privacy)
    bound = open_server(bench, _Silent()).plan.clipping_norm
    updates = [probe.canaries.update(number, 0.5 * bound) for number in range(min(2, probe.canaries.size))]
    if probe.honest is not None:
        updates = updates[: probe.honest]
    alone = [probe.released(open_server(bench, _Silent()), [one], _Silent()) for one in updates]
    both = probe.released(open_server(bench, _Silent()), updates, _Silent())
    rest = {name: block - sum(one[name] for one in alone) for name, block in both.items()}
    gap = probe.metric.norm(rest) / bound
    return SelfCheck("the divisor is public", gap <= _TOLERANCE, f"sums differ by {gap:.2e} of the bound")


def check_added(bench: Workbench, privacy: ClientPrivacy) -> SelfCheck:
    """Check that a release is the sum and the noise and nothing else: linear in updates and in numbers for noise."""
    probe = _Probe(bench, privacy)
    bound = open_server(bench, _Silent()).plan.clipping_norm
    many = range(min(_MANY if probe.honest is None else probe.honest, probe.canaries.size))

    def released(length: float, factor: float) -> Float64:
        source, updates = FixedNoise(factor), []
        if length > 0.0:  # of different lengths, which no coarse grid holds
            updates = [probe.canaries.update(at, length * (1.0 + 0.05 * at) * bound) for at in many]
        return _row(probe.released(open_server(bench, source), updates, source))[0]

    noise, short = released(0.0, 1.0), released(_SHORT, 0.0)
    pairs = [
        (released(0.0, TIMES), TIMES * noise),
        (released(TIMES * _SHORT, 0.0), TIMES * short),
        (released(OVERSHOOT, 1.0) - released(OVERSHOOT, 0.0), noise),
    ]
    values = max(float(np.abs(block).max(initial=0.0)) for block in probe.canaries.nobody.blocks.values())
    rounding = (
        8.0 * float(np.finfo(np.float32).eps) * values * (probe.honest or 1)
    )  # updates travel as values
    gaps = [
        max(0.0, float(np.abs(one - other).max()) - rounding) / max(float(np.abs(other).max()), 1e-30)
        for one, other in pairs
    ]
    silent = not noise.any()
    said = "there is none" if silent else f"largest relative change {max(gaps):.2e}"
    return SelfCheck("noise is added as it is", not silent and max(gaps) <= _TOLERANCE, said)


def check_empty_rounds(bench: Workbench, privacy: ClientPrivacy) -> SelfCheck:
    """Check that a round without answers is charged first and then noised in every block (or nothing is opened)."""
    name = "rounds without answers are charged and noised"
    probe = _Probe(bench, privacy)
    log = _Logged()
    server = open_server(bench, log, charge=lambda event: log.events.append("charge"))
    if probe.honest is not None:
        return _check_shares(name, probe, server, log)
    rounds = [_row(probe.released(server, [], log)) for _ in range(_ROUNDS)]
    orders = [one for at, one in enumerate(log.events) if at == 0 or one != log.events[at - 1]]
    charged = orders == ["charge", "noise"] * _ROUNDS
    silent, spans = _row(probe.released(open_server(bench, _Silent()), [], _Silent()))
    fresh, said = judge_fresh(np.stack([row for row, _ in rounds]), spans, silent, "values")
    return SelfCheck(name, charged and fresh, f"charged first {charged}, {said}")


def _row(blocks: Mapping[str, Float64]) -> tuple[Float64, dict[str, tuple[int, int]]]:
    """Return blocks as one row, and each block's first and end place."""
    names = sorted(blocks)
    ends = np.cumsum([blocks[name].size for name in names]).tolist()
    spans = {name: (end - blocks[name].size, end) for name, end in zip(names, ends, strict=True)}
    return np.concatenate([np.asarray(blocks[name], dtype=np.float64).ravel() for name in names]), spans


def _check_shares(name: str, probe: _Probe, server: Server, log: _Logged) -> SelfCheck:
    server.aggregator.begin(probe.start)
    few = [f"check-{number:03d}" for number in range((probe.honest or 1) - 1)]
    try:
        server.aggregator.authorize_sum(few)
    except TooFewRepliesError:
        held = "charge" not in log.events
        rows = np.stack([_share(probe, server, OsNoise()) for _ in range(_ROUNDS)])
        fresh, said = judge_fresh(
            rows, {_WHOLE: (0, rows.shape[1])}, _share(probe, server, _Silent()), "values"
        )
        opened = f"{len(few)} answers: nothing is opened, charged {not held}"
        return SelfCheck(name, held and fresh, f"{opened}; shares: {said}")
    return SelfCheck(name, False, f"{len(few)} answers were opened, {probe.honest} are promised")


def _share(probe: _Probe, server: Server, noise: NoiseSource) -> Float64:
    """Return what a client that has learned nothing adds to the sum: its share of the noise."""
    nobody = probe.canaries.nobody
    sent = clip_and_share(nobody, probe.start, server.plan, Normals(noise))
    return np.asarray(update_vector(sent, probe.start), dtype=np.float64)


def run_client_checks(bench: Workbench) -> list[SelfCheck]:
    """Run every check of the client-level release; none without client-level privacy."""
    privacy = bench.config.privacy
    if not isinstance(privacy, ClientPrivacy):
        return []
    return [
        check(bench, privacy) for check in (check_client_clip, check_divisor, check_added, check_empty_rounds)
    ]


__all__ = ["check_added", "check_client_clip", "check_divisor", "check_empty_rounds", "run_client_checks"]
