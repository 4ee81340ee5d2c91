"""Render conversations with a tokenizer's own chat template and find the response tokens.

The whole conversation is rendered and tokenised once, as it is at inference. A response starts
where the template's generation prompt ends (a token that joins the prompt's last blank with the
first word is the response's) and stops with the turn's end token (the first
special token after the answer), so that the model learns to stop; what the template prints
after that token belongs to the frame and is not learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedlora.data.rows import Row
from fedlora.data.tasks.base import IGNORED
from fedlora.errors import DataError

Message = Mapping[str, str]


def read_messages(value: Any) -> list[dict[str, str]]:
    """Check and normalise a `messages` column: dictionaries with role and content.

    `from`/`value` keys and the roles human, gpt and bot are understood.

    Raises:
        DataError: if it has another form; content is not shown.
    """
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError("column 'messages' must be a non-empty list of {role, content}")
    names = {"human": "user", "gpt": "assistant", "bot": "assistant"}
    messages = []
    for turn, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise DataError(f"column 'messages': turn {turn} is not a dictionary")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"column 'messages': turn {turn} needs text in role and content")
        messages.append({"role": names.get(role, role), "content": content})
    return messages


def as_messages(row: Row, prompt: str, response: str) -> list[dict[str, str]]:
    """Return a prompt/response record as messages; an optional `system` column comes first."""
    system = system_of(row)
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def keep_start(messages: Sequence[Message], characters: int, turns: int) -> tuple[list[Message], bool]:
    """Return a conversation's beginning: at most so many characters and turns; and whether something was cut.

    What lies beyond cannot fit the window; leaving it out before printing keeps the time bounded.
    """
    kept: list[Message] = []
    room = characters
    for message in messages[:turns]:
        if room <= 0:
            break
        kept.append(_with(message, message["content"][:room]))
        room -= len(message["content"])
    return kept, len(kept) < len(messages) or room < 0


def keep_end(
    messages: Sequence[Message], last: int, characters: int, turns: int
) -> tuple[list[Message], bool]:
    """Return what leads to turn `last`, that turn's beginning and what follows; and whether something was cut.

    At most `characters` and `turns` before `last` are kept, the newest ones; a system message at the start stays.
    """
    earlier: list[Message] = []
    room = characters
    for message in reversed(messages[:last]):
        if room <= 0 or len(earlier) == turns:
            break
        earlier.insert(0, _with(message, message["content"][-room:]))
        room -= len(message["content"])
    dropped = last - len(earlier)
    if dropped > 0 and len(earlier) > 1 and earlier[0]["role"] == "assistant":
        earlier = earlier[1:]  # templates want a user's turn first
    if dropped > 0 and messages[0]["role"] == "system":
        earlier.insert(0, _with(messages[0], messages[0]["content"][:characters]))
    behind = [
        _with(message, message["content"][:characters]) for message in messages[last : last + 1 + turns]
    ]
    kept = [*earlier, *behind]
    return kept, sum(len(one["content"]) for one in kept) < sum(len(one["content"]) for one in messages)


def _with(message: Message, content: str) -> Message:
    return message if len(content) == len(message["content"]) else {**message, "content": content}


def system_of(row: Row) -> str:
    """Return a record's system text, "" where it has none.

    Raises:
        DataError: if it is neither text nor missing.
    """
    system = row.get("system")
    if system is None or (isinstance(system, float) and system != system):
        return ""
    if not isinstance(system, str):
        raise DataError(f"column 'system' must be text, not {type(system).__name__}")
    return system


def encode_conversation(tokenizer: Any, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
    """Return (token ids, labels) of a conversation; labels are IGNORED outside the responses.

    Raises:
        DataError: if responses cannot be located in the rendered text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            "chat templates need a fast tokenizer (tokenizer.json), which gives character offsets"
        )
    text = render(tokenizer, messages)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, offsets = list(found["input_ids"]), list(found["offset_mapping"])
    labels = [IGNORED] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            start, stop = _response_span(tokenizer, messages, turn, text)
            for place in _response_tokens(tokenizer, ids, offsets, start, stop, text):
                labels[place] = ids[place]
    return ids, labels


def render(tokenizer: Any, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
    """Return the conversation as the tokenizer's chat template prints it.

    Raises:
        DataError: if the template refuses the roles or their order.
    """
    try:
        return str(
            tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        )
    except Exception as fault:
        # The template's own message may quote the conversation.
        raise DataError(
            f"the tokenizer's chat template refuses this sequence of roles ({type(fault).__name__}); "
            "check the roles and their order"
        ) from None


def opening_ids(tokenizer: Any, messages: Sequence[Message], last: int) -> list[int]:
    """Return the tokens that turn `last` is generated from: those before its own, as they are in training.

    Where the answer's first word takes the prompt's last blank into its token, the prompt ends before that blank.
    """
    before = render(tokenizer, messages[:last], generation_prompt=True)
    through = render(tokenizer, messages[: last + 1])
    text = through if through.startswith(before) else before
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    return [number for number, (_, right) in pairs if right <= len(before)]


def turn_end(tokenizer: Any) -> int | None:
    """Return the token that ends a response under the tokenizer's chat template, or None where there is none.

    Found on a public conversation of two words, so that it is the same whatever the records are.
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        _, labels = encode_conversation(tokenizer, messages)
    except DataError:
        return None
    learned = [label for label in labels if label != IGNORED]
    return learned[-1] if learned and learned[-1] in special_ids(tokenizer) else None


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids of all special tokens, whether the tokenizer names them or only marks them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}


def _response_span(tokenizer: Any, messages: Sequence[Message], turn: int, text: str) -> tuple[int, int]:
    """Return the characters from the end of the generation prompt to the end of the turn."""
    if turn == 0:
        raise DataError("a conversation cannot start with the assistant; put a user turn first")
    before = render(tokenizer, messages[:turn], generation_prompt=True)
    through = render(tokenizer, messages[: turn + 1])
    if not text.startswith(before):
        raise DataError(
            "the tokenizer's chat template rewrites earlier turns, so responses cannot be located; "
            "use single-turn records or a template that only appends"
        )
    if text.startswith(through):
        return len(before), len(through)
    shared = 0
    for left, right in zip(through, text, strict=False):
        if left != right:
            break
        shared += 1
    if shared < len(before) + len(messages[turn]["content"].strip()):
        raise DataError("the tokenizer's chat template rewrites earlier turns; responses cannot be located")
    return len(before), shared


def _response_tokens(
    tokenizer: Any,
    ids: Sequence[int],
    offsets: Sequence[tuple[int, int]],
    start: int,
    stop: int,
    text: str,
) -> list[int]:
    """Return the positions of a response's tokens, its end token included."""
    places = [
        place for place, (left, right) in enumerate(offsets) if left < stop and right > max(left, start)
    ]
    special = special_ids(tokenizer)
    for count, place in enumerate(places):
        if ids[place] in special:
            return places[: count + 1]
    # No end token: leave out the blanks that the template prints after the answer.
    end = start + len(text[start:stop].rstrip())
    return [place for place in places if offsets[place][0] < end]
