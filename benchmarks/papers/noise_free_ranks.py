"""Noise-free LoRA-FA under a static-poison canary, over ranks; and the same with noise.

Trend of Table 1 in "LoRA and Privacy: When Random Projections Help (and When They Don't)": AUC 99.8 to 100 % at every
rank. Scale here: a random one-layer BERT (width 32), 8 public random records beside the canary, `--trials` shadow
clients. The paper's: CIFAR-10, a CNN, 5000 records, 2000 shadow models.

Run: python benchmarks/papers/noise_free_ranks.py [--trials 60] [--steps 60] [--ranks 1 2 4 8] [--json FILE]
Full scale: fedlora audit CONFIG adapter.rank=R --attack all --trials 2000, with your own CONFIG on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "audit"))

from audit_helpers import make_bench, write_model

from fedlora.audit import membership


def measure(model: Path, rank: int, trials: int, steps: int) -> dict[str, Any]:
    private = make_bench(model, rank=rank)
    free = membership.noise_free(private)
    long = membership.make_shadows(free, trials=trials, steps=steps)
    one = membership.make_shadows(free, trials=trials, steps=1)
    noised = membership.make_shadows(private, trials=trials, steps=1)
    return {
        "rank": rank,
        "noise-free, loss": membership.loss_attack(free, long).figures["auc"],
        "noise-free, release": membership.release_attack(free, one).figures["auc"],
        "sigma 1, release": membership.release_attack(private, noised).figures["auc"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", 32)
        rows = [measure(model, rank, options.trials, options.steps) for rank in options.ranks]
    names = list(rows[0])
    print(" | ".join(names))
    for row in rows:
        print(" | ".join(f"{row[name]:.3f}" if name != "rank" else str(row[name]) for name in names))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
