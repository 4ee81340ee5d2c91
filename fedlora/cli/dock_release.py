"""`fedlora dock spec|describe|start|groups`: make specifications and use them in a federation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedlora.cli.common import ConfigArgument, JsonOption, OverlayOption, OverridesArgument, emit
from fedlora.errors import ConfigError
from fedlora.figures import at_least

if TYPE_CHECKING:
    from fedlora.specs.release import Label, Release
    from fedlora.specs.types import PrivacyStatement

NameOption = Annotated[str, typer.Option("--name", help="Unique name of the specification in a dock.")]
LicenceOption = Annotated[str, typer.Option("--licence", help="Licence of the entry (SPDX name).")]
OutputOption = Annotated[Path | None, typer.Option("--output", help="File to write; NAME.json otherwise.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands to `fedlora dock`."""
    for command in (spec, describe, start, groups):
        app.command()(command)


def spec(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    overlay: OverlayOption = None,
    client: Annotated[str, typer.Option("--client", help="Whose records and whose budget.")] = "",
    name: NameOption = "",
    kind: Annotated[
        str, typer.Option(help="task (a data set) or model (what an adapter was made for).")
    ] = "task",
    target: Annotated[
        str, typer.Option(help="label, or constant: no label is read (num_labels: 1).")
    ] = "label",
    licence: LicenceOption = "proprietary",
    adapter: Annotated[str, typer.Option(help="Run folder (or adapter.flr) that the entry stands for.")] = "",
    site: Annotated[Path | None, typer.Option(help="A site's own file: its data, policy and ledger.")] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The client's ledger; ledger.sqlite in run.dir.")
    ] = None,
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a private specification of one client's records (DP-S-PAVE) and write it as a JSON file.

    The cost is reserved in the client's ledger before a record is read. CONFIG is an ordinary run file with
    mechanism {kind: lora_fa, per_layer_clip: true}, adapter.freeze_head: true and federation.rounds: 1.

    Example: fedlora dock spec spec.yaml --client clinic-a privacy.target_epsilon=1

    Example: fedlora dock spec spec.yaml --site site.yaml --target constant
    """
    from fedlora.config import load
    from fedlora.specs.entries import write_entry
    from fedlora.specs.release import Label
    from fedlora.specs.runs import adapter_facts

    loaded = load(config, overrides or (), overlay or ()).config
    who = client or _only_client(site)
    facts = adapter_facts(adapter) if adapter else {}
    label = Label(name or who, _choice("kind", kind, ("task", "model")), licence, facts)
    release = _release(loaded, label, who, _choice("target", target, ("label", "constant")), site, ledger)
    path = output or Path(f"{label.name}.json".replace("/", "_"))
    write_entry(path, release.specification)
    said = release.specification.privacy
    found = {
        "file": str(path),
        "name": label.name,
        "client": who,
        "epsilon": said.epsilon,
        "account_epsilon": release.account_epsilon,
        "privacy": statement_json(said),
    }
    emit(found, as_json=as_json, text=_release_text(path, said, release.account_epsilon, who))


def _choice(what: str, value: str, allowed: tuple[str, ...]) -> Any:
    if value not in allowed:
        raise ConfigError(f"--{what}: got {value!r}; allowed {', '.join(allowed)}")
    return value


def _only_client(site: Path | None) -> str:
    if site is None:
        raise ConfigError("dock spec: name the client with --client (a site's own name is used with --site)")
    from fedlora.config.trainer import load_trainer

    return load_trainer(site).config.site.name


def _release(
    config: Any,
    label: Label,
    client: str,
    target: Literal["label", "constant"],
    site: Path | None,
    ledger: Path | None,
) -> Release:
    from fedlora.specs.release import release_specification
    from fedlora.specs.shelves import check_target, local_trainer, open_site

    check_target(config, target)
    if site is not None:
        if ledger is not None:
            raise ConfigError("dock spec: a site has its own ledger; leave --ledger out")
        from fedlora.config.trainer import load_trainer

        place = open_site(load_trainer(site).config, site, target)
        try:
            return release_specification(config, label, client, lambda _: place.trainer, target)
        finally:
            place.ledger.close()
    from fedlora.simulation.clients_ledger import open_clients_ledger

    book = open_clients_ledger(config, ledger)
    try:
        return release_specification(
            config, label, client, lambda resolved: local_trainer(resolved, client, book, target), target
        )
    finally:
        if book is not None:
            book.close()


def statement_json(statement: PrivacyStatement) -> dict[str, Any]:
    """Return a privacy statement as JSON-ready values."""
    from dataclasses import asdict

    return {**asdict(statement), "conditions": list(statement.conditions)}


def _release_text(path: Path, said: PrivacyStatement, account: float | None, client: str) -> str:
    if said.guarantee != "dp":
        return f"{path}: written; NO PRIVACY is claimed ({'; '.join(said.conditions)})"
    epsilon = at_least(math.inf if said.epsilon is None else said.epsilon)
    lines = [
        f"{path}: written; epsilon {epsilon} at delta {said.delta:g} per {said.unit} ({said.adjacency}), "
        f"against {said.adversary}",
        f"accountant: {said.accountant}; sampling: {said.sampling}",
        *(f"condition: {text}" for text in said.conditions),
    ]
    if account is not None:
        lines.append(
            f"the ledger of {client} now says epsilon {at_least(account)} for this data set, all runs together "
            "(its terms: fedlora budget show)"
        )
    return "\n".join(lines)


def describe(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished lora_fa run.")],
    name: NameOption = "",
    licence: LicenceOption = "proprietary",
    output: OutputOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the specification of a finished run's own adapter; nothing more is spent.

    Example: fedlora dock describe runs/news --licence Apache-2.0
    """
    from fedlora.specs.entries import write_entry
    from fedlora.specs.release import Label
    from fedlora.specs.runs import describe_run

    label = Label(name or run.name, "model", licence)
    specification = describe_run(run, label)
    path = output or Path(f"{label.name}.json".replace("/", "_"))
    write_entry(path, specification)
    said = specification.privacy
    emit(
        {"file": str(path), "name": label.name, "privacy": statement_json(said)},
        as_json=as_json,
        text=_release_text(path, said, None, ""),
    )


def start(
    dock_file: Annotated[Path, typer.Argument(metavar="DOCK", help="The dock's SQLite file.")],
    query: Annotated[
        Path, typer.Argument(metavar="SPEC", help="The new client's private task specification.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Pick the adapter that a new client starts from: the best match that names one, its hash checked.

    Example: fedlora simulate run.yaml $(fedlora dock start dock.sqlite my-task.json)
    """
    from fedlora.specs.dock import Dock
    from fedlora.specs.entries import read_entry
    from fedlora.specs.runs import best_start, checked_adapter

    specification = read_entry(query)
    dock = Dock(dock_file, create=False)
    try:
        found = best_start(dock, specification)
    finally:
        dock.close()
    place = checked_adapter(found)
    result = {"name": found.name, "cosine": found.cosine, "adapter": place, "licence": found.licence}
    emit(result, as_json=as_json, text=f"adapter.init_from={place}")


def groups(
    specs: Annotated[
        list[Path], typer.Argument(metavar="SPEC...", help="The clients' specifications, named as they.")
    ],
    number: Annotated[int, typer.Option("--groups", "-k", help="How many groups.")],
    output: Annotated[Path, typer.Option("--output", help="Folder for one overlay per group.")] = Path(
        "groups"
    ),
    run_name: Annotated[
        str, typer.Option("--run-name", help="Runs are called this and the group.")
    ] = "personal",
    dock_file: Annotated[
        Path | None, typer.Option("--dock", help="Start each group from its best match in this dock.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Group clients by their specifications and write one overlay per group.

    Each group trains its own global adapter: fedlora simulate run.yaml -o groups/group-1.yaml (or `fedlora server`).

    Example: fedlora dock groups clients/*.json -k 3 --output groups
    """
    from fedlora.specs.entries import read_entry
    from fedlora.specs.groups import cluster, write_overlays

    specifications = [read_entry(path) for path in specs]
    found = cluster(specifications, number)
    starts = {} if dock_file is None else _starts(dock_file, specifications, found)
    paths = write_overlays(output, found, run_name, starts)
    result = {
        "groups": [
            {"name": one.name, "members": list(one.members), "cohesion": one.cohesion, "file": str(path),
             "init_from": starts.get(one.name)}
            for one, path in zip(found, paths, strict=True)
        ]
    }  # fmt: skip
    lines = [
        f"{path}: {len(one.members)} clients, mean cosine {one.cohesion:.3f}"
        for one, path in zip(found, paths, strict=True)
    ]
    emit(result, as_json=as_json, text="\n".join(lines))


def _starts(dock_file: Path, specifications: list[Any], found: Any) -> dict[str, str]:
    from fedlora.specs.dock import Dock
    from fedlora.specs.groups import group_specification
    from fedlora.specs.runs import best_start, checked_adapter

    dock = Dock(dock_file, create=False)
    try:
        return {
            one.name: checked_adapter(best_start(dock, group_specification(one, specifications)))
            for one in found
        }
    finally:
        dock.close()
