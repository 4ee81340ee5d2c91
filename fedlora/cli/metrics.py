"""A small Prometheus endpoint with liveness and readiness, for local scraping."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from fedlora.errors import DeploymentError

_LOG = logging.getLogger(__name__)
_ROUND_EPSILON = (
    "Largest epsilon that a client has reported so far (under client-level privacy the federation's); "
)
Labels = tuple[tuple[str, str], ...]


class Registry:
    """Counters and gauges by name and labels."""

    def __init__(self) -> None:
        """Start empty."""
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {}
        self._kinds: dict[str, tuple[str, str]] = {}

    def describe(self, name: str, kind: str, help_: str) -> None:
        """Declare a metric: kind is counter or gauge."""
        self._kinds[name] = (kind, help_)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Increase a counter."""
        with self._lock:
            series = self._values.setdefault(name, {})
            key = tuple(sorted(labels.items()))
            series[key] = series.get(key, 0.0) + amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._values.setdefault(name, {})[tuple(sorted(labels.items()))] = value

    def set_together(self, values: Mapping[str, float]) -> None:
        """Set gauges of one event at once, so that no page shows half of it."""
        with self._lock:
            for name, value in values.items():
                self._values.setdefault(name, {})[()] = value

    def text(self) -> str:
        """Return the exposition format, version 0.0.4."""
        lines = []
        with self._lock:
            for name in sorted({*self._values, *self._kinds}):
                kind, help_ = self._kinds.get(name, ("untyped", ""))
                lines += [f"# HELP {name} {help_}", f"# TYPE {name} {kind}"]
                for labels, value in sorted(self._values.get(name, {}).items()):
                    shown = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
                    lines.append(f"{name}{{{shown}}} {value!r}" if shown else f"{name} {value!r}")
        return "\n".join(lines) + "\n"


def server_registry(means: str) -> Registry:
    """Return the server's registry with its metrics declared.

    Args:
        means: what the run's epsilon means: unit, relation, adversary, delta, accountant and sampling.
    """
    registry = Registry()
    registry.describe("fedlora_round", "gauge", "Last round that is over.")
    registry.describe("fedlora_round_accepted", "gauge", "Clients whose reply counted in the last round.")
    registry.describe("fedlora_round_asked", "gauge", "Clients asked in the last round.")
    registry.describe("fedlora_round_epsilon", "gauge", f"{_ROUND_EPSILON}{means}.")
    registry.describe("fedlora_restarts_total", "counter", "SuperLink or ServerApp started again.")
    return registry


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer:
    """Serves /metrics, /healthz (alive) and /readyz (ready) until closed.

    Args:
        address: "host:port"; bind it to a local or cluster-internal address.
        registry: what to show.
        ready: says whether the process can do its work now.
    """

    def __init__(self, address: str, registry: Registry, ready: Callable[[], bool]) -> None:
        """Open the port and serve in the background.

        Raises:
            DeploymentError: if the address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        answers: Mapping[str, Callable[[], tuple[int, str]]] = {
            "/metrics": lambda: (200, registry.text()),
            "/healthz": lambda: (200, "ok\n"),
            "/readyz": lambda: (200, "ready\n") if ready() else (503, "not ready\n"),
        }

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                status, text = answers.get(self.path, lambda: (404, "not found\n"))()
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                _LOG.debug("metrics: a connection from %s broke off", client_address)

        try:
            self._server = Server((host.strip("[]"), int(port)), Handler)
        except (OSError, ValueError, OverflowError) as error:
            raise DeploymentError(f"metrics address {address}: cannot be opened ({error})") from None
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
