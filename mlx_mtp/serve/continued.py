"""Render conversations whose last message is an answer that the model is to continue.

The end of that message is marked, and the rendered text is cut there: what the template strips or adds behind a
message does not matter, and white space at the end of the message is kept.
"""

import secrets
from typing import Any

from ..checkpoint.chat_template import render
from .template_traits import REASONING_FIELDS

Message = dict[str, Any]
MARK = f"\ufdd6{secrets.token_hex(8)}\ufdd6"  # between noncharacters, and no client can write it


def is_begun(messages: list[Message]) -> bool:
    """Whether a conversation ends with an answer that can be continued, which one with tool calls cannot."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def begun_answer(messages: list[Message], tokenizer: Any) -> Message:
    """The last message, with reasoning that its content begins and does not end taken out of the content."""
    message = messages[-1]
    content, start = (message.get("content") or "").lstrip(), getattr(tokenizer, "think_start", None)
    if message.get("reasoning_content") or not start or not content.startswith(start):
        return message
    if tokenizer.think_end in content:
        return message
    return {**message, "content": "", "reasoning_content": content.removeprefix(start).lstrip("\n")}


def is_empty(message: Message) -> bool:
    return not (message.get("content") or message.get("reasoning_content"))


def with_mark(message: Message) -> Message:
    """Mark the end of a message: that of its content, or of its reasoning where that is all."""
    name = "content" if message.get("content") else "reasoning_content"
    return {**message, name: message[name] + MARK}


def is_marked(messages: list[Message]) -> bool:
    """Whether the end of the last message is marked."""
    last = messages[-1] if messages else {}
    return any((last.get(name) or "").endswith(MARK) for name in ("content", *REASONING_FIELDS))


def render_begun(tokenizer: Any, messages: list[Message], options: dict[str, Any]) -> str:
    """Render the chat template up to the mark, if the last message has one.

    Raises ValueError where the template leaves out a part of that message.
    """
    text = render(tokenizer, messages, options)
    if not is_marked(messages):
        return text
    reasoning = [(messages[-1].get(name) or "").removesuffix(MARK).strip() for name in REASONING_FIELDS]
    text, mark, _ = text.rpartition(MARK)
    if not mark or not all(each in text for each in reasoning):
        raise ValueError("the chat template leaves out a part of the answer that is to be continued")
    return text


def behind_prompt(tokenizer: Any, tokens: list[int], reasoning: str, content: str) -> str:
    """The text of an answer behind a prompt that asks for one: reasoning between its marks, then the content."""
    if not getattr(tokenizer, "has_thinking", False):
        return content
    start, end = tokenizer.think_start, tokenizer.think_end
    opened = tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)
    behind = f"\n{end}\n\n{content}" if content else ""
    if reasoning:
        return ("" if opened else f"{start}\n") + reasoning + behind
    return behind if opened else content


def finished(messages: list[Message], answer: Message) -> list[Message]:
    """The conversation with an answer that continues its last message."""
    begun = messages[-1]
    texts = {name: (begun.get(name) or "") + (answer.get(name) or "") for name in ("content", "reasoning_content")}
    return [
        *messages[:-1],
        {**begun, **answer, **{name: text for name, text in texts.items() if text or name in answer}},
    ]


class Continuation:
    """Returns the white space in front of a continued answer, which is dropped at the beginning of other answers."""

    def __init__(self, tokenizer: Any, prompt: list[int]):
        self._tokenizer, self._tokens, self._over, self._broken = tokenizer, list[int](), False, True
        # Decoded in front of the answer, so that it does not stand at the beginning; any word does.
        self._word = next(([t] for t in reversed(prompt) if _is_word(tokenizer.decode([t]))), [])

    def text_of(self, response: Any) -> str:
        """The text of the next response, whole if it is the first that has any."""
        if self._over or response.finish_reason == "stop":
            return response.text
        self._tokens.append(response.token)
        self._over = bool(response.text)
        if not self._over:
            return ""
        before = self._tokenizer.decode(self._word)
        lost = self._tokenizer.decode([*self._word, *self._tokens]).removeprefix(before).removesuffix(response.text)
        return lost + response.text if not lost.strip(" ") else response.text

    def line_breaks(self, text: str) -> str:
        """The line breaks of a text that has nothing but them in front of it."""
        rest = text.lstrip("\n")
        breaks, self._broken = text[: len(text) - len(rest)] if self._broken else "", self._broken and not rest
        return breaks


def _is_word(text: str) -> bool:
    return bool(text.strip()) and "\ufffd" not in text
