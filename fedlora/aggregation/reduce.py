"""Sums formed on a node, before anything travels (linear modes, equal weights)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedlora.aggregation.running_sum import RunningSum
from fedlora.errors import InconsistentRepliesError, WireError
from fedlora.wire.checks import check_payload
from fedlora.wire.payload import AdapterLayout, AdapterPayload, PayloadKind


def reduce_payloads(
    updates: Mapping[str, AdapterPayload],
    layout: AdapterLayout,
    recipe: str | None,
    kind: PayloadKind,
) -> tuple[AdapterPayload | None, tuple[str, ...], dict[str, str]]:
    """Sum a node's updates in client-id order; bad ones are left out by name.

    Args:
        updates: client id to update.
        layout: PUBLIC shapes.
        recipe: sha256 of the shared recipe, if one is shared.
        kind: coordinates of the updates; a linear mode's uplink.

    Returns: (sum or None if nothing was usable, summed clients in id order, client to reason for the rest).

    Raises:
        InconsistentRepliesError: if sums of such updates mean nothing.
    """
    if kind not in ("lora_b", "tangent", "projected"):
        raise InconsistentRepliesError(f"sums of {kind!r} payloads mean nothing; send each client's own")
    total, used, bad = RunningSum(), [], {}
    for client in sorted(updates):
        try:
            check_payload(updates[client], layout, recipe, kind=kind, client=client)
        except WireError as error:
            bad[client] = f"{type(error).__name__}: {error}"
            continue
        if updates[client].notes.get("num_examples") == 0:
            bad[client] = f"client {client!r} has no examples; its update is skipped"
            continue
        total.add(updates[client].blocks)
        used.append(client)
    if not used:
        return None, (), bad
    blocks = {name: block.astype(np.float32) for name, block in total.total().items()}
    return replace(updates[used[0]], blocks=blocks, notes={}), tuple(used), bad
