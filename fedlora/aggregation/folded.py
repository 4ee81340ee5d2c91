"""`mean_b` for the noisy projection: one shared, fresh projection a round, folded into one low-rank adapter.

Clients send lora_B-shaped steps U_k under the round's projection A_t; mean(s U_k A_t) = s mean(U_k) A_t is exact. The
global adapter is the sum of all rounds' steps as factors of bounded rank, so a client that joins late or a
server that resumes needs nothing else. The next round's seed is drawn here, after the new weights are final.

Reference: LoRA and Privacy: When Random Projections Help (and When They Don't), Def. 3 (M2), Alg. 3.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from fedlora.adapters.projection_recipe import (
    SEED_NOTE,
    projection_from_seed,
    projection_recipe,
    with_projection,
)
from fedlora.aggregation.factors import Pair, pair_of, rank_frames, write_pair
from fedlora.aggregation.linear import MeanB, Means
from fedlora.aggregation.server_optimizer import ServerOptimizer
from fedlora.aggregation.types import Float64, Outcome
from fedlora.errors import InconsistentRepliesError
from fedlora.names import LORA_A, LORA_B, block_name
from fedlora.wire.payload import AdapterPayload, PayloadKind


class FoldedMean(MeanB):
    """Exact mean of steps under one shared projection; the global adapter is their folded, truncated sum.

    Args:
        optimizer: the server's.
        test_seed: TEST ONLY. Makes projections repeatable (see `with_projection`).
    """

    kind = "mean_b"
    uplink: PayloadKind = "projected"
    downlink: PayloadKind = "factors"

    def __init__(self, optimizer: ServerOptimizer, test_seed: int | None = None) -> None:
        """Bind the parts."""
        super().__init__(optimizer)
        self.test_seed = test_seed

    def begin(self, current: AdapterPayload) -> None:
        """Start a round at `current`.

        Raises:
            InconsistentRepliesError: if its projection's seed and recipe do not fit.
        """
        seed = current.notes.get(SEED_NOTE)
        if not isinstance(seed, str) or current.recipe != projection_recipe(seed):
            raise InconsistentRepliesError(
                "noisy_projection: the global adapter carries no projection of its own; start from "
                "mechanism.initial_payload, or draw one with with_projection"
            )
        super().begin(current)

    def updates(self, means: Means) -> dict[str, Float64]:
        """Clients sent steps of lora_B and values of the extras."""
        return {
            name: mean if name.endswith(block_name("", LORA_B)) else mean - self.current.blocks[name]
            for name, mean in means.items()
        }

    def apply(self, updates: Means) -> Outcome:
        """Fold the mean step, truncate to the rank that travels, then draw the next round's projection."""
        current = self.current
        blocks = dict(current.blocks)
        lost = total = 0.0
        for module, spec in current.modules.items():
            step = self._optimizer.step_block(module, np.asarray(updates[block_name(module, LORA_B)]))
            change = torch.from_numpy(np.asarray(step, dtype=np.float64)) * spec.scaling
            seed = str(current.notes[SEED_NOTE])
            a = projection_from_seed(seed, module, change.shape[1], spec.in_features).double()
            old = pair_of(current, module)
            frames, dropped = rank_frames(
                Pair(torch.cat([old.left, change], 1), torch.cat([old.right, a], 0)), spec.rank
            )
            lost += dropped**2
            total += dropped**2 + float(frames.core.square().sum())
            blocks |= write_pair(module, Pair(frames.q_out @ frames.core, frames.q_in.mT), spec.scaling)
        factors = {block_name(module, key) for module in current.modules for key in (LORA_A, LORA_B)}
        for name in blocks.keys() - factors:
            moved = self._optimizer.step_block(name, np.asarray(updates[name]))
            blocks[name] = (current.blocks[name] + moved).astype(np.float32)
        bare = replace(current, blocks=blocks, notes={SEED_NOTE: current.notes[SEED_NOTE]})
        payload = with_projection(bare, self.test_seed)
        return Outcome(payload, residual=math.sqrt(lost / total) if total > 0 else 0.0)
