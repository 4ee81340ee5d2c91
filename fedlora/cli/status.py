"""`fedlora status`: what runs at a server or a site, from its state folder and its trainer's socket."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedlora.cli.common import JsonOption, emit
from fedlora.cli.state import read_state
from fedlora.errors import DeploymentError

app = typer.Typer(help="Show what runs, and its health.", rich_markup_mode=None, add_completion=False)


@app.command()
def status(
    folders: Annotated[
        list[Path], typer.Argument(help="State folders of `fedlora server` or `fedlora client`.")
    ],
    socket: Annotated[Path | None, typer.Option("--trainer-socket", help="Also ask this trainer.")] = None,
    token: Annotated[Path | None, typer.Option("--token", help="Its token file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of servers, clients and trainers on this machine; fails if one of them is down.

    Example: fedlora status server-state

    Example: fedlora status client-state --trainer-socket run/trainer.sock --token run/trainer.token --json
    """
    roles, down = [], []
    for folder in folders:
        state = read_state(folder)
        if state is None:
            raise DeploymentError(f"{folder}: no state.json; is it the --state folder of a server or client?")
        roles.append({"folder": str(folder), **state})
        over = state.get("status") in {"finished", "stopped", "budget-exhausted"}
        if not state["alive"] and not over:
            down.append(str(folder))
    trainer = None
    if socket is not None:
        trainer = _ask_trainer(socket, token)
    text = "\n".join(_line(role) for role in roles)
    if trainer is not None:
        text += f"\ntrainer {socket}: ready, clients {', '.join(trainer['clients'])}"
    if down:
        raise DeploymentError(f"not running any more: {', '.join(down)}\n{text}")
    emit({"roles": roles, "trainer": trainer}, as_json=as_json, text=text)


def _ask_trainer(socket: Path, token: Path | None) -> dict[str, Any]:
    from fedlora.training.port import hello_packet, unpack_hello
    from fedlora.training.service import SocketPort

    port = SocketPort(
        str(socket), None if token is None else str(token), connect_seconds=5.0, request_seconds=10.0
    )
    hello = unpack_hello(port.exchange(hello_packet()))
    return {"clients": list(hello.clients), "version": hello.code_hash, "identity": hello.identity}


def _line(role: Mapping[str, Any]) -> str:
    alive = "running" if role["alive"] else "not running"
    age = max(0.0, time.time() - float(role.get("updated", 0.0)))
    known = [
        f"{key} {role[key]}" for key in ("status", "run_id", "round", "epsilon", "reason") if role.get(key)
    ]
    if role.get("epsilon"):
        known.append(f"epsilon is {role.get('epsilon_means') or 'explained by fedlora report RUN'}")
    if role["alive"] and isinstance(role.get("connected"), bool):
        known.append("connected" if role["connected"] else "not connected")
    parts = [f"{alive} (pid {role['pid']})", *known, f"changed {age:.0f} s ago"]
    return f"{role['role']} {role['folder']}: {', '.join(parts)}"
