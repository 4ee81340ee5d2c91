"""Accuracy of M2, DP-LoRA-FA and DP-SGD on frozen features, over epsilon and over rank.

Trend of Figure 3 in "LoRA and Privacy: When Random Projections Help (and When They Don't)": at small epsilon a low
rank beats DP-SGD (right), and M2 beats DP-LoRA-FA most at small ranks (left). The paper: ResNet-50 features of
CIFAR-10 (2048), batch 1024, delta 1e-4, Theorem 5's accounting. Here: all-MiniLM-L6-v2 features (384) of Banking77
(10 003 questions, 77 intents), rate .1, 100 steps, delta 1e-4; M2 with Theorem 5 and with this library's bound.

Run: python benchmarks/papers/projection_utility.py --data /path/to/banking77 [--cache features.pt] [--json FILE]
Full scale: the same with --features FILE on a GPU: a torch file [x, labels, x_test, labels_test] of any frozen
backbone, for example ResNet-50 on CIFAR-10, and --epsilons 0.1 0.2 0.4 0.7 1 2 4 8 --ranks 32 64 128 256 512 700
--rate 0.02048 --steps 2000 --seeds 5.

Noise is seeded so that the figures repeat: these runs measure accuracy and protect nobody.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import utility_head as head

from fedlora.accounting import NoisyProjectionEvent, theorem5


def methods(ranks: list[int]) -> list[head.Method]:
    rows = [head.Method("dp_sgd", "full")]
    for rank in ranks:
        rows.append(head.Method(f"lora_fa r{rank}", "lora_fa", rank))
        rows.append(head.Method(f"m2 r{rank}, Theorem 5", "m2", rank, "theorem5"))
        rows.append(head.Method(f"m2 r{rank}, ours", "m2", rank))
    return rows


def noise_multiplier(method: head.Method, epsilon: float, width: int, classes: int) -> float:
    """Return sigma for the whole run; Theorem 5 by bisection, on the private side."""
    if method.accountant != "theorem5":
        return head.noise_multiplier(method, epsilon, width, classes)

    def spent(sigma: float) -> float:
        event = NoisyProjectionEvent.single(width, int(method.rank or 0), sigma, head.RATE, classes)
        return theorem5.composed(event, head.STEPS, head.DELTA, accountant="rdp")

    low, high = 0.05, 0.1
    while spent(high) > epsilon:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


def measure(
    method: head.Method, data: tuple[torch.Tensor, ...], epsilon: float, seeds: int
) -> dict[str, Any]:
    width, classes = data[0].shape[1], int(data[1].max()) + 1
    sigma = noise_multiplier(method, epsilon, width, classes)
    grid = {
        (clip, rate): head.train(method, data, sigma, clip, rate / clip, seed=0)
        for clip in (0.3, 1.0)
        for rate in (2, 8, 32, 128)
    }
    clip, rate = max(grid, key=lambda key: grid[key])
    scores = [head.train(method, data, sigma, clip, rate / clip, seed=100 + seed) for seed in range(seeds)]
    mean = sum(scores) / seeds
    row = {
        "epsilon": epsilon,
        "method": method.name,
        "kind": method.kind,
        "rank": method.rank,
        "sigma": sigma,
    }
    print(f"eps {epsilon:<4g} {method.name:22s} sigma {sigma:7.3f} accuracy {mean:.3f}", flush=True)
    return {**row, "clip": clip, "lr": rate / clip, "accuracy": mean, "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with Banking77's train.csv and test.csv")
    parser.add_argument("--features", type=Path, help="torch file [x, labels, x_test, labels_test] instead")
    parser.add_argument("--cache", type=Path, default=Path("runs/banking77.pt"))
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.2, 0.4, 1.0, 3.0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 192])
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    head.RATE, head.STEPS, head.DELTA = options.rate, options.steps, options.delta
    if options.features is not None:
        loaded = tuple(torch.load(options.features, weights_only=True))
    elif options.data is not None:
        loaded = head.features(options.data, options.cache, options.device)
    else:
        parser.error("give --data or --features")
    data = tuple(part.to(options.device) for part in loaded)
    rows = [measure(m, data, e, options.seeds) for e in options.epsilons for m in methods(options.ranks)]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
