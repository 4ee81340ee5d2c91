"""Schema versions of the YAML: older files are migrated step by step, newer ones are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fedlora.config.problems import Problem
from fedlora.names import CONFIG_SCHEMA

Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes a container of version n (a copy that it may change) and returns one of version n + 1."""

MIGRATIONS: Mapping[int, Migration] = MappingProxyType({})
"""Version n to the function that makes version n + 1 of it; version 1 is the first."""


def migrate(
    container: Mapping[str, Any],
    *,
    migrations: Mapping[int, Migration] = MIGRATIONS,
    current: int = CONFIG_SCHEMA,
) -> tuple[dict[str, Any], list[str], list[Problem]]:
    """Bring a container to the current schema version.

    Args:
        container: merged plain values; not changed.
        migrations: version n to its migration.
        current: the version that this library speaks.

    Returns:
        (container of the current version, notes on what was migrated, problems).
    """
    result = dict(container)
    version = result.get("schema")
    if version is None:
        return result, [], [Problem("schema", f"missing; write `schema: {current}` at the top of the file")]
    if isinstance(version, bool) or not isinstance(version, int):
        return result, [], [Problem("schema", f"got {version!r}; a whole number is needed, now {current}")]
    if version > current:
        text = f"got {version}, this fedlora reads up to {current}; upgrade fedlora"
        return result, [], [Problem("schema", text)]
    notes: list[str] = []
    while version < current:
        if version not in migrations:
            text = f"got {version}, which cannot be migrated to {current}; write the file anew"
            return result, notes, [Problem("schema", text)]
        result = dict(migrations[version](result))
        notes.append(f"schema {version} was migrated to {version + 1}")
        version += 1
        result["schema"] = version
    return result, notes, []
