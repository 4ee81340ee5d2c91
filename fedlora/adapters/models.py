"""Load the frozen base model of a run, its tokenizer and its fingerprint."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from fedlora.adapters.offline import ModelLocation, locate_model
from fedlora.adapters.quantized import (
    check_quantization,
    quantization_arguments,
    refuse_stored_quantization,
    without_outliers,
)
from fedlora.config.schema import ModelConfig
from fedlora.errors import ModelError
from fedlora.names import LABELLED_TASKS

_LOG = logging.getLogger(__name__)

AUTO_CLASSES: Final = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "instruction": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
}
"""transformers' class for each task."""

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_UNKNOWN_WINDOW: Final = 10_000_000
_OFFSET_POSITIONS: Final = frozenset({"roberta", "xlm-roberta", "camembert", "longformer", "mpnet"})


@dataclass(frozen=True)
class LoadedBase:
    """A frozen base model, ready for adapters.

    Attributes:
        model: the transformers model, in eval mode, all parameters frozen, on `device`.
        tokenizer: tokenizer (or image processor for image tasks), with a pad token and the
            model's window as `model_max_length`.
        fingerprint: sha256 (hex) over the base weights; newly made heads are left out. PUBLIC.
        license: the base model's licence where its card states one.
        device: where the model lies.
        location: where it was loaded from.
        new_parameters: names that the checkpoint did not have (a new head).
    """

    model: Any
    tokenizer: Any
    fingerprint: str
    license: str | None
    device: torch.device
    location: ModelLocation
    new_parameters: tuple[str, ...] = ()


def load_base(config: ModelConfig, num_labels: int | None = None) -> LoadedBase:
    """Load, freeze, place and fingerprint the base model.

    New parameters (heads) are drawn from a fixed seed, so that every party starts alike.

    Args:
        config: the `model` section.
        num_labels: number of labels of a classification head; `config.num_labels` otherwise.

    Raises:
        ModelError: if the model cannot be found, loaded or quantised as asked, or its weights are not
            those that `model.fingerprint` names.
    """
    labels = _resolve_labels(config, num_labels)
    device = pick_device(config.device)
    check_quantization(config, device)
    location = locate_model(config.name_or_path, config.revision)
    tokenizer = _load_processor(config, location)
    model, missing = _load_model(config, location, labels)
    if config.quantization is None:
        model.to(device)
    else:
        without_outliers(model)
    model.requires_grad_(False)
    model.eval()
    fingerprint = fingerprint_weights(model, skip=missing)
    _check_fingerprint(config, fingerprint)
    _align_tokenizer(model, tokenizer)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return LoadedBase(
        model=model,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        license=location.license,
        device=device,
        location=location,
        new_parameters=missing,
    )


def load_tokenizer(config: ModelConfig) -> Any:
    """Load only the tokenizer (or image processor), with pad token and window set.

    Raises:
        ModelError: if the model cannot be found or has no tokenizer.
    """
    from transformers import AutoConfig

    location = locate_model(config.name_or_path, config.revision)
    processor = _load_processor(config, location)
    model_config = AutoConfig.from_pretrained(location.target, trust_remote_code=config.trust_remote_code)
    _set_window(model_config, processor)
    return processor


def fingerprint_weights(model: torch.nn.Module, skip: tuple[str, ...] = ()) -> str:
    """Return sha256 over names, dtypes, shapes and bytes of parameters and persistent buffers.

    Args:
        model: any module; wrappers must not be on yet.
        skip: names to leave out (parameters that did not come from the checkpoint).

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> fingerprint_weights(layer) == fingerprint_weights(layer)
        True
    """
    left_out = set(skip)
    digest = hashlib.sha256(b"fedlora-base-weights-1")
    for name, tensor in sorted(_weights(model)):
        if name in left_out:
            continue
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel() > 0:
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pick_device(wanted: str) -> torch.device:
    """Return the device for "auto", "cpu" or "cuda".

    Raises:
        ModelError: if "cuda" is asked for and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device is 'cuda' but no GPU is visible; use 'auto' or 'cpu'")
    use_gpu = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if use_gpu else "cpu")


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, persistent buffers, and the scales that quantised layers add to their saved state."""
    yield from model.named_parameters()
    seen = set(map(id, model.parameters()))
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:  # shared ones are saved under each name
            seen.add(id(value))
            yield name, value


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and its notes on new heads off the terminal."""
    from transformers.utils import logging

    notes: Any = logging
    before, bars = notes.get_verbosity(), notes.is_progress_bar_enabled()
    notes.set_verbosity_error()
    notes.disable_progress_bar()
    try:
        yield
    finally:
        notes.set_verbosity(before)
        if bars:
            notes.enable_progress_bar()


def _resolve_labels(config: ModelConfig, num_labels: int | None) -> int | None:
    if config.task not in LABELLED_TASKS:
        return None
    wanted = num_labels if num_labels is not None else config.num_labels
    if wanted is None:
        raise ModelError(
            f"model.task {config.task!r} needs the number of labels; set model.num_labels or data.labels"
        )
    if config.num_labels is not None and wanted > config.num_labels:
        raise ModelError(f"model.num_labels is {config.num_labels}, but the data has {wanted} labels")
    return config.num_labels if config.num_labels is not None else wanted


def _check_fingerprint(config: ModelConfig, found: str) -> None:
    if config.fingerprint is not None and config.fingerprint != found:
        raise ModelError(
            f"model {config.name_or_path!r} has the fingerprint {found}, not model.fingerprint {config.fingerprint}: "
            "other weights or another dtype; use the same revision and dtype, or leave model.fingerprint out"
        )


def _load_processor(config: ModelConfig, location: ModelLocation) -> Any:
    from transformers import AutoImageProcessor, AutoTokenizer

    image = config.task == "image-classification"
    loader = AutoImageProcessor if image else AutoTokenizer
    try:
        processor = loader.from_pretrained(location.target, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as fault:
        what = "image processor" if image else "tokenizer"
        raise ModelError(
            f"no {what} for model {config.name_or_path!r} in {location.target!r}: {fault}"
        ) from fault
    if not image and processor.pad_token_id is None:
        if processor.eos_token_id is None:
            raise ModelError(f"the tokenizer of {config.name_or_path!r} has neither a pad nor an eos token")
        processor.pad_token = processor.eos_token
    if not image:
        processor.padding_side = "right"
    return processor


def _load_model(
    config: ModelConfig, location: ModelLocation, labels: int | None
) -> tuple[Any, tuple[str, ...]]:
    import transformers

    arguments: dict[str, Any] = {
        "dtype": _DTYPES[config.dtype],
        "trust_remote_code": config.trust_remote_code,
        "output_loading_info": True,
    }
    if labels is not None:
        arguments |= {"num_labels": labels, "ignore_mismatched_sizes": True}
    auto = getattr(transformers, AUTO_CLASSES[config.task])
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[]):
            stored = transformers.AutoConfig.from_pretrained(
                location.target, trust_remote_code=config.trust_remote_code
            )
            refuse_stored_quantization(config, stored)
            if config.quantization is not None:
                with torch.device("meta"):
                    skeleton = auto.from_config(stored, trust_remote_code=config.trust_remote_code)
                arguments |= quantization_arguments(config, _DTYPES[config.dtype], skeleton)
            torch.default_generator.manual_seed(0)
            model, info = auto.from_pretrained(location.target, **arguments)
    except (OSError, ValueError, KeyError, RuntimeError) as fault:
        raise ModelError(
            f"model {config.name_or_path!r} cannot be loaded as {AUTO_CLASSES[config.task]} "
            f"(model.task {config.task!r}): {fault}"
        ) from fault
    mismatched = [entry[0] for entry in info.get("mismatched_keys", ())]
    return model, tuple(sorted({*info.get("missing_keys", ()), *mismatched}))


def _align_tokenizer(model: Any, processor: Any) -> None:
    """Give the processor the model's window, and the model the pad token it needs for batches."""
    _set_window(model.config, processor)
    pad = getattr(processor, "pad_token_id", None)
    if pad is not None and getattr(model.config, "pad_token_id", None) is None:
        model.config.pad_token_id = pad


def _set_window(model_config: Any, processor: Any) -> None:
    if not hasattr(processor, "model_max_length"):
        return
    window = model_window(model_config)
    if window is not None:
        processor.model_max_length = min(processor.model_max_length, window)
    elif processor.model_max_length > _UNKNOWN_WINDOW:
        _LOG.warning("neither the model nor its tokenizer states a window; data.max_length decides alone")


def model_window(model_config: Any) -> int | None:
    """Return the longest sequence of tokens that the model takes, or None where it states none.

    Args:
        model_config: a transformers configuration.
    """
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        value = getattr(model_config, name, None)
        if isinstance(value, int) and value > 0:
            if getattr(model_config, "model_type", "") in _OFFSET_POSITIONS:
                return value - 1 - int(getattr(model_config, "pad_token_id", 1) or 0)
            return value
    return None
