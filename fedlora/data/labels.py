"""Label names: where they come from, how they are written, and the check of a task's columns."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from fedlora.config.schema import DataConfig, ModelConfig
from fedlora.data.rows import Rows
from fedlora.errors import DataError
from fedlora.names import LABELLED_TASKS

LONGEST_NUMBER: Final = 18
"""Digits of a label that is read as a number; a longer one is a name."""


def label_names(
    model_config: ModelConfig, data_config: DataConfig, rows: Rows | None
) -> tuple[str, ...] | None:
    """Return the public label names in order, or None where the task has none.

    Also refuses records that lack the task's columns, before anything else is done with them. Names
    come from `data.labels`; otherwise from the records of a simulated data set (the label set is then
    public). Without either, labels must be numbers below `model.num_labels`.

    Raises:
        DataError: if columns are missing, or names would have to be read off one site's own records.
    """
    if rows is not None:
        check_columns(model_config, data_config, rows)
    if model_config.task not in LABELLED_TASKS or model_config.num_labels == 1:
        return None
    if data_config.labels is not None:
        return data_config.labels
    if rows is None or (data_config.partition is None and not data_config.marked_public):
        if model_config.num_labels is not None:
            return None
        raise DataError(
            "data.labels (or model.num_labels) must be stated: reading the label set off a site's own "
            "records would reveal which labels it has"
        )
    role = "tags" if model_config.task == "token-classification" else "label"
    found: set[str] = set()
    for place, value in enumerate(rows.column(role)):
        several = value.split() if role == "tags" and isinstance(value, str) else value
        parts = several if isinstance(several, (list, tuple)) else [several]
        try:
            found |= {label_text(part) for part in parts}
        except DataError as fault:
            raise DataError(f"{rows.origin(place)}: {fault}") from None
    if len(found) == 1:
        raise DataError(
            "the records have one label only, and a classification needs two; state data.labels with every label, or "
            "set model.num_labels to 1 for a regression"
        )
    if not found:
        if model_config.num_labels is not None:
            return None
        raise DataError(
            "there are no records to read the label set off; state data.labels or model.num_labels"
        )
    if all(text.removeprefix("-").isdecimal() and len(text) <= LONGEST_NUMBER for text in found):
        return tuple(sorted(found, key=int))
    return tuple(sorted(found))


def check_columns(model_config: ModelConfig, data_config: DataConfig, rows: Rows) -> None:
    """Refuse records that lack the columns of the task that `model.task` names (no tokenizer needed).

    Raises:
        DataError: listing the columns that are missing and those that are there.
    """
    from fedlora.data.tasks import build_task

    build_task(model_config, data_config, None).check_rows(rows)


def label_text(value: Any) -> str:
    """Return a label's name: text without surrounding blanks, numbers without a fraction of 0.

    Raises:
        DataError: for an empty or undefined label, or one that is neither text nor a number.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool):
        value = int(value)
    if not isinstance(value, (str, int, float, np.integer)):
        raise DataError(f"a label must be text or a number, not {type(value).__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError("the label is empty (no finite number); repair or remove the record")
    text = str(value).strip()
    if not text or text == "nan":
        raise DataError("the label is empty; repair or remove the record")
    return text
