"""Find and load the Flower app (client, server, strategies), and make sure that it is the right copy."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType

import fedlora
from fedlora.errors import SimulationError

_PACKAGES = ("client", "server", "strategies")


def find_app_dir() -> Path:
    """Return the directory that holds the app: the checkout beside `fedlora`, or the wheel's own copy.

    Raises:
        SimulationError: if neither is there.
    """
    package = Path(fedlora.__file__).resolve().parent
    for candidate in (package.parent, package / "_app"):
        if all((candidate / name / "__init__.py").is_file() for name in _PACKAGES):
            return candidate
    raise SimulationError(f"app: no client, server and strategies beside {package}; reinstall fedlora")


def code_hash(app_dir: Path) -> str:
    """Return sha256 (hex) over the Python files of the app and of the library that runs here."""
    digest = hashlib.sha256(fedlora.__version__.encode())
    library = Path(fedlora.__file__).resolve().parent
    roots = [(app_dir / name, app_dir) for name in _PACKAGES] + [(library, library.parent)]
    for root, base in roots:
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(base)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def load_module(app_dir: Path, name: str) -> ModuleType:
    """Import one module of the app, from this directory and no other.

    Raises:
        SimulationError: if a package of the same name from another directory is already imported.
    """
    text = str(app_dir)
    if text not in sys.path:
        sys.path.insert(0, text)
    module = importlib.import_module(name)
    origin = Path(module.__file__ or "").resolve()
    if not origin.is_relative_to(app_dir.resolve()):
        raise SimulationError(
            f"app: module {name} was imported from {origin.parent}, expected {app_dir}; start from a directory "
            "that has no package of that name"
        )
    return module
