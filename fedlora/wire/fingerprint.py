"""One sha256 that says whether two payloads are the same, bit for bit."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

import numpy as np

from fedlora.wire.payload import AdapterPayload


def payload_fingerprint(payload: AdapterPayload) -> str:
    """Hash kind, recipe, base model, specs and every number (notes are left out).

    Returns: sha256, hexadecimal. Equal payloads give equal hashes on every machine.
    """
    digest = hashlib.sha256()
    specs = {
        path: [spec.out_features, spec.in_features, spec.rank, spec.scaling]
        for path, spec in sorted(payload.modules.items())
    }
    head = [payload.kind, payload.recipe, payload.base_fingerprint, specs]
    digest.update(json.dumps(head, separators=(",", ":")).encode())
    for name in sorted(payload.blocks):
        block = payload.blocks[name]
        digest.update(_heading(name, block.shape))
        digest.update(np.ascontiguousarray(block, dtype="<f4").tobytes())
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _heading(name: str, shape: tuple[int, ...]) -> bytes:
    """Return what stands before a block's numbers; a round hashes the same names for each of its clients."""
    return json.dumps([name, list(shape)]).encode()
