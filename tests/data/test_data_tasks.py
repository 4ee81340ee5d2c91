from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from data_helpers import byte_tokenizer, data_config, model_config, tiny_model

from fedlora.data import EncodedRows, Rows, build_task, encode_report, label_names
from fedlora.data.rows import ListStore
from fedlora.data.tasks import TASKS
from fedlora.data.tasks.base import IGNORED
from fedlora.errors import DataError

TEXTS = ["the cat sat", "dog", "the dog ran home and the cat sat on the mat", "numbers 1 2 3"]


def image_processor() -> Any:
    from transformers import ViTImageProcessor

    return ViTImageProcessor(size={"height": 8, "width": 8})


def make(task: str, **data: Any) -> tuple[Any, Any, list[dict[str, Any]]]:
    """A task, a tiny model and four records of it."""
    tokenizer = image_processor() if task == "image-classification" else byte_tokenizer()
    built = build_task(model_config(task), data_config(**data), tokenizer, labels=("a", "b", "c"))
    rows: list[dict[str, Any]]
    if task == "sequence-classification":
        return built, tiny_model("bert"), [{"text": text, "label": "abca"[n]} for n, text in enumerate(TEXTS)]
    if task == "token-classification":
        rows = [{"tokens": text.split(), "tags": ["a", *"b" * text.count(" ")]} for text in TEXTS]
        return built, tiny_model("bert-tokens"), rows
    if task == "causal-lm":
        return built, tiny_model("gpt2"), [{"text": text} for text in TEXTS]
    if task == "instruction":
        return (
            built,
            tiny_model("gpt2"),
            [{"prompt": text, "response": text[:n]} for n, text in enumerate(TEXTS)],
        )
    if task == "seq2seq":
        return (
            built,
            tiny_model("t5"),
            [{"source": text, "target": text[::-1][: n * 5]} for n, text in enumerate(TEXTS)],
        )
    images = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), dtype=np.uint8)
    return built, tiny_model("vit"), [{"image": image, "label": "c"} for image in images]


@pytest.mark.parametrize("task", TASKS)
def test_loss_per_record_is_each_records_own(task: str) -> None:
    built, model, rows = make(task)
    records = [built.encode(row) for row in rows]
    together = built.per_record_loss(model, built.collate(records))
    assert together.shape == (4,)
    assert together.dtype == torch.float32
    alone = torch.cat([built.per_record_loss(model, built.collate([record])) for record in records])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    reverse = built.per_record_loss(model, built.collate(records[::-1]))
    torch.testing.assert_close(together.flip(0), reverse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("task", ["causal-lm", "instruction", "seq2seq", "token-classification"])
def test_token_losses_equal_the_models_own_for_one_record(task: str) -> None:
    built, model, rows = make(task)
    for row in rows[1:]:
        batch = built.collate([built.encode(row)])
        ours = built.per_record_loss(model, batch)
        theirs = model(**batch).loss
        torch.testing.assert_close(ours[0], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_gives_metrics_and_leaves_the_model_as_it_was(task: str) -> None:
    built, model, rows = make(task)
    model.train()
    metrics = built.evaluate(model, [built.encode(row) for row in rows], batch_size=3)
    assert model.training
    assert all(isinstance(value, float) for value in metrics.values())
    wanted = "perplexity" if task in ("causal-lm", "instruction", "seq2seq") else "accuracy"
    assert np.isfinite(metrics[wanted])
    again = built.evaluate(model, [built.encode(row) for row in rows], batch_size=1)
    assert metrics == pytest.approx(again, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("task", ["causal-lm", "instruction", "seq2seq", "token-classification"])
def test_nothing_is_learned_on_padding(task: str) -> None:
    built, model, rows = make(task)
    batch = built.collate([built.encode(row) for row in rows])
    if task != "seq2seq":
        padding = batch["attention_mask"] == 0
        assert padding.any()
        assert (batch["labels"][padding] == IGNORED).all()
        lengths = batch["attention_mask"].sum(dim=1)
        assert (batch["attention_mask"].argmin(dim=1) == torch.where(padding.any(dim=1), lengths, 0)).all()
    before = built.per_record_loss(model, batch)
    changed = {name: value.clone() for name, value in batch.items()}
    changed["input_ids"][batch["attention_mask"] == 0] = 7
    torch.testing.assert_close(before, built.per_record_loss(model, changed), atol=1e-5, rtol=1e-5)


def test_pad_that_equals_eos_still_learns_the_end_token() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    built = build_task(model_config("causal-lm"), data_config(), tokenizer)
    batch = built.collate([built.encode({"text": text}) for text in TEXTS])
    ends = (batch["labels"] == tokenizer.eos_token_id).sum(dim=1)
    assert ends.tolist() == [1, 1, 1, 1]
    assert (batch["labels"][batch["attention_mask"] == 0] == IGNORED).all()


@pytest.mark.parametrize("empty", ["long prompt", "no response tokens", "only such records"])
def test_h27_records_without_targets_give_zero_loss_and_gradient(empty: str) -> None:
    built = build_task(model_config("instruction"), data_config(max_length=24), byte_tokenizer())
    masked = {"prompt": "dog " * 2000, "response": "yes"}
    rows = [masked] * 3 + ([] if empty == "only such records" else [{"prompt": "cat", "response": "yes"}])
    if empty == "no response tokens":
        built = build_task(model_config("causal-lm"), data_config(max_length=24), byte_tokenizer())
        built.tokenizer.eos_token = None
        rows = [{"text": ""}, {"text": "dog"}]
    model = tiny_model("gpt2")
    records = [built.encode(row) for row in rows]
    losses = built.per_record_loss(model, built.collate(records))
    losses.sum().backward()
    blank = [place for place, record in enumerate(records) if record.targets == 0]
    assert encode_report(records).without_target == len(blank) > 0
    assert (losses[blank] == 0).all()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    if len(blank) == len(records):
        assert all((gradient == 0).all() for gradient in gradients)
        assert np.isnan(built.evaluate(model, records)["perplexity"])
    else:
        assert np.isfinite(built.evaluate(model, records)["perplexity"])


@pytest.mark.parametrize("task", ["sequence-classification", "causal-lm", "token-classification"])
def test_h28_overlong_records_are_cut_to_the_window_and_counted(task: str) -> None:
    built, model, _ = make(task)
    texts = ["x" * 200_000, "the dog " * 40, "dog"]
    rows: list[dict[str, Any]] = [{"text": text, "label": "a"} for text in texts]
    if task == "token-classification":
        rows = [
            {
                "tokens": ["x" * 200_000] if n == 0 else text.split(),
                "tags": ["a"] * (1 if n == 0 else len(text.split())),
            }
            for n, text in enumerate(texts)
        ]
    start = time.process_time()
    records = [built.encode(row) for row in rows]
    assert time.process_time() - start < 5
    assert [len(record.input_ids) for record in records[:2]] == [64, 64]
    assert encode_report(records).cut == (1 if task == "token-classification" else 2)
    assert torch.isfinite(built.per_record_loss(model, built.collate(records))).all()
    stated = build_task(model_config(task), data_config(max_length=9999), byte_tokenizer(), labels=("a",))
    assert stated.window == 64
    strict = build_task(
        model_config(task), data_config(on_overlong="refuse"), byte_tokenizer(), labels=("a",)
    )
    with pytest.raises(DataError, match="longer than 64 tokens"):
        strict.encode(rows[1])


def test_h28_a_record_that_fits_exactly_is_not_cut() -> None:
    built = build_task(model_config("causal-lm"), data_config(max_length=3), byte_tokenizer())
    exact = built.encode({"text": "the cat sat"})
    assert len(exact.input_ids) == 3
    assert not exact.cut
    assert built.encode({"text": "the cat sat on"}).cut


def test_labels_map_by_name_in_the_stated_order() -> None:
    built, _, _ = make("sequence-classification")
    assert [built.label_id(name) for name in ("c", "a", " b ")] == [2, 0, 1]
    with pytest.raises(DataError, match="value withheld") as caught:
        built.label_id("Zorblax")
    assert "Zorblax" not in str(caught.value)
    plain = build_task(model_config("sequence-classification", num_labels=2), data_config(), byte_tokenizer())
    assert [plain.label_id(value) for value in ("1", 0, 1.0, True)] == [1, 0, 1, 1]
    for bad in (2, -1, "x", 0.5):
        with pytest.raises(DataError, match="value withheld"):
            plain.label_id(bad)


def test_label_names_come_from_the_data_only_where_they_are_public() -> None:
    rows = Rows(ListStore([{"text": "t", "label": value} for value in ("10", "9", "9")], "x"))
    simulated = data_config(partition={"kind": "quantity", "clients": 2})
    task = model_config("sequence-classification")
    assert label_names(task, simulated, rows) == ("9", "10")
    assert label_names(task, data_config(labels=["x", "y"]), rows) == ("x", "y")
    assert label_names(model_config("sequence-classification", num_labels=4), data_config(), rows) is None
    with pytest.raises(DataError, match="would reveal which labels"):
        label_names(task, data_config(), rows)
    assert label_names(model_config("causal-lm"), data_config(), rows) is None
    empty = Rows(ListStore([], "x"))
    assert label_names(model_config("sequence-classification", num_labels=2), simulated, empty) is None
    with pytest.raises(DataError, match="no records to read the label set off"):
        label_names(task, simulated, empty)
    with pytest.raises(
        DataError, match=r"needs the column\(s\) prompt, response; the columns are text, label"
    ):
        label_names(model_config("instruction"), simulated, rows)


def test_schema_errors_name_row_and_column_without_content() -> None:
    store = ListStore([{"text": "fine", "label": "a"}, {"text": ["Zorblax"], "label": "a"}], "site.csv")
    built, _, _ = make("sequence-classification")
    view = EncodedRows(built, Rows(store))
    assert view[0].targets == 1
    with pytest.raises(DataError, match=r"site\.csv, row 2: column 'text' must be text, not list") as caught:
        view[1]
    assert "Zorblax" not in str(caught.value)
    with pytest.raises(DataError, match=r"needs the column\(s\) label; the columns are text"):
        built.check_rows(Rows(ListStore([{"text": "x"}], "site.csv")))


def test_pairs_and_regression() -> None:
    task = model_config("sequence-classification", num_labels=1)
    built = build_task(task, data_config(), byte_tokenizer())
    rows = [{"text": text, "text_pair": "dog", "label": str(n / 2)} for n, text in enumerate(TEXTS)]
    records = [built.encode(row) for row in rows]
    assert len(records[1].input_ids) == 2 * len(built.tokenizer("dog")["input_ids"])
    model = tiny_model("bert", labels=1)
    batch = built.collate(records)
    losses = built.per_record_loss(model, batch)
    outputs = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, 0]
    torch.testing.assert_close(losses, (outputs - batch["labels"]) ** 2)
    assert set(built.evaluate(model, records)) == {"loss", "pearson", "spearman"}
    for bad in ("x", "nan", None):
        with pytest.raises(DataError, match=r"must be (a number|finite)"):
            built.encode(rows[0] | {"label": bad})


def test_words_are_labelled_at_their_first_token_only() -> None:
    built, _, _ = make("token-classification")
    record = built.encode({"tokens": ["zzz", "dog"], "tags": ["b", "c"]})
    assert [label for label in record.labels if label != IGNORED] == [1, 2]
    assert len(record.labels) == len(record.input_ids) > 2
    with pytest.raises(DataError, match="1 tokens but 2 tags"):
        built.encode({"tokens": "zzz", "tags": ["b", "c"]})


def test_images_come_as_paths_bytes_and_arrays(tmp_path: Any) -> None:
    from PIL import Image

    built, _, rows = make("image-classification")
    image = Image.fromarray(rows[0]["image"])
    image.save(tmp_path / "a.png")
    forms = [rows[0]["image"], image, str(tmp_path / "a.png"), (tmp_path / "a.png").read_bytes()]
    pixels = [built.encode({"image": form, "label": "a"}).extras["pixel_values"] for form in forms]
    assert all(np.array_equal(pixels[0], other) for other in pixels[1:])
    with pytest.raises(DataError, match="cannot be read"):
        built.encode({"image": b"nonsense", "label": "a"})


def test_label_names_read_tags_as_lists_or_text_and_name_bad_rows() -> None:
    task, simulated = (
        model_config("token-classification"),
        data_config(partition={"kind": "quantity", "clients": 2}),
    )
    rows = Rows(ListStore([{"tokens": "a b", "tags": "B-X O"}, {"tokens": "a b", "tags": ["O", "I-X"]}], "x"))
    assert label_names(task, simulated, rows) == ("B-X", "I-X", "O")
    for bad in (None, "", float("nan"), {"a": 1}):
        store = Rows(ListStore([{"text": "t", "label": "a"}, {"text": "t", "label": bad}], "site.csv"))
        with pytest.raises(DataError, match=r"site\.csv, row 2: (the label is empty|a label must be)"):
            label_names(model_config("sequence-classification"), simulated, store)


def test_encoded_records_are_kept_up_to_a_number_of_tokens() -> None:
    built, _, rows = make("causal-lm")
    view = EncodedRows(built, Rows(ListStore(rows, "x")), keep=8)
    first = view[0]
    assert view[0] is first
    assert view[2] is not view[2]
    assert view[2] == view[2]
    assert [len(record) for record in view[1:3]] == [len(view[1]), len(view[2])]
