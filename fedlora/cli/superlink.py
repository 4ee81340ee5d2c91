"""Flower's SuperLink behind the gate: `python -m fedlora.cli.superlink`, same arguments as `flower-superlink`.

The gate is put in through Flower's own middleware hook. This is the only place that touches it, and it
refuses versions of Flower that it was not written for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fedlora.cli.gate import FLEET, Gate
from fedlora.errors import DeploymentError

ENV_CONTROL_TOKEN = "FEDLORA_CONTROL_TOKEN_FILE"  # noqa: S105 - a name, not a token
ENV_OPEN_FILE = "FEDLORA_GATE_OPEN_FILE"
FLOWER_VERSION = "1.42."
PUSH = f"{FLEET}push-messages"


def refuse_push(body: bytes) -> str | None:
    """Return why the messages that a SuperNode pushes are refused, or None.

    Flower 1.42 checks that the request's node signed it, and not whose name stands in the messages: a site could
    answer for another, or send another site work in the server's name.

    Args:
        body: a PushMessagesRequest.
    """
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return "push: malformed"
    for message in request.messages_list:
        metadata = message.metadata
        if metadata.src_node_id != request.node.node_id:
            return "push: in another node's name"
        if not metadata.reply_to_message_id or metadata.dst_node_id != SUPERLINK_NODE_ID:
            return "push: not a reply to the server"
    return None


def install_gate(token: str, open_file: str | None = None) -> None:
    """Make every SuperLink of this process start behind the gate.

    Args:
        token: the operator's token.
        open_file: nodes are let in once this file exists; None lets them in at once.

    Raises:
        DeploymentError: if Flower's version or hook is not the expected one.
    """
    import flwr
    from flwr.superlink import extensions
    from flwr.superlink import main as superlink_main
    from starlette.middleware import Middleware

    if not str(flwr.__version__).startswith(FLOWER_VERSION):
        raise DeploymentError(
            f"flwr: got {flwr.__version__}; the gate was written for {FLOWER_VERSION}x; install that version"
        )
    if getattr(superlink_main, "extensions", None) is not extensions:
        raise DeploymentError("flwr: the SuperLink's middleware hook has moved; the gate cannot be put in")
    inner = extensions.get_middleware

    def with_gate() -> tuple[Any, ...]:
        return (Middleware(Gate, token=token, open_file=open_file, inspect={PUSH: refuse_push}), *inner())

    extensions.get_middleware = with_gate


def main() -> None:
    """Run the SuperLink of this command line behind the gate."""
    file = os.environ.get(ENV_CONTROL_TOKEN)
    if not file:
        sys.exit(f"fedlora: {ENV_CONTROL_TOKEN} is not set; start the server with `fedlora server`")
    token = Path(file).read_text().strip()
    if len(token) < 32:
        sys.exit(f"fedlora: {file}: the control token is too short; delete the file")
    os.environ.pop(
        "FORWARDED_ALLOW_IPS", None
    )  # or a proxy header could pass another machine off as this one
    install_gate(token, os.environ.get(ENV_OPEN_FILE))
    from flwr.superlink.cli.flower_superlink import flower_superlink

    flower_superlink()


if __name__ == "__main__":
    main()
