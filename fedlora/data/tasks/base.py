"""What every task shares: encoded records, labels, truncation, padding and evaluation loops."""

from __future__ import annotations

import math
import string
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from torch import Tensor

from fedlora.adapters.models import AUTO_CLASSES
from fedlora.config.schema import DataConfig, ModelConfig
from fedlora.data.labels import LONGEST_NUMBER, label_names, label_text
from fedlora.data.rows import Row, Rows
from fedlora.errors import DataError

IGNORED: Final = -100
"""Label of a position that no loss looks at."""

CHARACTERS_PER_TOKEN: Final = 64
"""Texts are cut to this many characters per allowed token before tokenisation (bounded time)."""


@dataclass(frozen=True)
class Encoded:
    """SENSITIVE. One record, ready to collate.

    Attributes:
        input_ids: token ids (empty for images).
        labels: one label, or one per token (IGNORED where no loss is wanted).
        targets: number of positions that the loss looks at; 0 means loss 0.
        cut: the record was longer than the window and was truncated.
        extras: further inputs (token_type_ids, pixel_values, ...).
        prompt: tokens to generate from, where answers are generated.
        reference: expected answer, where answers are generated.
    """

    input_ids: list[int]
    labels: int | float | list[int]
    targets: int
    cut: bool = False
    extras: Mapping[str, Any] = field(default_factory=dict)
    prompt: list[int] | None = None
    reference: str | None = None

    def __len__(self) -> int:
        """Return the number of tokens (1 for an image), for grouping by length."""
        return max(1, len(self.input_ids))


@dataclass(frozen=True)
class EncodeReport:
    """SENSITIVE. Counts over encoded records; under DP they stay with the client."""

    records: int
    cut: int
    without_target: int


def encode_report(encoded: Sequence[Encoded]) -> EncodeReport:
    """Count records, truncated ones, and those with nothing to learn."""
    return EncodeReport(
        records=len(encoded),
        cut=sum(record.cut for record in encoded),
        without_target=sum(record.targets == 0 for record in encoded),
    )


class EncodedRows(Sequence[Encoded]):
    """SENSITIVE. Records encoded on first use; up to `keep` tokens of them stay in memory (36 bytes each)."""

    def __init__(self, task: Task, rows: Rows, keep: int = 4_000_000) -> None:
        """Wrap `rows`; nothing is read yet."""
        self._task, self._rows, self._room = task, rows, keep
        self._known: dict[int, Encoded] = {}

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        """Return one encoded record, or a list of them for a slice.

        Raises:
            DataError: naming file and row of a record that does not fit the task.
        """
        if isinstance(place, slice):
            return self.take(range(*place.indices(len(self))))
        return self.take([int(place)])[0]

    def take(self, places: Sequence[int]) -> list[Encoded]:
        """Return some records, encoded; the unknown ones are read in one pass.

        Raises:
            DataError: naming file and row of a record that does not fit the task.
        """
        missing = list(dict.fromkeys(place for place in places if place not in self._known))
        fresh = dict(zip(missing, encode_rows(self._task, self._rows, missing), strict=True))
        for place, found in fresh.items():
            size = len(found) + sum(np.size(value) for value in found.extras.values()) // 8
            if size <= self._room:
                self._known[place] = found
                self._room -= size
        return [fresh[place] if place in fresh else self._known[place] for place in places]


def encode_rows(task: Task, rows: Rows, places: Sequence[int]) -> Iterator[Encoded]:
    """Encode some records, which are read in one pass, naming file and row of one that fails."""
    if not places:
        return  # no file is opened
    for place, row in zip(places, rows.read_many(places), strict=True):
        yield _encoded(task, rows, place, row)


def _encoded(task: Task, rows: Rows, place: int, row: Row) -> Encoded:
    try:
        return task.encode(row)
    except DataError as fault:
        raise DataError(f"{rows.origin(place)}: {fault}") from fault
    except MemoryError:
        raise
    except Exception as fault:
        # A tokenizer's or an image library's own words may quote the record.
        raise DataError(
            f"{rows.origin(place)}: the record cannot be encoded ({type(fault).__name__}); content withheld"
        ) from None


class Task(ABC):
    """One kind of job: its columns, how records become tensors, loss per record, and metrics."""

    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        model_config: ModelConfig,
        data_config: DataConfig,
        tokenizer: Any,
        labels: Sequence[str] | None = None,
    ) -> None:
        """Bind the task to a tokenizer; `labels` are the public label names in order."""
        self.model_config = model_config
        self.data_config = data_config
        self.tokenizer = tokenizer
        self.labels = tuple(labels) if labels is not None else data_config.labels
        self._template = check_template(data_config.template)

    @property
    def auto_model_class(self) -> str:
        """Name of transformers' class for this task."""
        return AUTO_CLASSES[self.model_config.task]

    def num_labels(self, rows: Rows | None = None) -> int | None:
        """Return the number of labels from the configuration or, failing that, from `rows`."""
        names = label_names(self.model_config, self.data_config, rows)
        if names is not None and self.labels is None:
            self.labels = names
        return len(names) if names is not None else self.model_config.num_labels

    @abstractmethod
    def encode(self, row: Row) -> Encoded:
        """Turn one record into numbers. SENSITIVE.

        Raises:
            DataError: naming the column that is missing or of the wrong kind, never its content.
        """

    @abstractmethod
    def collate(self, records: Sequence[Encoded]) -> dict[str, Tensor]:
        """Pad records to one batch on the CPU (right padding; padding is never learned from)."""

    @abstractmethod
    def per_record_loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return (records,) float32: each record's mean over its own targets, 0 if it has none.

        No record's loss depends on another record of the batch. SENSITIVE.
        """

    @abstractmethod
    def evaluate(self, model: Any, encoded: Sequence[Encoded], batch_size: int = 32) -> dict[str, float]:
        """Return metrics on records (public ones, unless the result stays with the data owner)."""

    def check_rows(self, rows: Rows) -> None:
        """Refuse a data set that lacks the task's columns, before any record is used.

        Raises:
            DataError: listing the columns that are missing and those that are there.
        """
        if len(rows) == 0:
            return
        have = rows.columns
        missing = [name for name in self.required_columns() if name not in have]
        if missing:
            raise DataError(
                f"{rows.origin(0).source}: task {self.name!r} needs the column(s) {', '.join(missing)}; "
                f"the columns are {', '.join(have)}; map them with data.columns (or data.template)"
            )

    def required_columns(self) -> tuple[str, ...]:
        """Return the columns that every record must have."""
        if self._template is None:
            return self.required
        return tuple(dict.fromkeys([*self._template, *self.required[1:]]))

    @property
    def window(self) -> int:
        """Longest record in tokens: data.max_length, but never beyond the model's window."""
        stated = int(getattr(self.tokenizer, "model_max_length", 0) or 0)
        wanted = self.data_config.max_length
        if stated <= 0 or stated > 10_000_000:
            if wanted is None:
                raise DataError("the model states no window; set data.max_length")
            return wanted
        return min(wanted, stated) if wanted is not None else stated

    def refuse_narrow(self, special: int) -> None:
        """Refuse a window without room for one token beside the special ones: tokenizers do not cut to it then.

        Raises:
            DataError: saying what is needed.
        """
        if self.window <= special:
            raise DataError(
                f"data.max_length: got {self.window}; allowed is at least {special + 1} for records of this kind "
                f"({special} special tokens and one of the text)"
            )

    def text_of(self, row: Row, role: str = "text") -> str:
        """Return a record's text: the template filled in, or the role's column."""
        if self._template is not None and self.data_config.template is not None:
            return self.data_config.template.format(
                **{name: field_text(row, name) for name in self._template}
            )
        return field_text(row, role)

    def clip_text(self, text: str, *, keep_end: bool = False) -> tuple[str, bool]:
        """Cut a text so long that it cannot fit, so that tokenisation takes bounded time."""
        limit = self.window * CHARACTERS_PER_TOKEN
        if len(text) <= limit:
            return text, False
        return (text[-limit:] if keep_end else text[:limit]), True

    def fit(self, ids: list[int], cut: bool = False) -> tuple[list[int], bool]:
        """Cut token ids at the end to the window (or refuse, as configured)."""
        over = cut or len(ids) > self.window
        if over:
            self.refuse_if_overlong()
        return ids[: self.window], over

    def refuse_if_overlong(self) -> None:
        """Raise for a record that is too long where `data.on_overlong` is `refuse`."""
        if self.data_config.on_overlong == "refuse":
            raise DataError(
                f"the record is longer than {self.window} tokens and data.on_overlong is 'refuse'; content withheld"
            )

    def label_id(self, value: Any) -> int:
        """Return the number of a label.

        Raises:
            DataError: for a label that is not among the known ones (its value is not shown).
        """
        if self.labels is not None:
            try:
                return self.labels.index(label_text(value))
            except ValueError:
                raise DataError(
                    f"the label is not one of the {len(self.labels)} known labels; value withheld; "
                    "complete data.labels"
                ) from None
        limit = self.model_config.num_labels
        text = label_text(value)
        if limit is None or not text.isdecimal() or len(text) > LONGEST_NUMBER or int(text) >= limit:
            raise DataError(
                "the label is not a number below model.num_labels; value withheld; list names in data.labels"
            )
        return int(text)


def field_text(row: Row, name: str) -> str:
    """Return one text column of a record.

    Raises:
        DataError: if it is missing or not text (numbers are turned into text).
    """
    if name not in row:
        raise DataError(f"column {name!r} is missing; map it with data.columns")
    value = row[name]
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"column {name!r} is empty (no finite number); repair or remove the record")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"column {name!r} must be text, not {type(value).__name__}")
    return value


def check_template(template: str | None) -> tuple[str, ...] | None:
    """Return the column names in a template; only plain `{column}` fields are allowed.

    Raises:
        DataError: for attribute, index or format parts.

    Example:
        >>> check_template("Question: {question}")
        ('question',)
    """
    if template is None:
        return None
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as fault:
        raise DataError(f"data.template: {fault}") from None
    names = []
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            raise DataError(f"data.template: only plain fields like {{question}} are allowed, not {{{name}}}")
        names.append(name)
    return tuple(dict.fromkeys(names))
