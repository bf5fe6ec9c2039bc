"""Make prompts of conversations: through the chat template, with what users wrote kept text."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..cache.prompt_prefix import shared
from .continued import begun_answer, behind_prompt, is_begun, is_empty, render_begun, with_mark

Message = dict[str, Any]
# Stand around what a user wrote that would be read as a special token, in hexadecimal; noncharacters of Unicode.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
HELD = re.compile(f"{OPEN}([0-9a-f]+){CLOSE}")


class Prompt(NamedTuple):
    """The token ids of a prompt, and at which of them its system prompt and its last question begin to differ."""

    tokens: list[int]
    turns: tuple[int, ...] = ()


class Marks(NamedTuple):
    """The tokens of a tokenizer that are written as marks: those that no text of a user's may become."""

    every: re.Pattern[str]
    special: re.Pattern[str]


def marks_of(tokenizer: Any) -> Marks:
    """Collect a tokenizer's added tokens, and those among them that are special."""
    added = [token for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if str(token).strip()]
    special = [token for token in added if getattr(token, "special", False)]
    return Marks(*(_any_of({*map(str, tokens), *tokenizer.all_special_tokens}) for tokens in (added, special)))


def _any_of(names: set[str]) -> re.Pattern[str]:
    ordered = sorted((re.escape(name) for name in names if name), key=len, reverse=True)
    return re.compile("|".join([*ordered, OPEN, CLOSE]))


def encode_chat(
    tokenizer: Any,
    marks: Marks,
    messages: list[Message],
    tools: list[Any] | None,
    options: dict[str, Any],
    *,
    turns: bool,
    answers: bool = True,
    continues: bool = True,
) -> Prompt:
    """Render a conversation and encode it, up to where the answer begins, if one is to follow (`answers`).

    options: variables of the template. turns: find out also where turns begin. continues: a last message of the
    assistant is an answer to go on with. Raises ValueError where the template refuses the conversation in every form
    that could mean the same.
    """
    if not (answers and continues and is_begun(messages)):
        return _encode_chat(tokenizer, marks, messages, tools, options, turns=turns, answers=answers)
    before, last = messages[:-1], begun_answer(messages, tokenizer)
    if not is_empty(last):
        with contextlib.suppress(ValueError):
            marked = [*before, with_mark(last)]
            return _encode_chat(tokenizer, marks, marked, tools, options, turns=turns, answers=False)
    prompt = _encode_chat(tokenizer, marks, before, tools, options, turns=turns, answers=True)
    texts = (_held(last.get(name) or "", marks.special) for name in ("reasoning_content", "content"))
    return prompt._replace(tokens=prompt.tokens + _encode(tokenizer, behind_prompt(tokenizer, prompt.tokens, *texts)))


def _encode_chat(
    tokenizer: Any,
    marks: Marks,
    messages: list[Message],
    tools: list[Any] | None,
    options: dict[str, Any],
    *,
    turns: bool,
    answers: bool,
) -> Prompt:
    given = {**options, "add_generation_prompt": answers}
    if tools:
        given["tools"] = _held(tools, marks.every)
    *others, last = _forms([_held_in(message, marks) for message in messages])
    for form in others:
        with contextlib.suppress(ValueError):
            return _prompt(tokenizer, form, given, turns=turns)
    return _prompt(tokenizer, last, given, turns=turns)


def _prompt(tokenizer: Any, messages: list[Message], options: dict[str, Any], *, turns: bool) -> Prompt:
    """Encode one form of a conversation; ValueError where the template refuses it."""
    tokens = _encode(tokenizer, render_begun(tokenizer, messages, options))
    return Prompt(tokens, tuple(_turns(tokenizer, messages, options, tokens)) if turns else ())


def encode_text(tokenizer: Any, text: str) -> Prompt:
    """Encode a text as it is, which is what `/v1/completions` takes."""
    bos = tokenizer.bos_token
    return Prompt(tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos)))


def _held_in(message: Message, marks: Marks) -> Message:
    """Hold back marks; a model's own words may have those that are not special, such as of its reasoning."""
    pattern = marks.special if message["role"] == "assistant" else marks.every
    return {key: value if key == "role" else _held(value, pattern) for key, value in message.items()}


def _held(value: Any, pattern: re.Pattern[str]) -> Any:
    """Put a stand-in in the place of each mark, in all texts of a JSON value."""
    if isinstance(value, dict):
        return {_held(key, pattern): _held(each, pattern) for key, each in value.items()}
    if isinstance(value, list):
        return [_held(each, pattern) for each in value]
    return pattern.sub(_stand_in, value) if isinstance(value, str) else value


def _stand_in(mark: re.Match[str]) -> str:
    return f"{OPEN}{mark[0].encode().hex()}{CLOSE}"


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a rendered text, with the marks that were held back as the letters that they are written in."""
    tokens: list[int] = []
    for i, part in enumerate(HELD.split(text)):
        if i % 2:
            tokens += _letters(tokenizer, bytes.fromhex(part).decode())
        elif part:
            tokens += _tokens(tokenizer, part)
    return tokens


@functools.lru_cache(maxsize=8)  # of a long conversation every text but the newest comes again with each turn
def _tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@functools.lru_cache(maxsize=256)  # marks are few, and a message may repeat one a million times
def _letters(tokenizer: Any, mark: str) -> list[int]:
    """Encode a mark one character at a time, so that no token of more letters can be it."""
    ids = [token for letter in mark for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert not set(ids) & set(tokenizer.all_special_ids), f"{mark!r} has a letter that is special"
    return ids


def _forms(messages: list[Message]) -> Iterator[list[Message]]:
    """List a conversation's forms: as it is; without system turns but the first; with arguments of calls as JSON."""
    yield messages
    if any(message["role"] == "system" for message in messages[1:]):
        # Joined, as templates may want turns to alternate.
        messages = joined([messages[0], *map(_as_user, messages[1:])], "user", _one_text)
        yield messages
    if any(message.get("tool_calls") for message in messages):
        yield [_with_json_arguments(message) for message in messages]


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] == "system" else message


def _one_text(message: Message, more: Message) -> Message:
    return {**message, "content": f"{message['content']}\n\n{more['content']}"}


def joined(messages: list[Message], role: str, join: Callable[[Message, Message], Message]) -> list[Message]:
    """Join neighbouring messages of a role."""
    found: list[Message] = []
    for message in messages:
        if found and message["role"] == found[-1]["role"] == role:
            found[-1] = join(found[-1], message)
        else:
            found.append(message)
    return found


def _with_json_arguments(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _turns(tokenizer: Any, messages: list[Message], options: dict[str, Any], tokens: list[int]) -> Iterator[int]:
    """Find where the first and the last question of a user begin: other texts may go on from there."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for i in sorted({users[0], users[-1]}) if users else ():
        other = [*messages[:i], {"role": "user", "content": ""}]
        with contextlib.suppress(ValueError):
            text = render_begun(tokenizer, other, {**options, "add_generation_prompt": False})
            yield shared(_encode(tokenizer, text), tokens)
