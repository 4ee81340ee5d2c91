"""One fault of a configuration, with its key and the place it was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedlora.errors import ConfigError

Path = tuple[str | int, ...]

SECRET_KEYS = frozenset({"url", "query", "password", "token", "secret", "mlflow"})
"""Keys whose values never appear in a message."""


@dataclass(frozen=True)
class Origin:
    """Where one value was written.

    Attributes:
        layer: file name, or "command line".
        line: 1-based line in the file; None for the command line.
        value: the value as that layer gave it.
    """

    layer: str
    line: int | None
    value: object

    def place(self) -> str:
        """Return "conf.yaml:12" or "command line"."""
        return self.layer if self.line is None else f"{self.layer}:{self.line}"


@dataclass(frozen=True, order=True)
class Problem:
    """One fault: dotted key, what is wrong and what to do, and where (empty if nowhere)."""

    key: str
    message: str
    place: str = ""

    def __str__(self) -> str:
        """Return one line."""
        where = f" ({self.place})" if self.place else ""
        return f"{self.key}: {self.message}{where}"


def dotted(path: Path) -> str:
    """Return a path as text; a key that itself holds a dot is bracketed.

    Example:
        >>> dotted(("adapter", "rank_pattern", "layers.0.q", 1))
        'adapter.rank_pattern[layers.0.q].1'
    """
    text = ""
    for part in path:
        piece = str(part)
        if isinstance(part, str) and "." in part:
            text += f"[{piece}]"
        else:
            text += f".{piece}" if text else piece
    return text


def shown(path: Path, value: object) -> str:
    """Return a value for a message, or "(hidden)" for keys that may hold a secret."""
    if any(str(part) in SECRET_KEYS for part in path):
        return "(hidden)"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def place_of(path: Path, origins: Mapping[Path, tuple[Origin, ...]]) -> str:
    """Return the place of the nearest ancestor of `path` that was written somewhere."""
    for end in range(len(path), 0, -1):
        found = origins.get(path[:end])
        if found:
            return found[-1].place()
    return ""


def raise_problems(problems: Iterable[Problem], what: str) -> None:
    """Raise one ConfigError that lists every problem once, in key order; do nothing without problems.

    Raises:
        ConfigError: if there is at least one problem.
    """
    lines = tuple(str(problem) for problem in sorted(set(problems)))
    if lines:
        noun = "problem" if len(lines) == 1 else "problems"
        raise ConfigError(f"{what} cannot be used: {len(lines)} {noun}", lines)
