"""Noise, gauges and preconditioning of factor-space DP-LoRA against PRISM: Figures 1, 2, 3, 4, 8 and 12 in small.

Trends of "PRISM: Gauge-Invariant Tangent-Space Differentially Private LoRA", arXiv:2606.00944v1. The paper: Math-10K on
a language model with billions of weights. Here: one adapted matrix on real text, W = B A over frozen all-MiniLM-L6-v2
features (384) of Banking77 (77 intents); per-record clip, noise and Adam as in the paper; `fedlora diagnose
noise` and `fedlora diagnose preconditioned` show Figures 12 and 4 without data.

  Figure 1: ||noise in Z|| of factors over PRISM's, step by step of a DP-AdamW run in factor space
  Figure 2: rho = max_c ||dZ|| - min_c ||dZ|| over gauges (c A, B / c), over the mean ||dZ||; every gauge sees the same
    records and noise (the paper's runs have noise of their own, so that its rho of PRISM is small and not 0)
  Figure 3: energy of the noise in Z against S = out ||A||^2 + in ||B||^2 over the same run: correlation and slope
  Figure 4: norm in Z of the preconditioned noise against sigma, mean over steps after 10 of burn-in
  Figure 8: share of records that are clipped at step 1, per gauge
  Figure 12: noise in Z over log10 c in [-3, 3] at a fixed Z: median and 10 to 90 % band

Run: python benchmarks/papers/prism_figures.py --features /path/to/banking77.pt [--json FILE] [--plots DIR]
(the file that projection_utility.py caches: python benchmarks/papers/projection_utility.py --data DIR --cache FILE).
Full scale: fedlora simulate strategies/presets/maths-gsm8k.yaml mechanism.kind=factor, then =prism, on a GPU: the round
diagnostics `intrinsic_noise` and `preconditioned_noise` of its metrics.jsonl are Figures 1 and 4.

Noise is seeded: these runs measure noise and protect nobody.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from fedlora.accounting.plot import svg
from fedlora.geometry import (
    frames_from_factors,
    gauge_factors,
    project_dense,
    retract,
    split_core,
    tangent_dimension,
    tangent_noise,
    tangent_squared_norm,
)
from fedlora.mechanisms.prism_direction import PrismMoments, precondition, transport_moments, update_moments

Tensor = torch.Tensor
RANK, BATCH, CLIP, SIGMA, DRAWS = 8, 128, 1.0, 0.6, 64
GAUGES = (0.25, 0.5, 1.0, 2.0, 4.0)


class Problem:
    """Per-record gradients of one adapted matrix on real features, float64."""

    def __init__(self, path: Path) -> None:
        """Read features and labels."""
        x, y, *_ = torch.load(path, weights_only=True)
        self.x, self.y = x.double(), y
        self.out, self.width = int(y.max()) + 1, x.shape[1]

    def outer(self, z: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return g (records, out) and x (records, in); a record's gradient of Z is g x^T."""
        x = self.x[chosen]
        g = torch.softmax(x @ z.mT, 1)
        g[torch.arange(len(g)), self.y[chosen]] -= 1.0
        return g, x


def factor_norms(g: Tensor, x: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Return each record's joint norm in factor space."""
    parts = (g.norm(dim=1) * (x @ a.mT).norm(dim=1), (g @ b).norm(dim=1) * x.norm(dim=1))
    return (parts[0].square() + parts[1].square()).sqrt()


def factor_sums(g: Tensor, x: Tensor, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the clipped sums for B and A."""
    alpha = (CLIP / factor_norms(g, x, b, a).clamp_min(1e-30)).clamp_max(1.0)
    return (g * alpha[:, None]).mT @ (x @ a.mT), ((g @ b) * alpha[:, None]).mT @ x


class FactorAdam:
    """DP-AdamW on the factors B and A."""

    def __init__(self, b: Tensor, a: Tensor, sigma: float = SIGMA) -> None:
        """Start with empty moments."""
        self.tau = sigma * CLIP / BATCH
        self.b, self.a, self.step = b, a, 0
        self._moments = [[torch.zeros_like(t), torch.zeros_like(t)] for t in (b, a)]

    def dense(self) -> Tensor:
        """Return Z."""
        return self.b @ self.a

    def update(self, g: Tensor, x: Tensor, noise: tuple[Tensor, Tensor]) -> float:
        """Take a step; return the norm in Z of the preconditioned noise."""
        self.step += 1
        sums, updated, applied = factor_sums(g, x, self.b, self.a), [], []
        for value, total, xi, pair in zip((self.b, self.a), sums, noise, self._moments, strict=True):
            d = total / BATCH + xi
            pair[0], pair[1] = torch.lerp(d, pair[0], 0.9), torch.lerp(d.square(), pair[1], 0.99)
            scale = (pair[1] / (1 - 0.99**self.step)).sqrt() + 1e-8
            updated.append(value - 0.01 * pair[0] / (1 - 0.9**self.step) / scale)
            applied.append(xi / scale)
        in_z = float((applied[0] @ self.a + self.b @ applied[1]).norm())
        self.b, self.a = updated
        return in_z


class PrismRun:
    """PRISM with frames: tangent clip, tangent noise, debiased moments, retraction."""

    def __init__(self, b: Tensor, a: Tensor, sigma: float = SIGMA) -> None:
        """Start at the frames of B A."""
        self.tau = sigma * CLIP / BATCH
        self.point = frames_from_factors(b, a)
        self._moments = PrismMoments.zeros(self.point)

    def dense(self) -> Tensor:
        """Return Z."""
        return self.point.dense()

    def update(self, g: Tensor, x: Tensor, ambient: Tensor) -> float:
        """Take a step; return the norm in Z of the preconditioned noise."""
        point, tau = self.point, self.tau
        tangents = project_dense(point, g[:, :, None] * x[:, None, :])
        alpha = (CLIP / tangent_squared_norm(point, tangents).sqrt().clamp_min(1e-30)).clamp_max(1.0)[
            :, None, None
        ]
        total = type(tangents)((tangents.x_out * alpha).sum(0), (tangents.x_in * alpha).sum(0))
        noise = project_dense(point, ambient).scaled(tau)
        noised = total.scaled(1.0 / BATCH).plus(noise)
        kept = update_moments(self._moments, point, noised, beta1=0.9, beta2=0.99)
        step = precondition(kept, point, beta1=0.9, beta2=0.99, noise_variance=tau**2)
        lift_out, lift_in = split_core(point, noise)
        alone = replace(kept, m_out=lift_out, m_in=lift_in)
        shown = precondition(alone, point, beta1=0.0, beta2=0.99, noise_variance=tau**2)
        self.point = retract(point, step, -0.01)
        self._moments = transport_moments(kept, point, self.point, beta2=0.99, noise_variance=tau**2)
        return float(tangent_squared_norm(point, shown).sqrt())


def start(problem: Problem, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    a = torch.randn(RANK, problem.width, generator=generator, dtype=torch.float64) / RANK**0.5
    b = 0.05 * torch.randn(problem.out, RANK, generator=generator, dtype=torch.float64)
    return b, a


def training_noise(problem: Problem, steps: int) -> dict[str, Any]:
    """Figures 1 and 3: DP-AdamW on factors; the noise that each step would put into Z, factors against tangents."""
    g0 = torch.Generator().manual_seed(0)
    run = FactorAdam(*start(problem, g0))
    tau = SIGMA * CLIP / BATCH
    ratios, energies, statistics = [], [], []
    for _ in range(steps):
        chosen = torch.randint(len(problem.x), (BATCH,), generator=g0)
        b, a = run.b, run.a
        xi_b, xi_a = (tau * torch.randn(*t.shape, generator=g0, dtype=torch.float64) for t in (b, a))
        in_z = float((xi_b @ a + b @ xi_a + xi_b @ xi_a).norm())
        frames = frames_from_factors(b, a)
        ours = float(tangent_squared_norm(frames, tangent_noise(frames, tau, generator=g0)).sqrt())
        ratios.append(in_z / ours)
        energies.append(in_z**2)
        statistics.append(float(problem.out * a.square().sum() + problem.width * b.square().sum()))
        run.update(*problem.outer(run.dense(), chosen), (xi_b, xi_a))
    slope = float(np.dot(energies, statistics) / np.dot(statistics, statistics))
    return {
        "ratio": ratios,
        "energy": energies,
        "statistic": statistics,
        "correlation": float(np.corrcoef(energies, statistics)[0, 1]),
        "slope over tau^2": slope / tau**2,
        "end": (run.b, run.a),
    }


def gauge_sensitivity(problem: Problem, steps: int) -> dict[str, list[float]]:
    """Figure 2: rho_t over the gauges; every gauge sees the same records and the same normals."""
    g0 = torch.Generator().manual_seed(7)
    b0, a0 = start(problem, g0)
    gauged = [gauge_factors(b0, a0, c) for c in GAUGES]
    runs: dict[str, list[Any]] = {
        "factors": [FactorAdam(b, a) for b, a in gauged],
        "prism": [PrismRun(b, a) for b, a in gauged],
    }
    rho: dict[str, list[float]] = {name: [] for name in runs}
    tau = SIGMA * CLIP / BATCH
    for _ in range(steps):
        chosen = torch.randint(len(problem.x), (BATCH,), generator=g0)
        ambient = torch.randn(problem.out, problem.width, generator=g0, dtype=torch.float64)
        pair = (tau * ambient[:, :RANK], tau * ambient[:RANK])
        for name, own in runs.items():
            moved = []
            for run in own:
                before = run.dense()
                run.update(*problem.outer(before, chosen), pair if name == "factors" else ambient)
                moved.append(float((run.dense() - before).norm()))
            rho[name].append((max(moved) - min(moved)) / (sum(moved) / len(moved)))
    return rho


def preconditioned(problem: Problem, steps: int) -> list[dict[str, float]]:
    """Figure 4: mean norm in Z of the preconditioned noise per sigma, after 10 steps of burn-in."""
    rows = []
    for sigma in (0.2, 0.4, 0.8, 1.6, 3.2):
        g0 = torch.Generator().manual_seed(11)
        b, a = start(problem, g0)
        runs: dict[str, Any] = {"factors": FactorAdam(b, a, sigma), "prism": PrismRun(b, a, sigma)}
        found: dict[str, list[float]] = {name: [] for name in runs}
        tau = sigma * CLIP / BATCH
        for _ in range(steps):
            chosen = torch.randint(len(problem.x), (BATCH,), generator=g0)
            ambient = torch.randn(problem.out, problem.width, generator=g0, dtype=torch.float64)
            pair = [tau * torch.randn(*t.shape, generator=g0, dtype=torch.float64) for t in (b, a)]
            for name, run in runs.items():
                drawn = pair if name == "factors" else ambient
                found[name].append(run.update(*problem.outer(run.dense(), chosen), drawn))
        rows.append({"sigma": sigma, **{name: float(np.mean(v[10:])) for name, v in found.items()}})
    return rows


def clipped_by_gauge(problem: Problem) -> list[dict[str, float]]:
    """Figure 8: share of clipped records at step 1; C is each method's median norm at c = 1."""
    g0 = torch.Generator().manual_seed(3)
    b0, a0 = start(problem, g0)
    g, x = problem.outer(b0 @ a0, torch.arange(512))
    norms: dict[float, dict[str, Tensor]] = {}
    for c in GAUGES:
        b, a = gauge_factors(b0, a0, c)
        frames = frames_from_factors(b, a)
        tangents = project_dense(frames, g[:, :, None] * x[:, None, :])
        ours = tangent_squared_norm(frames, tangents).sqrt()
        norms[c] = {"factors": factor_norms(g, x, b, a), "prism": ours}
    bounds = {name: float(value.median()) for name, value in norms[1.0].items()}
    return [
        {
            "c": c,
            **{
                name: float((value > bounds[name] * (1 + 1e-9)).double().mean())
                for name, value in own.items()
            },
        }
        for c, own in norms.items()
    ]


def noise_by_gauge(b0: Tensor, a0: Tensor) -> list[dict[str, float]]:
    """Figure 12: noise in Z for 61 gauges at one Z: medians and 10 to 90 % bands of 64 draws."""
    g0 = torch.Generator().manual_seed(5)
    tau = SIGMA * CLIP / BATCH
    rows = []
    for power in np.linspace(-3, 3, 61):
        b, a = gauge_factors(b0, a0, 10.0**power)
        frames = frames_from_factors(b, a)
        found: dict[str, list[float]] = {"factors": [], "prism": []}
        for _ in range(DRAWS):
            xb = tau * torch.randn(*b.shape, generator=g0, dtype=torch.float64)
            xa = tau * torch.randn(*a.shape, generator=g0, dtype=torch.float64)
            found["factors"].append(float((xb @ a + b @ xa + xb @ xa).norm()))
            drawn = tangent_noise(frames, tau, generator=g0)
            found["prism"].append(float(tangent_squared_norm(frames, drawn).sqrt()))
        row: dict[str, float] = {"log10 c": float(power)}
        for name, values in found.items():
            low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
            row |= {name: float(middle), f"{name} 10%": float(low), f"{name} 90%": float(high)}
        rows.append(row)
    return rows


def plots(folder: Path, found: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    steps = [float(i) for i in range(1, len(found["figure 1"]["ratio"]) + 1)]
    sweep, sigmas = found["figure 12"], found["figure 4"]
    charts = {
        "prism-1": svg(
            "noise in Z, factors over PRISM", "step", steps, {"ratio": found["figure 1"]["ratio"]}, y_label="ratio"
        ),
        "prism-12": svg(
            "noise in Z at a fixed Z", "log10 c", [r["log10 c"] for r in sweep],
            {k: [r[k] for r in sweep] for k in ("factors", "prism")}, y_label="norm",
        ),
        "prism-4": svg(
            "preconditioned noise", "sigma", [r["sigma"] for r in sigmas],
            {k: [r[k] for r in sigmas] for k in ("factors", "prism")}, log_x=True, y_label="norm",
        ),
    }  # fmt: skip
    for name, chart in charts.items():
        (folder / f"{name}.svg").write_text(chart, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--gauge-steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plots", type=Path)
    options = parser.parse_args()
    problem = Problem(options.features)
    run = training_noise(problem, options.steps)
    end_b, end_a = run.pop("end")
    found: dict[str, Any] = {
        "figure 1": run,
        "figure 2": gauge_sensitivity(problem, options.gauge_steps),
        "figure 4": preconditioned(problem, options.gauge_steps),
        "figure 8": clipped_by_gauge(problem),
        "figure 12": noise_by_gauge(end_b, end_a),
    }
    dimension = tangent_dimension(problem.out, problem.width, RANK)
    ratio = run["ratio"]
    print(
        f"1  noise ratio: start {np.mean(ratio[:10]):.2f}, end {np.mean(ratio[-10:]):.2f}, least {min(ratio):.2f}"
    )
    print(
        "2  rho over the mean move: "
        + ", ".join(f"{k} {np.mean(v):.2g}" for k, v in found["figure 2"].items())
    )
    print(
        f"3  correlation {run['correlation']:.3f}, energy / (tau^2 S) {run['slope over tau^2']:.3f}; S "
        f"{min(run['statistic']):.0f} to {max(run['statistic']):.0f}, PRISM always {dimension}"
    )
    for row in found["figure 4"]:
        print("4  " + "  ".join(f"{k} {v:.3g}" for k, v in row.items()))
    for row in found["figure 8"]:
        print("8  " + "  ".join(f"{k} {v:.3g}" for k, v in row.items()))
    sweep = found["figure 12"]
    least = min(sweep, key=lambda r: r["factors"])
    print(
        f"12 factors {least['factors']:.3g} at log10 c {least['log10 c']:.1f} to {max(r['factors'] for r in sweep):.3g}"
    )
    print(f"12 prism {min(r['prism'] for r in sweep):.3g} to {max(r['prism'] for r in sweep):.3g}")
    if options.plots:
        plots(options.plots, found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
