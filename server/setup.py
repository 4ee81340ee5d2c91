"""Put a run's server together: base model, aggregator, strategy, evaluation, ledger mirror."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import Grid

from fedlora.aggregation import build_aggregator
from fedlora.config import config_container
from fedlora.config.resolve import config_hash
from fedlora.config.schema import ClientPrivacy, FedLoraConfig, NoPrivacy
from fedlora.ledger import Ledger, load_or_create_secret, open_ledger, register_of
from fedlora.report.conditions import conditions_of
from fedlora.report.diagnostics import RoundDiagnostics
from fedlora.report.trackers import Trackers, open_trackers, require_trackers
from fedlora.simulation.settings import ServerSettings
from fedlora.training.session import Workbench, build_workbench
from fedlora.training.starting import starting_payload
from server.charging import FEDERATION, ServerCharge
from server.draws import client_sampler, require_client_draws
from server.evaluation import PublicEvaluator
from server.folder import RunFolder
from server.loop import Answers, RoundLoop
from server.mirror import LedgerMirror
from server.noise import ServerNoise
from server.receipts import open_desk
from server.roster import Roster
from strategies.fedlora_strategy import FedLoraStrategy, RunFacts

_LOG = logging.getLogger(__name__)


@dataclass
class Server:
    """A run's server, ready for its rounds."""

    settings: ServerSettings
    bench: Workbench
    strategy: FedLoraStrategy
    evaluator: PublicEvaluator
    answers: Answers
    folder: RunFolder
    loop: RoundLoop
    ledger: Ledger | None
    charge: ServerCharge
    seconds: dict[str, float]
    trackers: Trackers

    def close(self) -> None:
        """Close trackers, the server's ledger and its mirror of receipts."""
        self.trackers.close(self.loop.state.status)
        if self.answers.receipts is not None:
            self.answers.receipts.close()
        if self.ledger is not None:
            self.ledger.close()


def build_server(settings: ServerSettings, grid: Grid) -> Server:
    """Load the base model and bind the parts of a run.

    Args:
        settings: the run's settings.
        grid: Flower's grid.

    Raises:
        TooFewRepliesError: if fewer clients than `federation.min_replies` come online in time.
        UnsupportedCombinationError: if the settings cannot go together.
        SensitivityMismatchError: if clients are not drawn as the accounting claims.
    """
    started = time.perf_counter()
    config = settings.config
    require_trackers(config.tracking)
    require_client_draws(config)
    bench = settings.bench if settings.bench is not None else build_workbench(config)
    loaded = time.perf_counter()
    roster = _roster(settings, grid)
    ledger = _server_ledger(settings)
    charge = ServerCharge(ledger, config, settings.run_id)
    noise = ServerNoise(config)
    strategy, answers = _strategy(settings, bench, roster, noise, charge)
    evaluator = PublicEvaluator(bench)
    folder = RunFolder(settings.folder)

    before_round, epsilon = _hooks(config, noise, charge, roster, strategy, answers)
    trackers = open_trackers(config, settings.run_id, settings.folder)
    diagnostics = RoundDiagnostics(bench)
    loop = RoundLoop(
        settings, grid, strategy, evaluator, answers, folder, before_round, epsilon, diagnostics, trackers
    )
    seconds = {"load_model": loaded - started, "set_up": time.perf_counter() - loaded}
    return Server(
        settings, bench, strategy, evaluator, answers, folder, loop, ledger, charge, seconds, trackers
    )


def _roster(settings: ServerSettings, grid: Grid) -> Roster:
    """Return who takes part; a deployment waits for its clients, within a bound.

    Raises:
        TooFewRepliesError: if they are not there in time.
    """
    config = settings.config
    roster = Roster(grid, settings.clients, settings.app_hash, config.federation.members)
    expected = config.deployment.expected_clients or len(settings.expect or ())
    if settings.clients is None:
        wanted = max(config.federation.min_replies, expected)
        roster.wait_for(wanted, config.deployment.startup_timeout_seconds)
    return roster


def _hooks(
    config: FedLoraConfig,
    noise: ServerNoise,
    charge: ServerCharge,
    roster: Roster,
    strategy: FedLoraStrategy,
    answers: Answers,
) -> tuple[Callable[[int], None], Callable[[], float | None]]:
    """Return what happens before each round, and how the epsilon that binds is read."""

    def before_round(number: int) -> None:
        noise.start_round(number)
        charge.start_round(number)
        roster.refresh()
        strategy.set_roster(roster.clients)

    def epsilon() -> float | None:
        if isinstance(config.privacy, ClientPrivacy):
            return charge.epsilon()
        return answers.mirror.said_so_far

    return before_round, epsilon


def _server_ledger(settings: ServerSettings) -> Ledger | None:
    """Open the ledger of client-level privacy, beside the clients' own: whatever shares one shares the other."""
    if not isinstance(settings.config.privacy, ClientPrivacy):
        return None
    beside = settings.folder.parent / "ledger.sqlite" if settings.ledger is None else settings.ledger
    path = beside.with_name(f"server-{beside.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    key = path.with_suffix(".key")
    secret = load_or_create_secret(key)
    began = (
        settings.folder / "config.yaml"
    ).exists()  # written after the ledger was opened for the first time
    return open_ledger(path, secret=secret, create=not began, register=register_of(key))


def _strategy(
    settings: ServerSettings, bench: Workbench, roster: Roster, noise: ServerNoise, charge: ServerCharge
) -> tuple[FedLoraStrategy, Answers]:
    config = settings.config
    recipe = bench.adapted.recipe.sha256
    aggregator = build_aggregator(
        config,
        bench.layout,
        recipe,
        num_clients=config.deployment.expected_clients or roster.count(),
        noise=noise,
        charge=charge,
        uplink=bench.mechanism.uplink,
    )
    facts = RunFacts(
        run_id=settings.run_id,
        config=config_container(config),
        config_hash=config_hash(config),
        steps=config.training.local_steps,
        timeout_seconds=config.federation.round_timeout_seconds,
        compression=config.federation.compression,
    )
    simulated = settings.clients is not None or settings.expect is not None
    desk = open_desk(config, settings.run_id, settings.folder, bench.event, simulated=simulated)
    answers = Answers(LedgerMirror(config), desk)
    strategy = FedLoraStrategy(
        facts,
        aggregator,
        client_sampler(config),
        starting_payload(bench),
        roster.clients,
        on_reply=answers.note,
        on_ask=None if desk is None else desk.ask,
    )
    return strategy, answers


def statement(config: FedLoraConfig, server: Server) -> Mapping[str, Any]:
    """Return what the run's epsilon means; it goes wherever the figure goes."""
    found = conditions_of(config)
    if isinstance(config.privacy, NoPrivacy):
        return found
    if isinstance(config.privacy, ClientPrivacy):
        whose = "what the server's ledger reports for all clients together (other runs over the data set included)"
        alone = server.charge.table().get(FEDERATION, {}).get("epsilon_from_events")
    else:
        whose = "the largest over clients of what each client's own ledger reports (other runs included)"
        alone = server.answers.mirror.largest()
        if server.answers.receipts is not None:
            whose += "; rounds that a site was asked for and left without a receipt count in full"
    return {**found, "epsilon_is": whose, "epsilon_from_this_runs_events": alone}
