"""`fedlora diagnose`: gauge dependence, intrinsic and preconditioned noise, moments of LoRA's sketch.

Synthetic and deterministic: no data, no model and no ledger are touched.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fedlora.cli.common import JsonOption, emit
from fedlora.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure what a mechanism does to the weights: gauges, noise, moments.",
    epilog="Example: fedlora diagnose gauge --mechanism prism --json",
)

Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**63 - 1, help="Public seed of the synthetic problem.")
]
Rank = Annotated[int, typer.Option(min=1, max=4096)]
Width = Annotated[int, typer.Option("--in", min=2, max=16384)]
_SMALLEST, _LARGEST = 1e-12, 1e6
"""Norms beyond these leave a number's range where they are raised to powers; the problems scale, so nothing is lost."""


@app.command(epilog="Example: fedlora diagnose gauge --mechanism prism --adaptivity paper --json")
def gauge(
    mechanism: Annotated[str, typer.Option(help="prism, factor or lora_fa.")] = "prism",
    adaptivity: Annotated[str, typer.Option(help="For prism: frames, paper or none.")] = "frames",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Training steps.")] = 20,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    zero_b: Annotated[bool, typer.Option("--zero-b", help="Start from lora_B = 0.")] = False,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Train from (c A, B / c), c in {0.25, 0.5, 2, 4}, and three general R, with the same noise; compare Z."""
    import torch

    from fedlora.mechanisms.diagnostics_gauge import GaugeSettings, gauge_sensitivity

    dtypes = {"float32": torch.float32, "float64": torch.float64}
    if dtype not in dtypes:
        raise ConfigError(f"--dtype: got {dtype!r}; allowed are float32, float64")
    if adaptivity not in ("frames", "paper", "none"):
        raise ConfigError(f"--adaptivity: got {adaptivity!r}; allowed are frames, paper, none")
    name = mechanism if mechanism != "prism" or adaptivity == "frames" else f"prism-{adaptivity}"
    settings = GaugeSettings(steps=steps, dtype=dtypes[dtype], zero_b=zero_b, seed=seed)
    report = gauge_sensitivity(name, settings)  # type: ignore[arg-type]
    result = {**asdict(report), "dtype": dtype, "zero_b": zero_b, "seed": seed}
    lines = [
        f"{name}, {steps} steps, {dtype}: max relative difference {report.max_relative_difference:.3g}",
        *(
            f"  {k:8s} first step {report.first_step[k]:9.3g}   after {steps} steps {v:9.3g}"
            for k, v in report.per_gauge.items()
        ),
    ]
    emit(result, as_json=as_json, text="\n".join(lines))


@app.command(epilog="Example: fedlora diagnose noise --stddev 0.1 --json")
def noise(
    out_features: Annotated[int, typer.Option("--out", min=2, max=16384)] = 48,
    in_features: Width = 40,
    rank: Rank = 4,
    stddev: Annotated[float, typer.Option(min=1e-12, help="Noise per factor or tangent coordinate.")] = 0.1,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Energy of the noise that reaches Z, per gauge: noise on factors against tangent noise."""
    _refuse_size("--stddev", stddev)
    import torch

    from fedlora.mechanisms.diagnostics import intrinsic_noise_by_gauge

    g = torch.Generator().manual_seed(seed)
    b = torch.randn(out_features, rank, generator=g, dtype=torch.float64)
    a = torch.randn(rank, in_features, generator=g, dtype=torch.float64) / rank**0.5
    points = intrinsic_noise_by_gauge(b, a, (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0), stddev=stddev, seed=seed)
    rows = [asdict(p) for p in points]
    text = "\n".join(
        ["energy of the noise in Z over stddev^2 (Z fixed)", "      c      factors      tangent"]
        + [f"{p.c:7g} {p.factor_measured:12.1f} {p.prism_measured:12.1f}" for p in points]
    )
    emit({"stddev": stddev, "points": rows}, as_json=as_json, text=text)


@app.command("preconditioned", epilog="Example: fedlora diagnose preconditioned --json")
def preconditioned(
    rank: Rank = 4,
    signal: Annotated[float, typer.Option(min=0.0, help="Norm of the constant signal.")] = 1.0,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Norm of the noise after preconditioning, against sigma: Adam on factors and PRISM's floors."""
    _refuse_size("--signal", signal)
    from fedlora.mechanisms.diagnostics import preconditioned_noise_by_sigma

    points = preconditioned_noise_by_sigma(
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0), rank=rank, signal=signal, seed=seed
    )
    text = "\n".join(
        ["  sigma          raw         adam        prism"]
        + [f"{p.sigma:7g} {p.raw:12.4g} {p.adam:12.4g} {p.prism:12.4g}" for p in points]
    )
    emit({"points": [asdict(p) for p in points]}, as_json=as_json, text=text)


@app.command(epilog="Example: fedlora diagnose moments --rank 8 --in 256 --json")
def moments(
    rank: Rank = 8,
    in_features: Width = 128,
    init: Annotated[str, typer.Option(help="gaussian, kaiming (PEFT's) or he.")] = "gaussian",
    draws: Annotated[int, typer.Option(min=100, max=1_000_000)] = 4000,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """Mean and variance of q (A^T A - I) against Lemmas 6.1 and B.1, and the bias of the chosen lora_A."""
    import torch

    from fedlora.mechanisms.diagnostics import sketch_moments

    q = torch.randn(in_features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = sketch_moments(q, rank, init=init, draws=draws, seed=seed)  # type: ignore[arg-type]
    text = (
        f"{init}, rank {rank}, in {in_features}: bias {found.bias:+.4f} of the gradient; mean off by "
        f"{found.mean_error:.2f} standard errors (1 is chance), variance ratio {found.variance_ratio:.4f}"
    )
    emit(
        {"init": init, "rank": rank, "in_features": in_features, **asdict(found)}, as_json=as_json, text=text
    )


@app.command("sketch-noise", epilog="Example: fedlora diagnose sketch-noise --rank 8 --json")
def sketch_noise(
    rank: Rank = 8,
    init: Annotated[str, typer.Option(help="gaussian, kaiming (PEFT's) or he.")] = "gaussian",
    norms: Annotated[str, typer.Option(help="Gradient norms of the layers, JSON list.")] = "[0.5, 1, 2, 4]",
    in_features: Width = 128,
    seed: Seed = 0,
    as_json: JsonOption = False,
) -> None:
    """N(W, r) per layer: how far one LoRA step is from the full gradient step."""
    import torch

    from fedlora.mechanisms.diagnostics import injected_noise_by_layer

    g = torch.Generator().manual_seed(seed)
    gradients = {}
    for index, norm in enumerate(_numbers(norms)):
        matrix = torch.randn(in_features, in_features, generator=g, dtype=torch.float64)
        gradients[f"layer{index}"] = matrix * (norm / matrix.norm())
    found = injected_noise_by_layer(gradients, rank, init=init, seed=seed)  # type: ignore[arg-type]
    text = "\n".join(
        ["layer       |gradient|      N(W,r)       ratio    expected"]
        + [
            f"{k:10s} {v['gradient_norm']:11.4g} {v['noise']:11.4g} {v['ratio']:11.4g} {v['expected_ratio']:11.4g}"
            for k, v in found.items()
        ]
    )
    emit({"init": init, "rank": rank, "layers": found}, as_json=as_json, text=text)


def _numbers(text: str) -> list[float]:
    try:
        values: Any = json.loads(text)
        if not isinstance(values, list) or any(isinstance(v, (bool, str)) for v in values):
            raise ValueError
        numbers = [float(v) for v in values]
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ConfigError(f"--norms: got {text!r}; allowed is a JSON list of numbers") from None
    if not numbers or not all(_SMALLEST <= n <= _LARGEST for n in numbers):
        raise ConfigError(f"--norms: got {text!r}; allowed are numbers of {_SMALLEST:g} to {_LARGEST:g}")
    return numbers


def _refuse_size(option: str, value: float) -> None:
    if not value <= _LARGEST:  # NaN too
        raise ConfigError(f"{option}: got {value}; allowed are numbers up to {_LARGEST:g}")
