from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlora.adapters import AdaptedModel, inject
from fedlora.adapters.export import RunFacts, export_adapter, push_folder
from fedlora.adapters.export_merge import export_merged
from fedlora.adapters.models import LoadedBase, load_base
from fedlora.config.schema import FedLoraConfig
from fedlora.errors import ExportError
from fedlora.wire.payload import AdapterPayload, ModuleSpec

RUN: dict[str, Any] = {
    "schema": 1,
    "run": {"name": "sample-run", "seed": 3},
    "model": {"name_or_path": "x", "task": "sequence-classification", "num_labels": 3, "device": "cpu"},
    "adapter": {"rank": 4, "lora_alpha": 8, "target_modules": ["query", "value"]},
    "data": {
        "source": {"kind": "file", "paths": ["/secret/place/a.csv"]},
        "name": "notes-2026",
        "labels": ["bad", "fair", "good"],
    },
    "mechanism": {"kind": "lora_fa"},
    "privacy": {
        "unit": "record",
        "adjacency": "add_or_remove",
        "noise_multiplier": 1.1,
        "target_delta": 1e-5,
        "max_grad_norm": 1.0,
        "budget": {"epsilon": 8.0, "delta": 1e-5, "on_exhausted": "refuse"},
        "noise_source": "os",
    },
    "training": {
        "expected_batch_size": 4,
        "nominal_records": 40,
        "steps_per_round": 1,
        "optimizer": {"kind": "sgd", "lr": 0.1},
    },
    "federation": {"rounds": 5, "min_replies": 1, "aggregation": {"kind": "mean_b"}},
}


def run_config(**sections: Any) -> FedLoraConfig:
    merged = {name: dict(section) if isinstance(section, dict) else section for name, section in RUN.items()}
    for name, changes in sections.items():
        merged[name] = merged[name] | changes if "unit" not in changes else changes
    return FedLoraConfig.model_validate_json(json.dumps(merged))


@dataclass(frozen=True)
class Bench:
    config: FedLoraConfig
    base: LoadedBase
    adapted: AdaptedModel


def save_tokenizer(where: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[PAD]", "[EOS]", *(f"w{n}" for n in range(58))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0", pad_token="[PAD]", eos_token="[EOS]"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    fast.save_pretrained(where)


def save_base(where: Path, kind: str) -> None:
    import transformers as hf

    torch.manual_seed(0)
    small = {"vocab_size": 60, "pad_token_id": 0}
    encoder = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 40,
    }
    model: Any
    if kind == "gpt2":
        model = hf.GPT2Model(
            hf.GPT2Config(
                n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1, **small
            )
        )
    elif kind == "distilbert":
        model = hf.DistilBertModel(
            hf.DistilBertConfig(
                dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=32, **small
            )
        )
    elif kind == "roberta":
        model = hf.RobertaModel(hf.RobertaConfig(**encoder, **small))
    elif kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=1, **encoder, **small))
    elif kind == "t5":
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=60,
                d_model=16,
                d_kv=8,
                d_ff=24,
                num_layers=1,
                num_heads=2,
                decoder_start_token_id=0,
            )
        )
    elif kind == "vit":
        model = hf.ViTModel(
            hf.ViTConfig(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=24,
                image_size=8,
                patch_size=4,
            )
        )
        hf.ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(where)
    else:
        model = hf.BertModel(hf.BertConfig(**encoder, **small))
    model.save_pretrained(where)
    if kind != "vit":
        save_tokenizer(where)


def make_bench(where: Path, kind: str, targets: list[str], **sections: Any) -> Bench:
    if not (where / "config.json").exists():
        save_base(where, kind)
    model = {"name_or_path": str(where)} | sections.pop("model", {})
    adapter = {"target_modules": targets} | sections.pop("adapter", {})
    config = run_config(model=model, adapter=adapter, **sections)
    base = load_base(config.model, config.model.num_labels)
    adapted = inject(base.model, config.adapter, seed=config.run.seed, fingerprint=base.fingerprint)
    return Bench(config, base, adapted)


def trained_payload(bench: Bench, size: float = 0.2) -> AdapterPayload:
    """Random values for every trained block, as after training."""
    start = bench.adapted.write_factors()
    generator = np.random.default_rng(1)
    blocks = {
        name: (generator.normal(size=value.shape) * size).astype(np.float32)
        for name, value in start.blocks.items()
    }
    return replace(start, blocks=blocks)


TASKS = {
    "gpt2": ("sequence-classification", ["c_attn"]),
    "distilbert": ("sequence-classification", ["q_lin", "v_lin"]),
    "roberta": ("token-classification", ["query", "dense"]),
    "bert": ("sequence-classification", ["query", "value"]),
    "llama": ("causal-lm", ["q_proj", "down_proj"]),
    "t5": ("seq2seq", ["q", "wo"]),
    "vit": ("image-classification", ["query"]),
}


@pytest.mark.parametrize("kind", TASKS)
def test_h08_head_and_adapter_come_back_with_the_same_logits(kind: str, tmp_path: Path) -> None:
    task, targets = TASKS[kind]
    if kind == "vit":
        targets = ["q_proj"] if "q_proj" in str(vit_names(tmp_path)) else targets
    bench = make_bench(tmp_path / "base", kind, targets, model={"task": task})
    payload = trained_payload(bench)
    report = export_adapter(bench, payload, tmp_path / "out")
    assert report.reload.max_abs <= report.limit
    assert report.effect.max_abs > 100 * report.limit
    assert report.rank == 4
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "fedlora.json"} <= set(
        report.files
    )
    assert ("preprocessor_config.json" if kind == "vit" else "tokenizer.json") in report.files
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["fan_in_fan_out"] == (kind == "gpt2")
    assert written["base_model_name_or_path"] == str(tmp_path / "base")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    if kind in ("gpt2", "distilbert"):
        heads = {"gpt2": ["score"], "distilbert": ["pre_classifier", "classifier"]}
        assert sorted(written["modules_to_save"]) == sorted(heads[kind])


def vit_names(tmp_path: Path) -> list[str]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
    )
    return [name for name, _ in ViTModel(config).named_modules()]


NEW_PROCESS = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
base = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=3)
base.config.pad_token_id = 0
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
batch = tokenizer(["w3 w9 w12", "w5"], return_tensors="pt", padding=True)
batch.pop("token_type_ids", None)
print([round(x, 6) for x in model(**batch).logits.flatten().tolist()])
"""


def test_h08_plain_peft_in_a_new_process_gives_the_same_logits(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "base", "gpt2", ["c_attn", "c_fc"])
    export_adapter(bench, trained_payload(bench), tmp_path / "out")
    batch = bench.base.tokenizer(["w3 w9 w12", "w5"], return_tensors="pt", padding=True)
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        want = bench.adapted.model(**batch).logits.flatten().tolist()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NEW_PROCESS, str(tmp_path / "base"), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.strip().splitlines()[-1]) == pytest.approx(want, abs=1e-5)


def test_h08_a_lost_head_is_noticed_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(tmp_path / "base", "bert", ["query"])
    payload = trained_payload(bench)
    export_adapter(bench, payload, tmp_path / "kept")
    before = sorted(path.name for path in tmp_path.iterdir())
    import safetensors.torch

    save = safetensors.torch.save_file

    def lose(how: str) -> None:
        def spoiled(state: dict[str, torch.Tensor], *where: Any, **more: Any) -> None:
            heads = [name for name in state if "classifier" in name]
            left = {name: value for name, value in state.items() if name not in heads}
            save(
                left if how == "absent" else left | {name: state[name] * 0 for name in heads}, *where, **more
            )

        monkeypatch.setattr(safetensors.torch, "save_file", spoiled)

    for place in ("new", "kept"):
        for how, message in (("absent", "cannot load"), ("zero", "logits of the reloaded adapter differ")):
            lose(how)
            with pytest.raises(ExportError, match=message):
                export_adapter(bench, payload, tmp_path / place)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert "classifier" in (tmp_path / "kept" / "adapter_config.json").read_text()


def frames_of(payload: AdapterPayload, layout: Any) -> AdapterPayload:
    blocks = {name: value for name, value in payload.blocks.items() if name in layout.extra}
    for name, spec in payload.modules.items():
        product = spec.scaling * payload.blocks[f"{name}|lora_B"] @ payload.blocks[f"{name}|lora_A"]
        left, size, right = np.linalg.svd(product.astype(np.float64), full_matrices=False)
        rank = spec.rank
        blocks[f"{name}|q_out"] = left[:, :rank].astype(np.float32)
        blocks[f"{name}|core"] = np.diag(size[:rank]).astype(np.float32)
        blocks[f"{name}|q_in"] = right[:rank].T.astype(np.float32)
    return replace(payload, kind="frames", blocks=blocks)


def test_every_payload_kind_exports_the_same_model(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "base", "bert", ["query", "value"])
    factors = trained_payload(bench)
    recipe = bench.adapted.recipe
    drawn = {f"{name}|lora_A": recipe.draw(name) for name in factors.modules}
    common = replace(factors, blocks={**factors.blocks, **drawn})
    lora_b = replace(
        common,
        kind="lora_b",
        recipe=recipe.sha256,
        blocks={name: value for name, value in common.blocks.items() if not name.endswith("lora_A")},
    )
    reports = [
        export_adapter(bench, payload, tmp_path / str(number))
        for number, payload in enumerate((common, lora_b, frames_of(common, bench.adapted.layout)))
    ]
    assert reports[0].effect.max_abs == pytest.approx(reports[1].effect.max_abs)
    assert reports[0].effect.max_abs == pytest.approx(reports[2].effect.max_abs, rel=1e-4)


def test_h02_ranks_and_scalings_that_differ_become_one_rank_and_alpha(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "base", "bert", ["query", "value"])
    payload = trained_payload(bench)
    modules, blocks = dict(payload.modules), dict(payload.blocks)
    for number, name in enumerate(modules):
        spec = modules[name]
        rank = 2 + number
        modules[name] = ModuleSpec(spec.out_features, spec.in_features, rank, 0.5 * (number + 1))
        generator = np.random.default_rng(number)
        blocks[f"{name}|lora_A"] = generator.normal(size=(rank, spec.in_features)).astype(np.float32)
        blocks[f"{name}|lora_B"] = generator.normal(size=(spec.out_features, rank)).astype(np.float32)
    report = export_adapter(bench, replace(payload, modules=modules, blocks=blocks), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert report.rank == written["r"] == written["lora_alpha"] == 5
    assert not written["rank_pattern"]
    assert not written["alpha_pattern"]
    assert report.reload.max_abs <= report.limit


@pytest.mark.parametrize("target", ["c_attn", "c_proj", "c_fc"])
def test_h09_gpt2_layers_merge_in_their_own_orientation(target: str, tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "base", "gpt2", [target])
    report = export_merged(bench, trained_payload(bench), tmp_path / "out")
    assert report.reload.max_abs <= report.limit <= 1e-3
    assert report.effect.max_abs > 0.05
    assert "model.safetensors" in report.files
    assert "unmerged" not in report.files
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["id2label"] == {"0": "bad", "1": "fair", "2": "good"}


@pytest.mark.parametrize(
    ("kind", "targets"), [("bert", ["query", "dense"]), ("llama", ["q_proj", "up_proj"])]
)
def test_h10_bf16_bases_merge_in_float32_and_lossy_merges_are_refused(
    kind: str, targets: list[str], tmp_path: Path
) -> None:
    task = TASKS[kind][0]
    bench = make_bench(tmp_path / "base", kind, targets, model={"task": task, "dtype": "bfloat16"})
    small = trained_payload(bench, size=0.01)
    fresh = bench.adapted.write_factors()
    small = replace(
        small,
        blocks={
            n: fresh.blocks[n] if n in bench.adapted.layout.extra else v for n, v in small.blocks.items()
        },
    )
    report = export_merged(bench, small, tmp_path / "out")
    assert report.reload.max_abs <= report.limit
    with pytest.raises(ExportError, match="rounding would lose the adapter"):
        export_merged(bench, small, tmp_path / "lossy", dtype="bfloat16")
    assert not (tmp_path / "lossy").exists()
    with pytest.raises(ExportError, match="dtype 'int8' is unknown"):
        export_merged(bench, small, tmp_path / "lossy", dtype="int8")


def test_h10_a_wrong_merge_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import LoraModel

    bench = make_bench(tmp_path / "base", "bert", ["value", "dense"])

    def untouched(self: Any, **_: Any) -> Any:
        return self._unload_and_optionally_merge(merge=False)

    monkeypatch.setattr(LoraModel, "merge_and_unload", untouched)
    with pytest.raises(ExportError, match="differ from base \\+ adapter"):
        export_merged(bench, trained_payload(bench), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["thesis.tex", "config.json", "adapter_config.json"])
def test_other_peoples_files_are_never_replaced(name: str, tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "base", "bert", ["query"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("x")
    for export in (export_adapter, export_merged):
        with pytest.raises(ExportError, match="holds other files"):
            export(bench, trained_payload(bench), tmp_path / "mine")
        with pytest.raises(ExportError, match="holds other files"):
            export(bench, trained_payload(bench), tmp_path / "base")
    with pytest.raises(ExportError, match="is a file"):
        export_adapter(bench, trained_payload(bench), tmp_path / "mine" / name)
    assert (tmp_path / "mine" / name).read_text() == "x"
    assert (tmp_path / "base" / "model.safetensors").exists()


def test_an_earlier_export_is_replaced_also_behind_a_link(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "base", "bert", ["query"])
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for export in (export_adapter, export_merged, export_adapter):
        export(bench, trained_payload(bench), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "real" / "model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "link", "real"]


def test_whole_matrices_export_only_merged(tmp_path: Path) -> None:
    save_base(tmp_path / "base", "bert")
    config = run_config(model={"name_or_path": str(tmp_path / "base")})
    base = load_base(config.model, 3)
    adapted = inject(base.model, config.adapter, seed=1, fingerprint=base.fingerprint, adapt="full")
    bench = Bench(config, base, adapted)
    payload = trained_payload(bench)
    with pytest.raises(ExportError, match="--merged"):
        export_adapter(bench, payload, tmp_path / "out")
    report = export_merged(bench, payload, tmp_path / "out")
    assert report.effect.max_abs > 0.01
    assert report.reload.max_abs <= report.limit


FACTS = RunFacts(
    epsilon=3.25,
    statement={
        "accountant": "pld",
        "sampling_assumption": "Poisson sampling of records, rate 0.1 (as stated)",
    },
    metrics={"accuracy": 0.875},
    rounds=5,
    warnings=("one ledger differs",),
)


def test_the_card_states_epsilon_with_everything_it_means(tmp_path: Path) -> None:
    bench = make_bench(tmp_path / "base", "bert", ["query"])
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    bench = make_bench(tmp_path / "base", "bert", ["query"])
    export_adapter(bench, trained_payload(bench), tmp_path / "out", facts=FACTS)
    card = (tmp_path / "out" / "README.md").read_text()
    for part in (
        "3.25",
        "1e-05",
        "one record (per record, not per person)",
        "add_or_remove",
        "the server included",
        "Poisson sampling of records, rate 0.1",
        "lora_fa",
        "notes-2026",
        "bad, fair, good",
        "license: apache-2.0",
        "- differential-privacy",
        "0.875",
        "one ledger differs",
        "library_name: peft",
    ):
        assert part in card, part
    assert "/secret/place" not in card
    facts = json.loads((tmp_path / "out" / "fedlora.json").read_text())
    assert facts["epsilon"] == 3.25
    assert facts["base_fingerprint"] == bench.base.fingerprint


@pytest.mark.parametrize("how", ["none", "seeded", "unknown", "infinite"])
def test_a_card_never_suggests_privacy_that_is_not_there(how: str, tmp_path: Path) -> None:
    privacy: dict[str, Any] = dict(RUN["privacy"])
    facts = FACTS
    if how == "none":
        privacy = {"unit": "none"}
    elif how == "seeded":
        privacy = privacy | {"noise_source": "seeded-test-only"}
    else:
        facts = replace(FACTS, epsilon=None if how == "unknown" else float("inf"))
    bench = make_bench(tmp_path / "base", "bert", ["query"], privacy=privacy)
    export_adapter(bench, trained_payload(bench), tmp_path / "out", facts=facts)
    card = (tmp_path / "out" / "README.md").read_text()
    if how in ("none", "seeded"):
        assert "WITHOUT differential privacy" in card
        assert "- differential-privacy" not in card
    else:
        assert "do not treat the model as private" in card


def card_of(tmp_path: Path, facts: RunFacts = FACTS, **sections: Any) -> str:
    from fedlora.adapters.export_card import write_card
    from fedlora.adapters.export_facts import BaseFacts

    bench = make_bench(tmp_path / "base", "bert", ["query"], **sections)
    (tmp_path / "card").mkdir(exist_ok=True)
    base = BaseFacts.of(bench.config, bench.base)
    write_card(tmp_path / "card", bench.config, base, facts, merged=False)
    return (tmp_path / "card" / "README.md").read_text()


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(8.0, "8"), (8.00001, "8.001"), (7.99954, "8"), (1.23401, "1.235"), (0.0, "0"), (123456.7, "1.235e+05")],
)
def test_the_cards_epsilon_is_never_below_the_runs(epsilon: float, shown: str, tmp_path: Path) -> None:
    assert f"| epsilon (largest over clients) | {shown} |" in card_of(
        tmp_path, replace(FACTS, epsilon=epsilon)
    )
    assert float(shown) >= epsilon


def test_the_cards_delta_is_the_one_that_the_ledgers_epsilon_holds_at(tmp_path: Path) -> None:
    privacy = RUN["privacy"] | {"budget": {"epsilon": 8.0, "delta": 1e-4, "on_exhausted": "refuse"}}
    card = card_of(tmp_path, replace(FACTS, statement={"target_delta": 1e-5}), privacy=privacy)
    assert "| delta | 0.0001 |" in card
    assert "| delta that the noise was chosen for | 1e-05 |" in card


def test_a_client_level_card_says_whose_epsilon_it_is_and_what_it_assumes(tmp_path: Path) -> None:
    from fedlora.report.conditions import conditions_of

    privacy = {name: value for name, value in RUN["privacy"].items() if name != "max_grad_norm"}
    sections = {
        "privacy": privacy | {"unit": "client", "clipping_norm": 1.0},
        "mechanism": {"kind": "lora_fa"},
    }
    said = conditions_of(run_config(**sections))
    card = card_of(tmp_path, replace(FACTS, statement=said), **sections)
    assert "| epsilon | 3.25 |" in card
    assert "one client (all its records)" in card
    assert "the server sees every update and is trusted to clip and noise" in card
    assert f"| neighbouring data sets | {said['neighbouring']} |" in card


def test_a_card_tells_that_a_run_started_from_another_and_shows_no_path(tmp_path: Path) -> None:
    facts = replace(FACTS, warnings=("started from /home/me/runs/old, which states no privacy: beware",))
    card = card_of(tmp_path, facts, adapter={"init_from": "/home/me/runs/old"})
    assert "started from another run's adapter, which states no privacy: beware" in card
    assert "| started from | another run's adapter;" in card
    assert "/home/me" not in card
    assert str(tmp_path) not in card
    assert "base_model:" not in card  # a folder of this machine is no name on the hub


def test_a_card_names_no_client_and_counts_no_shared_record(tmp_path: Path) -> None:
    """Simulated clients may be called after people, and hundreds of them may have a warning each."""
    warnings = (
        "17 records sit at several of 3 clients, one at 2 (Ann (Smith) and Bob: 9): for them the figures add up",
        "17 people sit at several of 3 clients, one at 2: for them the clients' figures add up",
        *(f"client Zed-{number} reports epsilon 1, its events imply 2" for number in range(300)),
        "client Ann: no receipt for round 2; counted as spent in full",
    )
    card = card_of(tmp_path, replace(FACTS, warnings=warnings))
    assert "some records sit at several clients" in card
    assert "some people sit at several clients" in card
    assert "301 warnings about single clients' ledgers" in card
    assert not [name for name in ("Ann", "Bob", "Zed", "17", "imply") if name in card]


def test_labels_and_descriptions_cannot_break_out_of_the_cards_table(tmp_path: Path) -> None:
    labels = ["bad |x", "fair\n\n# Privacy: epsilon 0", "<b>good"]
    card = card_of(tmp_path, data={"labels": labels, "description": "a\n## Privacy\nnone"})
    assert "\n# Privacy" not in card
    assert card.count("## Privacy") == 2  # the card's own, and one inside a line of the description
    assert card.count("\n## Privacy") == 1
    assert "&lt;b>good" in card


def test_warnings_stand_on_the_card_of_a_run_without_privacy_too(tmp_path: Path) -> None:
    card = card_of(tmp_path, privacy={"unit": "none"})
    assert "WITHOUT differential privacy" in card
    assert "one ledger differs" in card
    assert "epsilon" not in card


def test_push_uploads_the_folder_and_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    calls: list[tuple[str, dict[str, Any]]] = []

    class Api:
        def create_repo(self, name: str, **how: Any) -> None:
            calls.append((name, how))

        def upload_folder(self, **how: Any) -> str:
            calls.append(("upload", how))
            return "https://hub/me/model"

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    assert push_folder(tmp_path, "me/model") == "https://hub/me/model"
    assert calls[0] == ("me/model", {"private": True, "exist_ok": True})
    assert calls[1][1]["folder_path"] == str(tmp_path)
    monkeypatch.setattr(Api, "upload_folder", lambda self, **how: 1 / 0)
    with pytest.raises(ExportError, match="hf auth login"):
        push_folder(tmp_path, "me/model")


def test_the_folder_has_the_layout_that_servers_read(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    bench = make_bench(tmp_path / "base", "llama", ["q_proj", "v_proj"], model={"task": "instruction"})
    export_adapter(bench, trained_payload(bench), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert written["peft_type"] == "LORA"
    assert written["task_type"] == "CAUSAL_LM"
    assert written["bias"] == "none"
    assert written["modules_to_save"] is None
    assert sorted(written["target_modules"]) == ["q_proj", "v_proj"]
    assert (written["r"], written["lora_alpha"], written["use_rslora"]) == (4, 8, False)
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    ends = {name.removeprefix("base_model.model.model.layers.") for name in tensors}
    assert "0.self_attn.q_proj.lora_A.weight" in ends
    assert "1.self_attn.v_proj.lora_B.weight" in ends
    assert len(tensors) == 8
    assert "content" in (tmp_path / "out" / "chat_template.jinja").read_text()
