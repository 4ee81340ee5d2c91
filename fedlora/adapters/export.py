"""Export a trained adapter as an ordinary PEFT folder, load it again and compare logits.

The folder holds what plain PEFT (and servers that read PEFT's layout) need: one rank and one
alpha for all layers, the trained head, the tokenizer and a model card that states the privacy.
It is written beside its place and moved there only when the reloaded adapter gives the same
logits as the trained one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from fedlora.adapters.adapted import AdaptedModel
from fedlora.adapters.export_card import left_open, write_card
from fedlora.adapters.export_facts import FACTS_FILE, BaseFacts, portable_name, write_facts
from fedlora.adapters.export_probe import LogitDifference, difference, load_peft, probe_batch, probe_logits
from fedlora.adapters.models import LoadedBase, load_base, quiet_transformers
from fedlora.adapters.spectral import with_removed
from fedlora.config.schema import FedLoraConfig, ModelConfig
from fedlora.errors import ExportError, FedLoraError
from fedlora.names import LORA_A, LORA_B, block_name, split_block_name
from fedlora.wire.payload import AdapterPayload, Array

TOLERANCE: Final = 1e-5
"""Largest logit difference after reloading, relative to the largest logit (at least 1)."""

_TASK_TYPES: Final = {
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "causal-lm": "CAUSAL_LM",
    "instruction": "CAUSAL_LM",
    "seq2seq": "SEQ_2_SEQ_LM",
}
_NAMING_FILES: Final = frozenset({"adapter_config.json", "config.json", "tokenizer_config.json"})
_NAMES: Final = ("base_model_name_or_path", "_name_or_path", "name_or_path")
"""Keys of those files that name a model or tokenizer."""


class Exportable(Protocol):
    """What is exported: a configuration with its loaded base model and adapter."""

    @property
    def config(self) -> FedLoraConfig:
        """The resolved configuration."""

    @property
    def base(self) -> LoadedBase:
        """The base model as it was loaded."""

    @property
    def adapted(self) -> AdaptedModel:
        """The base model with the injected adapter."""


@dataclass(frozen=True)
class RunFacts:
    """PUBLIC. What a model card says about the run, beside its configuration.

    Attributes:
        epsilon: largest epsilon of a client, None without privacy or where unknown.
        statement: what epsilon means, as the run states it.
        metrics: public evaluation.
        rounds: completed rounds.
        warnings: what a reader must know.
    """

    epsilon: float | None = None
    statement: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    rounds: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExportReport:
    """PUBLIC. What was written and how well it reproduces the trained model.

    Attributes:
        folder: where it lies.
        kind: "peft" or "merged".
        reload: logits of the reloaded export against the trained model.
        effect: logits of the untouched base model against the trained model.
        limit: largest difference that was allowed.
        rank: rank of the exported adapter (0 for a merged model).
        files: file names.
        card_lacks: what a reader of the model card still misses.
    """

    folder: Path
    kind: str
    reload: LogitDifference
    effect: LogitDifference
    limit: float
    rank: int
    files: tuple[str, ...]
    card_lacks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self) | {
            "folder": str(self.folder),
            "files": list(self.files),
            "card_lacks": list(self.card_lacks),
        }


def export_adapter(
    bench: Exportable,
    payload: AdapterPayload,
    folder: str | Path,
    *,
    facts: RunFacts | None = None,
    fresh_base: Callable[[], LoadedBase] | None = None,
) -> ExportReport:
    """Write an adapter as a PEFT folder, reload it on a fresh base model and compare.

    Args:
        bench: configuration, base model and adapted model (whose adapter is replaced by `payload`).
        payload: kind `lora_b`, `factors` or `frames`. PUBLIC.
        folder: where to write; an earlier export there is replaced.
        facts: epsilon, metrics and the like for the model card.
        fresh_base: loads an untouched base model for the check; by default as configured.

    Raises:
        ExportError: if the reloaded adapter's logits differ; nothing is left at `folder` then.
        LayoutMismatchError: if the payload does not belong to this base model.
    """
    adapted, config = bench.adapted, bench.config
    if not adapted.layout.modules:
        raise ExportError(
            "export: this run trained no LoRA layer (a head alone, or whole matrices), so there is no PEFT adapter; "
            "use `fedlora export RUN --merged`"
        )
    adapted.load(payload)
    batch = probe_batch(adapted.model, bench.base.tokenizer)
    trained = probe_logits(adapted.model, batch)
    fresh = fresh_base() if fresh_base is not None else _load_fresh(config.model)
    effect = difference(trained, probe_logits(fresh.model, batch))
    with staged(Path(folder)) as scratch:
        rank = write_peft_folder(adapted, config.model, scratch)
        save_processor(bench.base.tokenizer, scratch)
        reloaded = probe_logits(load_peft(fresh.model, scratch), batch)
        found = difference(trained, reloaded)
        limit = TOLERANCE * max(1.0, found.scale)
        if not (found.max_abs <= limit):
            raise ExportError(
                f"export: logits of the reloaded adapter differ by {found.max_abs:.3g} (allowed {limit:.3g}); "
                "nothing was written"
            )
        write_statements(scratch, config, BaseFacts.of(config, bench.base), facts or RunFacts(), merged=False)
    files = tuple(sorted(path.name for path in Path(folder).iterdir()))
    lacks = left_open(config, BaseFacts.of(config, bench.base))
    return ExportReport(Path(folder), "peft", found, effect, limit, rank, files, lacks)


def write_statements(
    folder: Path, config: FedLoraConfig, base: BaseFacts, facts: RunFacts, *, merged: bool
) -> None:
    """Write the model card and `fedlora.json`."""
    write_card(folder, config, base, facts, merged=merged)
    write_facts(folder, config, base, facts)


def restate(folder: Path, config: FedLoraConfig, facts: RunFacts) -> None:
    """Write an adapter's card anew once more is known of its run (what the clients' ledgers say at its end)."""
    write_statements(folder, config, BaseFacts.read(folder), facts, merged=False)


def write_peft_folder(adapted: AdaptedModel, model: ModelConfig, folder: Path) -> int:
    """Write adapter_config.json and adapter_model.safetensors; return the rank.

    Layers of lower rank are filled up with zeros and differing scalings go into lora_B, so that
    one rank and one alpha describe all layers. After `init: spectral` the rank doubles: what was taken out of
    the base comes back in, so that the folder fits the untouched base model.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    factors = adapted.write_factors()
    rank = max(spec.rank for spec in factors.modules.values()) * (2 if adapted.removed else 1)
    scalings = {spec.scaling for spec in factors.modules.values()}
    common = scalings.pop() if len(scalings) == 1 else 1.0
    state: dict[str, torch.Tensor] = {}
    for name, spec in factors.modules.items():
        lora_a, lora_b = factors.blocks[block_name(name, LORA_A)], factors.blocks[block_name(name, LORA_B)]
        if name in adapted.removed:
            lora_a, lora_b = with_removed(lora_a, lora_b, spec.scaling, adapted.removed[name])
        state[f"base_model.model.{name}.lora_A.weight"] = _padded(lora_a, (rank, lora_a.shape[1]))
        if spec.scaling != common:
            lora_b = (lora_b.astype(np.float64) * (spec.scaling / common)).astype(np.float32)
        state[f"base_model.model.{name}.lora_B.weight"] = _padded(lora_b, (lora_b.shape[0], rank))
    for name in adapted.layout.extra:
        module, parameter = split_block_name(name)
        state[f"base_model.model.{module}.{parameter}"] = torch.from_numpy(factors.blocks[name].copy())
    save_file(state, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    alpha: Any = _whole(common * rank)
    LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=target_names(adapted),
        modules_to_save=list(_head_names(adapted)) or None,
        fan_in_fan_out=any(bool(layer.fan_in_fan_out) for layer in adapted.lora_layers.values()),
        task_type=_TASK_TYPES.get(model.task),
        base_model_name_or_path=portable_name(model),
        revision=model.revision,
        inference_mode=True,
    ).save_pretrained(str(folder))
    return rank


def target_names(adapted: AdaptedModel) -> list[str]:
    """Return short module names where they match exactly the adapted layers, else full paths."""
    wanted = set(adapted.layout.modules)
    short = sorted({name.rpartition(".")[2] for name in wanted})
    paths = {path.removeprefix("base_model.model.") for path, _ in adapted.model.named_modules()}
    surplus = [
        path
        for path in paths
        if path not in wanted and any(path == name or path.endswith(f".{name}") for name in short)
    ]
    return sorted(wanted) if surplus else short


def refuse_others_files(folder: Path) -> None:
    """Refuse a place that holds something else than an earlier export.

    Raises:
        ExportError: naming it.
    """
    if folder.exists() and not folder.is_dir():
        raise ExportError(f"export: {folder} is a file; choose an empty or new folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / FACTS_FILE).is_file():
        raise ExportError(f"export: {folder} holds other files; choose an empty or new folder")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """Give a scratch folder beside `folder` that takes its place if the block succeeds.

    Raises:
        ExportError: if `folder` holds something that is not an earlier export.
    """
    folder = folder.resolve()  # a link keeps leading to its place
    refuse_others_files(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    before = scratch.with_name(scratch.name + ".before")
    try:
        yield scratch
        scratch.chmod(0o755)
        if folder.exists():
            folder.rename(before)  # an earlier export goes only after the new one lies there
        scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(before, ignore_errors=True)


def save_processor(processor: Any, folder: Path) -> None:
    """Save a tokenizer or image processor, with the chat template it has."""
    with quiet_transformers():
        processor.save_pretrained(str(folder))


def push_folder(folder: Path, repository: str, *, private: bool = True) -> str:
    """Upload an export to a hub repository (created if need be) and return its address.

    Raises:
        ExportError: if the hub refuses; the message says how to log in.
    """
    from huggingface_hub import HfApi

    check_repository(repository)
    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        with _without_paths(folder) as shared:
            address: Any = api.upload_folder(
                repo_id=repository, folder_path=str(shared), commit_message="Add adapter exported by fedlora"
            )
    except FedLoraError:
        raise
    except Exception as fault:
        raise ExportError(
            f"export --push: the hub refused {repository!r} ({type(fault).__name__}); log in with `hf auth login` "
            f"and check the name and the network; the export stays in {folder}"
        ) from fault
    return str(address)


def check_repository(repository: str) -> None:
    """Refuse a repository's name that no hub takes, before anything is done for it.

    Raises:
        ExportError: if it is not OWNER/NAME.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
        good = repository.count("/") == 1
    except HFValidationError:
        good = False
    if not good:
        raise ExportError(
            f"export --push: got {repository!r}; a repository is OWNER/NAME, for example me/my-model"
        )


@contextmanager
def _without_paths(folder: Path) -> Iterator[Path]:
    """Give the export as it is shared: where its JSON files name a folder of this machine, only that folder's name."""
    changed: dict[str, str] = {}
    for name in _NAMING_FILES:
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            local = {key: Path(content[key]).name for key in _NAMES if _is_local(content.get(key))}
            if local:
                changed[name] = json.dumps(content | local, indent=2) + "\n"
    if not changed:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
        for path in folder.iterdir():
            if path.name in changed:
                (Path(place) / path.name).write_text(changed[path.name], encoding="utf-8")
            else:
                (Path(place) / path.name).symlink_to(path.resolve())
        yield Path(place)


def _is_local(name: Any) -> bool:
    return isinstance(name, str) and (name.startswith(("/", ".", "~")) or Path(name).exists())


def _load_fresh(model: ModelConfig) -> LoadedBase:
    return load_base(model, model.num_labels)


def _head_names(adapted: AdaptedModel) -> tuple[str, ...]:
    configs: Any = getattr(adapted.model, "peft_config", {})
    saved = next((each.modules_to_save for each in configs.values()), None)
    return tuple(saved or ())


def _padded(array: Array, shape: tuple[int, int]) -> torch.Tensor:
    out = np.zeros(shape, dtype=np.float32)
    out[: array.shape[0], : array.shape[1]] = array
    return torch.from_numpy(out)


def _whole(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
