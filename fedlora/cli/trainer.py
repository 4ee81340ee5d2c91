"""`fedlora trainer`: the resident process that owns a site's data, base model and ledger."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlora.cli.common import JsonOption, OverlayOption, OverridesArgument, emit
from fedlora.cli.metrics import MetricsServer, Registry
from fedlora.cli.processes import StopSignals
from fedlora.cli.state import AuditLog, StateFile, note_change
from fedlora.config.schema import FileSource
from fedlora.config.trainer import SiteBudgetConfig, TrainerConfig, load_trainer, site_path
from fedlora.errors import DataError, FedLoraError
from fedlora.training.port import Packet, unpack_request
from fedlora.training.service_server import Took
from fedlora.wire.fingerprint import payload_fingerprint

_LOG = logging.getLogger("fedlora.trainer")

app = typer.Typer(
    help="Start the process that owns a site's data, model and ledger.",
    rich_markup_mode=None,
    add_completion=False,
)


@app.command()
def trainer(
    config: Annotated[Path, typer.Argument(metavar="SITE_CONFIG", help="The site's own YAML file.")],
    overrides: OverridesArgument = None,
    overlay: OverlayOption = None,
    check: Annotated[bool, typer.Option("--check", help="Check the file and the ledger, then exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve training requests on the site's Unix socket until stopped.

    Nobody but this process reads records, spends the ledger or holds the identity key. It loads the model
    once and keeps it between rounds. Stop it with SIGTERM: a round in progress is finished first.

    Example: fedlora trainer site.yaml --check

    Example: fedlora trainer site.yaml operations.metrics_address=127.0.0.1:9464
    """
    loaded = load_trainer(config, overrides or (), overlay or ())
    for note in loaded.notes:
        _LOG.warning("%s", note)
    running = RunningTrainer(loaded.config, config)
    if check:
        running.close()
        emit(running.facts(), as_json=as_json, text=f"{config}: usable; {running.summary()}")
        return
    stop = StopSignals()
    try:
        running.start()
        emit(running.facts(), as_json=as_json, text=f"trainer ready: {running.summary()}")
        while not stop.wait(1.0):
            pass
    finally:
        running.close()


class RunningTrainer:
    """A site's trainer with its socket, metrics, audit log and state file."""

    def __init__(self, config: TrainerConfig, config_file: Path) -> None:
        """Build the trainer; the socket is opened by `start`.

        Raises:
            FedLoraError: if the ledger, identity key or data description is unusable, or a file of records is missing.
        """
        from fedlora.training.service_site import build_site

        self._config, self._file = config, config_file
        self._check_records()
        self._site = build_site(config, config_file)
        self._registry = _registry(config.budget)
        self._audit = AuditLog(self._path(config.operations.audit_log))
        self._service: Any = None
        self._state: StateFile | None = None
        self._metrics: MetricsServer | None = None

    def start(self) -> None:
        """Open the socket (and the metrics address) and serve in the background."""
        from fedlora.training.service_server import ServiceLimits, TrainerService, ensure_token

        socket = self._config.socket
        path = site_path(self._file, socket.path)
        token = ensure_token(site_path(self._file, socket.token_file), socket.group)
        limits = ServiceLimits(
            max_message_bytes=socket.max_message_bytes,
            idle_seconds=socket.idle_timeout_seconds,
            send_seconds=socket.request_timeout_seconds,
        )
        self._service = TrainerService(
            self._site.port(),
            path,
            token,
            limits=limits,
            group=socket.group,
            on_packet=self._served,
            after=self._site.ledger.foresee,
        )
        self._service.start()
        if self._config.operations.metrics_address is not None:
            self._metrics = MetricsServer(
                self._config.operations.metrics_address, self._registry, lambda: True
            )
        self._state = StateFile(path.parent, "trainer")
        self._state.update(status="running", **self.facts())
        self._audit.write("trainer started", **self.facts())

    def close(self) -> None:
        """Finish what is being answered, then close socket, metrics, ledger and audit log."""
        if self._service is not None:
            self._service.stop(grace_seconds=self._config.socket.request_timeout_seconds)
            self._service = None
        if self._state is not None:
            note_change(self._state, self._audit, "trainer stopped", "stopped")
        if self._metrics is not None:
            self._metrics.close()
        self._audit.close()
        self._site.ledger.close()

    def facts(self) -> dict[str, Any]:
        """Return public facts for state files and `--json`."""
        from fedlora.training.pinned import sums_hold_against

        hello = self._site.trainer.hello()
        return {
            "site": self._config.site.name,
            "clients": list(hello.clients),
            "identity": hello.identity,
            "socket": str(site_path(self._file, self._config.socket.path)),
            "dataset": self._config.data.name,
            "budget": self._config.budget.epsilon,
            "secure_sums_hold_against": sums_hold_against(self._config),
        }

    def _check_records(self) -> None:
        """Find the files of records (nothing in them is read), so that their absence costs no round.

        Raises:
            DataError: if one is missing or this user may not read it.
        """
        from fedlora.data.files import expand_paths

        source = self._config.data.source
        if not isinstance(source, FileSource):
            return
        for path in expand_paths([str(site_path(self._file, one)) for one in source.paths]):
            if not os.access(path, os.R_OK):
                raise DataError(f"data.source: this user may not read {path}; change its owner or mode")

    def summary(self) -> str:
        """Return one line for people."""
        facts = self.facts()
        return f"site {facts['site']}, {len(facts['clients'])} client(s), socket {facts['socket']}"

    def _path(self, value: str | None) -> Path | None:
        return None if value is None else site_path(self._file, value)

    def _served(self, packet: Packet, answer: Packet, took: Took) -> None:
        """Count and audit one request; only public facts are written."""
        op = str(packet.header.get("op"))[:20]
        self._registry.add("fedlora_requests_total", op=op)
        self._registry.add("fedlora_request_seconds_total", took.seconds, op=op)
        if op != "round":
            return
        run, number = str(packet.header.get("run_id"))[:200], packet.header.get("round")
        replies = answer.header.get("replies")
        if not isinstance(replies, list):
            self._audit.write("round failed", run=run, round=number, error=answer.header.get("message"))
            self._registry.add("fedlora_rounds_total", status="failed")
            return
        common = {"run": run, "round": number, "adapter": _adapter(packet), **self._overhead(took)}
        for reply in replies:
            self._one(common, reply)

    def _overhead(self, took: Took) -> dict[str, float]:
        """Publish where the last round's time went; return what was neither training nor loading the model."""
        parts = dict(self._site.trainer.last_timings)
        busy = parts.pop("train_cpu", 0.0) + parts.pop("open_cpu", 0.0)
        for part, value in parts.items():
            self._registry.set("fedlora_round_seconds", value, part=part)
        overhead = max(0.0, took.seconds - parts.get("train", 0.0) - parts.get("open", 0.0))
        self._registry.set("fedlora_round_overhead_seconds", overhead)
        return {
            "overhead_seconds": round(overhead, 4),
            "overhead_cpu_seconds": round(took.cpu_seconds - busy, 4),
        }

    def _one(self, common: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        status, client = str(reply["status"]), str(reply["client"])
        self._registry.add("fedlora_rounds_total", status=status)
        fields: dict[str, Any] = {**common, "client": client, "status": status}
        epsilon = reply.get("epsilon")
        if isinstance(epsilon, int | float) and math.isfinite(epsilon):
            self._registry.set("fedlora_epsilon_spent", float(epsilon), client=client)
            fields["epsilon"] = epsilon
        if reply.get("error") is not None:
            fields["error"] = reply["error"]
        self._audit.write("round", **fields, steps=reply.get("steps"), ledger_head=reply.get("ledger_head"))
        _LOG.info("round %s of %s: %s %s", common["round"], common["run"], client, status)


def _adapter(packet: Packet) -> str | None:
    """Return the fingerprint of the global adapter that a round's request carries."""
    try:
        return payload_fingerprint(unpack_request(packet).payload)
    except FedLoraError:
        return None


def _registry(budget: SiteBudgetConfig) -> Registry:
    from fedlora.ledger.reports import ADVERSARY

    registry = Registry()
    registry.describe("fedlora_requests_total", "counter", "Requests served on the trainer's socket.")
    registry.describe("fedlora_request_seconds_total", "counter", "Seconds spent on requests.")
    registry.describe("fedlora_round_seconds", "gauge", "Seconds of the last round by part.")
    registry.describe(
        "fedlora_round_overhead_seconds",
        "gauge",
        "Seconds of the last round outside training and model loading.",
    )
    registry.describe("fedlora_rounds_total", "counter", "Client rounds by outcome.")
    registry.describe(
        "fedlora_epsilon_spent",
        "gauge",
        f"Epsilon that the client's own ledger says is spent; per {budget.unit}, {budget.adjacency}, delta "
        f"{budget.delta:g}, against {ADVERSARY[budget.unit]}; accountant {budget.accountant}; sampling as in the runs "
        "that were paid for, which fedlora budget show tells.",
    )
    return registry
