"""The outcome of a self-check, and what a failed one means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedlora.errors import SensitivityMismatchError


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


def require_passed(checks: Iterable[SelfCheck]) -> None:
    """Refuse to go on if a check failed.

    Raises:
        SensitivityMismatchError: naming the failed checks and their figures.
    """
    failed = [f"{one.name} ({one.detail})" for one in checks if not one.passed]
    if failed:
        raise SensitivityMismatchError(f"self-check failed: {'; '.join(failed)}; nothing is trained")


__all__ = ["SelfCheck", "require_passed"]
