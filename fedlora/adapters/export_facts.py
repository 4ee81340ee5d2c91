"""What an export says of itself to programs: its mark, the base model, the run's figures as others may see them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fedlora.adapters.models import LoadedBase
from fedlora.adapters.offline import PACKAGE_PREFIX, PACKAGED_MODELS
from fedlora.config.schema import FedLoraConfig, ModelConfig
from fedlora.figures import finite

if TYPE_CHECKING:
    from fedlora.adapters.export import RunFacts

FACTS_FILE: Final = "fedlora.json"
"""Lies in every export; a folder without it is never replaced."""


def portable_name(model: ModelConfig) -> str:
    """Return the base model's name as others can load it: the hub's name of a packaged model."""
    if not model.name_or_path.startswith(PACKAGE_PREFIX):
        return model.name_or_path
    asked = model.name_or_path[len(PACKAGE_PREFIX) :].replace("_", "-").lower()
    return next(name for name, packaged in PACKAGED_MODELS.items() if packaged.distribution == asked)


@dataclass(frozen=True)
class BaseFacts:
    """PUBLIC. What is said of the base model.

    Attributes:
        name: its name on the hub, or None for a folder of this machine, whose path says others nothing.
        fingerprint: sha256 of its weights.
        license: as its own card states it.
    """

    name: str | None
    fingerprint: str
    license: str | None

    @classmethod
    def of(cls, config: FedLoraConfig, base: LoadedBase) -> BaseFacts:
        """Return the facts of a loaded base model."""
        name = None if base.location.origin == "folder" else portable_name(config.model)
        return cls(name, base.fingerprint, base.license)

    @classmethod
    def read(cls, folder: Path) -> BaseFacts:
        """Return the facts that an export states."""
        content = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        return cls(content["base_model"], content["base_fingerprint"], content["base_license"])


def write_facts(folder: Path, config: FedLoraConfig, base: BaseFacts, facts: RunFacts) -> None:
    """Write `fedlora.json`: the model card's figures for programs. PUBLIC; no path of this machine in it."""
    content = {
        "base_model": base.name,
        "base_fingerprint": base.fingerprint,
        "base_license": base.license,
        "labels": list(config.data.labels) if config.data.labels is not None else None,
        "task": config.model.task,
        "epsilon": facts.epsilon,
        "statement": dict(facts.statement),
        "metrics": dict(facts.metrics),
        "rounds": facts.rounds,
        "warnings": list(shareable(config, facts.warnings)),
    }
    text = json.dumps(finite(content), indent=2, allow_nan=False, ensure_ascii=False)
    (folder / FACTS_FILE).write_text(text + "\n", encoding="utf-8")


def shareable(config: FedLoraConfig, warnings: Sequence[str]) -> tuple[str, ...]:
    """Return a run's warnings as others may read them: without clients' names, counts of records and paths.

    A simulated client may be called after a person, and how many records two clients share is nobody's business.
    """
    place = config.adapter.init_from
    found: dict[str, None] = {}
    of_clients = 0
    for warning in warnings:
        if warning.startswith("client "):
            of_clients += 1
        elif " sit at several of " in warning:
            what = "people" if " people sit at" in warning else "records"
            found[_SHARED.format(what=what)] = None
        else:
            found[warning if place is None else warning.replace(place, "another run's adapter")] = None
    told = (
        (f"{of_clients} warnings about single clients' ledgers: see the run's summary",) if of_clients else ()
    )
    return (*found, *told)


_SHARED: Final = (
    "some {what} sit at several clients: for them the clients' figures add up, the largest figure of one client does "
    "not cover them"
)
