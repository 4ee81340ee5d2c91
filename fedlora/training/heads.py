"""Trained heads, seen through public random sequences: where they start, where they move, how fast.

Everything here is measured on `public_records`: random tokens with random labels, the same for everybody. Nothing
private is looked at, so none of it costs privacy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.records import batch_to_device
from fedlora.adapters.session import without_direction
from fedlora.config.schema import FedLoraConfig
from fedlora.data import Encoded, Task
from fedlora.mechanisms.group_weights import START_LOGIT, head_scale, round_significant
from fedlora.names import block_name
from fedlora.training.groups import public_records, row_norm

if TYPE_CHECKING:
    from fedlora.training.session import Parts

_LOG = logging.getLogger(__name__)
_BATCH: Final = 16

LOGIT_RATE: Final = 4.0
"""What `head_rates: auto` makes of a server's learning rate: an entry of a head moves by 4 lr / (its input's norm)."""


def new_heads(config: FedLoraConfig, adapted: AdaptedModel) -> dict[str, nn.Linear]:
    """Return the trained linear leaves by path, without the matrices that `dp_sgd` trains, which are no heads."""
    targets = config.adapter.target_modules if config.mechanism.kind == "dp_sgd" else ()
    return {
        name: leaf
        for name, leaf in adapted.leaves.items()
        if isinstance(leaf, nn.Linear) and not any(f".{name}".endswith(f".{target}") for target in targets)
    }


def head_inputs(
    heads: Mapping[str, nn.Linear], task: Task, adapted: AdaptedModel, records: Sequence[Encoded]
) -> dict[str, torch.Tensor]:
    """Return what reaches each head and tells in the loss, (rows, in) in float64.

    Models that apply their head to every token and then take one token's logits have one row for each record here.

    Args:
        heads: module path to the leaf.
        task: collates and computes losses.
        adapted: the model; left as it is.
        records: encoded; the rows are PUBLIC where they are.
    """
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in heads}
    was_training = adapted.model.training
    adapted.model.eval()
    for first in range(0, len(records), _BATCH):
        seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        handles = [leaf.register_forward_hook(partial(_keep, seen, name)) for name, leaf in heads.items()]
        batch = batch_to_device(task.collate(list(records[first : first + _BATCH])), adapted.device)
        try:
            with torch.enable_grad():
                loss = task.per_record_loss(adapted.model, batch).sum()
                if loss.requires_grad:
                    torch.autograd.backward(loss)
        finally:
            for handle in handles:
                handle.remove()
        for name, (rows, out) in seen.items():
            used = None if out.grad is None else out.grad.flatten(0, -2).abs().amax(-1) > 0
            parts[name].append(rows if used is None else rows[used])
    adapted.model.train(was_training)
    return {name: torch.cat(rows) for name, rows in parts.items() if rows}


def _keep(
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]],
    name: str,
    _leaf: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> None:
    """Note a leaf's input rows and its output, which is to keep its gradient."""
    if not output.requires_grad:
        output.requires_grad_()
    output.retain_grad()
    seen[name] = inputs[0].detach().double().flatten(0, -2), output


def center_heads(config: FedLoraConfig, task: Task, adapted: AdaptedModel) -> dict[str, torch.Tensor]:
    """Keep trained heads from moving along the common part of their inputs (`adapter.head_input: centered`).

    A transformer's pooled features share a large common vector (for all-MiniLM-L6-v2 three quarters of their energy),
    which tells no two records apart. In a head's gradient g x^T it takes up the clip norm and receives noise. Its
    direction is measured on public random sequences, so leaving it out costs no privacy.

    Args:
        config: PUBLIC.
        task: the run's task.
        adapted: its `left_out` is filled.

    Returns:
        Weight's name to the unit vector u of its input's mean. PUBLIC.

    Reference: Sun, Suresh and Menon, The Importance of Feature Preprocessing for Differentially Private Linear
    Optimization, arXiv:2307.11106, where the centre is found privately.
    """
    found = {}
    for name, rows in head_inputs(new_heads(config, adapted), task, adapted, public_records(task)).items():
        mean = rows.mean(0)
        size = float(mean.norm())
        if size > 0 and math.isfinite(size):
            found[block_name(name, "weight")] = (mean / size).to(adapted.accumulate_dtype)
    adapted.left_out.update(found)
    return found


def start_heads_at_typical_size(config: FedLoraConfig, task: Task, adapted: AdaptedModel) -> dict[str, float]:
    """Scale trained heads up to a size at which adapters learn at once (`adapter.head_start: typical`).

    A new head's logits can be so flat that the adapters behind it receive next to no gradient for many rounds. Its rows
    are scaled, never down, until a feature aligned with one gives the logit 2. The features are those of public random
    sequences (what `head_input` leaves out taken off), so the start depends on nothing private.

    Args:
        config: PUBLIC.
        task: the run's task.
        adapted: its trained linear leaves are scaled in place.

    Returns:
        Module path to its factor, at least 1. PUBLIC.
    """
    heads = new_heads(config, adapted)
    factors = {}
    for name, rows in head_inputs(heads, task, adapted, public_records(task, 16)).items():
        feature_norm = _input_norm(adapted, name, rows)
        factors[name] = round_significant(head_scale(row_norm(heads[name].weight), feature_norm, START_LOGIT))
        heads[name].weight.data.mul_(factors[name])
    _LOG.info("heads start scaled by %s", factors)
    return factors


def with_head_rates(config: FedLoraConfig, parts: Parts) -> FedLoraConfig:
    """Return the configuration with `server_optimizer.head_rates: auto` replaced by numbers.

    An adaptive step moves every entry of a head's matrix by the learning rate, whatever its inputs are, and so a logit
    by the learning rate times the input's norm: 1.2 for one model's features, 50 for another's. Each head's rate is 4
    over the root mean square norm of its (centered) inputs.
    """
    settings = config.federation.server_optimizer
    if settings.head_rates != "auto":
        return config
    rates = {}
    for name, rows in head_inputs(
        new_heads(config, parts.adapted), parts.task, parts.adapted, public_records(parts.task)
    ).items():
        norm = _input_norm(parts.adapted, name, rows)
        if norm > 0 and math.isfinite(norm):
            rates[name] = round_significant(LOGIT_RATE / norm)
    _LOG.info("heads step at %s times the server's learning rate", rates)
    changed = config.federation.model_copy(
        update={"server_optimizer": settings.model_copy(update={"head_rates": rates})}
    )
    return config.model_copy(update={"federation": changed})


def _input_norm(adapted: AdaptedModel, head: str, rows: torch.Tensor) -> float:
    """Return the root mean square norm of a head's inputs without what is left out of them."""
    direction = adapted.left_out.get(block_name(head, "weight"))
    used = rows if direction is None else without_direction(rows, direction.to(rows))
    return math.sqrt(float(used.square().sum(1).mean()))
