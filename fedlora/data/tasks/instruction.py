"""Instruction tuning: prompts and responses, or whole conversations; only responses are learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from fedlora.data.chat import (
    Message,
    as_messages,
    encode_conversation,
    keep_end,
    keep_start,
    opening_ids,
    read_messages,
    system_of,
)
from fedlora.data.rows import Row
from fedlora.data.tasks.base import CHARACTERS_PER_TOKEN, IGNORED, Encoded, field_text
from fedlora.data.tasks.causal_lm import CausalLm
from fedlora.errors import DataError


class Instruction(CausalLm):
    """Columns: messages; or prompt (or a template) and response, and optionally system.

    With a chat template the tokenizer's own is used. A base model without one sees the system text if there
    is one, the prompt, a line break each, the response and the end token. `data.on_overlong` decides what is cut:
    `truncate_prompt` cuts the oldest tokens and keeps the response's end, `truncate_end` cuts the end (a response that
    is cut away entirely gives loss 0), `refuse` stops.
    """

    name: ClassVar[str] = "instruction"
    required: ClassVar[tuple[str, ...]] = ("prompt", "response")

    def required_columns(self) -> tuple[str, ...]:
        """Return the columns that every record must have; conversations need only `messages`."""
        if "messages" in self.data_config.columns:
            return ("messages",)
        return super().required_columns()

    def check_rows(self, rows: Any) -> None:
        """Accept a data set with `messages` instead of prompt and response."""
        if "messages" not in rows.columns:
            super().check_rows(rows)

    def encode(self, row: Row) -> Encoded:
        """Tokenise, label the responses, cut to the window, and keep what answers are generated from."""
        self.refuse_narrow(1)  # nothing precedes the first token
        if "messages" in row and "response" not in self.data_config.columns:
            return self._conversation(read_messages(row["messages"]))
        prompt, cut_prompt = self.clip_text(self.text_of(row, "prompt"), keep_end=True)
        response, cut_response = self.clip_text(field_text(row, "response"))
        if not self._has_template:
            system, cut_system = self.clip_text(system_of(row))
            opening = f"{system}\n{prompt}" if system else prompt
            return self._plain(opening, response, cut_prompt or cut_response or cut_system)
        return self._conversation(as_messages(row, prompt, response), cut_prompt or cut_response)

    def _conversation(self, messages: Sequence[Message], cut: bool = False) -> Encoded:
        """Encode turns under the chat template; what cannot fit the window is left out before it is printed."""
        if not self._has_template:
            raise DataError("the tokenizer has no chat template; use prompt and response columns")
        last = max((turn for turn, each in enumerate(messages) if each["role"] == "assistant"), default=None)
        if last is None:
            raise DataError("a conversation needs at least one assistant turn to learn from")
        if last == 0:
            raise DataError("a conversation cannot start with the assistant; put a user turn first")
        bounds = self.window * CHARACTERS_PER_TOKEN, max(2, self.window // 2)
        tail, cut_tail = keep_end(messages, last, *bounds)
        if self.data_config.on_overlong == "truncate_prompt":
            learned, cut_now = tail, cut_tail
        else:
            learned, cut_now = keep_start(messages, *bounds)
        ids, labels = encode_conversation(self.tokenizer, learned)
        before = max(turn for turn, each in enumerate(tail) if each["role"] == "assistant")
        opening = opening_ids(self.tokenizer, tail, before)
        return self._cut(ids, labels, opening, messages[last]["content"], cut or cut_now)

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def _plain(self, prompt: str, response: str, cut: bool) -> Encoded:
        """Encode for a tokenizer without a chat template."""
        asked = prompt if prompt.endswith((" ", "\n")) else prompt + "\n"
        opening = list(self.tokenizer(asked, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and opening and opening[-1] == end:
            opening = opening[:-1]
        answer = list(self.tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"])
        if end is not None:
            answer.append(end)
        labels = [IGNORED] * len(opening) + answer
        return self._cut(opening + answer, labels, opening, response, cut)

    def _cut(
        self, ids: list[int], labels: list[int], opening: list[int], reference: str, cut: bool = False
    ) -> Encoded:
        over = cut or len(ids) > self.window
        if over:
            self.refuse_if_overlong()
        if len(ids) > self.window:
            if self.data_config.on_overlong == "truncate_prompt":
                ids, labels = self._keep_response(ids, labels)
            else:
                ids, labels = ids[: self.window], labels[: self.window]
        if labels:
            labels = [IGNORED, *labels[1:]]  # nothing precedes the first token
        return Encoded(
            input_ids=ids,
            labels=labels,
            targets=sum(label != IGNORED for label in labels),
            cut=over,
            prompt=opening[-self.window :],
            reference=reference,
        )

    def _keep_response(self, ids: list[int], labels: list[int]) -> tuple[list[int], list[int]]:
        """Cut the oldest tokens; keep at least one token of prompt before the last response.

        A last response longer than the window keeps its beginning.
        """
        drop = len(ids) - self.window
        last = len(labels)
        while last > 0 and labels[last - 1] == IGNORED:
            last -= 1
        first = last
        while first > 0 and labels[first - 1] != IGNORED:
            first -= 1
        drop = min(drop, max(0, first - 1))
        return ids[drop : drop + self.window], labels[drop : drop + self.window]
