"""LoRA as a random sketch: calibrated membership attack, rank, and how unevenly the implicit noise falls on layers.

Trends of Table 1 and Figures 2, 3 and 4 in "LoRA Provides Differential Privacy by Design via Random Sketching":
without any added noise, full fine-tuning is attacked best, LoRA less, LoRA with frozen lora_A least (Table 1);
utility and AUC grow with the rank (Figure 3); ||M - M A^T A|| falls with the rank only where lora_A has variance 1/r
(Figure 2); layers with larger gradients receive more of it (Figure 4). The paper: GPT-2 on Enron, Pubmed and PTB, 20
epochs. Here: a linear head on frozen all-MiniLM-L6-v2 features of Banking77, 20 (or 40) epochs, Eq. 16's score
against a reference model trained on other questions; "perplexity" is exp(test loss). Figure 4 uses the gradients
of the model's own six layers.

None of this is a guarantee: the same releases with a known lora_A are attacked with AUC near 1 by
benchmarks/papers/noise_free_ranks.py.

Run: python benchmarks/papers/sketch_attack.py --features /path/to/banking77.pt [--texts train.csv] [--json FILE]
(the file that projection_utility.py caches; --texts adds Figure 4.)
Full scale: fedlora audit CONFIG --attack calibrated, CONFIG with model.task=causal-lm, model.name_or_path=gpt2,
mechanism.kind=none or lora_fa, privacy={unit: none}, adapter.rank=R, on a GPU with the data sets of the paper.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from fedlora.audit.statistics import roc_figures
from fedlora.mechanisms.diagnostics import injected_noise_by_layer, injected_noise_measure

Tensor = torch.Tensor
Split = tuple[Tensor, Tensor]


def train(
    kind: str, x: Tensor, y: Tensor, classes: int, rank: int, epochs: int, batch: int, lr: float, g: torch.Generator
) -> Tensor:  # fmt: skip
    """Return the heads (models, classes, width); x (models, n, width): every model has records of its own."""
    models, count, width = x.shape
    a = torch.randn(models, rank, width, generator=g, device=x.device) / rank**0.5
    b = torch.zeros(models, classes, rank, device=x.device)
    w = torch.zeros(models, classes, width, device=x.device)
    steps = epochs * count // batch
    for step in range(steps):
        rate = lr * (1.0 - step / steps)
        chosen = torch.randint(count, (models, batch), generator=g, device=x.device)
        own = torch.gather(x, 1, chosen[:, :, None].expand(-1, -1, width))
        weight = w if kind == "full" else b @ a
        grad = torch.softmax(own @ weight.mT, 2)
        grad -= torch.nn.functional.one_hot(torch.gather(y, 1, chosen), classes)
        full = grad.mT @ own / batch
        if kind == "full":
            w -= rate * full
            continue
        step_b = full @ a.mT
        if kind == "lora":
            a = a - rate * (b.mT @ full)
        b = b - rate * step_b
    return w if kind == "full" else b @ a


def losses(heads: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return (models, n) cross entropies."""
    logits = x @ heads.mT
    return torch.logsumexp(logits, 2) - torch.gather(logits, 2, y[:, :, None])[:, :, 0]


def attack(
    kind: str, data: tuple[Tensor, ...], rank: int, epochs: int, batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Train targets on half of the audited records and references on others; score by Eq. 16."""
    x, y, x_test, y_test = data
    g = torch.Generator(device=x.device).manual_seed(2)
    size, classes = options.records, int(y.max()) + 1
    order = torch.stack(
        [torch.randperm(len(x), generator=g, device=x.device)[: 3 * size] for _ in range(options.models)]
    )
    parts = [order[:, i * size : (i + 1) * size] for i in range(3)]  # members, others, auxiliary
    rate = options.lr_full if kind == "full" else options.lr
    target = train(kind, x[parts[0]], y[parts[0]], classes, rank, epochs, batch, rate, g)
    reference = train(kind, x[parts[2]], y[parts[2]], classes, rank, epochs, batch, rate, g)
    audited = torch.cat(parts[:2], 1)
    scores = losses(reference, x[audited], y[audited]) - losses(target, x[audited], y[audited])
    truth = np.arange(2 * size) < size
    found = [roc_figures(one.cpu().numpy(), truth) for one in scores]
    many = (options.models, -1)
    test = losses(target, x_test.expand(options.models, -1, -1), y_test.expand(*many))
    right = (x_test @ target.mT).argmax(2) == y_test
    return {
        "method": kind, "rank": None if kind == "full" else rank, "epochs": epochs, "batch": batch,
        "perplexity": float(test.mean().exp()), "accuracy": float(right.float().mean()),
        "auc": float(np.mean([f.auc for f in found])), "tpr at 10%": float(np.mean([f.tpr_at_10 for f in found])),
        "tpr at 1%": float(np.mean([f.tpr_at_1 for f in found])),
    }  # fmt: skip


def noise_by_variance() -> list[dict[str, float]]:
    """Figure 2: ||M - M A^T A||_F with entries of A of variance r^-gamma; mean of 5 draws."""
    g = torch.Generator().manual_seed(4)
    m = torch.rand(100, 100, generator=g, dtype=torch.float64)
    rows = []
    for rank in (1, 2, 4, 8, 16, 32, 64, 100):
        row: dict[str, float] = {"rank": rank}
        for gamma in (0.5, 1.0, 1.5):
            draws = [
                injected_noise_measure(
                    m, torch.randn(rank, 100, generator=g, dtype=torch.float64) * rank ** (-gamma / 2)
                )
                for _ in range(5)
            ]
            row[f"gamma {gamma}"] = float(np.mean(draws))
        rows.append(row)
    return rows


def noise_by_layer(texts: Path, features: Tensor, labels: Tensor) -> list[dict[str, float]]:
    """Figure 4: gradient norms of the query matrices of a real batch, and N(W, r) per layer."""
    from fedlora.adapters.models import load_base
    from fedlora.config.schema import ModelConfig

    name = "sentence-transformers/all-MiniLM-L6-v2"
    base = load_base(ModelConfig(name_or_path=name, task="sequence-classification", num_labels=2), 2)
    encoder = base.model.base_model.eval()
    with texts.open(newline="", encoding="utf-8") as handle:
        rows = [row["text"] for row in csv.DictReader(handle)]
    centres = torch.stack([features[labels == c].mean(0) for c in range(int(labels.max()) + 1)])
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:32]
    batch = base.tokenizer(
        [rows[i] for i in chosen], padding=True, truncation=True, max_length=64, return_tensors="pt"
    )
    for parameter in encoder.parameters():
        parameter.requires_grad_(True)
    hidden, mask = encoder(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    pooled = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    torch.nn.functional.cross_entropy(20.0 * pooled @ centres.mT, labels[chosen]).backward()
    queries = {
        f"layer {i}": layer.attention.self.query.weight.grad for i, layer in enumerate(encoder.encoder.layer)
    }
    found = {rank: injected_noise_by_layer(queries, rank) for rank in (4, 16, 64)}
    return [
        {
            "layer": i,
            "gradient": found[4][key]["gradient_norm"],
            **{f"N r={r}": found[r][key]["noise"] for r in found},
        }
        for i, key in enumerate(queries)
    ]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(title)
    for row in rows:
        print(
            "  " + "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="train.csv of Banking77, for Figure 4")
    parser.add_argument("--records", type=int, default=300)
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32, 128])
    parser.add_argument("--lr", type=float, default=4.0)
    parser.add_argument("--lr-full", type=float, default=8.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    data = tuple(part.to(options.device) for part in torch.load(options.features, weights_only=True))
    rows = [("full", 16, 20, 8), ("lora", 16, 20, 8), ("lora_fa", 16, 20, 8), ("lora_fa", 16, 40, 16)]
    found: dict[str, Any] = {"figure 2": noise_by_variance()}
    show("Figure 2", found["figure 2"])
    if options.texts:
        found["figure 4"] = noise_by_layer(options.texts, data[0].cpu(), data[1].cpu())
        show("Figure 4", found["figure 4"])
    found["table 1"] = [attack(kind, data, r, e, b, options) for kind, r, e, b in rows]
    show("Table 1", found["table 1"])
    found["figure 3"] = [attack("lora_fa", data, rank, 20, 8, options) for rank in options.ranks]
    show("Figure 3", found["figure 3"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
