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


def run_tests(mutation: Mutation | None, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy of the project, with one mutation applied (or none, which must pass)."""
    with tempfile.TemporaryDirectory(prefix="fedlora-mutation-") as folder:
        copy = Path(folder)
        for item in COPIED:
            source = ROOT / item
            if source.is_dir():
                shutil.copytree(source, copy / item, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, copy / item)
        if mutation is not None:
            path = copy / mutation.file
            path.write_text(path.read_text("utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-m",
                "not long and not network and not postgres",
                *tests,
            ],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "CI": "false"},
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )


def survives(mutation: Mutation) -> tuple[bool, str]:
    """Apply one mutation to a copy and run its tests; True if nothing failed."""
    found = occurrences(mutation)
    if found != 1:
        return True, f"the line to change occurs {found} times in {mutation.file}"
    result = run_tests(mutation, mutation.tests)
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED")]
    if result.returncode != 1 or not failed:
        return True, f"exit {result.returncode}: {(result.stdout + result.stderr).strip()[-200:]}"
    return False, failed[0].removeprefix("FAILED ")[:110]


def baseline() -> tuple[bool, str]:
    """Run every test that some mutation names on an unchanged copy: a kill means nothing if they fail there."""
    tests = tuple(dict.fromkeys(test for mutation in load_mutations() for test in mutation.tests))
    result = run_tests(None, tests)
    return result.returncode == 0, result.stdout.strip()[-300:]


def main(names: list[str]) -> int:
    """Run the named mutations (all by default); exit status 1 if one survives."""
    chosen = [m for m in load_mutations() if not names or m.name in names]
    missing = set(names) - {m.name for m in chosen}
    if missing or not chosen:
        print(f"no mutation named {sorted(missing)}", file=sys.stderr)
        return 2
    start, alive = time.monotonic(), []
    if not names:
        passed, said = baseline()
        print(f"unchanged copy: {said.splitlines()[-1] if said else ''}", flush=True)
        if not passed:
            return 3
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        for mutation, (lived, said) in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVED' if lived else 'killed  '} {mutation.name}: {said}", flush=True)
            if lived:
                alive.append(mutation.name)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutations killed in {time.monotonic() - start:.0f} s")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
