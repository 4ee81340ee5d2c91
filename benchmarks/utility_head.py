"""Accuracy of a private linear head on frozen features: DP-SGD, LoRA-FA and the noisy projection M2.

The table of the mechanisms page: Banking77 (10 003 questions, 77 intents), features of a frozen
all-MiniLM-L6-v2, sampling rate .1, 100 steps of plain SGD, delta 1e-5; epsilon 0.2 to 3. Learning rate and clipping
norm come from one small grid on one seed; the figures are means over further seeds.

    python benchmarks/utility_head.py --data /path/to/banking77 --epsilons 0.2 0.4 1.0 --seeds 3 --json head.json

`--data` holds train.csv and test.csv (text, category). Runs on a CPU in minutes; features are cached
beside the JSON. Noise is seeded so that the table repeats: these runs measure accuracy and protect nobody.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fedlora.accounting import Event, NoisyProjectionEvent, PoissonGaussianEvent, calibrate_noise_multiplier
from fedlora.mechanisms.projection_math import projected_noise, projection_from_normals

RATE, STEPS, DELTA = 0.1, 100, 1e-5


@dataclass(frozen=True)
class Method:
    """One column: how the head's gradient is released."""

    name: str
    kind: str
    rank: int | None = None
    accountant: str = "best"


METHODS = (
    Method("dp_sgd", "full"),
    Method("lora_fa r16", "lora_fa", 16),
    Method("m2 r16 theorem5", "m2", 16, "theorem5"),
    Method("m2 r16", "m2", 16),
    Method("lora_fa r64", "lora_fa", 64),
    Method("m2 r64 theorem5", "m2", 64, "theorem5"),
    Method("m2 r64", "m2", 64),
)


def features(data: Path, cache: Path, device: str) -> tuple[torch.Tensor, ...]:
    """Return normalised mean-pooled features and labels of both splits; computed once."""
    if cache.exists():
        return tuple(torch.load(cache, weights_only=True))
    from fedlora.adapters.models import load_base
    from fedlora.config.schema import ModelConfig

    config = ModelConfig(
        name_or_path="sentence-transformers/all-MiniLM-L6-v2", task="sequence-classification", num_labels=2
    )
    base = load_base(config, 2)
    encoder, tokenizer = base.model.base_model.to(device), base.tokenizer
    parts, names = [], {}
    for split in ("train", "test"):
        with (data / f"{split}.csv").open(newline="", encoding="utf-8") as handle:
            rows = [(row["text"], row["category"]) for row in csv.DictReader(handle)]
        order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
        out = torch.empty(len(rows), encoder.config.hidden_size)
        for first in range(0, len(order), 128):
            chunk = order[first : first + 128]
            batch = tokenizer(
                [rows[i][0] for i in chunk], padding=True, truncation=True, max_length=64, return_tensors="pt"
            ).to(device)
            with torch.no_grad():
                hidden = encoder(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            pooled = (hidden * mask).sum(1) / mask.sum(1)
            out[torch.tensor(chunk)] = torch.nn.functional.normalize(pooled, dim=1).float().cpu()
        labels = torch.tensor([names.setdefault(label, len(names)) for _, label in rows])
        parts += [out, labels]
    cache.parent.mkdir(parents=True, exist_ok=True)
    torch.save(parts, cache)
    return tuple(parts)


def step_event(method: Method, sigma: float, width: int, out_width: int) -> Event:
    """Return the event of one step."""
    if method.kind == "m2":
        return NoisyProjectionEvent.single(width, int(method.rank or 0), sigma, RATE, out_width)
    return PoissonGaussianEvent(sigma, RATE)


def noise_multiplier(method: Method, epsilon: float, width: int, out_width: int) -> float:
    """Return sigma for the whole run."""
    return calibrate_noise_multiplier(
        lambda sigma: step_event(method, sigma, width, out_width).times(STEPS),
        epsilon,
        DELTA,
        accountant_name=method.accountant,
        tolerance=1e-3,
    )


def train(
    method: Method, data: tuple[torch.Tensor, ...], sigma: float, clip: float, lr: float, seed: int
) -> float:
    """Return test accuracy after the run."""
    x, y, x_test, y_test = data
    generator = torch.Generator(device=x.device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=x.device)

    classes, width = int(y.max()) + 1, x.shape[1]
    weight = torch.zeros(classes, width, device=x.device)
    divisor = RATE * len(x)
    frozen = projection_from_normals(normal(method.rank, width)) if method.kind == "lora_fa" else None
    for _ in range(STEPS):
        chosen = torch.rand(len(x), generator=generator, device=x.device) < RATE
        h, target = x[chosen], y[chosen]
        g = torch.softmax(h @ weight.mT, dim=1)
        g[torch.arange(len(g), device=x.device), target] -= 1.0
        a = frozen if method.kind != "m2" else projection_from_normals(normal(int(method.rank or 0), width))
        seen = (
            h @ a.mT if method.kind == "lora_fa" else h
        )  # clipped in the coordinates that receive the noise
        norms = g.norm(dim=1) * seen.norm(dim=1)
        total = (g * (clip / norms.clamp_min(1e-12)).clamp_max(1.0)[:, None]).mT @ h
        if method.kind == "full":
            weight = weight - lr / divisor * (total + sigma * clip * normal(classes, width))
            continue
        omega = normal(classes, int(method.rank or 0))
        noise = sigma * clip * (omega if method.kind == "lora_fa" else projected_noise(omega, a))
        weight = weight - lr / divisor * ((total @ a.mT + noise) @ a)
    return float(((x_test @ weight.mT).argmax(1) == y_test).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.2, 0.4, 1.0, 3.0])
    parser.add_argument("--methods", nargs="+", default=[m.name for m in METHODS])
    parser.add_argument("--seeds", type=int, default=3, help="further seeds after the grid's own")
    parser.add_argument("--clips", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=Path("runs/utility_head.json"))
    args = parser.parse_args()
    data = tuple(
        t.to(args.device) for t in features(args.data, args.json.parent / "banking77.pt", args.device)
    )
    width, out_width = data[0].shape[1], int(data[1].max()) + 1
    results = []
    for epsilon in args.epsilons:
        for method in (m for m in METHODS if m.name in args.methods):
            began = time.perf_counter()
            sigma = noise_multiplier(method, epsilon, width, out_width)
            # learning rates are tried per unit of the clipping norm, so the grid moves with it
            grid = {
                (c, r): train(method, data, sigma, c, r / c, seed=0) for c in args.clips for r in args.rates
            }
            clip, rate = max(grid, key=lambda k: grid[k])
            scores = [train(method, data, sigma, clip, rate / clip, seed=100 + s) for s in range(args.seeds)]
            mean = sum(scores) / len(scores)
            spread = math.sqrt(sum((s - mean) ** 2 for s in scores) / max(1, len(scores) - 1))
            row = {
                "epsilon": epsilon, **asdict(method), "noise_multiplier": sigma, "clip": clip, "lr": rate / clip,
                "grid_best": max(grid.values()), "mean": mean, "stderr": spread / math.sqrt(len(scores)),
                "seeds": len(scores), "seconds": time.perf_counter() - began,
            }  # fmt: skip
            results.append(row)
            print(
                f"eps {epsilon:<4g} {method.name:16s} sigma {sigma:7.3f} C {clip:<4g} lr {rate / clip:<6.4g} "
                f"accuracy {mean:.3f} +- {row['stderr']:.3f}  ({row['seconds']:.0f} s)",
                flush=True,
            )
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
