"""Break privacy-critical lines one by one and check that the test suite notices.

Each mutation changes one line of a copy of the project and runs the tests that should catch it; a mutation
that survives fails the script. Run all of them, or some:

    python tests/mutations.py
    python tests/mutations.py clip-off noise-halved
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("fedlora", "server", "client", "strategies", "tests", "pyproject.toml", "README.md")


@dataclass(frozen=True)
class Mutation:
    """One changed line: `old` must occur exactly once in `file`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def load_mutations() -> tuple[Mutation, ...]:
    """Read the list beside this file: blocks of `name`, `file`, `- old`, `+ new`, `tests`."""
    text = Path(__file__).with_name("mutations.txt").read_text(encoding="utf-8")
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        fields = {"old": [], "new": [], "head": []}
        for line in lines:
            kind = {"-": "old", "+": "new"}.get(line[0], "head")
            fields[kind].append(line[1:] if kind != "head" else line)
        name, file, tests = fields["head"]
        found.append(
            Mutation(name, file, "\n".join(fields["old"]), "\n".join(fields["new"]), tuple(tests.split()))
        )
    return tuple(found)


def occurrences(mutation: Mutation) -> int:
    """How often the line to change stands in its file (must be 1)."""
    return (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old)


def survives(mutation: Mutation) -> tuple[bool, str]:
    """Apply one mutation to a copy and run its tests; True if nothing failed."""
    with tempfile.TemporaryDirectory(prefix="fedlora-mutation-") as folder:
        copy = Path(folder)
        for item in COPIED:
            source = ROOT / item
            if source.is_dir():
                shutil.copytree(source, copy / item, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, copy / item)
        path = copy / mutation.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            return True, f"the line to change occurs {text.count(mutation.old)} times in {mutation.file}"
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-m",
                "not network and not postgres",
                *mutation.tests,
            ],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "CI": "false"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    last = (result.stdout.strip().splitlines() or [result.stderr[-300:]])[-1]
    if result.returncode != 1:
        return True, f"exit {result.returncode}: {last}"
    return False, last


def main(names: list[str]) -> int:
    """Run the named mutations (all by default); exit status 1 if one survives."""
    chosen = [m for m in load_mutations() if not names or m.name in names]
    missing = set(names) - {m.name for m in chosen}
    if missing or not chosen:
        print(f"no mutation named {sorted(missing)}", file=sys.stderr)
        return 2
    start, alive = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for mutation, (lived, said) in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVED' if lived else 'killed  '} {mutation.name}: {said}", flush=True)
            if lived:
                alive.append(mutation.name)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutations killed in {time.monotonic() - start:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
