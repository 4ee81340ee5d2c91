"""The server's role: SuperLink behind the gate, allow-list, run, restarts, resume."""

from __future__ import annotations

import json
import logging
import secrets
import sys
import time
from pathlib import Path

from fedlora import errors
from fedlora.cli.bundle import build_bundle
from fedlora.cli.control import Control, RunState, public_key_pem
from fedlora.cli.files import PUBLIC, write_file
from fedlora.cli.keyring import AllowList
from fedlora.cli.metrics import server_registry
from fedlora.cli.pki import CA_CERT, SERVER_CERT, SERVER_KEY
from fedlora.cli.processes import Child, StopSignals, child_environment
from fedlora.cli.serving_files import (
    RunFile,
    absolute_sources,
    control_token,
    ended_with,
    forget_failure,
    last_line,
    make_folder,
    read_json,
)
from fedlora.cli.serving_plan import ServerPlan
from fedlora.cli.state import AuditLog, StateFile
from fedlora.cli.superlink import ENV_CONTROL_TOKEN, ENV_OPEN_FILE
from fedlora.config import save_resolved
from fedlora.errors import CheckpointError, DeploymentError, FedLoraError, FileAccessError
from fedlora.files import FolderLock
from fedlora.names import ENV_ROSTER, RUN_FOLDER_UNWRITABLE
from fedlora.report.conditions import conditions_line, conditions_of

_LOG = logging.getLogger("fedlora.server")
START_SECONDS = 60.0
RAISED = "ServerApp failed with exception:"
"""Flower's words for an exception; before the first round it would only come again."""
ROSTER_FILE = "roster.json"
"""Node id to the clients that it may answer for; the ServerApp reads it."""
SILENT_SECONDS = 180.0
"""A SuperLink that runs and answers nothing for so long is ended, and started again as one that died."""


class ServerRole:
    """Runs one server until its run is over or it is stopped."""

    def __init__(
        self, plan: ServerPlan, *, app_dir: Path, resume: bool, new: bool, once: bool = False
    ) -> None:
        """Check the plan and prepare the state folder.

        Raises:
            FedLoraError: for anything unusable; nothing was started then.
        """
        plan.check()
        self._plan, self._app_dir = plan, app_dir
        make_folder(plan.state, "--state")
        make_folder(plan.run_dir, "run.dir")
        self._lock = FolderLock(plan.state, "--state")
        try:
            self._run = RunFile.read(plan.state)
            self._over = once and bool(self._run.run_id) and self._run.finished
            self._resume = not self._over and self._choose_run(
                resume=resume or (once and not new), new=new, once=once
            )
        except BaseException:
            self._lock.close()
            raise
        self._state = StateFile(plan.state, "server")
        self._audit = AuditLog(plan.state / "audit.jsonl")
        self._means = conditions_line(conditions_of(plan.config))
        self.registry = server_registry(self._means)
        self._token = control_token(plan.state)
        self._child: Child | None = None
        self._control: Control | None = None
        self._flower_run: int | None = None
        self._restarts, self._answered = 0, 0.0
        self._allow_seen: tuple[float, int] | None = None

    @property
    def run_id(self) -> str:
        """Return the run's unique name."""
        return self._run.run_id

    @property
    def run_folder(self) -> Path:
        """Return the run's folder."""
        return self._plan.run_dir / self._run.run_id

    def ready(self) -> bool:
        """Return whether the SuperLink runs (readiness)."""
        return self._child is not None and self._child.poll() is None and self._control is not None

    def serve(self, stop: StopSignals) -> str:
        """Start everything and watch it.

        Returns:
            "finished", "budget-exhausted" or "stopped".

        Raises:
            FedLoraError: what ended the run, or DeploymentError after too many restarts.
        """
        try:
            if self._over and not self._plan.stay:
                return "finished"
            self._start_superlink()
            status = "finished"
            if not self._over:
                self._start_run()
                status = self._watch(stop)
            if self._plan.stay and status != "stopped":
                self._stay(stop, status)
            self._state.update(status=status)
            return status
        except FedLoraError as error:
            self._state.update(status="failed", reason=str(error)[:500])
            raise
        finally:
            self._shut_down()

    # -- starting ----------------------------------------------------------------------------------

    def _choose_run(self, *, resume: bool, new: bool, once: bool) -> bool:
        """Decide which run this is; return whether it goes on from a checkpoint."""
        unfinished = bool(self._run.run_id) and not self._run.finished
        if unfinished and not resume and not new:
            raise CheckpointError(
                f"run {self._run.run_id} is unfinished in {self._plan.state}; give --resume to go on, or --new"
            )
        if resume and not once and not self._run.run_id:
            raise CheckpointError(f"--resume: {self._plan.state} holds no run")
        if resume and unfinished:
            return True
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self._run.run_id = f"{self._plan.config.run.name}-{stamp}-{secrets.token_hex(3)}"
        self._run.finished = False
        self._run.write()
        return False

    def _start_superlink(self) -> None:
        plan = self._plan
        certs = plan.certs.resolve()
        state = plan.state.resolve()
        command = [
            *(sys.executable, "-m", "fedlora.cli.superlink"),
            *("--ssl-ca-certfile", str(certs / CA_CERT)),
            *("--ssl-certfile", str(certs / SERVER_CERT), "--ssl-keyfile", str(certs / SERVER_KEY)),
            *("--enable-supernode-auth", "--host", plan.host, "--port", str(plan.port)),
            *("--database", str(state / "superlink.db"), "--disable-runtime-dependency-installation"),
        ]
        gate = state / "gate.open"
        gate.unlink(missing_ok=True)
        places = {
            ENV_CONTROL_TOKEN: str(state / "control.token"),
            ENV_OPEN_FILE: str(gate),
            ENV_ROSTER: str(state / ROSTER_FILE),
        }
        environment = child_environment(places, state / "flower")
        self._child = Child(
            "superlink", command, environment=environment, folder=state / "empty", log=state / "superlink.log"
        )
        self._child.start()
        child = self._child
        loopback = "[::1]" if plan.host in {"::", "::1"} else "127.0.0.1"
        self._control = Control(f"{loopback}:{plan.port}", certs / CA_CERT, self._token)
        self._control.wait_until_ready(START_SECONDS, lambda: child.poll() is None)
        self._allow_seen = None
        self._sync_keys()
        self._answered = time.monotonic()
        gate.touch()
        self._state.update(status="serving", run_id=self.run_id, port=plan.port, superlink_pid=child.pid)
        self._audit.write("superlink started", port=plan.port, restarts=self._restarts)

    def _start_run(self) -> None:
        plan = self._plan
        config_file = save_resolved(absolute_sources(plan.config), plan.state.resolve() / "config.yaml")
        settings: dict[str, str | int | float | bool] = {
            "config": str(config_file),
            "run-id": self.run_id,
            "run-dir": str(plan.run_dir),
            "resume": self._resume,
        }
        forget_failure(self.run_folder)
        self._flower_run = self._asked().start_run(build_bundle(self._app_dir), settings)
        self._state.update(
            status="running", run_id=self.run_id, folder=str(self.run_folder), epsilon_means=self._means
        )
        self._audit.write("run started", run=self.run_id, flower_run=self._flower_run, resume=self._resume)
        _LOG.info("run %s %s", self.run_id, "goes on" if self._resume else "started")

    def _asked(self) -> Control:
        if self._control is None:
            raise DeploymentError("SuperLink: not started")
        return self._control

    # -- keys --------------------------------------------------------------------------------------

    def _sync_keys(self) -> None:
        """Make the registered nodes equal the allow-list whenever its file has changed."""
        try:
            found = self._plan.allow.stat()
            seen = (found.st_mtime, found.st_ino)
            if seen == self._allow_seen:
                return
            wanted = {
                public_key_pem(entry.public_key): entry
                for entry in AllowList.load(self._plan.allow).allowed()
            }
        except (OSError, FedLoraError) as error:
            if self._allow_seen is None:
                raise
            _LOG.error("allow-list: %s; the last good one stays in force", error)
            return
        control = self._asked()
        known = {node.public_key: node for node in control.nodes()}
        for key in [key for key in known if key not in wanted]:
            control.unregister(known[key].node_id)
            self._audit.write("site removed", site=known[key].name, node=known[key].node_id)
            _LOG.warning("site %s is no longer allowed; its node was removed", known[key].name)
        nodes = {key: node.node_id for key, node in known.items() if key in wanted}
        for key, entry in wanted.items():
            if key not in known:
                node = nodes[key] = control.register(key, entry.name)
                self._audit.write("site registered", site=entry.name, node=node, key=entry.fingerprint)
                _LOG.info("site %s may connect (%s)", entry.name, entry.fingerprint)
        roster = {str(nodes[key]): list(entry.clients) or [entry.name] for key, entry in wanted.items()}
        content = (json.dumps(roster) + "\n").encode()
        write_file(self._plan.state / ROSTER_FILE, content, mode=PUBLIC, replace=True)
        self._allow_seen = seen

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self, stop: StopSignals) -> str:
        while not stop.wait(1.0):
            if self._child is None or self._child.poll() is not None:
                self._again("SuperLink ended")
                self._start_superlink()
                self._start_run()
                continue
            try:
                self._sync_keys()
                state = self._asked().run_state(self._flower_run or 0)
            except DeploymentError as error:
                self._no_answer(error)
                continue
            self._answered = time.monotonic()
            self._note_progress()
            if state.status == "finished":
                status = self._finished(state)
                if status is not None:
                    return status
                self._start_run()
        self._stop_run()
        return "stopped"

    def _stay(self, stop: StopSignals, status: str) -> None:
        """Keep serving after the run: keys stay in force, a SuperLink that dies is started again."""
        self._state.update(status=status)
        while not stop.wait(1.0):
            if self._child is None or self._child.poll() is not None:
                self._again("SuperLink ended")
                self._start_superlink()
                self._state.update(status=status)
                continue
            try:
                self._sync_keys()
                self._answered = time.monotonic()
            except DeploymentError as error:
                self._no_answer(error)

    def _no_answer(self, error: DeploymentError) -> None:
        """Note that the SuperLink did not answer; end it if that goes on for too long."""
        _LOG.warning("%s", error)
        if self._child is not None and time.monotonic() - self._answered > SILENT_SECONDS:
            _LOG.error("the SuperLink has not answered for %.0f s; it is ended", SILENT_SECONDS)
            self._child.stop()

    def _finished(self, state: RunState) -> str | None:
        """Return how the run ended, or None if it must be started again.

        Raises:
            FedLoraError: the error that ended it.
        """
        summary = read_json(self.run_folder / "summary.json")
        status = str(summary.get("status", ""))
        if state.sub_status == "completed":
            self._run.finished = True
            self._run.write()
            self._audit.write("run finished", run=self.run_id, status=status or "finished")
            return status or "finished"
        name = str(summary.get("error", "")) if status == "failed" else ""
        known = getattr(errors, name, None) if name else None
        if isinstance(known, type) and issubclass(known, FedLoraError):
            self._audit.write("run failed", run=self.run_id, error=name)
            raise ended_with(
                known, f"run {self.run_id} failed: {summary.get('message') or name}; see superlink.log"
            )
        if RUN_FOLDER_UNWRITABLE in state.details:
            told = state.details[state.details.index(RUN_FOLDER_UNWRITABLE) :].strip()
            raise FileAccessError(f"run {self.run_id} failed: {told[:500]}")
        if RAISED in state.details and not (self.run_folder / "metrics.jsonl").exists():
            self._audit.write("run failed", run=self.run_id, error=state.details[:500])
            raise DeploymentError(
                f"run {self.run_id} could not start: {state.details.partition(RAISED)[2].strip()[:500]}"
            )
        self._again(
            f"ServerApp ended ({state.sub_status} {state.details}) {summary.get('message', '')}".strip()
        )
        return None

    def _again(self, why: str) -> None:
        """Count a restart; the run goes on from its checkpoint.

        Raises:
            DeploymentError: after too many.
        """
        self._restarts += 1
        self.registry.add("fedlora_restarts_total")
        self._audit.write("restart", why=why, count=self._restarts)
        if self._restarts > self._plan.max_restarts:
            raise DeploymentError(
                f"{why}; gave up after {self._plan.max_restarts} restarts; see superlink.log"
            )
        _LOG.warning("%s; restart %s of %s", why, self._restarts, self._plan.max_restarts)
        self._resume = True
        if self._control is not None and (self._child is None or self._child.poll() is not None):
            self._control.close()
            self._control = None
        if self._child is not None and self._child.poll() is not None:
            self._child.stop()

    def _note_progress(self) -> None:
        line = last_line(self.run_folder / "metrics.jsonl")
        number = line.get("round")
        if isinstance(number, int):
            self._state.update(
                status="running", round=number, accepted=line.get("accepted"), epsilon=line.get("epsilon")
            )
        shown = {"fedlora_round": number} | {
            f"fedlora_round_{name}": line.get(name) for name in ("accepted", "asked", "epsilon")
        }
        self.registry.set_together(
            {name: float(value) for name, value in shown.items() if isinstance(value, int | float)}
        )

    # -- stopping ----------------------------------------------------------------------------------

    def _stop_run(self) -> None:
        if self._flower_run is not None and self.ready():
            try:
                self._asked().stop_run(self._flower_run)
            except FedLoraError as error:
                _LOG.info("%s", error)
        self._audit.write("server stopped", run=self.run_id)

    def _shut_down(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._child is not None:
            self._child.stop()
        self._audit.close()
        self._lock.close()
