"""Process ids with start times, so that an id that was given again is not mistaken for the one that had it."""

from __future__ import annotations

from pathlib import Path


def process_start(pid: int) -> str | None:
    """Return a process's start time in clock ticks, None if it is gone (or where there is no /proc)."""
    fields = _stat(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def descendants(root: int) -> dict[int, str]:
    """Return every process below one, with its start time in clock ticks; empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    starts: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        fields = _stat(pid)
        if fields is None:
            continue
        children.setdefault(int(fields[1]), []).append(pid)
        if fields[0] != "Z":
            starts[pid] = fields[19]
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return {pid: starts[pid] for pid in found if pid in starts}


def _stat(pid: int) -> list[str] | None:
    """Return the fields behind the program's name; the first one is the state."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
