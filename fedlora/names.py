"""Names that travel: wire keys, record names and environment variables, each written once."""

from __future__ import annotations

from typing import Final

WIRE_SCHEMA: Final = 1
"""Version of the message schema; a message of another version is refused."""

CONFIG_SCHEMA: Final = 1
"""Version of the YAML schema; older ones are migrated, newer ones refused."""

STATES_FOLDER: Final = "clients"
"""Where a simulation's run folder holds its clients' optimiser state."""

# Records of one Flower message.
ARRAYS: Final = "adapter"
META: Final = "meta"
METRICS: Final = "metrics"

# Keys of the meta record (ConfigRecord: str, int, float, bool, bytes and homogeneous lists only).
K_SCHEMA: Final = "wire-schema"
K_RUN_ID: Final = "run-id"
K_ROUND: Final = "server-round"
K_CONFIG: Final = "config-json"
K_CONFIG_HASH: Final = "config-hash"
K_CODE_HASH: Final = "code-hash"
K_PAYLOAD: Final = "payload-header"
K_CLIENTS: Final = "clients"
K_REPLY: Final = "reply-json"
K_ERROR: Final = "error-json"

# One block of a payload is named "<module path>|<block>".
BLOCK_SEPARATOR: Final = "|"
LORA_A: Final = "lora_A"
LORA_B: Final = "lora_B"
FRAME_OUT: Final = "q_out"
FRAME_IN: Final = "q_in"
CORE: Final = "core"
TANGENT_OUT: Final = "x_out"
TANGENT_IN: Final = "x_in"

# Groups of trainable parameters (public clip weights are given per group).
GROUP_ADAPTERS: Final = "adapters"
GROUP_HEAD: Final = "head"

LABELLED_TASKS: Final = frozenset({"sequence-classification", "token-classification", "image-classification"})
"""Tasks whose head has one output per label, and is trained unless `adapter.freeze_head` says otherwise."""

ENV_NUM_THREADS: Final = "OMP_NUM_THREADS"
ENV_TRAINER_SOCKET: Final = "FEDLORA_TRAINER_SOCKET"
ENV_TRAINER_TOKEN: Final = "FEDLORA_TRAINER_TOKEN_FILE"  # noqa: S105 (the name of a variable)
ENV_ROSTER: Final = "FEDLORA_ROSTER_FILE"

RUN_FOLDER_UNWRITABLE: Final = "the run folder cannot be written"
"""Begins the message of a run that could not even write why it ended; it travels as Flower's text only."""


def block_name(module: str, block: str) -> str:
    """Return the payload name of one block of one module.

    Example:
        >>> block_name("encoder.layer.0.query", LORA_B)
        'encoder.layer.0.query|lora_B'
    """
    return f"{module}{BLOCK_SEPARATOR}{block}"


def split_block_name(name: str) -> tuple[str, str]:
    """Split a payload name into (module, block).

    Raises:
        ValueError: if the name has no separator.

    Example:
        >>> split_block_name("score|weight")
        ('score', 'weight')
    """
    module, separator, block = name.rpartition(BLOCK_SEPARATOR)
    if not separator:
        raise ValueError(f"block name {name!r} has no {BLOCK_SEPARATOR!r}")
    return module, block
