"""`fedlora export`: a run's adapter as a PEFT folder or a merged model, checked; `--push` to the hub."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlora.cli.common import JsonOption, emit
from fedlora.errors import ExportError

if TYPE_CHECKING:
    from fedlora.adapters.export import ExportReport, RunFacts
    from fedlora.config.schema import FedLoraConfig
    from fedlora.wire.payload import AdapterPayload

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
        ExportError: if the folder has no adapter, or the export does not reproduce it.
    """
    from fedlora.adapters.export import export_adapter
    from fedlora.adapters.export_merge import export_merged
    from fedlora.config import load_config
    from fedlora.training.port import DEFAULT_MAX_BYTES, decode_packet
    from fedlora.training.session import load_parts
    from fedlora.wire.codec import from_arrays

    saved = run / "adapter.flr"
    if not saved.is_file() or not (run / "config.yaml").is_file():
        raise ExportError(
            f"export: {run} has no config.yaml and adapter.flr; give the folder of a finished run (or resume it)"
        )
    packet = decode_packet(saved.read_bytes(), 8 * DEFAULT_MAX_BYTES)
    arrays = {name: array.copy() for name, array in packet.arrays.items()}  # decoded arrays are read-only
    payload = from_arrays(packet.header["payload"], arrays, max_bytes=8 * DEFAULT_MAX_BYTES)
    config = load_config(run / "config.yaml")
    bench = _Loaded(config, load_parts(config))
    facts = read_facts(run)
    if merged:
        return export_merged(bench, payload, output or run / "merged", dtype=dtype, facts=facts)
    payload, lost = at_export_rank(config, payload)
    if lost is not None:
        facts = replace(facts, warnings=(*facts.warnings, lost))
    return export_adapter(bench, payload, output or run / "adapter", facts=facts)


def at_export_rank(config: FedLoraConfig, payload: AdapterPayload) -> tuple[AdapterPayload, str | None]:
    """Cut folded weights to `mechanism.export_rank` where one is set, and say what was lost; else change nothing."""
    from fedlora.mechanisms.noisy_projection import truncated_export

    rank = getattr(config.mechanism, "export_rank", None)
    if rank is None or payload.kind != "factors":
        return payload, None
    cut, errors = truncated_export(payload, rank)
    worst = max(errors.values(), default=0.0)
    return cut, f"the adapter was cut to rank {rank}; the largest relative error of a layer is {worst:.3g}"


def read_facts(run: Path) -> RunFacts:
    """Return what a run's summary says about epsilon, its meaning and the evaluation."""
    from fedlora.adapters.export import RunFacts

    path = run / "summary.json"
    if not path.is_file():
        return RunFacts(warnings=("the run has no summary: it did not finish",))
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    epsilon = summary.get("epsilon")
    return RunFacts(
        epsilon=float(epsilon) if epsilon is not None else None,
        statement=summary.get("statement") or {},
        metrics=summary.get("metrics") or {},
        rounds=summary.get("rounds"),
        warnings=tuple(summary.get("warnings") or ()),
    )


class _Loaded:
    """Configuration, base model and adapter of a run, without its mechanism."""

    def __init__(self, config: Any, parts: Any) -> None:
        """Hold them together."""
        self.config, self.base, self.adapted = config, parts.base, parts.adapted
