"""The tasks, one module each, and the function that builds the one a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from fedlora.config.schema import DataConfig, ModelConfig
from fedlora.data.tasks.base import Task
from fedlora.errors import ConfigError

TASKS: Final = {
    "sequence-classification": ("sequence_classification", "SequenceClassification"),
    "token-classification": ("token_classification", "TokenClassification"),
    "causal-lm": ("causal_lm", "CausalLm"),
    "instruction": ("instruction", "Instruction"),
    "seq2seq": ("seq2seq", "Seq2Seq"),
    "image-classification": ("image_classification", "ImageClassification"),
}
"""Task name to (module, class)."""


def build_task(
    model_config: ModelConfig,
    data_config: DataConfig,
    tokenizer: Any,
    labels: Sequence[str] | None = None,
) -> Task:
    """Build the task that `model.task` names.

    Args:
        model_config: the `model` section.
        data_config: the `data` section.
        tokenizer: from `load_base` or `load_tokenizer` (an image processor for images).
        labels: label names in order, as `label_names` gives them; `data.labels` otherwise.

    Raises:
        ConfigError: for an unknown task.
    """
    if model_config.task not in TASKS:
        raise ConfigError(f"model.task: {model_config.task!r} is unknown; known are {', '.join(TASKS)}")
    module, name = TASKS[model_config.task]
    built: Task = getattr(import_module(f"{__name__}.{module}"), name)(
        model_config, data_config, tokenizer, labels
    )
    return built
