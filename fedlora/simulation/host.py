"""One node of a simulation: a trainer with its share of the logical clients, behind the real ClientApp."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict

from fedlora.config import config_from_container
from fedlora.errors import SimulationError
from fedlora.ledger.types import CommitRequest
from fedlora.simulation.appdir import code_hash, load_module
from fedlora.simulation.identity import assume_identity
from fedlora.simulation.node_spec import NodeSpec, Readiness
from fedlora.simulation.trim import Trimmer
from fedlora.training.charging import Grant, GrantKeeper
from fedlora.training.local import register_port, unregister_port
from fedlora.training.port import LocalPort
from fedlora.training.sampling import KeptCoins


@dataclass(frozen=True)
class Answered:
    """What a node gives back for one message.

    Attributes:
        message: the reply. PUBLIC (under record-level privacy).
        commits: what the driver must record before it hands the reply on.
        cohort: clients that this node trains together at most; lower than asked where memory ran out.
        seconds: time of this message in forward and backward passes and in drawing noise. Never leaves a simulation.
    """

    message: Message
    commits: Sequence[CommitRequest]
    cohort: int | None
    seconds: Mapping[str, float]


def import_all() -> None:
    """Import the libraries that every node needs, before it is told what to do."""
    for name in ("transformers.modeling_utils", "peft", "fedlora.data", "fedlora.training.trainer"):
        importlib.import_module(name)
    importlib.import_module("fedlora.accounting.lean_import").load_pld()


class NodeHost:
    """Runs inside a Ray actor (or in the driver, for tests)."""

    def __init__(self, spec: NodeSpec, *, own_process: bool = True) -> None:
        """Keep the spec only: an actor whose constructor fails cannot say why."""
        self._spec = spec
        self._own_process = own_process
        self._trim = Trimmer()
        self._app: Any = None

    def _set_up(self) -> None:
        """Check the app's code, load the ClientApp and make the trainer; no model is loaded yet."""
        spec = self._spec
        if self._own_process:
            self._quiet(spec.threads)
        app_dir = Path(spec.app_dir)
        found = code_hash(app_dir)
        if found != spec.code_hash:
            raise SimulationError(
                f"app: the worker sees other code in {app_dir} ({found[:12]}) than the driver "
                f"({spec.code_hash[:12]}); put the same version on every machine"
            )
        app = load_module(app_dir, "client.app").app
        self._keeper = GrantKeeper()
        self._config = config_from_container(spec.container)
        self._trainer = self._make_trainer()
        register_port(spec.node_id, LocalPort(self._trainer))
        self._context = Context(
            run_id=spec.run_number, node_id=spec.node_id, node_config={}, state=RecordDict(), run_config={}
        )
        self._app = app

    @staticmethod
    def _quiet(threads: int) -> None:
        import torch
        import transformers

        torch.set_num_threads(threads)
        loggers: Any = transformers.utils.logging
        loggers.set_verbosity_error()
        loggers.disable_progress_bar()
        logging.getLogger("flwr").setLevel(logging.WARNING)

    def _make_trainer(self) -> Any:
        from fedlora.data import load_rows
        from fedlora.training.policy import Policy
        from fedlora.training.replies import NoReplies
        from fedlora.training.shelf import RowShelf
        from fedlora.training.slots import SlotStore
        from fedlora.training.trainer import Trainer

        data = self._config.data
        shelf = RowShelf(lambda: load_rows(data), self._spec.parts)
        return Trainer(
            shelf,
            Policy.simulation(),
            self._keeper,
            replies=NoReplies(),
            timings=True,
            slots=SlotStore(Path(self._spec.state_dir)),
        )

    def prepare(self) -> Readiness:
        """Load the base model; return the accounting event of one step."""
        import resource

        if self._app is None:
            self._set_up()
        event = self._trainer.prepare(self._config, self._spec.config_hash)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return Readiness(self._spec.node_id, event.to_json(), os.getpid(), peak)

    def process(
        self,
        message: Message,
        grants: Sequence[Grant],
        cohort: int | None = None,
        coins_key: bytes | None = None,
    ) -> Answered:
        """Answer one Flower message with the ClientApp.

        Args:
            message: what the server sent.
            grants: reservations that the driver made for this message's clients.
            cohort: clients to train together at most; None for no limit.
            coins_key: this message's key of coins: a second worker draws the very same batches. SENSITIVE.
        """
        if self._app is None:
            raise SimulationError("node: asked before it was prepared")
        if self._own_process:
            assume_identity(self._spec.run_number, self._spec.node_id)
        engine = self._trainer.engine
        if cohort is not None and engine is not None:
            engine.limit_cohort(cohort)
        self._trainer.coins = None if coins_key is None else partial(KeptCoins, coins_key)
        before = {} if engine is None else engine.seconds
        self._keeper.hand_over(grants)
        reply = self._app(message, self._context)
        engine = self._trainer.engine
        after = {} if engine is None else engine.seconds
        seconds = {name: value - before.get(name, 0.0) for name, value in after.items()}
        found = None if engine is None else engine.cohort
        self._trim()
        return Answered(reply, self._keeper.take_commits(), found, seconds)

    def close(self) -> None:
        """Forget the trainer."""
        unregister_port(self._spec.node_id)
