"""`fedlora check`: resolve and validate a configuration, predict payload, memory and epsilon."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.common import ConfigArgument, JsonOption, OverlayOption, OverridesArgument, emit
from fedlora.figures import at_least_digits

if TYPE_CHECKING:
    from fedlora.config import FedLoraConfig, Loaded
    from fedlora.training.session import Workbench
    from fedlora.wire import AdapterPayload

app = typer.Typer(help="Resolve and validate a configuration.", rich_markup_mode=None, add_completion=False)


@app.command()
def check(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    overlay: OverlayOption = None,
    static: Annotated[
        bool, typer.Option("--static", help="Only the file: load neither data nor model, derive nothing.")
    ] = False,
    deployment: Annotated[
        bool, typer.Option("--deployment", help="Also apply the rules of real deployments.")
    ] = False,
    save: Annotated[str, typer.Option("--save", help="Write the resolved configuration to this file.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Check a configuration and print what a run of it would send, need and spend.

    Every problem is listed at once, with its key and line. Values that a later file or the command line
    replaced are shown with what they replaced.

    Example: fedlora check run.yaml

    Example: fedlora check run.yaml privacy.target_epsilon=3 --json

    Example: fedlora check run.yaml --static --deployment
    """
    from fedlora.config import config_container, config_hash, load, save_resolved, total_steps
    from fedlora.config.tracking import check_names, missing_packages

    loaded = load(config, overrides or (), overlay or (), deployment=deployment)
    check_names(loaded.config.tracking)
    resolved, figures = loaded.config, _static_figures(loaded.config, total_steps(loaded.config))
    if not static:
        resolved, more = _predict(loaded.config)
        figures.update(more)
    if save:
        save_resolved(resolved, save, loaded.notes)
    missing = tuple(
        f"tracking.{key}: its package is not installed here; a run needs pip install 'fedlora[{key}]'"
        for key in missing_packages(loaded.config.tracking)
    )
    loaded = dataclasses.replace(loaded, notes=(*loaded.notes, *missing))
    result: dict[str, Any] = {
        "config_hash": config_hash(resolved),
        "notes": list(loaded.notes),
        "overridden": loaded.overridden(),
        "predicted": figures,
        "config": config_container(resolved),
    }
    emit(result, as_json=as_json, text=_text(config, loaded, figures))


def _static_figures(config: FedLoraConfig, steps: int) -> dict[str, Any]:
    return {
        "unit": config.privacy.unit,
        "sample_rate": config.training.sample_rate,
        "steps_per_round": config.training.local_steps,
        "rounds": config.federation.rounds,
        "steps_per_client_at_most": steps,
    }


def _predict(config: FedLoraConfig) -> tuple[FedLoraConfig, dict[str, Any]]:
    """Load public parts (and rows for their label names where they are not stated) and derive the figures."""
    from fedlora.data import check_records
    from fedlora.report.conditions import conditions_line, conditions_of
    from fedlora.simulation.prepare import complete, make_federation
    from fedlora.training.predicted import clients_of_a_round, predict_round

    clients, federation = None, None
    if config.data.partition is not None:
        federation = make_federation(config)
        config, clients = federation.config, len(federation.parts)
    prepared = complete(config)
    if federation is not None:
        check_records(prepared.bench.task, federation.rows, federation.parts)
    resolved, bench = prepared.config, prepared.bench
    start = bench.initial_payload()
    known = clients or config.deployment.expected_clients or config.federation.min_replies
    wire = predict_round(
        resolved,
        bench.layout,
        start,
        bench.mechanism.uplink,
        bench.event,
        clients_of_a_round(config, known),
        signed=clients is None,
    )
    figures: dict[str, Any] = {
        "clients": clients,
        **_sizes(resolved, bench, start),
        "wire_bytes_down_per_client_and_round": wire.down,
        "wire_bytes_up_per_client_and_round": wire.up,
        "wire_bytes_per_round": wire.clients * (wire.down + wire.up),
        "base_fingerprint": bench.base.fingerprint,
        "model_license": bench.base.license,
    }
    if resolved.derived is not None:
        derived = resolved.derived
        figures.update(
            noise_multiplier=derived.noise_multiplier,
            epsilon_per_client_after_the_run=derived.epsilon,
            delta=derived.delta,
            accountant=derived.accountant,
            derived_from=derived.from_,
            epsilon_means=conditions_line({**conditions_of(resolved), "delta": derived.delta}),
        )
    return resolved, figures


def _sizes(config: FedLoraConfig, bench: Workbench, start: AdapterPayload) -> dict[str, Any]:
    """Return what travels and what is kept, in bytes."""
    from fedlora.wire.layout import payload_bytes, predict_size

    down = predict_size(bench.layout, bench.mechanism.downlink).total
    up = predict_size(bench.layout, bench.mechanism.uplink, config.federation.compression).total
    trained = payload_bytes(start) // 4
    return {
        "payload_bytes_down": down,
        "payload_bytes_up_per_client": up,
        "payload_bytes_per_client_and_round": down + up,
        "trained_parameters": trained,
        "base_model_bytes": sum(
            int(p.numel()) * int(p.element_size()) for p in bench.base.model.parameters()
        ),
        "per_record_gradient_bytes": trained * 4 * config.training.expected_batch_size,
    }


def _text(config: str, loaded: Loaded[FedLoraConfig], figures: dict[str, Any]) -> str:
    lines = [f"{config}: usable"]
    lines += [f"  note: {note}" for note in loaded.notes]
    lines += [f"  {line}" for line in loaded.overridden()]
    for name, value in figures.items():
        if value is None:
            continue
        shown = f"{value:.6g}" if isinstance(value, float) else str(value)
        if name.startswith("epsilon") and isinstance(value, float):
            shown = at_least_digits(value, 6)
        if name.endswith("_bytes") or "_bytes_" in name:
            shown = f"{int(value):,}"
        lines.append(f"  {name.replace('_', ' ')}: {shown}")
    return "\n".join(lines)
