"""Static-poison membership attack on the noisy projections M2 and M1, over ranks and noise.

Trend of Tables 2 and 3 in "LoRA and Privacy: When Random Projections Help (and When They Don't)": AUC, balanced
accuracy and test accuracy all grow with the rank, and fall with the noise. The paper: a CNN on CIFAR-10 with 200 shadow
models. Here: a linear head on frozen all-MiniLM-L6-v2 features of Banking77 questions (10 of its intents), full-batch
gradient descent with each record clipped to C, a canary of random features with the least likely label.

M2 releases (V + sigma C Xi) A^T A with a fresh A each step, M1 releases V A^T A + sigma C Xi (an analysis, not
offered for training). The last columns: epsilon of M2's steps by this library's bound, delta 1e-5.

Run: python benchmarks/papers/projection_attack.py --features /path/to/banking77.pt [--json FILE]
(the file that projection_utility.py caches: python benchmarks/papers/projection_utility.py --data DIR --cache FILE).
Full scale: --features FILE of CIFAR-10 (torch file [x, labels, x_test, labels_test], any backbone) --records 5000
--trials 2000 --ranks 16 64 128 256 384 512 --noises 0.1 0.5 --device cuda.

Noise is seeded: these runs measure attacks and protect nobody.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from fedlora.accounting import NoisyProjectionEvent, epsilon_of
from fedlora.audit.statistics import roc_figures

CLASSES, CLIP, DELTA = 10, 1.0, 1e-5
Data = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def subset(path: Path, records: int, device: str) -> Data:
    """Return so many training records of ten classes, and their test records."""
    x, y, x_test, y_test = torch.load(path, weights_only=True)
    kept, kept_test = y < CLASSES, y_test < CLASSES
    order = torch.randperm(int(kept.sum()), generator=torch.Generator().manual_seed(0))[:records]
    parts = (x[kept][order], y[kept][order], x_test[kept_test], y_test[kept_test])
    return tuple(part.to(device) for part in parts)  # type: ignore[return-value]


def train(
    data: Data, canary: tuple[torch.Tensor, int], member: torch.Tensor, kind: str, rank: int, sigma: float,
    steps: int, lr: float, generator: torch.Generator,
) -> torch.Tensor:  # fmt: skip
    """Return the heads (models, classes, width) of shadow models; `member` says which train on the canary."""
    x = torch.cat([data[0], canary[0][None]])
    y = torch.cat([data[1], torch.tensor([canary[1]], device=x.device)])
    models, (count, width) = len(member), x.shape
    weight = torch.zeros(models, CLASSES, width, device=x.device)
    shown = torch.ones(count, models, device=x.device)
    shown[-1] = member
    hot = torch.nn.functional.one_hot(y, CLASSES)[:, None].float()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=x.device)

    for _ in range(steps):
        g = torch.softmax((x @ weight.flatten(0, 1).mT).view(count, models, CLASSES), 2) - hot
        norms = g.norm(dim=2) * x.norm(dim=1)[:, None]
        g *= ((CLIP / norms.clamp_min(1e-12)).clamp_max(1.0) * shown)[:, :, None]
        total = (g.flatten(1).mT @ x).view(models, CLASSES, width)
        noise = sigma * CLIP * normal(models, CLASSES, width)
        a = normal(models, rank, width) / rank**0.5
        seen = total + noise if kind == "m2" else total
        moved = (seen @ a.mT) @ a
        weight -= lr / count * (moved if kind == "m2" else moved + noise)
    return weight


def measure(data: Data, kind: str, rank: int, sigma: float, options: argparse.Namespace) -> dict[str, Any]:
    device = data[0].device
    generator = torch.Generator(device=device).manual_seed(1)
    width = data[0].shape[1]
    features = torch.randn(width, generator=generator, device=device)
    features /= features.norm()
    nobody = torch.zeros(1, device=device)
    reference = train(data, (features, 0), nobody, kind, rank, sigma, options.steps, options.lr, generator)[0]
    canary = (features, int((reference @ features).argmin()))
    scores, truth, accuracy = [], [], []
    for first in range(0, options.trials, options.chunk):
        size = min(options.chunk, options.trials - first)
        member = (torch.arange(size, device=device) % 2 == 0).float()
        heads = train(data, canary, member, kind, rank, sigma, options.steps, options.lr, generator)
        losses = torch.logsumexp(heads @ features, 1) - (heads @ features)[:, canary[1]]
        scores.append(-losses.cpu().numpy())
        truth.append(member.bool().cpu().numpy())
        found = (data[2] @ heads.flatten(0, 1).mT).view(len(data[2]), size, CLASSES).argmax(2)
        accuracy.append(float((found == data[3][:, None]).float().mean()))
    score, inside = np.concatenate(scores), np.concatenate(truth)
    balanced = max(
        ((score[inside] >= cut).mean() + (score[~inside] < cut).mean()) / 2 for cut in np.unique(score)
    )
    event = NoisyProjectionEvent.single(width, min(rank, width), sigma, 1.0, CLASSES).times(options.steps)
    epsilon = epsilon_of(event, DELTA).epsilon if kind == "m2" else None
    return {
        "release": kind, "noise": sigma, "rank": rank, "auc": roc_figures(score, inside).auc,
        "balanced accuracy": float(balanced), "test accuracy": float(np.mean(accuracy)), "epsilon": epsilon,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--records", type=int, default=300)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--chunk", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--noises", type=float, nargs="+", default=[0.1, 0.5])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = subset(options.features, options.records, options.device)
    rows = []
    for kind, noises in (("m2", options.noises), ("m1", options.noises[-1:])):
        for sigma in noises:
            for rank in options.ranks:
                rows.append(measure(data, kind, rank, sigma, options))
                print(
                    "  ".join(
                        f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()
                    )
                )
                sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
