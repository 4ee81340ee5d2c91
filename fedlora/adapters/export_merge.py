"""Export a merged model: base plus adapter in float32, reloaded and compared with the adapter."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from fedlora.adapters.export import (
    Exportable,
    ExportReport,
    RunFacts,
    save_processor,
    staged,
    write_peft_folder,
    write_statements,
)
from fedlora.adapters.export_card import left_open
from fedlora.adapters.export_facts import BaseFacts
from fedlora.adapters.export_probe import LogitDifference, difference, load_peft, probe_batch, probe_logits
from fedlora.adapters.models import AUTO_CLASSES, LoadedBase, load_base, quiet_transformers
from fedlora.config.schema import ModelConfig
from fedlora.errors import ExportError
from fedlora.names import split_block_name
from fedlora.wire.payload import AdapterPayload

FLOAT32_TOLERANCE: Final = 1e-4
"""Largest logit difference of a float32 merge, relative to the largest logit (at least 1)."""

LOSSY_SHARE: Final = 0.1
"""Largest mean difference of a rounded merge, as a share of what the adapter changes at all."""

_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_merged(
    bench: Exportable,
    payload: AdapterPayload,
    folder: str | Path,
    *,
    dtype: str = "float32",
    facts: RunFacts | None = None,
    fresh_base: Callable[[ModelConfig], LoadedBase] | None = None,
) -> ExportReport:
    """Merge in float32 on the unquantised base, save, reload and compare with base + adapter.

    Args:
        bench: configuration, base model and adapted model (whose adapter is replaced by `payload`).
        payload: kind `lora_b`, `factors` or `frames`. PUBLIC.
        folder: where to write; an earlier export there is replaced.
        dtype: "float32", or a rounded form that is refused where rounding would lose the adapter.
        facts: epsilon, metrics and the like for the model card.
        fresh_base: loads a base model for a configuration; by default `load_base`.

    Raises:
        ExportError: if the merged model answers differently; nothing is left at `folder` then.
    """
    if dtype not in _DTYPES:
        raise ExportError(f"export: dtype {dtype!r} is unknown; allowed are {', '.join(_DTYPES)}")
    plain = bench.config.model.model_copy(update={"dtype": "float32", "quantization": None, "device": "cpu"})
    load = fresh_base if fresh_base is not None else _load
    bench.adapted.load(payload)
    target = Path(folder)
    with staged(target) as scratch:
        merged, reference, untouched, batch = _merge(bench, load, plain, scratch)
        effect = difference(reference, untouched)
        _name_labels(merged, bench)
        with quiet_transformers():
            merged.to(_DTYPES[dtype]).save_pretrained(str(scratch))
        save_processor(bench.base.tokenizer, scratch)
        found = difference(reference, probe_logits(_reload(plain, scratch), batch))
        limit = _check(found, effect, dtype)
        base = BaseFacts.of(bench.config, bench.base)
        write_statements(scratch, bench.config, base, facts or RunFacts(), merged=True)
    files = tuple(sorted(path.name for path in target.iterdir()))
    lacks = left_open(bench.config, base)
    return ExportReport(target, "merged", found, effect, limit, 0, files, lacks)


def _merge(
    bench: Exportable, load: Callable[[ModelConfig], LoadedBase], plain: ModelConfig, scratch: Path
) -> tuple[Any, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (merged float32 model, logits of base + adapter, logits of the base, batch)."""
    fresh = load(plain)
    batch = probe_batch(fresh.model, bench.base.tokenizer)
    untouched = probe_logits(fresh.model, batch)
    if not bench.adapted.layout.modules:
        _copy_extra(bench, fresh.model)
        return fresh.model, probe_logits(fresh.model, batch), untouched, batch
    apart = scratch / "unmerged"
    apart.mkdir()
    write_peft_folder(bench.adapted, bench.config.model, apart)
    with_adapter = load_peft(fresh.model, apart)
    reference = probe_logits(with_adapter, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = with_adapter.merge_and_unload(safe_merge=True)
    for path in apart.iterdir():
        path.unlink()
    apart.rmdir()
    return merged, reference, untouched, batch


def _copy_extra(bench: Exportable, model: Any) -> None:
    """Write wholly trained matrices into a fresh base model."""
    for name, value in bench.adapted.extra_values().items():
        module, parameter = split_block_name(name)
        getattr(model.get_submodule(module), parameter).data.copy_(torch.from_numpy(value))


def _check(found: LogitDifference, effect: LogitDifference, dtype: str) -> float:
    if dtype == "float32":
        limit = FLOAT32_TOLERANCE * max(1.0, found.scale)
        if not (found.max_abs <= limit):
            raise ExportError(
                f"export --merged: logits differ from base + adapter by {found.max_abs:.3g} (allowed {limit:.3g}); "
                "nothing was written"
            )
        return limit
    limit = LOSSY_SHARE * effect.mean_abs
    if not (found.mean_abs <= limit):
        raise ExportError(
            f"export --merged: in {dtype} the logits differ from base + adapter by {found.mean_abs:.3g} on average, "
            f"where the whole adapter changes them by {effect.mean_abs:.3g} (allowed {limit:.3g}); rounding would lose "
            "the adapter; use --dtype float32 or keep the adapter apart"
        )
    return limit


def _load(config: ModelConfig) -> LoadedBase:
    return load_base(config, config.num_labels)


def _reload(config: ModelConfig, folder: Path) -> Any:
    import transformers

    auto = getattr(transformers, AUTO_CLASSES[config.task])
    with quiet_transformers():
        return auto.from_pretrained(
            str(folder), dtype=torch.float32, trust_remote_code=config.trust_remote_code
        ).eval()


def _name_labels(model: Any, bench: Exportable) -> None:
    labels = bench.config.data.labels
    if labels is not None:
        model.config.id2label = dict(enumerate(labels))
        model.config.label2id = {name: number for number, name in enumerate(labels)}
