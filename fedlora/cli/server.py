"""`fedlora server`: the server of a real federation and its run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlora.addresses import host_and_port
from fedlora.cli.common import ConfigArgument, JsonOption, OverlayOption, OverridesArgument, emit
from fedlora.errors import DeploymentError

if TYPE_CHECKING:
    from fedlora.cli.serving import ServerRole

_LOG = logging.getLogger("fedlora.server")

app = typer.Typer(help="Start the server of a real federation.", rich_markup_mode=None, add_completion=False)

CertsOption = Annotated[Path, typer.Option("--certs", help="Folder with ca.crt, server.crt and server.key.")]
AllowOption = Annotated[Path, typer.Option("--allow", help="The allow-list of sites.")]
StateOption = Annotated[Path, typer.Option("--state", help="Folder for what outlives the process.")]
HostOption = Annotated[
    str,
    typer.Option(
        "--host",
        help="0.0.0.0 for all interfaces, or 127.0.0.1.  [default: 127.0.0.1 if deployment.superlink names this "
        "machine, else 0.0.0.0]",
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65535, help="TCP port.  [default: that of deployment.superlink]"),
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run of --state.")]
NewOption = Annotated[bool, typer.Option("--new", help="Start a new run although one is unfinished.")]
OnceOption = Annotated[
    bool,
    typer.Option(
        "--once", help="Go on if a run is unfinished, start one if there was none, else do nothing."
    ),
]
StayOption = Annotated[bool, typer.Option("--stay", help="Keep serving after the run is over.")]
RestartsOption = Annotated[int, typer.Option("--max-restarts", min=0, help="Restarts after a crash.")]
MetricsOption = Annotated[str, typer.Option("--metrics", help="host:port for Prometheus metrics and health.")]


@app.command()
def server(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    overlay: OverlayOption = None,
    certs: CertsOption = Path("certs"),
    allow: AllowOption = Path("allow.json"),
    state: StateOption = Path("server-state"),
    host: HostOption = "",
    port: PortOption = None,
    resume: ResumeOption = False,
    new: NewOption = False,
    once: OnceOption = False,
    stay: StayOption = False,
    max_restarts: RestartsOption = 5,
    metrics: MetricsOption = "",
    as_json: JsonOption = False,
) -> None:
    """Start the server, wait for the sites, run the configuration, and stop when it is done.

    Only keys on the allow-list may connect; changes to the list take effect while it runs. Runs can be
    started from this machine only. After a crash of any part the run goes on from its last checkpoint.

    Example: fedlora server run.yaml --certs certs --allow allow.json --host 0.0.0.0

    Example: fedlora server run.yaml --resume

    Example: fedlora server run.yaml --once  (for service managers that start it again and again)
    """
    places = (certs, allow, state)
    role = _role(
        config, overrides, overlay, places, (host, port), max_restarts, stay=stay, choice=(resume, new, once)
    )
    status = _serve(role, metrics)
    result = {"status": status, "run_id": role.run_id, "folder": str(role.run_folder)}
    emit(result, as_json=as_json, text=f"run {role.run_id}: {status}; folder {role.run_folder}")


def _role(
    config: str,
    overrides: list[str] | None,
    overlay: list[str] | None,
    places: tuple[Path, Path, Path],
    address: tuple[str, int | None],
    max_restarts: int,
    *,
    stay: bool,
    choice: tuple[bool, bool, bool],
) -> ServerRole:
    """Read the configuration and prepare the role: places are certs, allow-list, state; choice resume, new, once."""
    from fedlora.cli.serving import ServerRole
    from fedlora.cli.serving_plan import ServerPlan
    from fedlora.config import load
    from fedlora.config.tracking import require_trackers
    from fedlora.simulation.appdir import find_app_dir

    loaded = load(config, overrides or (), overlay or (), deployment=True)
    require_trackers(loaded.config.tracking)
    for note in (*loaded.notes, *loaded.overridden()):
        _LOG.info("%s", note)
    given_host, given_port = _address(loaded.config.deployment.superlink)
    plan = ServerPlan(
        config=loaded.config,
        certs=places[0],
        allow=places[1],
        state=places[2],
        host=address[0] or given_host,
        port=address[1] or given_port,
        run_dir=Path(loaded.config.run.dir).absolute(),
        max_restarts=max_restarts,
        stay=stay,
    )
    resume, new, once = choice
    return ServerRole(plan, app_dir=find_app_dir(), resume=resume, new=new, once=once)


def _serve(role: ServerRole, metrics: str) -> str:
    """Run the role until it is over or asked to stop, with its metrics endpoint if one is wanted."""
    from fedlora.cli.metrics import MetricsServer
    from fedlora.cli.processes import StopSignals

    stop = StopSignals()
    endpoint = MetricsServer(metrics, role.registry, role.ready) if metrics else None
    try:
        return role.serve(stop)
    finally:
        if endpoint is not None:
            endpoint.close()


def _address(text: str) -> tuple[str, int]:
    """Split host:port of `deployment.superlink`; a name or outer address means: listen on all interfaces."""
    parts = host_and_port(text)
    if parts is None:
        raise DeploymentError(f"deployment.superlink: got {text!r}; give host:port")
    host, port = parts
    local = host in {"127.0.0.1", "localhost", "::1", "[::1]"}
    return ("127.0.0.1" if local else "0.0.0.0"), port  # noqa: S104 - the server is meant to be reached
