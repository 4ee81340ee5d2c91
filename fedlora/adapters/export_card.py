"""The model card of an export: what was trained, on what, and what its privacy means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fedlora.adapters.export_facts import BaseFacts, shareable
from fedlora.adapters.models import AUTO_CLASSES
from fedlora.adapters.offline import PACKAGED_MODELS
from fedlora.config.client_terms import client_terms
from fedlora.config.schema import ClientPrivacy, FedLoraConfig, NoPrivacy, RecordPrivacy
from fedlora.figures import at_least_digits
from fedlora.names import LABELLED_TASKS

if TYPE_CHECKING:
    from fedlora.adapters.export import RunFacts

_PIPELINES: Final = {
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "causal-lm": "text-generation",
    "instruction": "text-generation",
    "seq2seq": "text2text-generation",
    "image-classification": "image-classification",
}
_NO_PRIVACY: Final = (
    "**This model was trained WITHOUT differential privacy.** It may reveal records it was trained on."
)


def write_card(
    folder: Path, config: FedLoraConfig, base: BaseFacts, facts: RunFacts, *, merged: bool
) -> None:
    """Write README.md; it names no path, address or record of the training data."""
    sections = [
        _front_matter(config, base, merged),
        f"# {config.run.name}\n\n{_intro(config, base, merged)}",
        f"## Privacy\n\n{privacy_text(config, facts)}",
        f"## Data\n\n{_data(config)}",
        f"## Training\n\n{_table(_training(config, facts))}",
    ]
    if facts.metrics:
        metrics = {
            name: f"{value:.4g}" if isinstance(value, int | float) else "not available"
            for name, value in facts.metrics.items()
        }
        sections.append(f"## Evaluation on public records\n\n{_table(metrics)}")
    sections += [f"## Use\n\n{_usage(config, base, merged)}", f"## Licences\n\n{_licences(config, base)}"]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def privacy_text(config: FedLoraConfig, facts: RunFacts) -> str:
    """Return the privacy statement: epsilon with everything that gives it a meaning."""
    privacy = config.privacy
    notes = "\n".join(f"- {_line(warning)}" for warning in shareable(config, facts.warnings))
    warned = f"\n\nWarnings:\n\n{notes}" if notes else ""
    if isinstance(privacy, NoPrivacy):
        return _NO_PRIVACY + warned
    if privacy.noise_source != "os":
        return _NO_PRIVACY + " Its noise came from a seeded generator made for tests." + warned
    known = facts.epsilon is not None and math.isfinite(facts.epsilon)
    of_whom = " (largest over clients)" if isinstance(privacy, RecordPrivacy) else ""
    epsilon = at_least_digits(facts.epsilon or 0.0) if known else "unknown: read the clients' ledgers"
    rows: dict[str, Any] = {
        f"epsilon{of_whom}": epsilon,
        "delta": f"{privacy.budget.delta:g}",
        **_meaning(config, privacy, facts.statement),
        "releases, at most": _releases(config, privacy),
    }
    if config.adapter.init_from is not None:
        rows["started from"] = "another run's adapter; what that one shows of its own records comes on top"
    text = _table(rows | _said(facts.statement))
    if not known:
        text = "**The epsilon of this run is not stated here; do not treat the model as private.**\n\n" + text
    return text + warned


def _meaning(
    config: FedLoraConfig, privacy: RecordPrivacy | ClientPrivacy, statement: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what epsilon means: as the run states it, else as its configuration says."""
    derived = config.derived
    how = f" ({derived.accountant})" if derived is not None and derived.accountant else ""
    return {
        "unit": _unit(privacy),
        "adjacency": privacy.adjacency,
        "adversary": statement.get("adversary", _adversary(config, privacy)),
        "accountant": f"{privacy.accountant}{how}",
        "mechanism": config.mechanism.kind,
        "noise multiplier": f"{privacy.noise_multiplier:g}" if privacy.noise_multiplier else "not stated",
        "sampling assumption": statement.get("sampling_assumption", _sampling(config, privacy)),
    }


_SAID: Final = {
    "neighbouring": "neighbouring data sets",
    "assumption": "assumed",
    "target_delta": "delta that the noise was chosen for",
    "secure_aggregation": "secure aggregation",
    "epsilon_is": "this epsilon is",
}
"""Further keys of a run's statement, in the card's words; the others stand in the table already."""


def _said(statement: Mapping[str, Any]) -> dict[str, Any]:
    found = {words: statement[key] for key, words in _SAID.items() if statement.get(key) is not None}
    alone = statement.get("epsilon_from_this_runs_events")
    if isinstance(alone, int | float) and math.isfinite(alone):
        found["epsilon of this run's events alone"] = at_least_digits(float(alone))
    budget = statement.get("budget")
    if isinstance(budget, Mapping):
        found["budget of a client"] = ", ".join(f"{name} {value}" for name, value in budget.items())
    return found


def _unit(privacy: RecordPrivacy | ClientPrivacy) -> str:
    if isinstance(privacy, ClientPrivacy):
        return "one client (all its records)"
    if privacy.group_by is not None:
        return f"one person, at most {privacy.max_records_per_group} records each"
    return "one record (per record, not per person)"


def _adversary(config: FedLoraConfig, privacy: RecordPrivacy | ClientPrivacy) -> str:
    if isinstance(privacy, RecordPrivacy):
        return "anyone who sees every update, the server included"
    return client_terms(privacy, config.federation).adversary


def _sampling(config: FedLoraConfig, privacy: RecordPrivacy | ClientPrivacy) -> str:
    if isinstance(privacy, RecordPrivacy):
        return f"Poisson sampling of records, rate {config.training.sample_rate:.4g} (public)"
    return client_terms(privacy, config.federation).sampling


def _releases(config: FedLoraConfig, privacy: RecordPrivacy | ClientPrivacy) -> str:
    rounds = config.federation.rounds
    if isinstance(privacy, RecordPrivacy):
        return f"{rounds * config.training.local_steps} steps per client"
    return f"{rounds} rounds"


def _front_matter(config: FedLoraConfig, base: BaseFacts, merged: bool) -> str:
    private = not isinstance(config.privacy, NoPrivacy) and config.privacy.noise_source == "os"
    lines = [
        "---",
        *([f"base_model: {base.name}"] if base.name is not None else []),
        f"library_name: {'transformers' if merged else 'peft'}",
        f"pipeline_tag: {_PIPELINES[config.model.task]}",
        *([f"license: {base.license}"] if base.license else []),
        "tags:",
        "- lora",
        "- federated-learning",
        *(["- differential-privacy"] if private else []),
        "---",
    ]
    return "\n".join(lines)


def _intro(config: FedLoraConfig, base: BaseFacts, merged: bool) -> str:
    what = "A model with a merged LoRA adapter" if merged else "A LoRA adapter"
    on = f"`{base.name}`" if base.name is not None else "a base model that lay in a folder"
    text = f"{what} for {config.model.task} on {on} (weights with the fingerprint `{base.fingerprint}`), "
    text += "trained with federated learning by fedlora."
    for other, packaged in PACKAGED_MODELS.items():
        if not packaged.exact and other == base.name:
            text += (
                f" It may have been trained on the rounded weights of the package {packaged.distribution}; compare the "
                "fingerprint."
            )
    return text


def _data(config: FedLoraConfig) -> str:
    rows: dict[str, Any] = {
        "data set (name in the ledger)": config.data.name,
        "kind of source": config.data.source.kind,
        "clients": "simulated partition" if config.data.partition is not None else "the sites' own records",
        "longest record": f"{config.data.max_length} tokens"
        if config.data.max_length
        else "the model's window",
    }
    if config.data.labels is not None:
        rows["labels"] = ", ".join(config.data.labels)
    missing = "Describe here where the records come from and who consented to their use."
    return f"{_table(rows)}\n\n{_line(config.data.description or missing)}"


def left_open(config: FedLoraConfig, base: BaseFacts) -> tuple[str, ...]:
    """Return what a reader of the card still misses: configuration keys, or the base model's licence."""
    found = [f"data.{key}" for key in ("description", "license") if getattr(config.data, key) is None]
    return (*found, *(() if base.license else ("the base model's licence",)))


def _training(config: FedLoraConfig, facts: RunFacts) -> dict[str, Any]:
    return {
        "mechanism": config.mechanism.kind,
        "aggregation": config.federation.aggregation.kind,
        "rounds": facts.rounds if facts.rounds is not None else config.federation.rounds,
        "rank / alpha": f"{config.adapter.rank} / {config.adapter.lora_alpha:g}",
        "expected batch size": config.training.expected_batch_size,
        "optimizer": f"{config.training.optimizer.kind}, learning rate {config.training.optimizer.lr:g}",
        "base dtype": config.model.dtype,
    }


def _usage(config: FedLoraConfig, base: BaseFacts, merged: bool) -> str:
    auto, count = AUTO_CLASSES[config.model.task], config.model.num_labels
    labels = f", num_labels={count}" if config.model.task in LABELLED_TASKS and count is not None else ""
    if merged:
        return f'```python\nfrom transformers import {auto}\n\nmodel = {auto}.from_pretrained("THIS FOLDER")\n```'
    return (
        f"```python\nfrom peft import PeftModel\nfrom transformers import {auto}\n\n"
        f'base = {auto}.from_pretrained("{base.name or "THE BASE MODEL"}"{labels})\n'
        'model = PeftModel.from_pretrained(base, "THIS FOLDER")\n```'
    )


def _licences(config: FedLoraConfig, base: BaseFacts) -> str:
    return (
        f"- base model: {base.license or 'not stated where it was loaded from; look it up before sharing'}\n"
        f"- data ({config.data.name}): {_line(config.data.license or 'state it here before sharing')}"
    )


def _line(value: object) -> str:
    """Return a value on one line, without the characters that would start another cell or tag."""
    return " ".join(str(value).split()).replace("|", "/").replace("<", "&lt;")


def _table(rows: dict[str, Any]) -> str:
    body = [f"| {name} | {_line(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *body])
