"""A private head on frozen pooled features, as the model gives them and without their common part.

    python benchmarks/utility_centered_head.py --epsilons 3 8
    python benchmarks/utility_centered_head.py --model SmolLM2-FOLDER --modules q_proj v_proj --head score

BBC topics as in `utility_mechanisms.py` (8 clients of 228 records, rate .07, 60 rounds of one step, Adam at the
server), but nothing except the head is trained, so that its inputs are computed once. For each learning rate, means
over seeds: inputs as they are, and without the direction of the public sequences' mean (`head_input: centered`),
each with the head's rate as it is and multiplied by 4 / norm (`head_rates: auto`). Noise is seeded: these runs protect
nobody.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot
from utility_setup import TASKS, Bench

from fedlora.accounting import PoissonGaussianEvent, calibrate_noise_multiplier
from fedlora.adapters.session import without_direction
from fedlora.mechanisms.group_weights import START_LOGIT, head_scale
from fedlora.training.groups import public_records
from fedlora.training.heads import LOGIT_RATE, head_inputs, new_heads


def inputs_of(bench: Bench, records: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what reaches the head for some records, (records, in) float32, and their labels."""
    heads = new_heads(bench.federation.config, bench.parts.adapted)
    (rows,) = head_inputs(heads, bench.parts.task, bench.parts.adapted, records).values()
    return rows.float(), bench.parts.task.collate(records)["labels"]


def train(
    data: tuple[torch.Tensor, ...],
    public: torch.Tensor,
    sigma: float,
    rate: float,
    seed: int,
    *,
    scaled: bool,
) -> float:
    """Return the test accuracy of one run; C is .15 times the public typical norm, as for the adapters."""
    x, y, x_test, y_test = data
    facts = TASKS["bbc"]
    batch, clients = facts["batch"], facts["clients"]
    draw = torch.Generator().manual_seed(seed)
    classes, norm = int(y.max()) + 1, float(public.square().sum(1).mean().sqrt())
    weight = torch.randn(classes, x.shape[1], generator=draw) * 0.02
    weight *= head_scale(float(weight.square().sum(1).mean().sqrt()), norm, START_LOGIT)
    clip = 0.15 * norm * math.sqrt(1 - 1 / classes)
    deviation = sigma * clip / batch / math.sqrt(clients)
    first, second = torch.zeros_like(weight), torch.full_like(weight, deviation**2)
    for _ in range(facts["rounds"]):
        rows = torch.rand(len(x), generator=draw) < batch / facts["records"]
        g = torch.softmax(x[rows] @ weight.mT, 1) - one_hot(y[rows], classes)
        factor = (clip / (g.norm(dim=1) * x[rows].norm(dim=1)).clamp_min(1e-12)).clamp_max(1.0)
        mean = (g * factor[:, None]).mT @ x[rows] / (batch * clients)
        mean += deviation * torch.randn(weight.shape, generator=draw)
        first, second = 0.9 * first + 0.1 * mean, 0.99 * second + 0.01 * mean.square()
        weight -= rate * (LOGIT_RATE / norm if scaled else 1.0) * first / (second.sqrt() + deviation)
    return float(((x_test @ weight.mT).argmax(1) == y_test).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
    parser.add_argument("--modules", nargs="+", default=["query", "value"])
    parser.add_argument("--head", default="classifier")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[3.0, 8.0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.005, 0.01, 0.02, 0.04, 0.08, 0.16])
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    fixed = {"task": "bbc", "data": Path("data"), "device": "cpu", "lora_alpha": 8.0, "init": "orthonormal",
             "head_start": "model", "head_input": "model", "head_rates": False, "base_seed": 1, "rounds": None,
             "max_eval": 10_000, "head_noise": 1.5}  # fmt: skip
    bench = Bench.load(argparse.Namespace(**vars(args), **fixed))
    bench.parts.adapted.model.eval()
    chosen = [bench.encoded[int(i)] for part in bench.federation.parts.values() for i in part]
    data = (*inputs_of(bench, chosen), *inputs_of(bench, bench.evaluation))
    public, _ = inputs_of(bench, public_records(bench.parts.task))
    direction = torch.nn.functional.normalize(public.mean(0), dim=0)
    kept = without_direction(data[0], direction), data[1], without_direction(data[2], direction), data[3]
    shapes = {"as they are": (data, public), "centered": (kept, without_direction(public, direction))}
    rate = TASKS["bbc"]["batch"] / TASKS["bbc"]["records"]
    for epsilon in args.epsilons:
        sigma = calibrate_noise_multiplier(
            lambda s: PoissonGaussianEvent(s, rate).times(TASKS["bbc"]["rounds"]), epsilon,
            TASKS["bbc"]["delta"], tolerance=1e-3,
        )  # fmt: skip
        for name, (rows, seen) in shapes.items():
            for scaled in (False, True):
                found = {
                    lr: sum(train(rows, seen, sigma, lr, s, scaled=scaled) for s in range(args.seeds))
                    / args.seeds
                    for lr in args.rates
                }
                norm = float(seen.square().sum(1).mean().sqrt())
                shown = " ".join(f"{lr:g}: {accuracy:.3f}" for lr, accuracy in found.items())
                print(
                    f"epsilon {epsilon:g}  {name:12s} norm {norm:6.2f}  rates {'auto' if scaled else '-':5s} {shown}"
                )


if __name__ == "__main__":
    main()
