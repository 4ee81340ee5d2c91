"""The demo: private federated fine-tuning on real text, beside its baselines.

1. eight clients train LoRA adapters and a classifier head under record-level privacy (DP-LoRA-FA);
2. the same clients train the head alone at the same epsilon; a real site would have to pay for such a comparison
   from the same budget, so it runs against a ledger of its own here, as if the first run had not happened;
3. a shorter run without privacy, 8 rounds instead of 36, for comparison.

Exit status 0 only if every promise that the README makes for this demo was kept.

    python examples/demo/run.py [--runs FOLDER] [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from fedlora.cli.simulate import progress_display
from fedlora.config import load_config
from fedlora.errors import FedLoraError
from fedlora.report.page import render
from fedlora.report.run_data import read_run
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RunResult

HERE = Path(__file__).resolve().parent
MIN_ACCURACY = 0.85
MAX_EPSILON = 8.0

PRIVATE: tuple[str, ...] = ()
HEAD_ONLY = (
    "run.name=demo-head-only",
    "adapter.target_modules=[]",
    "privacy.group_weights=equal",
)
NOT_PRIVATE = (
    "run.name=demo-no-privacy",
    "privacy={unit: none}",
    "federation.rounds=8",
    "federation.server_optimizer={kind: adam, lr: 2.0e-2, beta1: 0.9, beta2: 0.99, eps: 1.0e-8}",
)


def run(title: str, overrides: tuple[str, ...], ledger: Path | None) -> RunResult:
    """Run one configuration, show it live, and write its report."""
    print(f"\n== {title}", file=sys.stderr, flush=True)
    config = load_config(HERE / "demo.yaml", overrides=overrides)
    with progress_display(config.federation.rounds, quiet=False, config=config) as note:
        result = simulate(config, progress=note, ledger=ledger)
    (result.folder / "report.html").write_text(render(read_run(result.folder)), encoding="utf-8")
    return result


def row(title: str, result: RunResult) -> str:
    """One line of the closing table."""
    epsilon = "no privacy" if result.epsilon is None else f"{result.epsilon:.3f}"
    metrics = result.metrics or {}
    return f"{title:<34}{metrics.get('accuracy', float('nan')):>9.3f}{epsilon:>13}{result.seconds['wall']:>9.0f} s"


def broken_promises(private: RunResult, head: RunResult) -> list[str]:
    """What the demo promised and did not keep."""
    found = []
    accuracy, baseline = (private.metrics or {})["accuracy"], (head.metrics or {})["accuracy"]
    if not accuracy >= MIN_ACCURACY:
        found.append(f"accuracy {accuracy:.3f} is below {MIN_ACCURACY}")
    if not accuracy > baseline:
        found.append(f"accuracy {accuracy:.3f} is not above the head-only {baseline:.3f}")
    for result in (private, head):
        if result.epsilon is None or not result.epsilon <= MAX_EPSILON:
            found.append(f"{result.run_id}: epsilon {result.epsilon} is above {MAX_EPSILON}")
    if private.adapter is None or private.status != "finished":
        found.append(f"{private.run_id}: status {private.status}, adapter {private.adapter}")
    return found


def main() -> int:
    """Run the three configurations and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", default="runs", help="where run folders go")
    parser.add_argument("--ledger", type=Path, help="an existing ledger, to go on spending from it")
    parser.add_argument("overrides", nargs="*", help="dotted overrides for every run")
    options = parser.parse_args()
    # Each demo has its own ledger file: a second demo on the first one's ledger would be refused, as it should be.
    stamp = time.strftime("%Y%m%d-%H%M%S")
    ledger = options.ledger or Path(options.runs) / f"demo-{stamp}.ledger.sqlite"
    other = Path(options.runs) / f"demo-{stamp}-head-only.ledger.sqlite"
    extra = (f"run.dir={options.runs}/", *options.overrides)
    try:
        private = run("DP-LoRA-FA, epsilon 8, eight clients", (*PRIVATE, *extra), ledger)
        if private.status != "finished":
            print(f"the run ended early: {private.status}; see {private.folder}", file=sys.stderr)
            return 1
        head = run("the head alone, epsilon 8", (*HEAD_ONLY, *extra), other)
        plain = run("without privacy, 8 rounds", (*NOT_PRIVATE, *extra), None)
    except FedLoraError as error:
        print(f"demo: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\n{'':<34}{'accuracy':>9}{'epsilon':>13}{'time':>11}")
    print(row("DP-LoRA-FA", private))
    print(row("head alone, same epsilon", head))
    print(row("no privacy, 8 rounds", plain))
    majority = (private.metrics or {}).get("majority", float("nan"))
    print(f"majority class {majority:.3f}; delta {private.statement['delta']}")
    print(f"\nrun folder    {private.folder}\nreport        {private.folder / 'report.html'}")
    print(f"adapter       {private.adapter} (PEFT; reloaded, same logits)\nledger        {ledger}")
    print(f"what was spent: fedlora budget show {ledger}")
    problems = broken_promises(private, head)
    for problem in problems:
        print(f"demo: {problem}", file=sys.stderr)
    summary = {"private": private.metrics, "head_only": head.metrics, "no_privacy": plain.metrics}
    (private.folder / "demo.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
