"""Render conversations whose last message is an unfinished answer that the model is to continue.

A mark is appended to that message, and the rendered text is cut at the mark. So nothing that the template adds after
a message is in the prompt, and white space at the end of the message is kept.
"""

import secrets
from typing import Any

from ..checkpoint.chat_template import render
from .frames import ends_in_reasoning
from .template_traits import REASONING_FIELDS

Message = dict[str, Any]
MARK = f"\ufdd6{secrets.token_hex(8)}\ufdd6"  # random, so that no client can write it


def is_begun(messages: list[Message]) -> bool:
    """Return whether the last message is an answer that can be continued: one without tool calls."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def begun_answer(messages: list[Message], tokenizer: Any) -> Message:
    """Return the last message, with reasoning that its content begins and does not end moved to reasoning_content.

    The start mark is dropped. A message that already has reasoning_content is unchanged.
    """
    message = messages[-1]
    content, start = (message.get("content") or "").lstrip(), getattr(tokenizer, "think_start", None)
    if message.get("reasoning_content") or not start or not content.startswith(start):
        return message
    if tokenizer.think_end in content:
        return message
    return {**message, "content": "", "reasoning_content": content.removeprefix(start).lstrip("\n")}


def with_mark(message: Message) -> Message:
    """Return the message with MARK appended to its content, or to its reasoning if it has no content."""
    name = "content" if message.get("content") else "reasoning_content"
    return {**message, name: message[name] + MARK}


def is_marked(messages: list[Message]) -> bool:
    """Return whether the last message's content or reasoning ends with MARK."""
    last = messages[-1] if messages else {}
    texts = [last.get(name) for name in ("content", *REASONING_FIELDS)]
    return any(isinstance(text, str) and text.endswith(MARK) for text in texts)


def render_begun(tokenizer: Any, messages: list[Message], options: dict[str, Any]) -> str:
    """Return a conversation rendered by the chat template, only up to MARK if its last message ends with that.

    Raises ValueError if the template refuses the conversation, or omits MARK or that message's reasoning.
    """
    text = render(tokenizer, messages, options)
    if not is_marked(messages):
        return text
    reasoning = [(messages[-1].get(name) or "").removesuffix(MARK).strip() for name in REASONING_FIELDS]
    text, mark, _ = text.rpartition(MARK)
    if not mark or not all(each in text for each in reasoning):
        raise ValueError("the chat template omits a part of the answer to be continued")
    return text


def after_prompt(tokenizer: Any, tokens: list[int], reasoning: str, content: str) -> str:
    """Return the text with which an unfinished answer continues a prompt's `tokens`: its reasoning, then its content.

    A start mark precedes reasoning unless the prompt ends inside reasoning; an end mark precedes content if there is
    reasoning or the prompt ends inside it. If the tokenizer has no such marks, return only the content.
    """
    if not getattr(tokenizer, "has_thinking", False):
        return content
    start, end = tokenizer.think_start, tokenizer.think_end
    opened = ends_in_reasoning(tokenizer, tokens)
    rest = f"\n{end}\n\n{content}" if content else ""
    if reasoning:
        return ("" if opened else f"{start}\n") + reasoning + rest
    return rest if opened else content


def finished(messages: list[Message], answer: Message) -> list[Message]:
    """Return the conversation with an answer joined to its last message, the answer's unfinished start."""
    begun = messages[-1]
    texts = {name: (begun.get(name) or "") + (answer.get(name) or "") for name in ("content", "reasoning_content")}
    texts = {name: text for name, text in texts.items() if text or name in answer}
    return [*messages[:-1], {**begun, **answer, **texts}]


class Continuation:
    """Restores the white space at the start of a continued answer, which detokenizers and splitters drop."""

    def __init__(self, tokenizer: Any, prompt: list[int]):
        self._tokenizer, self._tokens, self._started, self._broken = tokenizer, list[int](), False, True
        # A word to decode before the answer's tokens, since a detokenizer drops a space at the start of a text.
        decoded = ((token, tokenizer.decode([token])) for token in reversed(prompt) if token >= 0)
        self._word = next(([token] for token, text in decoded if text.strip() and "\ufffd" not in text), [])

    def text_of(self, response: Any) -> str:
        """Return a response's text; the first that is not empty gets back the spaces that the detokenizer dropped."""
        if self._started or response.finish_reason == "stop":
            return response.text
        self._tokens.append(response.token)
        self._started = bool(response.text)
        if not self._started:
            return ""
        before = self._tokenizer.decode(self._word)
        lost = self._tokenizer.decode([*self._word, *self._tokens]).removeprefix(before).removesuffix(response.text)
        return lost + response.text if not lost.strip(" ") else response.text

    def line_breaks(self, text: str) -> str:
        """Return the line breaks at the start of a piece of text, if all earlier pieces were only line breaks."""
        rest = text.lstrip("\n")
        breaks, self._broken = text[: len(text) - len(rest)] if self._broken else "", self._broken and not rest
        return breaks
