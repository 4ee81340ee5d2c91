"""The Flower app bundle: client, server and strategies of this installation, nothing else.

The library `fedlora` is never in it: a site runs the library that it installed itself.
"""

from __future__ import annotations

from pathlib import Path

import fedlora
from fedlora.errors import DeploymentError

PACKAGES = ("client", "server", "strategies")
_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedlora-app"
version = "{version}"
description = "Relay and server of fedlora"
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedlora"

[tool.flwr.app.components]
serverapp = "server.app:app"
clientapp = "client.app:app"

[tool.flwr.app.config]
config = ""
overrides = ""
run-id = ""
run-dir = ""
resume = false
"""


def app_files(app_dir: Path) -> dict[str, bytes]:
    """Return the bundle's files by relative path.

    Raises:
        DeploymentError: if the app's packages are not in the folder.
    """
    files = {"pyproject.toml": _PYPROJECT.format(version=fedlora.__version__).encode()}
    for package in PACKAGES:
        found = sorted((app_dir / package).rglob("*.py"))
        if not found:
            raise DeploymentError(f"app: no {package} in {app_dir}; reinstall fedlora")
        for path in found:
            if "__pycache__" not in path.parts:
                files[path.relative_to(app_dir).as_posix()] = path.read_bytes()
    return files


def build_bundle(app_dir: Path) -> bytes:
    """Build the bundle (Flower's FAB) of an app folder."""
    from flwr.cli.build import build_fab_from_files

    content, _ = build_fab_from_files(app_files(app_dir))
    return bytes(content)
