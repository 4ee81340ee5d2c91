"""What `fedlora server` was asked to do, checked before anything is started."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from fedlora.cli.keyring import AllowList
from fedlora.cli.pki import check_server_certificate, check_server_key
from fedlora.cli.processes import port_is_free
from fedlora.config import FedLoraConfig
from fedlora.errors import DeploymentError

_LOG = logging.getLogger("fedlora.server")
ANY_HOSTS = ("0.0.0.0", "::", "127.0.0.1", "::1")  # noqa: S104 - the server is meant to be reached


@dataclass(frozen=True)
class ServerPlan:
    """What `fedlora server` was asked to do.

    Attributes:
        config: the run's configuration.
        certs: folder with ca.crt, server.crt, server.key.
        allow: the allow-list.
        state: folder of everything that outlives the process.
        host: address to listen on: all (0.0.0.0, ::) or the loopback.
        port: TCP port.
        run_dir: folder of run folders, absolute.
        max_restarts: how often a crashed SuperLink or ServerApp is started again.
        stay: keep serving after the run.
    """

    config: FedLoraConfig
    certs: Path
    allow: Path
    state: Path
    host: str
    port: int
    run_dir: Path
    max_restarts: int = 5
    stay: bool = False

    def check(self) -> None:
        """Check everything that can be checked before anything is started.

        Raises:
            FedLoraError: for an unusable certificate, allow-list, address or port.
        """
        if self.host not in ANY_HOSTS:
            raise DeploymentError(
                f"--host {self.host}: use 0.0.0.0 (all interfaces) or 127.0.0.1; the server's own processes need "
                "the loopback. Limit interfaces with the firewall or the container's network"
            )
        facts = check_server_certificate(self.certs)
        check_server_key(self.certs)
        if "127.0.0.1" not in facts.names:
            raise DeploymentError("server certificate: must list 127.0.0.1 too; run `fedlora certs renew`")
        if facts.days_left() < 30:
            _LOG.warning(
                "the server's certificate ends in %.0f days; run `fedlora certs renew`", facts.days_left()
            )
        if not AllowList.load(self.allow).allowed():
            raise DeploymentError(f"allow-list {self.allow}: no site is allowed; use `fedlora keys allow`")
        if not port_is_free(self.host, self.port):
            raise DeploymentError(f"port {self.port}: in use already; is another server running?")
