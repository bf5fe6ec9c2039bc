"""Make prompts of conversations: through the chat template, with what users wrote kept text."""

import contextlib
import functools
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from ..cache.prompt_prefix import shared
from ..checkpoint.chat_template import render
from .continued import begun_answer, behind_prompt, is_begun, is_empty, is_marked, render_begun, with_mark
from .forms import Change, Conversation, Message, changed, forms, with_calls_as_text, with_calls_behind_content
from .history import ESCAPED, STAND_IN, linked, restored, stand_ins, with_arguments
from .template_traits import REASONING_FIELDS, Traits, traits_of

# Stand around what a user wrote that would be read as a special token, in hexadecimal; noncharacters of Unicode,
# which some templates print as escape sequences.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
HELD = re.compile(rf"(?:{OPEN}|\\ufdd0)([0-9a-f]+)(?:{CLOSE}|\\ufdd1)")
RESERVED = [re.escape(each) for each in (OPEN, CLOSE, STAND_IN, r"\ufdd0", r"\ufdd1", ESCAPED)]


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
    return re.compile("|".join([*ordered, *RESERVED]))


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
    that could mean the same, with the last reason that it gives.
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
    chat = Chat(tokenizer, marks, traits_of(tokenizer))
    error, found, conversation = None, None, Conversation(linked(messages, chat.traits), tools)
    unprinted = {"calls": not chat.traits.calls, "results": not chat.traits.results}
    conversation = with_calls_as_text(conversation, **unprinted)
    for changes, form in forms(conversation):
        if is_marked(messages) and not is_marked(form.messages):
            continue
        try:
            rendered = chat.rendered(form, given)
        except ValueError as e:
            error = e
            continue
        if rendered.whole:
            form, rendered = _with_fewest_changes(chat, conversation, changes, (form, rendered), given)
            return _prompt(chat, _with_contents(chat, form, rendered, given), turns=turns)
        found = found or rendered
    if found is None:
        raise error or ValueError("the chat template takes no form that ends with the answer to be continued")
    return _prompt(chat, found, turns=turns)


def _with_fewest_changes(
    chat: "Chat",
    conversation: Conversation,
    changes: tuple[Change, ...],
    found: tuple[Conversation, "Rendered"],
    options: dict[str, Any],
) -> tuple[Conversation, "Rendered"]:
    """A form without the changes that are not needed, so that a longer conversation may begin alike."""
    for change in changes if len(changes) > 1 else ():
        fewer = tuple(each for each in changes if each is not change)
        form = changed(conversation, fewer)
        if is_marked(conversation.messages) and not is_marked(form.messages):
            continue
        with contextlib.suppress(ValueError):
            rendered = chat.rendered(form, options)
            if rendered.whole:
                changes, found = fewer, (form, rendered)
    return found


def _with_contents(chat: "Chat", form: Conversation, rendered: "Rendered", options: dict[str, Any]) -> "Rendered":
    """The conversation with contents in front of calls, where the template prints these but none beside calls."""
    contents = [_content(message) for message in rendered.messages if message.get("tool_calls")]
    if not all(content in rendered.text for content in contents):
        with contextlib.suppress(ValueError):
            split = chat.rendered(with_calls_behind_content(form), options)
            if split.whole and all(content in split.text for content in contents):
                return split
    return rendered


class Rendered(NamedTuple):
    """A conversation in the form that was rendered, what its stand-ins stand for, and its text.

    whole: the system prompts and all stand-ins are in the text.
    """

    messages: list[Message]
    texts: list[str]
    options: dict[str, Any]
    text: str
    whole: bool


class Chat(NamedTuple):
    """A tokenizer's chat template, and what is known of it."""

    tokenizer: Any
    marks: Marks
    traits: Traits

    def rendered(self, form: Conversation, options: dict[str, Any]) -> Rendered:
        """Render a form of a conversation, with arguments as the client wrote them wherever that is possible."""
        options = {**options, **({} if form.tools is None else {"tools": _held(form.tools, self.marks.every)})}
        messages = [_held_in(message, self.marks, self.traits) for message in form.messages]
        hold = partial(_held, pattern=self.marks.special)
        systems = [_content(each) for each in messages if each["role"] == "system"]
        with contextlib.suppress(ValueError):
            exact, texts = with_arguments(messages, self.traits, hold, exact=True)
            printed = render_begun(self.tokenizer, exact, options) if texts else ""
            if texts and (text := restored(printed, texts)) is not None:
                whole = stand_ins(printed) == len(texts) and all(each in text for each in systems)
                return Rendered(exact, texts, options, text, whole)
        messages, _ = with_arguments(messages, self.traits, hold, exact=False)
        text = render_begun(self.tokenizer, messages, options)
        return Rendered(messages, [], options, text, all(each in text for each in systems))


def _prompt(chat: Chat, rendered: Rendered, *, turns: bool) -> Prompt:
    """Encode a rendered conversation."""
    tokens = _encode(chat.tokenizer, rendered.text)
    return Prompt(tokens, tuple(_turns(chat, rendered, tokens)) if turns else ())


def encode_text(tokenizer: Any, text: str) -> Prompt:
    """Encode a text as it is, which is what `/v1/completions` takes."""
    bos = tokenizer.bos_token
    return Prompt(tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos)))


def _held_in(message: Message, marks: Marks, traits: Traits) -> Message:
    """Hold back marks; a model's own words may have those that are not special, such as of its reasoning.

    Calls are left to `with_arguments`. Reasoning is in the field that the template reads.
    """
    pattern = marks.special if message["role"] == "assistant" else marks.every
    kept, renamed = ("role", "tool_calls"), {REASONING_FIELDS[0]: traits.reasoning}
    return {renamed.get(key, key): value if key in kept else _held(value, pattern) for key, value in message.items()}


def _content(message: Message) -> str:
    """The content of a message without white space at its ends, which templates may drop."""
    return (message.get("content") or "").strip()


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


def _turns(chat: Chat, rendered: Rendered, tokens: list[int]) -> Iterator[int]:
    """Find where the first and the last question of a user begin: other texts may go on from there."""
    messages, options = rendered.messages, {**rendered.options, "add_generation_prompt": False}
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for i in sorted({users[0], users[-1]}) if users else ():
        other = [*messages[:i], {"role": "user", "content": ""}]
        with contextlib.suppress(ValueError):
            text = restored(render(chat.tokenizer, other, options), rendered.texts)
            if text is not None:
                yield shared(_encode(chat.tokenizer, text), tokens)
