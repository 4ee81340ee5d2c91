"""Public clip weights per group (`privacy.group_weights: auto`), measured on public random sequences.

The norms that the rule needs are measured through the same model and mechanism on random tokens with random
labels; no private record is looked at, so the weights cost no privacy. The resolved configuration holds
the numbers, so that server and clients clip alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from fedlora.adapters.blocks import FlatBlocks
from fedlora.adapters.deferred import DeferredGradient, OuterGradient
from fedlora.adapters.records import RecordAxis, batch_to_device
from fedlora.config.schema import FedLoraConfig, RecordPrivacy
from fedlora.data import Encoded, Task
from fedlora.mechanisms.base import Mechanism, build_mechanism
from fedlora.mechanisms.group_weights import (
    TRAINED_LOGIT,
    head_scale,
    mechanism_dimension,
    neyman_weights,
)
from fedlora.mechanisms.per_record import per_record_gradients
from fedlora.names import GROUP_ADAPTERS, GROUP_HEAD

if TYPE_CHECKING:
    from fedlora.training.session import Parts

_LOG = logging.getLogger(__name__)
_RECORDS: Final = 64
_TOKENS: Final = 64
_SEED: Final = 20240607
"""Fixed and public: everybody who resolves a configuration measures the same sequences."""


def public_records(task: Task, count: int = _RECORDS, tokens: int = _TOKENS) -> list[Encoded]:
    """Make random public records in a task's own columns; nothing of them comes from data.

    Args:
        task: the run's task.
        count: number of records.
        tokens: about so many tokens each (at most the window).
    """
    generator = np.random.Generator(np.random.Philox(_SEED))
    rows = [_row(task, generator, min(tokens, max(8, task.window))) for _ in range(count)]
    return [task.encode(row) for row in rows]


def _row(task: Task, generator: np.random.Generator, tokens: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column in task.required_columns():
        if column == "label":
            row[column] = _label(task, generator)
        elif column == "tags":
            row[column] = [_label(task, generator) for _ in range(max(1, tokens // 2))]
        elif column == "tokens":
            row[column] = _text(task, generator, tokens).split()[: max(1, tokens // 2)]
        elif column == "image":
            row[column] = generator.integers(0, 256, size=(64, 64, 3), dtype=np.uint8)
        else:
            row[column] = _text(task, generator, tokens)
    if "tokens" in row and "tags" in row:
        words = [word for word in row["tokens"] if word] or ["word"]
        row["tokens"], row["tags"] = words, [_label(task, generator) for _ in words]
    return row


def _label(task: Task, generator: np.random.Generator) -> Any:
    if task.labels is not None:
        return task.labels[int(generator.integers(len(task.labels)))]
    number = task.model_config.num_labels
    return float(generator.random()) if number == 1 else int(generator.integers(number or 2))


def _text(task: Task, generator: np.random.Generator, tokens: int) -> str:
    size = int(getattr(task.tokenizer, "vocab_size", 0) or len(task.tokenizer))
    ids = generator.integers(0, size, size=tokens).tolist()
    special = set(getattr(task.tokenizer, "all_special_ids", ()))
    text = task.tokenizer.decode([one for one in ids if one not in special])
    return str(text).encode("utf-8", "ignore").decode("utf-8") or "public"


def group_norms(mechanism: Mechanism, parts: Parts) -> dict[str, float]:
    """Return the root mean square of public records' gradient norms per group, at the adapter's start.

    A new head is scaled to a trained head's size first (see `fedlora.mechanisms.group_weights`): the adapters'
    gradients come through its weights, which are tiny at the start and grow with training.

    Args:
        mechanism: built with equal weights.
        parts: loaded model, task and adapter.
    """
    records = public_records(parts.task)
    adapted = parts.adapted
    state = mechanism.first_state(adapted)
    low = state.values.like(state.values.flat.to(adapted.compute_dtype, copy=True))
    sums: dict[str, float] = {}
    for first in (None, *range(0, len(records), 16)):
        part = records[:16] if first is None else records[first : first + 16]
        axis = RecordAxis.of([len(part)], adapted.device)
        batch = batch_to_device(parts.task.collate(part), adapted.device)
        gradients = per_record_gradients(
            adapted,
            mechanism.coordinates,
            mechanism.metric,
            mechanism.stages.views(mechanism, state, low, axis),
            {name: low[name] for name in mechanism.coordinates.extras},
            axis,
            lambda batch=batch: parts.task.per_record_loss(adapted.model, batch),  # type: ignore[misc]
            mechanism.left_out,
        )
        if first is None:
            _scale_head(low, gradients.deferred)
            continue
        for group, squared in mechanism.measured(gradients, state).squared_norms.items():
            sums[group] = sums.get(group, 0.0) + float(squared.sum())
    return {group: math.sqrt(total / len(records)) for group, total in sums.items()}


def row_norm(matrix: torch.Tensor) -> float:
    """Return the root mean square norm of a matrix's rows."""
    return math.sqrt(float(matrix.double().square().sum(1).mean()))


def _scale_head(values: FlatBlocks, heads: Mapping[str, DeferredGradient]) -> None:
    """Scale trained matrices (not embeddings) up to a trained head's size, in place."""
    for name, gradient in heads.items():
        if isinstance(gradient, OuterGradient):
            rows = values[name][0].mT if gradient.transposed else values[name][0]
            feature_norm = math.sqrt(float(gradient.x.double().square().sum(2).mean()))
            values[name].mul_(head_scale(row_norm(rows), feature_norm, TRAINED_LOGIT))


def with_group_weights(config: FedLoraConfig, parts: Parts) -> FedLoraConfig:
    """Return the configuration with `group_weights: auto` replaced by numbers.

    Raises:
        PrivacyParameterError: if every public gradient norm is 0.
    """
    privacy = config.privacy
    if not isinstance(privacy, RecordPrivacy) or privacy.group_weights != "auto":
        return config
    if config.mechanism.kind == "noisy_projection" or getattr(config.mechanism, "per_layer_clip", False):
        return _with(config, privacy, "equal")
    probe = _with(config, privacy, "equal")
    mechanism = build_mechanism(probe, parts.adapted.layout, parts.adapted.left_out)
    if set(mechanism.metric.group_of.values()) != {GROUP_ADAPTERS, GROUP_HEAD}:
        return probe
    layout = parts.adapted.layout
    dimensions = {
        GROUP_ADAPTERS: sum(mechanism_dimension(mechanism.kind, spec) for spec in layout.modules.values()),
        GROUP_HEAD: sum(math.prod(shape) for shape in layout.extra.values()),
    }
    rule = neyman_weights(group_norms(mechanism, parts), dimensions)
    _LOG.info("group weights from public sequences: %s", dict(rule.weights))
    return _with(config, privacy, dict(rule.weights))


def _with(config: FedLoraConfig, privacy: RecordPrivacy, weights: Any) -> FedLoraConfig:
    return config.model_copy(update={"privacy": privacy.model_copy(update={"group_weights": weights})})
