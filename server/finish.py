"""The end of a run: export, check, summary."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedlora.config.schema import ClientPrivacy
from fedlora.errors import FedLoraError, FileAccessError
from fedlora.names import RUN_FOLDER_UNWRITABLE
from fedlora.simulation.cards import restate_card
from fedlora.simulation.clients_ledger import open_clients_ledger
from fedlora.simulation.overlap import find_sharing
from fedlora.simulation.prepare import make_federation
from fedlora.simulation.settings import RunResult, ServerSettings
from fedlora.training.port import Packet, encode_packet, where_it_failed
from fedlora.training.starting import starting_warnings
from fedlora.wire.codec import to_arrays
from fedlora.wire.payload import AdapterPayload
from server.folder import RunFolder, write_atomically, write_ledger
from server.setup import Server, statement

_LOG = logging.getLogger(__name__)


def save_payload(path: Path, payload: AdapterPayload) -> None:
    """Write an adapter in its own coordinates (fedlora's packet format)."""
    header, arrays = to_arrays(payload)
    write_atomically(path, encode_packet(Packet({"payload": header}, arrays)))


def finish(server: Server, status: str, seconds: float) -> RunResult:
    """Write ledger mirror, adapter and summary; return the result."""
    settings = server.settings
    config = settings.config
    started = time.perf_counter()
    receipts = server.answers.receipts
    warnings = list(server.answers.mirror.differences())
    if receipts is not None:
        warnings += receipts.differences()
        server.folder.write_json("ledger-receipts.json", receipts.table())
    if config.seeded_noise:
        warnings.append("NO PRIVACY: the noise source is seeded for tests")
    warnings += [*starting_warnings(config), *server.trackers.warnings]
    save_payload(server.folder.path / "adapter.flr", server.strategy.payload)
    _write_accounts(server)
    adapter = _export(server, warnings) if status != "stopped" else None
    server.seconds["export"] = time.perf_counter() - started
    server.seconds["total"] = seconds + server.seconds["export"]
    result = RunResult(
        run_id=settings.run_id,
        folder=server.folder.path,
        status=status,
        rounds=server.loop.state.round,
        metrics=server.loop.state.metrics,
        epsilon=_final_epsilon(server),
        statement=statement(config, server),
        adapter=adapter,
        seconds=dict(server.seconds),
        warnings=tuple(warnings),
    )
    server.folder.write_json("summary.json", result)
    return result


def _write_accounts(server: Server) -> None:
    """Write who was charged for which events: the clients as the server saw them, or the federation's own account."""
    config = server.settings.config
    if not isinstance(config.privacy, ClientPrivacy):
        server.folder.write_json("ledger-mirror.json", server.answers.mirror.table())
        return
    server.folder.write_json("ledger-mirror.json", server.charge.table())
    report = server.charge.report()
    if report is not None:
        account = {name: one for name, one in asdict(report).items() if name != "rounds"}
        server.folder.write_json("ledger.json", {"dataset": config.data.name, "accounts": [account]})


def record_failure(folder: Path, error: BaseException) -> FileAccessError | None:
    """Write what ended a run, before its first round or later, as `summary.json`: class, message, exit code.

    A foreign error's message may quote anything, so of it only class and place are kept.

    Returns:
        None, or where the file cannot be written (a full disk) an error that tells this and what ended the run.
    """
    known = isinstance(error, FedLoraError)
    record = {
        "status": "failed",
        "error": type(error).__name__,
        "message": str(error) if known else where_it_failed(error),
        "exit_code": error.exit_code if isinstance(error, FedLoraError) else 1,
    }
    try:
        RunFolder(folder).write_json("summary.json", record)
    except (OSError, FileAccessError) as problem:
        _LOG.error("summary.json: cannot be written (%s)", problem)
        return FileAccessError(f"{RUN_FOLDER_UNWRITABLE}: {record['message']}")
    return None


def add_clients_ledger(result: RunResult, settings: ServerSettings) -> RunResult:
    """Write the accounts of a simulation on Flower's engine; the ledger's largest epsilon is the run's."""
    book = open_clients_ledger(settings.config, None)
    if book is None:
        return result
    try:
        epsilon = write_ledger(settings.folder, book, settings.config, settings.expect or ())
    finally:
        book.close()
    federation = make_federation(settings.config)
    sharing = find_sharing(federation.config, federation.rows, federation.parts)
    told = () if sharing is None else sharing.warnings
    highest = result.epsilon if epsilon is None else epsilon
    final = replace(result, epsilon=highest, warnings=(*result.warnings, *told))
    RunFolder(settings.folder).write_json("summary.json", final)
    restate_card(settings.config, final)
    return final


def _final_epsilon(server: Server) -> float | None:
    """Return the largest epsilon that is known: from a ledger, this run's events, or receipts and unanswered rounds."""
    if isinstance(server.settings.config.privacy, ClientPrivacy):
        return server.charge.epsilon()
    receipts = server.answers.receipts
    known = [server.answers.mirror.largest_said, server.answers.mirror.largest()]
    known.append(None if receipts is None else receipts.largest())
    return max((one for one in known if one is not None), default=None)


def _export(server: Server, warnings: list[str]) -> Path | None:
    """Write the adapter in PEFT's format, load it again and compare logits."""
    from fedlora.adapters.export import RunFacts, export_adapter

    target = server.folder.path / "adapter"
    facts = RunFacts(
        epsilon=_final_epsilon(server),
        statement=statement(server.settings.config, server),
        metrics=server.loop.state.metrics or {},
        rounds=server.loop.state.round,
        warnings=tuple(warnings),
    )
    try:
        export_adapter(server.bench, server.strategy.payload, target, facts=facts)
    except FedLoraError as error:
        warnings.append(f"export: {error}")
        _LOG.error("export: %s", error)
        return None
    return target


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a finished run."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
