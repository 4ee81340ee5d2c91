"""The list of mutations stays applicable, and every mutation is caught."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("mutations", Path(__file__).with_name("mutations.py"))
mutations = importlib.util.module_from_spec(SPEC)
sys.modules["mutations"] = mutations
SPEC.loader.exec_module(mutations)
ALL = mutations.load_mutations()


def test_there_are_at_least_thirty_different_mutations():
    assert len({m.name for m in ALL}) == len(ALL) >= 30
    assert len({(m.file, m.old, m.new) for m in ALL}) == len(ALL)


@pytest.mark.parametrize("mutation", ALL, ids=lambda m: m.name)
def test_mutation_still_applies(mutation):
    assert mutations.occurrences(mutation) == 1
    assert mutation.old != mutation.new
    assert mutation.old.count("\n") == mutation.new.count("\n") == 0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_an_unchanged_copy_passes():
    passed, said = mutations.baseline()
    assert passed, said


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mutation", ALL, ids=lambda m: m.name)
def test_mutation_is_killed(mutation):
    lived, said = mutations.survives(mutation)
    assert not lived, said
