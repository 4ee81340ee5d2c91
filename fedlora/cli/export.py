"""`fedlora export`: a run's adapter as a PEFT folder or a merged model, checked; `--push` to the hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.common import JsonOption, emit
from fedlora.errors import ExportError, WireError

if TYPE_CHECKING:
    from fedlora.adapters.export import ExportReport, RunFacts
    from fedlora.config.schema import FedLoraConfig
    from fedlora.wire.payload import AdapterPayload

_ENDED = ("finished", "stopped-early", "budget-exhausted")
"""How a run ends whose adapter is the one that it set out for."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; RUN/adapter or RUN/merged if left out."),
    ] = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Write base and adapter as one model (merged in float32).")
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Stored dtype of a merged model: float32, bfloat16 or float16.")
    ] = "float32",
    push: Annotated[
        str, typer.Option("--push", metavar="OWNER/NAME", help="Also upload to this hub repository.")
    ] = "",
    public: Annotated[bool, typer.Option("--public", help="Make a new hub repository public.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a run's adapter, reload it on a fresh base model and compare logits.

    Examples: fedlora export runs/demo; fedlora export runs/demo --merged -o model --push me/my-model
    """
    if public and not push:
        raise typer.BadParameter("--public says how --push makes a repository; give --push OWNER/NAME too")
    if dtype != "float32" and not merged:
        raise typer.BadParameter("--dtype is the dtype of a merged model; give --merged too")
    if push:
        from fedlora.adapters.export import check_repository

        check_repository(push)
    report = export_run(run, output, merged=merged, dtype=dtype)
    result = report.to_json()
    lines = [
        f"{report.kind} export in {report.folder} ({len(report.files)} files)",
        f"logits after reloading differ by at most {report.reload.max_abs:.3g}, {report.reload.mean_abs:.3g} on "
        f"average (allowed {report.limit:.3g}); the adapter changes them by up to {report.effect.max_abs:.3g}",
    ]
    if push:
        from fedlora.adapters.export import push_folder

        result["pushed"] = push_folder(report.folder, push, private=not public)
        lines.append(f"uploaded to {result['pushed']}")
    if report.card_lacks:
        lines.append(f"the model card does not say yet: {', '.join(report.card_lacks)}")
    emit(result, as_json=as_json, text="\n".join(lines))


def export_run(
    run: Path, output: Path | None, *, merged: bool = False, dtype: str = "float32"
) -> ExportReport:
    """Export a run folder's adapter.

    Args:
        run: folder with config.yaml, adapter.flr and summary.json.
        output: where to write.
        merged: write one merged model.
        dtype: stored dtype of a merged model.

    Raises:
        ExportError: if the folder has no adapter that can be read, or the export does not reproduce it.
    """
    from fedlora.adapters.export import export_adapter, refuse_others_files
    from fedlora.adapters.export_merge import export_merged
    from fedlora.config import load_config
    from fedlora.training.session import load_parts

    saved = run / "adapter.flr"
    if not saved.is_file() or not (run / "config.yaml").is_file():
        raise ExportError(
            f"export: {run} has no config.yaml and adapter.flr; give the folder of a finished run (or resume it)"
        )
    target = output or run / ("merged" if merged else "adapter")
    refuse_others_files(target)
    payload = _read_adapter(saved)
    config = load_config(run / "config.yaml")
    facts = read_facts(run, config)
    bench = _Loaded(config, load_parts(config))
    if merged:
        return export_merged(bench, payload, target, dtype=dtype, facts=facts)
    payload, lost = at_export_rank(config, payload)
    if lost is not None:
        facts = replace(facts, warnings=(*facts.warnings, lost))
    return export_adapter(bench, payload, target, facts=facts)


def _read_adapter(path: Path) -> AdapterPayload:
    from fedlora.training.port import DEFAULT_MAX_BYTES, decode_packet
    from fedlora.wire.codec import from_arrays

    try:
        packet = decode_packet(path.read_bytes(), 8 * DEFAULT_MAX_BYTES)
        arrays = {name: array.copy() for name, array in packet.arrays.items()}  # decoded arrays are read-only
        return from_arrays(packet.header["payload"], arrays, max_bytes=8 * DEFAULT_MAX_BYTES)
    except (WireError, KeyError, ValueError) as fault:
        raise ExportError(
            f"export: {path} is damaged or of another version ({fault}); resume the run, which writes it anew"
        ) from fault


def at_export_rank(config: FedLoraConfig, payload: AdapterPayload) -> tuple[AdapterPayload, str | None]:
    """Cut folded weights to `mechanism.export_rank` where one is set, and say what was lost; else change nothing."""
    from fedlora.mechanisms.noisy_projection import truncated_export

    rank = getattr(config.mechanism, "export_rank", None)
    if rank is None or payload.kind != "factors":
        return payload, None
    cut, errors = truncated_export(payload, rank)
    worst = max(errors.values(), default=0.0)
    return cut, f"the adapter was cut to rank {rank}; the largest relative error of a layer is {worst:.3g}"


def read_facts(run: Path, config: FedLoraConfig) -> RunFacts:
    """Return what a run's summary says about epsilon, its meaning and the evaluation.

    Without a summary, or with a damaged one, epsilon is unknown and its meaning is what the configuration says.
    """
    from fedlora.adapters.export import RunFacts
    from fedlora.report.conditions import conditions_of

    path = run / "summary.json"
    try:
        summary: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return RunFacts(
            statement=conditions_of(config), warnings=("the run has no summary: it did not finish",)
        )
    except (OSError, ValueError, TypeError):
        return RunFacts(statement=conditions_of(config), warnings=("the run's summary cannot be read",))
    status = summary.get("status")
    told = () if status in _ENDED else (f"the run did not finish: its status is {status}",)
    epsilon = summary.get("epsilon")
    return RunFacts(
        epsilon=float(epsilon) if epsilon is not None else None,
        statement=summary.get("statement") or conditions_of(config),
        metrics=summary.get("metrics") or {},
        rounds=summary.get("rounds"),
        warnings=(*told, *(summary.get("warnings") or ())),
    )


class _Loaded:
    """Configuration, base model and adapter of a run, without its mechanism."""

    def __init__(self, config: Any, parts: Any) -> None:
        """Hold them together."""
        self.config, self.base, self.adapted = config, parts.base, parts.adapted
