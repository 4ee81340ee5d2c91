"""The operator's side of Flower's control interface: register nodes, start and watch runs, with the token."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedlora.errors import AuthenticationError, DeploymentError

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Node:
    """PUBLIC. One registered SuperNode: id, name, public key (PEM bytes of Flower) and status."""

    node_id: int
    name: str
    public_key: bytes
    status: str


@dataclass(frozen=True)
class RunState:
    """PUBLIC. One run: id, "pending", "starting", "running" or "finished", and how it finished."""

    run_id: int
    status: str
    sub_status: str
    details: str


class _Token:
    """Adds the operator's token to every request."""

    def __init__(self, token: str) -> None:
        self._value = f"Bearer {token}"

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Add the header and go on."""
        context.request.headers["authorization"] = self._value
        return call_next(context)


class Control:
    """A client of the control interface.

    Args:
        address: host:port of the SuperLink on this machine.
        ca: the federation's CA certificate.
        token: the operator's token.
    """

    def __init__(self, address: str, ca: Path, token: str) -> None:
        """Open the client; nothing is sent yet."""
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        self._address = address
        self._client = ControlHttpClient.from_server_address(
            address,
            False,
            ca.read_bytes(),
            [_Token(token), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )

    def close(self) -> None:
        """Close the client."""
        self._client.close()

    def wait_until_ready(self, seconds: float, alive: Callable[[], bool]) -> None:
        """Wait until the SuperLink answers.

        Raises:
            DeploymentError: if it ends or does not answer in time.
            AuthenticationError: if it refuses the token.
        """
        deadline = time.monotonic() + seconds
        reason = ""
        while time.monotonic() < deadline:
            if not alive():
                raise DeploymentError("SuperLink: ended while starting; see superlink.log")
            try:
                self.nodes()
                return
            except AuthenticationError:
                raise
            except DeploymentError as error:
                reason = str(error)
                time.sleep(0.25)
        raise DeploymentError(f"SuperLink: no answer within {seconds:.0f} s ({reason}); see superlink.log")

    def nodes(self) -> list[Node]:
        """Return the registered nodes."""
        from flwr.proto.control_pb2 import ListNodesRequest

        answer = self._ask(lambda: self._client.ListNodes(ListNodesRequest()))
        return [
            Node(info.node_id, info.name, info.public_key, info.status)
            for info in answer.nodes_info
            if info.status != "unregistered"
        ]

    def register(self, public_key: bytes, name: str) -> int:
        """Register a node's public key (PEM); return the node id."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=public_key, name=name)
        return int(self._ask(lambda: self._client.RegisterNode(request)).node_id)

    def unregister(self, node_id: int) -> None:
        """Unregister a node: its next request is refused."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self._ask(lambda: self._client.UnregisterNode(UnregisterNodeRequest(node_id=node_id)))

    def start_run(self, fab: bytes, run_config: Mapping[str, str | int | float | bool]) -> int:
        """Start a run of an app bundle; return Flower's run id."""
        import hashlib

        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        bundle = Fab(hashlib.sha256(fab).hexdigest(), fab, {})
        request = StartRunRequest(
            fab=fab_to_proto(bundle), override_config=user_config_to_proto(dict(run_config)), federation=""
        )
        answer = self._ask(lambda: self._client.StartRun(request))
        if not answer.HasField("run_id"):
            raise DeploymentError("SuperLink: refused to start the run; see superlink.log")
        return int(answer.run_id)

    def run_state(self, run_id: int) -> RunState:
        """Return a run's state.

        Raises:
            DeploymentError: if the SuperLink does not know it or does not answer.
        """
        from flwr.proto.control_pb2 import ListRunsRequest

        answer = self._ask(lambda: self._client.ListRuns(ListRunsRequest(run_id=run_id)))
        run = answer.run_dict.get(run_id)
        if run is None:
            raise DeploymentError(f"SuperLink: does not know run {run_id}")
        return RunState(run_id, run.status.status, run.status.sub_status, run.status.details)

    def stop_run(self, run_id: int) -> None:
        """Ask the SuperLink to stop a run."""
        from flwr.proto.control_pb2 import StopRunRequest

        self._ask(lambda: self._client.StopRun(StopRunRequest(run_id=run_id)))

    def _ask(self, call: Callable[[], Any]) -> Any:
        import httpx

        try:
            return call()
        except httpx.HTTPStatusError as error:
            text = error.response.text[:200]
            if error.response.status_code in {401, 403}:
                raise AuthenticationError(
                    f"SuperLink {self._address}: refused the operator's token ({text})"
                ) from None
            raise DeploymentError(f"SuperLink {self._address}: {text}") from None
        except (httpx.HTTPError, OSError) as error:
            raise DeploymentError(f"SuperLink {self._address}: {type(error).__name__} {error}") from None


def public_key_pem(openssh: str) -> bytes:
    """Return an OpenSSH public key as the PEM bytes that Flower stores."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_ssh_public_key(openssh.encode())
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
