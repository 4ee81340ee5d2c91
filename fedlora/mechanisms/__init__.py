"""Local private mechanisms: per-record gradients, clip, noise, direction, update."""

from fedlora.mechanisms.base import (
    LocalState,
    Mechanism,
    Stages,
    StepPrivacy,
    build_mechanism,
    mechanism_kinds,
)

__all__ = ["LocalState", "Mechanism", "Stages", "StepPrivacy", "build_mechanism", "mechanism_kinds"]
