"""The exported adapter's card, once the clients' ledgers have said what the run cost."""

from __future__ import annotations

import logging

from fedlora.config.schema import FedLoraConfig
from fedlora.simulation.settings import RunResult

_LOG = logging.getLogger(__name__)


def restate_card(config: FedLoraConfig, result: RunResult) -> None:
    """Write the model card of a run's adapter anew with the run's final epsilon and warnings.

    The server exports before the ledgers are read: a round whose answers were lost is in a ledger only, and records
    that several clients hold are found by looking at the records.
    """
    if result.adapter is None or not result.adapter.is_dir():
        return
    from fedlora.adapters.export import RunFacts, restate

    facts = RunFacts(
        epsilon=result.epsilon,
        statement=result.statement,
        metrics=result.metrics or {},
        rounds=result.rounds,
        warnings=tuple(result.warnings),
    )
    try:
        restate(result.adapter, config, facts)
    except (OSError, ValueError, KeyError) as error:  # the run stands; `fedlora export` writes the card too
        _LOG.error("export: the model card could not be brought up to date (%s)", type(error).__name__)
