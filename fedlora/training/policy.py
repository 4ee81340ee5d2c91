"""The data owner's own rules: what a server may ask of this trainer, checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedlora.adapters.heads import covered
from fedlora.config.schema import FedLoraConfig, NoPrivacy
from fedlora.errors import PolicyRefusedError
from fedlora.wire.payload import AdapterLayout

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Policy:
    """What a site allows; every rule is checked against the request before a record is read.

    Attributes:
        mechanisms: allowed mechanism kinds; None allows every private one.
        min_noise_multiplier: least noise multiplier for record-level noise; None for no bound beyond the budget.
        base_fingerprints: allowed base models by sha256; None allows any.
        max_rounds: largest round number served in one run.
        max_steps_per_round: largest number of optimiser steps a round.
        allow_no_privacy: serve runs with `privacy.unit: none` (public data only).
        allow_client_unit: serve client-level privacy whose noise is added elsewhere.
        allow_seeded_noise: serve the test-only noise source; never in a deployment.
        allow_remote_code: serve models that bring their own Python code.
        target_modules: module names that may be trained; empty allows any.
    """

    mechanisms: frozenset[str] | None = None
    min_noise_multiplier: float | None = None
    base_fingerprints: frozenset[str] | None = None
    max_rounds: int | None = None
    max_steps_per_round: int | None = None
    allow_no_privacy: bool = False
    allow_client_unit: bool = False
    allow_seeded_noise: bool = False
    allow_remote_code: bool = False
    target_modules: frozenset[str] = frozenset()

    @classmethod
    def simulation(cls) -> Policy:
        """Return the policy of a simulation: the configuration's owner owns the data too."""
        return cls(
            allow_no_privacy=True, allow_client_unit=True, allow_seeded_noise=True, allow_remote_code=True
        )

    def check_config(self, config: FedLoraConfig) -> None:
        """Check a run's configuration.

        Raises:
            PolicyRefusedError: naming the rule, what was asked and what is allowed.
        """
        self._check_unit(config)
        kind = config.mechanism.kind
        if self.mechanisms is not None and kind not in self.mechanisms:
            raise PolicyRefusedError(
                f"policy.mechanisms: asked for {kind}; allowed {', '.join(sorted(self.mechanisms))}"
            )
        if config.model.trust_remote_code and not self.allow_remote_code:
            raise PolicyRefusedError(
                "policy.allow_remote_code: the run asks to execute the model's own code; refused"
            )
        if not isinstance(config.privacy, NoPrivacy) and config.training.sampling != "poisson":
            raise PolicyRefusedError(
                "training.sampling: shuffled batches have no amplification by sampling and their accounting is "
                "refused under privacy; use sampling: poisson"
            )

    def _check_unit(self, config: FedLoraConfig) -> None:
        privacy = config.privacy
        if isinstance(privacy, NoPrivacy):
            if not self.allow_no_privacy:
                raise PolicyRefusedError(
                    "policy.allow_no_privacy: the run has privacy.unit none; this site refuses"
                )
            return
        if privacy.unit == "client" and not self.allow_client_unit:
            raise PolicyRefusedError(
                "policy.allow_client_unit: the run protects whole clients with noise added elsewhere; this site refuses"
            )
        if privacy.noise_source != "os" and not self.allow_seeded_noise:
            raise PolicyRefusedError(
                f"policy.allow_seeded_noise: asked for noise_source {privacy.noise_source}, which gives no privacy; "
                "use noise_source: os"
            )
        if config.mechanism.kind == "none" and privacy.unit == "record":
            raise PolicyRefusedError("mechanism none adds no noise; refused under privacy.unit record")
        low = self.min_noise_multiplier
        got = privacy.noise_multiplier
        if low is not None and (got is None or not (got >= low)):
            raise PolicyRefusedError(
                f"policy.min_noise_multiplier: asked for {got}; this site allows {low} or more"
            )

    def check_round(self, server_round: int, steps: int) -> None:
        """Check the numbers of one round.

        Raises:
            PolicyRefusedError: if the round number or its steps are beyond what is allowed.
        """
        if self.max_rounds is not None and server_round > self.max_rounds:
            raise PolicyRefusedError(
                f"policy.max_rounds: asked for round {server_round}; allowed {self.max_rounds}"
            )
        if self.max_steps_per_round is not None and steps > self.max_steps_per_round:
            raise PolicyRefusedError(
                f"policy.max_steps_per_round: asked for {steps} steps; allowed {self.max_steps_per_round}"
            )

    def check_base(self, fingerprint: str) -> None:
        """Check the base model.

        Raises:
            PolicyRefusedError: if its fingerprint is not on the list.
        """
        if self.base_fingerprints is not None and fingerprint not in self.base_fingerprints:
            raise PolicyRefusedError(
                f"policy.base_fingerprints: base model {fingerprint[:16]} is not allowed here; add it to the list"
            )

    def check_joint_noise(self, config: FedLoraConfig, parts: Sequence[float]) -> None:
        """Check the noise of what is clipped in parts: several Gaussian releases of one step are one with less noise.

        Args:
            config: the run's configuration.
            parts: noise multiplier of each part that is clipped alone; jointly 1 / sqrt(sum of 1 / sigma^2).

        Raises:
            PolicyRefusedError: if the joint release has less noise than this site asks for.
        """
        low, privacy = self.min_noise_multiplier, config.privacy
        if low is None or len(parts) <= 1 or isinstance(privacy, NoPrivacy) or privacy.unit != "record":
            return
        joint = 1.0 / math.sqrt(sum(1.0 / sigma**2 for sigma in parts))
        if not (joint >= low):
            each = ", ".join(sorted({f"{sigma:.4g}" for sigma in parts}))
            raise PolicyRefusedError(
                f"policy.min_noise_multiplier: {len(parts)} parts are clipped alone with noise {each}, which is "
                f"{joint:.4g} for their joint release; this site allows {low} or more"
            )

    def check_trained(self, layout: AdapterLayout) -> None:
        """Check what a model's adapter would train, a head that it found by itself included.

        Raises:
            PolicyRefusedError: naming a module that is not on the list.
        """
        allowed = self.target_modules
        if not allowed:
            return
        extra = {name.partition("|")[0] for name in layout.extra}
        beyond = [name for name in sorted(extra) if not covered(name, allowed)]
        if ALL_LINEAR not in allowed:
            beyond += [name for name in layout.modules if not covered(name, allowed)]
        if beyond:
            raise PolicyRefusedError(
                f"policy.target_modules: the run would train {beyond[0]}"
                + (f" and {len(beyond) - 1} more" if len(beyond) > 1 else "")
                + f"; allowed {', '.join(sorted(allowed))}"
            )
