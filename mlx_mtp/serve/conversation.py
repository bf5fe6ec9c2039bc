"""Turn a conversation, in the form that all APIs are brought to, into what is to be answered."""

from dataclasses import replace
from functools import partial
from typing import Any

from .answer import Part
from .exchange import said
from .fields import Door, Refused
from .job import Ask
from .prompts import Message, encode_chat

ROLES = ("system", "user", "assistant", "tool")


def asks_of(
    door: Door,
    body: dict[str, Any],
    messages: list[Message],
    tools: list[Any] | None,
    template: dict[str, Any],
    *,
    most: int | None,
    choices: int = 1,
    **more: Any,
) -> list[Ask]:
    """Make what is to be answered: one for each choice, whose draws differ.

    messages: with texts as content, and arguments of calls as objects. Raises Refused.
    """
    if not messages:
        raise Refused("messages: allowed is one or more", param="messages")
    try:
        prompt = encode_chat(door.tokenizer, door.marks, messages, tools, template, turns=door.turns)
    except ValueError as e:
        raise Refused(str(e), param="messages") from e
    begun = _within_reasoning(door.tokenizer, prompt.tokens)
    more = {
        "chat": True,
        "thinking": begun,
        "tools": tools,
        "follows": partial(_next_prompt, door, messages, tools, template),
        **more,
    }
    ask = door.ask(prompt, body, most, **more)
    seed = ask.sampling["seed"]
    return [replace(ask, sampling={**ask.sampling, "seed": (seed + i) % 2**63}) for i in range(choices)]


def _within_reasoning(tokenizer: Any, tokens: list[int]) -> bool:
    """Tell whether an answer behind these tokens begins in the middle of its reasoning."""
    return tokenizer.has_thinking and tokenizer.rfind_think_start(tokens) > tokenizer.rfind_think_end(tokens)


def _next_prompt(
    door: Door, messages: list[Message], tools: list[Any] | None, template: dict[str, Any], parts: list[Part]
) -> list[int]:
    """Encode the conversation with its answer, as the next turn will begin."""
    asked = [*messages, said(parts), {"role": "user", "content": ""}]
    return encode_chat(door.tokenizer, door.marks, asked, tools, template, turns=False, answers=False).tokens
