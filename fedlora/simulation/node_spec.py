"""What a worker is told when it starts, and what it answers once it is ready; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class NodeSpec:
    """What a worker needs to become a node; the rows themselves are read by the worker.

    Attributes:
        node_id: Flower's number of the node.
        run_number: Flower's number of the run.
        app_dir: directory of the Flower app.
        code_hash: hash of that app as the driver sees it.
        container: resolved configuration as plain values.
        config_hash: its hash.
        parts: logical client id to the positions of its rows.
        state_dir: where clients' optimiser state is kept (a folder that all machines see).
        threads: CPU threads of this worker.
    """

    node_id: int
    run_number: int
    app_dir: str
    code_hash: str
    container: Mapping[str, Any]
    config_hash: str
    parts: Mapping[str, npt.NDArray[np.int64]]
    state_dir: str
    threads: int = 1


@dataclass(frozen=True)
class Readiness:
    """PUBLIC. What a node knows once its model is loaded."""

    node_id: int
    event: Mapping[str, Any]
    pid: int
    peak_rss_mb: float
