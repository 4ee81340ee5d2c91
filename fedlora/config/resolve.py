"""Resolve a configuration: derive what follows from it, hash it canonically, save it.

Deriving goes from `target_epsilon` to `noise_multiplier` or back, for the number of releases that a
client makes at most: rounds x local steps under record-level privacy, rounds under client-level privacy.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omegaconf import OmegaConf

from fedlora.config.load import config_container, config_from_container
from fedlora.config.schema import ClientPrivacy, FedLoraConfig, NoPrivacy, RecordPrivacy
from fedlora.errors import ConfigError, PrivacyParameterError
from fedlora.files import write_durably

if TYPE_CHECKING:
    from fedlora.accounting import Event

MakeEvent = Callable[[FedLoraConfig], "Event"]
"""What one release under this configuration is; its `privacy.noise_multiplier` is always filled in."""

EPSILON_TOLERANCE = 1e-6
"""A resolved configuration's epsilon may lie this fraction above its target (rounding of the search)."""


class Accounting(Protocol):
    """The two questions that deriving asks an accountant."""

    def epsilon(self, event: Event, config: FedLoraConfig) -> tuple[float, str]:
        """Return (upper bound on epsilon of the whole run, the accountant's name)."""

    def calibrate(self, make: Callable[[float], Event], config: FedLoraConfig) -> float:
        """Return the least noise multiplier found whose whole run (`total_steps` of `make`) meets the target."""


def canonical_json(config: FedLoraConfig) -> str:
    """Return the canonical text of a configuration: sorted keys, defaults filled in, no spaces."""
    return json.dumps(config_container(config), sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_hash(config: FedLoraConfig) -> str:
    """Return sha256 (hex) of the canonical text; equal configurations hash alike, however they were written."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


def total_steps(config: FedLoraConfig) -> int:
    """Return how many releases one client's records enter at most in the whole run (public)."""
    if config.privacy.unit == "client":
        return config.federation.rounds
    return config.federation.rounds * config.training.local_steps


def with_noise(config: FedLoraConfig, noise_multiplier: float) -> FedLoraConfig:
    """Return a copy whose privacy section has this noise multiplier."""
    privacy = config.privacy
    if isinstance(privacy, NoPrivacy):
        raise PrivacyParameterError("privacy.unit is none: there is no noise multiplier")
    return config.model_copy(
        update={"privacy": privacy.model_copy(update={"noise_multiplier": noise_multiplier})}
    )


def derive_noise(
    config: FedLoraConfig, make_event: MakeEvent, accounting: Accounting | None = None
) -> FedLoraConfig:
    """Fill in `noise_multiplier` (from `target_epsilon`) and the `derived` section.

    Args:
        config: a checked configuration; not changed.
        make_event: the accounting event of one release, from the objects that will run.
        accounting: the accountant; fedlora's own by default.

    Returns:
        The resolved configuration: `privacy.noise_multiplier` set, `derived` filled in. A configuration
        that is resolved already is derived anew and must come out the same (see `check_derived`).

    Raises:
        PrivacyParameterError: if the target cannot be reached.
    """
    privacy = config.privacy
    steps = total_steps(config)
    base = {"sample_rate": config.training.sample_rate, "total_steps": steps}
    if isinstance(privacy, NoPrivacy):
        return _with_derived(config, {"from": "none", **base})
    tool = accounting if accounting is not None else _LibraryAccounting()
    given = _given(config, privacy)
    sigma = privacy.noise_multiplier
    if given == "target_epsilon":
        sigma = tool.calibrate(lambda noise: make_event(with_noise(config, noise)), config)
    if sigma is None:
        raise PrivacyParameterError("privacy: neither target_epsilon nor noise_multiplier is given")
    filled = with_noise(config, sigma)
    epsilon, name = tool.epsilon(make_event(filled).times(steps), filled)
    if given == "target_epsilon" and not (
        epsilon <= (privacy.target_epsilon or 0.0) * (1 + EPSILON_TOLERANCE)
    ):
        raise PrivacyParameterError(
            f"privacy.target_epsilon: noise {sigma:.4g} gives epsilon {epsilon:.6g}, above the target "
            f"{privacy.target_epsilon}; raise the target or take fewer rounds"
        )
    fields = {"from": given, "noise_multiplier": sigma, "epsilon": epsilon, "accountant": name}
    return _with_derived(filled, {**fields, "delta": privacy.target_delta, **base})


def _given(config: FedLoraConfig, privacy: RecordPrivacy | ClientPrivacy) -> str:
    """Return which of the two the user gave; both stand there only where the noise was derived from the target.

    A resolved file may be changed before it runs again: the rule `noise_choice` refuses a target beside a noise
    that was not derived from it, so that neither is there without effect.
    """
    return "target_epsilon" if privacy.target_epsilon is not None else "noise_multiplier"


def _with_derived(config: FedLoraConfig, derived: Mapping[str, Any]) -> FedLoraConfig:
    return config_from_container({**config_container(config), "derived": dict(derived)})


def check_derived(config: FedLoraConfig, make_event: MakeEvent, accounting: Accounting | None = None) -> None:
    """Check a resolved configuration that someone else resolved (a client does, before anything is read).

    Raises:
        ConfigError: if its numbers do not follow from it, or it was never resolved.
    """
    derived = config.derived
    if derived is None:
        raise ConfigError("derived: missing; the configuration was never resolved")
    if isinstance(config.privacy, NoPrivacy):
        return
    sigma = config.privacy.noise_multiplier
    if sigma is None or sigma != derived.noise_multiplier or derived.total_steps != total_steps(config):
        raise ConfigError("derived: noise_multiplier or total_steps do not follow from the configuration")
    tool = accounting if accounting is not None else _LibraryAccounting()
    epsilon, _ = tool.epsilon(make_event(config).times(total_steps(config)), config)
    if derived.epsilon is None or not (epsilon <= derived.epsilon * (1 + 1e-3)):
        raise ConfigError(
            f"derived.epsilon: claims {derived.epsilon}, but this configuration spends {epsilon:.6g}"
        )


@dataclass(frozen=True)
class _LibraryAccounting:
    """fedlora.accounting behind the small interface."""

    def epsilon(self, event: Event, config: FedLoraConfig) -> tuple[float, str]:
        """Return (epsilon, accountant's name)."""
        from fedlora.accounting import epsilon_of

        privacy = config.privacy
        if isinstance(privacy, NoPrivacy):
            return math.inf, "none"
        report = epsilon_of(
            event,
            privacy.target_delta,
            adjacency=privacy.adjacency,
            accountant=privacy.accountant,
            unit=privacy.unit,
        )
        return report.epsilon, report.accountant

    def calibrate(self, make: Callable[[float], Event], config: FedLoraConfig) -> float:
        """Return the noise multiplier at which the whole run's event meets the target."""
        from fedlora.accounting import calibrate_noise_multiplier

        privacy = config.privacy
        if isinstance(privacy, NoPrivacy) or privacy.target_epsilon is None:
            raise PrivacyParameterError("privacy.target_epsilon: missing; there is nothing to calibrate for")
        steps = total_steps(config)
        return calibrate_noise_multiplier(
            lambda noise: make(noise).times(steps),
            privacy.target_epsilon,
            privacy.target_delta,
            adjacency=privacy.adjacency,
            accountant_name=privacy.accountant,
        )


def to_yaml(config: FedLoraConfig) -> str:
    """Return a configuration as YAML that `load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(config_container(config)))


def save_resolved(config: FedLoraConfig, path: str | Path, notes: tuple[str, ...] = ()) -> Path:
    """Write a configuration durably (temporary file, fsync, rename), with notes as comments.

    Returns:
        The path written.
    """
    target = Path(path)
    head = [f"# config_hash: {config_hash(config)}", *(f"# {' '.join(note.split())}" for note in notes)]
    write_durably(target, "\n".join([*head, to_yaml(config)]).encode())
    return target
