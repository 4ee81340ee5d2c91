"""DP-S-PAVE: train a specification from a client's records, paid for before a record is read.

The release is one round of the trainer on its own: reserve in the client's ledger, train lora_B with per-layer clipping
and noise at a frozen Gaussian lora_A of public seed, commit what ran. Compacting, projecting and matching are
post-processing.

Formal guarantee: the joint release of all L layers is T Poisson-subsampled Gaussians of noise multiplier
sigma / sqrt(L) (sigma is the noise's deviation over the per-layer clipping norm). The paper's Eq. 28, a sum over layers
of subsampled terms, is not used: layers share one batch, so it is not a bound for sampling rates below 1.

Source: "PAVE Specifications of Learnwares Yield Intrinsic Privacy-Preserving Capabilities", Algorithm 1, Theorem 3.9.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

import fedlora.errors
from fedlora.config import config_container
from fedlora.config.resolve import config_hash
from fedlora.config.schema import FedLoraConfig, LoraFaMechanism, NoPrivacy, RecordPrivacy
from fedlora.errors import ConfigError, DataError, FedLoraError, LedgerError, PrivacyError
from fedlora.simulation.prepare import Prepared, complete
from fedlora.specs.types import TARGET, PrivacyStatement, Specification, statement_from_event
from fedlora.specs.vectors import specification_vector
from fedlora.training.charging import budget_terms
from fedlora.training.requests import ClientReply, RoundRequest
from fedlora.training.trainer import Trainer
from fedlora.wire.payload import AdapterPayload

RUN_PREFIX: Final = "specification:"
"""Ledger entries of specifications have run ids that start so."""
ADVERSARY: Final = "anyone who reads the dock, its server and the federation's server included"
PUBLIC_A: Final = "lora_A and its seed are public; the guarantee comes from the noise alone"
POISSON: Final = "Poisson: each record joins each step independently with the public rate {rate:.6g}"
_HASH_CHARS: Final = 16


@dataclass(frozen=True)
class Release:
    """PUBLIC. A trained specification.

    Attributes:
        specification: the compact vector with its privacy statement.
        payload: the adapter that it was made from (lora_B).
        steps: optimiser steps that were charged.
        account_epsilon: what the client's ledger says after it, other releases included; None without privacy.
    """

    specification: Specification
    payload: AdapterPayload
    steps: int
    account_epsilon: float | None


@dataclass(frozen=True)
class Label:
    """PUBLIC. What names a specification: unique name, kind, licence and public facts."""

    name: str
    kind: Literal["model", "task"] = "task"
    licence: str = "proprietary"
    metadata: Mapping[str, str | int | float] | None = None


def check_configuration(config: FedLoraConfig) -> None:
    """Require a configuration that gives a comparable specification.

    Raises:
        ConfigError: listing every key that does not fit, with what to set.
    """
    mechanism, problems = config.mechanism, []
    if not isinstance(mechanism, LoraFaMechanism) or not mechanism.per_layer_clip:
        problems.append("mechanism: a specification needs {kind: lora_fa, per_layer_clip: true}")
    if config.adapter.init != "gaussian":
        problems.append(f"adapter.init: got {config.adapter.init}; a specification needs gaussian")
    if not config.adapter.freeze_head:
        problems.append("adapter.freeze_head: a specification's head is fixed and public; set true")
    if config.adapter.init_from is not None:
        problems.append("adapter.init_from: a specification starts from zero; set null")
    if config.privacy.unit not in ("record", "none"):
        problems.append(f"privacy.unit: got {config.privacy.unit}; a specification needs record (or none)")
    if config.training.sampling != "poisson" and not isinstance(config.privacy, NoPrivacy):
        problems.append("training.sampling: set poisson")
    if config.federation.rounds != 1:
        problems.append(
            "federation.rounds: a specification is one release; set 1 (steps_per_round counts steps)"
        )
    if config.data.labels is None and config.model.num_labels is None:
        problems.append(
            "data.labels: state the labels (or model.num_labels); they are never read off the records"
        )
    if problems:
        raise ConfigError("this configuration gives no specification", tuple(problems))


def release_specification(
    config: FedLoraConfig,
    label: Label,
    client: str,
    make_trainer: Callable[[FedLoraConfig], Trainer],
    target: str = "label",
) -> Release:
    """Train a specification of one client's records.

    A repeated call with the same name, configuration and target gets the bytes of the first one where the ledger kept
    them, and is refused otherwise; it never draws fresh noise for free.

    Args:
        config: PUBLIC. See `check_configuration`.
        label: PUBLIC. Name and facts.
        client: whose records and whose account.
        make_trainer: builds the trainer for the resolved configuration.
        target: PUBLIC. What the trainer draws the outputs to; another one is another release.

    Raises:
        ConfigError: if the configuration gives no specification.
        BudgetExceededError: if the budget does not allow it; nothing was read.
        FedLoraError: whatever else the trainer refuses or fails with.
    """
    check_configuration(config)
    _check_label(label)
    prepared = complete(config)
    resolved = prepared.config
    run_id = f"{RUN_PREFIX}{label.name}:{_release_hash(resolved, target)}"
    request = RoundRequest(
        run_id=run_id,
        server_round=1,
        config=config_container(resolved),
        config_hash=config_hash(resolved),
        payload=prepared.bench.initial_payload(),
        clients=(client,),
        steps=resolved.training.local_steps,
    )
    reply = make_trainer(resolved).handle(request).replies[0]
    if reply.status != "ok" or reply.payload is None:
        raise _raised(reply)
    _check_reply(prepared, reply)
    statement = _statement(prepared, reply)
    facts: dict[str, str | int | float] = {
        "base_model": resolved.model.name_or_path,
        "rank": resolved.adapter.rank,
        "layers": len(prepared.bench.layout.modules),
        "steps": reply.steps,
        TARGET: target,
    }
    specification = describe(reply.payload, label, statement, facts)
    return Release(specification, reply.payload, reply.steps, reply.epsilon)


def _release_hash(config: FedLoraConfig, target: str) -> str:
    """Return what tells releases of one name apart: configuration and target."""
    return hashlib.sha256(f"{config_hash(config)}/{target}".encode()).hexdigest()[:_HASH_CHARS]


def describe(
    payload: AdapterPayload,
    label: Label,
    statement: PrivacyStatement,
    facts: Mapping[str, str | int | float] | None = None,
) -> Specification:
    """Return the specification of a trained lora_B: compact, projected, normalised (post-processing).

    Raises:
        LayoutMismatchError: if the payload has no common lora_A.
        DataError: if it is zero.
    """
    vector, projection = specification_vector(payload)
    return Specification(
        name=label.name,
        vector=vector,
        kind=label.kind,
        base_fingerprint=payload.base_fingerprint,
        recipe=str(payload.recipe),
        projection=projection,
        privacy=statement,
        licence=label.licence,
        metadata={**(facts or {}), **(label.metadata or {})},
    )


def _check_label(label: Label) -> None:
    """Refuse names that no dock would take, before anything is spent."""
    Specification(
        label.name, np.ones(1, np.float32), label.kind, "-", "-", "none", PrivacyStatement("none"), label.licence,
        dict(label.metadata or {}),
    )  # fmt: skip


def _check_reply(prepared: Prepared, reply: ClientReply) -> None:
    """Require that what came back is this very release: a kept reply could belong to another request of that name.

    Raises:
        LedgerError: if its event, lora_A or layers differ from what was asked for.
    """
    bench, payload = prepared.bench, reply.payload
    fits = payload is not None and payload.kind == "lora_b" and payload.recipe == bench.adapted.recipe.sha256
    fits = fits and payload is not None and dict(payload.modules) == dict(bench.layout.modules)
    private = not isinstance(prepared.config.privacy, NoPrivacy)
    if not fits or (private and reply.event != bench.event.to_json()):
        raise LedgerError(
            "specification: the ledger keeps another release under this name and configuration; choose another --name"
        )


def _statement(prepared: Prepared, reply: ClientReply) -> PrivacyStatement:
    """Account for what ran as one joint release."""
    config, bench = prepared.config, prepared.bench
    privacy = config.privacy
    if not isinstance(privacy, RecordPrivacy):
        return PrivacyStatement("none", conditions=("no privacy: nothing was clipped or noised",))
    if privacy.noise_source != "os":
        return PrivacyStatement("none", conditions=("NO PRIVACY: the noise source is seeded for tests",))
    stated = statement_from_event(
        bench.event.times(reply.steps),
        privacy.target_delta,
        adjacency=privacy.adjacency,
        accountant=privacy.accountant,
        unit=budget_terms(config).unit,
        adversary=ADVERSARY,
        sampling=POISSON.format(rate=config.training.sample_rate),
    )
    layers = len(bench.layout.modules)
    parts = "1 layer" if layers == 1 else f"{layers} layers, each clipped alone"
    notes = (f"one joint release of {parts}", PUBLIC_A)
    return replace(stated, conditions=(*notes, *stated.conditions))


def _raised(reply: ClientReply) -> FedLoraError:
    """Return the trainer's refusal or failure as an error of its own class where that is one of ours."""
    record = reply.error or {}
    name, message = str(record.get("error", "")), str(record.get("message", reply.status))
    kind = getattr(fedlora.errors, name, None) if re.fullmatch(r"\w+Error", name) else None
    if not (isinstance(kind, type) and issubclass(kind, FedLoraError)):
        kind = PrivacyError if reply.status == "refused" else DataError
    error = kind.__new__(kind, message)
    error.args = (message,)
    return error
