"""A node of a simulation on Flower's own engine (`flwr run`), hosted by whichever process has the message.

Flower hands a node's messages to any free worker, so nothing may live in one worker only: each process
makes one trainer for all nodes of the run, optimiser state is read from files, and every process reserves in
the one ledger file before records are opened and commits after; the ledger serialises its writers.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedlora.config import config_container
from fedlora.config.schema import FedLoraConfig
from fedlora.data import load_rows
from fedlora.errors import ConfigError, DataError
from fedlora.ledger import Ledger
from fedlora.simulation.appdir import code_hash
from fedlora.simulation.clients_ledger import open_clients_ledger
from fedlora.simulation.flower_plan import FlowerPlan, read_plan
from fedlora.simulation.prepare import Index, make_federation, share_out
from fedlora.training.charging import BudgetKeeper, GrantKeeper, LedgerKeeper
from fedlora.training.policy import Policy
from fedlora.training.port import Hello, LocalPort, Packet, PacketPort
from fedlora.training.replies import NoReplies
from fedlora.training.requests import RoundReply, RoundRequest
from fedlora.training.shelf import RowShelf
from fedlora.training.slots import Slots, SlotStore
from fedlora.training.trainer import Trainer

_LOCK = threading.Lock()
_RUNS: dict[int, HostedRun] = {}


class FileSlots(SlotStore):
    """Clients' optimiser state in files only: the round before may have run in another process.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder."""
        super().__init__(folder)
        self._where = folder

    def load(self, client: str, server_round: int) -> Slots | None:
        """Return the state that the client had before a round, or None if it has none."""
        return SlotStore(self._where).load(client, server_round)

    def save(self, client: str, server_round: int, slots: Slots) -> None:
        """Keep the state that a round left."""
        SlotStore(self._where).save(client, server_round, slots)


@dataclass(frozen=True)
class HostedRun:
    """One run in this process.

    Attributes:
        plan: the run's settings.
        config: its configuration with label names.
        trainer: serves all nodes.
        parts: logical client id to the positions of its rows.
        app_hash: hash of the app's code that runs here.
        ledger: the clients' ledger, None where nothing is charged.
    """

    plan: FlowerPlan
    config: FedLoraConfig
    trainer: Trainer
    parts: Mapping[str, Index]
    app_hash: str
    ledger: Ledger | None

    def close(self) -> None:
        """Close the ledger; open reservations stay spent."""
        if self.ledger is not None:
            self.ledger.close()


@dataclass(frozen=True)
class NodeShare:
    """One node's view of its process's trainer: its own logical clients and this run, nothing else."""

    run: HostedRun
    clients: tuple[str, ...]

    def hello(self) -> Hello:
        """Return public facts about the node, with the hash of the code that runs here."""
        found = self.run.trainer.hello()
        return replace(found, clients=self.clients, facts={**found.facts, "app": self.run.app_hash})

    def handle(self, request: RoundRequest) -> RoundReply:
        """Train the request's clients.

        Raises:
            ConfigError: if the request belongs to another run or describes other data than this node reads.
            DataError: if a client does not live at this node.
        """
        foreign = [client for client in request.clients if client not in self.clients]
        if foreign:
            raise DataError(f"client {foreign[0]}: does not live at this node")
        mine = config_container(self.run.config)
        seed = request.config.get("run", {}).get("seed")
        if request.run_id != self.run.plan.run_id:
            raise ConfigError(
                f"round request: run {request.run_id}; this node serves {self.run.plan.run_id} only"
            )
        if request.config.get("data") != mine["data"] or seed != mine["run"]["seed"]:
            raise ConfigError(
                "round request: its data section or run.seed differ from the file that this node read; server and "
                "nodes must see the same configuration file"
            )
        return self.run.trainer.handle(request)

    def secure(self, packet: Packet) -> Packet:
        """Refuse: what was withheld may lie in another process.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("federation.secure_aggregation: not under flwr run; use fedlora simulate")


def node_port(
    run_config: Mapping[str, Any], flower_run: int, partition: tuple[int, int], app_dir: Path
) -> PacketPort:
    """Return the port of one node; the process's trainer is made at the first call of a run.

    Args:
        run_config: Flower's run configuration.
        flower_run: Flower's number of the run.
        partition: number of this node's partition and of all partitions.
        app_dir: directory of the app that runs here.

    Raises:
        ConfigError: if the run configuration cannot be simulated.
        DataError: if rows cannot be read.
    """
    with _LOCK:
        run = _RUNS.get(flower_run)
        if run is None:
            close_runs()
            run = _RUNS[flower_run] = _host(read_plan(run_config, flower_run, app_dir), app_dir)
    number, total = partition
    shares = share_out(run.parts, total)
    own = tuple(shares[number]) if number < len(shares) else ()
    return LocalPort(NodeShare(run, own))


def close_runs() -> None:
    """Forget every run of this process and close its ledger."""
    for run in _RUNS.values():
        run.close()
    _RUNS.clear()


def _host(plan: FlowerPlan, app_dir: Path) -> HostedRun:
    import torch

    torch.set_num_threads(plan.config.simulation.threads_per_worker)
    federation = make_federation(plan.config)
    ledger = open_clients_ledger(plan.config, None)
    keeper: BudgetKeeper = GrantKeeper() if ledger is None else LedgerKeeper(ledger)
    trainer = Trainer(
        RowShelf(lambda: load_rows(plan.config.data), federation.parts),
        Policy.simulation(),
        keeper,
        replies=NoReplies(),
        timings=True,
        slots=FileSlots(plan.state_dir),
    )
    return HostedRun(plan, federation.config, trainer, federation.parts, code_hash(app_dir), ledger)
