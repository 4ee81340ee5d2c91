"""What Linux tells about this machine's memory: what is free, what a control group leaves, whom the kernel killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")
_VERSION_2: Final = ("memory.max", "memory.current", "inactive_file")
_VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_bytes() -> int | None:
    """Return what this process and its children may still take; None where nothing tells."""
    kilobytes = _field("meminfo", "MemAvailable")
    found = [*([] if kilobytes is None else [1024 * kilobytes]), *_left_by_groups()]
    return min(found, default=None)


def kernel_kills() -> int | None:
    """Return how many processes the kernel has killed for memory since the machine started; None if it does not say.

    Kills inside control groups (containers) are counted too.
    """
    return _field("vmstat", "oom_kill")


def _field(file: str, name: str) -> int | None:
    try:
        lines = [line.split() for line in (_PROC / file).read_text(encoding="ascii").splitlines()]
        return next(int(words[1]) for words in lines if words[0].rstrip(":") == name)
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _left_by_groups() -> Iterator[int]:
    """Yield what each control group around this process leaves, of either version; those without a limit are left out.

    Inside a container the path in /proc may not exist below the mount; the mount's root is then the container's group.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names == "":
            yield from _left(_GROUPS, path, _VERSION_2)
        elif "memory" in names.split(","):
            yield from _left(_GROUPS / "memory", path, _VERSION_1)


def _left(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    limit_name, used_name, cache_name = names
    place = root / path.lstrip("/")
    for folder in (place, *(one for one in place.parents if one.is_relative_to(root))):
        try:
            limit = int((folder / limit_name).read_text(encoding="ascii"))
            used = int((folder / used_name).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text("ascii").splitlines())
            yield max(0, limit - used + int(stat.get(cache_name, 0)))
        except (OSError, ValueError):  # no such file, or the word "max": no limit
            continue
