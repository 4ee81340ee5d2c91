"""Moments of a real ServerApp at which it stands still until a test lets it go on: no moment can be missed."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

HOOK = """\
import importlib.abc, importlib.util, socket, sys

def wait(point, number):
    with socket.socket(socket.AF_UNIX) as line:
        line.connect({path!r})
        line.sendall(f"{{point}} {{number}}\\n".encode())
        line.recv(1)

def hook(loop):
    one_round, save = loop._one_round, loop._save
    def before_round(self, number, last):
        wait("round", number)
        return one_round(self, number, last)
    def before_save(self, record):
        wait("checkpoint", record.round)
        return save(self, record)
    loop._one_round, loop._save = before_round, before_save

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "server.loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            hook(module.RoundLoop)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
"""The `sitecustomize` of a server's processes; only the one that runs rounds loads `server.loop`."""


class Barrier:
    """Stops a server before every round, and before a checkpoint if that is asked for.

    A server that stands there has replies of nobody to wait for: no deadline runs, its nodes' heartbeats go on.

    Args:
        folder: gets the hook; goes first in PYTHONPATH of the server.
        path: a Unix socket's short path.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HOOK.format(path=str(path)))
        self.folder = folder
        self._points = {"round"}
        self._standing: dict[str, tuple[int, socket.socket]] = {}
        self._change = threading.Condition()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        threading.Thread(target=self._run, daemon=True).start()

    def stop_at_checkpoint(self) -> None:
        """Stop also before the next checkpoint is written."""
        with self._change:
            self._points.add("checkpoint")

    def until(self, point: str, seconds: float) -> int | None:
        """Wait until the server stands at a point; return its round, or None if it does not in time."""
        with self._change:
            self._change.wait_for(lambda: point in self._standing, seconds)
            return self._standing[point][0] if point in self._standing else None

    def go(self, point: str) -> None:
        """Let the server go on from a point where it stands."""
        with self._change:
            _, line = self._standing.pop(point)
            line.sendall(b"g")

    def close(self) -> None:
        """Let everything go on, now and later."""
        with self._change:
            self._points.clear()
            for point in list(self._standing):
                with contextlib.suppress(OSError):
                    self.go(point)
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._stand, args=(line,), daemon=True).start()

    def _stand(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError, ValueError):
            point, number = line.recv(100).decode().split()
            with self._change:
                if point not in self._points:
                    return
                self._points -= {"checkpoint"}
                self._standing[point] = (int(number), line)
                self._change.notify_all()
            line.recv(1)  # nothing is ever sent: this ends when the server goes on, or dies
            with self._change:
                if self._standing.get(point, (0, None))[1] is line:
                    del self._standing[point]
