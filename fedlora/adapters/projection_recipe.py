"""The shared projection of one noisy-projection round: a published seed from fresh entropy, never from a recipe.

Reference: LoRA and Privacy: When Random Projections Help (and When They Don't), Def. 3 (M2), Alg. 3. The privacy
amplification lives in the projection's randomness, so it must be drawn after the weights of its step are fixed and
share no generator with noise or sampling.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import replace
from typing import Final

import torch

from fedlora.adapters.philox_normal import normals
from fedlora.config.schema import FedLoraConfig
from fedlora.errors import PrivacyParameterError, RankMismatchError
from fedlora.wire.payload import AdapterPayload

SEED_NOTE: Final = "projection_seed"
"""Name of the note of a payload that carries the round's seed."""
_SEED_BYTES: Final = 32


def new_projection_seed() -> str:
    """Return a fresh public seed from the operating system's entropy, as 64 hex digits.

    Draw it after the weights of its step are fixed: a seed known in advance lets the weights be chosen so that a
    victim's gradient lies in the projection's row space.
    """
    return secrets.token_hex(_SEED_BYTES)


def projection_recipe(seed: str) -> str:
    """Return the sha256 by which updates name the projection that they were made under."""
    return hashlib.sha256(f"fedlora noisy_projection|1|{_checked(seed)}".encode()).hexdigest()


def seed_of_test_run(config: FedLoraConfig) -> int | None:
    """Return the seed from which a run with the test noise source draws its projections; None for real entropy."""
    return config.run.seed if config.seeded_noise else None


def with_projection(payload: AdapterPayload, test_seed: int | None = None) -> AdapterPayload:
    """Return the payload with a fresh shared projection; call it once a round, when the payload's weights are final.

    Every round asks anew, a repeated or resumed one too: two releases under one projection are not covered.

    Args:
        payload: the global adapter.
        test_seed: TEST ONLY (`seed_of_test_run`). Each projection then follows from the one before it.
    """
    if test_seed is None:
        seed = new_projection_seed()
    else:
        text = f"fedlora test projection|{test_seed}|{payload.notes.get(SEED_NOTE, '')}"
        seed = hashlib.sha256(text.encode()).hexdigest()
    notes = {**payload.notes, SEED_NOTE: seed}
    return replace(payload, recipe=projection_recipe(seed), notes=notes)


def projection_from_seed(seed: str, module: str, rank: int, in_features: int) -> torch.Tensor:
    """Return the shared projection A of one module, (rank, in_features) float32, the same bits everywhere.

    Args:
        seed: 64 hex digits of `new_projection_seed`, published with the step.
        module: module path.
        rank: r.
        in_features: width.

    Raises:
        PrivacyParameterError: if the seed is not 64 hex digits.
        RankMismatchError: if the rank does not fit.
    """
    check_projection(rank, in_features)
    name = f"fedlora noisy_projection|1|{_checked(seed)}|{module}|{rank}|{in_features}"
    values = torch.from_numpy(normals(name, rank * in_features)).reshape(rank, in_features)
    return (values / math.sqrt(rank)).float()


def check_projection(rank: int, in_features: int) -> None:
    """Refuse a projection whose A A^T is singular.

    Raises:
        RankMismatchError: unless 1 <= rank <= in_features.
    """
    if not 1 <= rank <= in_features:
        raise RankMismatchError(
            f"projection rank: got {rank} for in-width {in_features}; allowed are 1 to {in_features} "
            "(A A^T is singular above); lower adapter.rank"
        )


def _checked(seed: object) -> str:
    try:
        if isinstance(seed, str) and len(bytes.fromhex(seed)) == _SEED_BYTES:
            return seed.lower()
    except ValueError:
        pass
    raise PrivacyParameterError(
        "projection seed: got something else than 64 hex digits; draw it with new_projection_seed"
    )
