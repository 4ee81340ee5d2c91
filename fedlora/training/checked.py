"""The outcome of a self-check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SelfCheck:
    """PUBLIC. Outcome of one check.

    Attributes:
        name: what was checked.
        passed: whether it held.
        detail: figures that decided.
    """

    name: str
    passed: bool
    detail: str
