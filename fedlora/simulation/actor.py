"""What Ray starts in a worker: a node that is imported and loaded while the garbage collector is held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedlora.collector import held_collector
from fedlora.errors import SimulationError

if TYPE_CHECKING:
    from flwr.app import Message

    from fedlora.simulation.host import Answered, NodeHost
    from fedlora.simulation.node_spec import NodeSpec, Readiness
    from fedlora.training.charging import Grant


class NodeHostActor:
    """Hands everything on to a `NodeHost`. This module imports nothing heavy, so that `load` can do it on its terms."""

    def __init__(self) -> None:
        """Do nothing: an actor whose constructor fails cannot say why."""
        self._host: NodeHost | None = None

    def load(self) -> None:
        """Import what every node needs; what fails here fails again, and by name, in `prepare`."""
        with held_collector():
            try:
                from fedlora.simulation.host import import_all

                import_all()
            except Exception:
                return

    def prepare(self, spec: NodeSpec) -> Readiness:
        """Become a node: load the base model; return the accounting event of one step."""
        if self._host is not None:
            return self._host.prepare()
        with held_collector():
            from fedlora.simulation.host import NodeHost

            host = NodeHost(spec)
            ready = host.prepare()
        self._host = host
        return ready

    def process(
        self,
        message: Message,
        grants: Sequence[Grant],
        cohort: int | None = None,
        coins_key: bytes | None = None,
    ) -> Answered:
        """Answer one Flower message; see `NodeHost.process`."""
        if self._host is None:
            raise SimulationError("node: asked before it was prepared")
        return self._host.process(message, grants, cohort, coins_key)
