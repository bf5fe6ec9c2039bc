"""Convert conversations to prompts with the chat template; special tokens that a user writes stay plain text."""

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ..cache.prompt_prefix import shared
from ..checkpoint.chat_template import parts_with_pictures, render
from ..pictures.rows import Picture, place, row_of
from .continued import after_prompt, begun_answer, is_begun, is_marked, render_begun, with_mark
from .departure import check_client
from .forms import (
    Conversation,
    ConversationChange,
    Message,
    changed,
    forms,
    with_calls_after_content,
    with_calls_as_text,
)
from .history import IN_ASCII, PLACEHOLDER, linked, placeholders, restored, with_arguments
from .template_traits import REASONING_FIELDS, Traits, traits_of

# Around the hexadecimal form of a special token that a user wrote. They are noncharacters of Unicode, which some
# templates print as escape sequences.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
ESCAPED = re.compile(rf"(?:{OPEN}|\\ufdd0)([0-9a-f]+)(?:{CLOSE}|\\ufdd1)")
RESERVED = [re.escape(each) for each in (OPEN, CLOSE, PLACEHOLDER, r"\ufdd0", r"\ufdd1", IN_ASCII)]

PIECE = 1 << 14  # characters that are tokenized at once; tokenizers need up to 500 bytes for each
EXCESS, CUT = 1.25, 4  # pieces may have more tokens than the whole text: by this factor, and by CUT at each cut


class EncodedPrompt(NamedTuple):
    """A prompt's token ids; rows of its pictures are negative. pictures: in the prompt's order.

    turns: indices in `tokens` at which the contents of the first and the last user message start, as `_turns` yields
    them; () unless requested.
    """

    tokens: list[int]
    turns: tuple[int, ...] = ()
    pictures: tuple[Picture, ...] = ()


class Marks(NamedTuple):
    """Patterns of the added tokens that a user's text must not become: of all of them, and of the special ones.

    picture: id of the token that the chat template writes for a picture; None if the model reads no pictures.
    """

    every: re.Pattern[str]
    special: re.Pattern[str]
    picture: int | None = None


def marks_of(tokenizer: Any, picture: int | None = None) -> Marks:
    """Return the `Marks` of a tokenizer, for `encode_chat`. picture: as in `Marks`."""
    added = [token for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if str(token).strip()]
    special = [token for token in added if getattr(token, "special", False)]
    every, own = (_any_of({*map(str, tokens), *tokenizer.all_special_tokens}) for tokens in (added, special))
    return Marks(every, own, picture)


def _any_of(names: set[str]) -> re.Pattern[str]:
    ordered = sorted((re.escape(name) for name in names if name), key=len, reverse=True)
    return re.compile("|".join([*ordered, *RESERVED]))


class Rendered(NamedTuple):
    """A form of a conversation as the template rendered it.

    messages: those given to the template, some arguments of calls as placeholders. texts: the placeholders' values.
    text: the template's output with these values. whole: no placeholder, system prompt or picture is missing in it.
    """

    form: Conversation
    messages: list[Message]
    texts: list[str]
    options: dict[str, Any]
    text: str
    whole: bool


class ChatTemplate(NamedTuple):
    """A tokenizer's chat template with its traits. positions: as in `encode_chat`."""

    tokenizer: Any
    marks: Marks
    traits: Traits
    positions: int | None = None

    def rendered(self, form: Conversation, options: dict[str, Any]) -> Rendered:
        """Render a form, if possible with tool-call arguments as the client wrote them; ValueError if refused."""
        check_client()
        options = {**options, **({} if form.tools is None else {"tools": _escaped(form.tools, self.marks.every)})}
        messages = [_escaped_message(message, self.marks, self.traits) for message in form.messages]
        escape = partial(_escaped, pattern=self.marks.special)
        with contextlib.suppress(ValueError):
            exact, texts = with_arguments(messages, self.traits, escape, exact=True)
            printed = render_begun(self.tokenizer, exact, options) if texts else ""
            if texts and (text := restored(printed, texts)) is not None:
                whole = placeholders(printed) == len(texts) and self._has_all(text, messages)
                return Rendered(form, exact, texts, options, text, whole)
        messages, _ = with_arguments(messages, self.traits, escape, exact=False)
        text = render_begun(self.tokenizer, messages, options)
        return Rendered(form, messages, [], options, text, self._has_all(text, messages))

    def check_contents(self, messages: list[Message]) -> None:
        """Raise TooLong for contents too long for the context. Answers are not counted: templates shorten them."""
        if self.positions is not None:
            contents = (each.get("content") or "" for each in messages if each["role"] != "assistant")
            parts = (part for each in contents for part in ([{"text": each}] if isinstance(each, str) else each))
            check_length(self.tokenizer, (part.get("text", "").strip() for part in parts), self.positions)

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text; raises TooLong if it is too long for the context."""
        if self.positions is not None:
            check_length(self.tokenizer, (), self.positions, text.count(OPEN))  # each is at least one token
            parts = ESCAPED.split(text)
            letters = sum(len(bytes.fromhex(part).decode()) for part in parts[1::2])
            check_length(self.tokenizer, parts[::2], self.positions, letters)
        return _encode(self.tokenizer, text)

    def _has_all(self, text: str, messages: list[Message]) -> bool:
        """Return whether a rendered text has the contents of all system messages, and one mark for each picture."""
        if not all(_content(each) in text for each in messages if each["role"] == "system"):
            return False
        count = len(parts_with_pictures(messages))
        return not count or text.count(self.tokenizer.convert_ids_to_tokens(self.marks.picture)) == count


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
    positions: int | None = None,
) -> EncodedPrompt:
    """Return a conversation, rendered with the chat template, as tokens; special tokens in messages stay text.

    options: variables of the template. turns: also return `EncodedPrompt.turns`. answers: end with the generation
    prompt. continues: with `answers`, a last message of the assistant is an unfinished answer; the prompt ends within
    it. positions: of the context; None: any length is encoded.
    Raises ValueError, with the template's last reason, if the template refuses all equivalent forms, and unless it
    writes a mark for each picture; TooLong, as `check_length`; and ClientDisconnect, as `check_client`.
    """
    chat = ChatTemplate(tokenizer, marks, traits_of(tokenizer), positions)
    chat.check_contents(messages)
    prompting, closed = ({**options, "add_generation_prompt": each} for each in (True, False))
    if not (answers and continues and is_begun(messages)):
        return _encode_chat(chat, Conversation(messages, tools), prompting if answers else closed, turns=turns)
    before, last = messages[:-1], begun_answer(messages, tokenizer)
    if last.get("content") or last.get("reasoning_content"):
        with contextlib.suppress(ValueError):
            return _encode_chat(chat, Conversation([*before, with_mark(last)], tools), closed, turns=turns)
    prompt = _encode_chat(chat, Conversation(before, tools), prompting, turns=turns)
    texts = (_escaped(last.get(name) or "", marks.special) for name in ("reasoning_content", "content"))
    return prompt._replace(tokens=prompt.tokens + chat.encode(after_prompt(tokenizer, prompt.tokens, *texts)))


def _encode_chat(
    chat: ChatTemplate, conversation: Conversation, options: dict[str, Any], *, turns: bool
) -> EncodedPrompt:
    """Encode the first form of a conversation that the template renders whole, otherwise the first it renders.

    Raises ValueError if it renders none, and unless it writes a mark for each picture.
    """
    error, found, marked = None, None, is_marked(conversation.messages)
    conversation = conversation._replace(messages=linked(conversation.messages, chat.traits))
    conversation = with_calls_as_text(conversation, calls=not chat.traits.calls, results=not chat.traits.results)
    for changes, form in forms(conversation):
        if marked and not is_marked(form.messages):
            continue
        try:
            rendered = chat.rendered(form, options)
        except ValueError as e:
            error = e
            continue
        if rendered.whole:
            rendered = _with_fewest_changes(chat, conversation, changes, rendered, options)
            found = _with_contents(chat, rendered, options)
            break
        found = found or rendered
    if found is None:
        raise error or ValueError("the chat template accepts no form that ends with the answer to be continued")
    tokens, pictures = chat.encode(found.text), parts_with_pictures(found.messages)
    starts, mark = _turns(chat.tokenizer, found, tokens) if turns else (), chat.marks.picture
    if mark is None:
        assert not pictures
        return EncodedPrompt(tokens, tuple(starts))
    starts = [row_of(start, tokens, pictures, mark) for start in starts]
    return EncodedPrompt(place(tokens, pictures, mark), tuple(starts), tuple(pictures))


def _with_fewest_changes(
    chat: ChatTemplate,
    conversation: Conversation,
    changes: tuple[ConversationChange, ...],
    found: Rendered,
    options: dict[str, Any],
) -> Rendered:
    """Return `found` without the changes that it does not need, so that later prompts start with the same tokens."""
    for change in changes if len(changes) > 1 else ():
        fewer = tuple(each for each in changes if each is not change)
        form = changed(conversation, fewer)
        if is_marked(conversation.messages) and not is_marked(form.messages):
            continue
        with contextlib.suppress(ValueError):
            rendered = chat.rendered(form, options)
            if rendered.whole:
                changes, found = fewer, rendered
    return found


def _with_contents(chat: ChatTemplate, rendered: Rendered, options: dict[str, Any]) -> Rendered:
    """Return `rendered`, with content split from calls if the template prints it only in a message of its own."""
    contents = [_content(message) for message in rendered.messages if message.get("tool_calls")]
    if not all(content in rendered.text for content in contents):
        with contextlib.suppress(ValueError):
            split = chat.rendered(with_calls_after_content(rendered.form), options)
            if split.whole and all(content in split.text for content in contents):
                return split
    return rendered


def _escaped_message(message: Message, marks: Marks, traits: Traits) -> Message:
    """Return a message with added tokens escaped, and its reasoning in the field that the template reads.

    In an answer only special tokens are escaped, not, for example, marks of reasoning. Calls are not escaped.
    """
    check_client()
    pattern = marks.special if message["role"] == "assistant" else marks.every
    kept, renamed = ("role", "tool_calls"), {REASONING_FIELDS[0]: traits.reasoning}
    found = {renamed.get(key, key): each if key in kept else _escaped(each, pattern) for key, each in message.items()}
    if isinstance(content := message["content"], list):
        texts = [{**part, "text": _escaped(part["text"], pattern)} if "text" in part else part for part in content]
        found["content"] = texts
    return found


def _content(message: Message) -> str:
    """Return a message's content without white space at its ends, which templates may drop.

    Of a content with pictures, return only the first text part, "" without one.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = next((part["text"] for part in content if "text" in part), "")
    return content.strip()


def _escaped(value: Any, pattern: re.Pattern[str]) -> Any:
    """Replace each match of the pattern, in all strings of a JSON value, by its hexadecimal form."""
    if isinstance(value, dict):
        return {_escaped(key, pattern): _escaped(each, pattern) for key, each in value.items()}
    if isinstance(value, list):
        return [_escaped(each, pattern) for each in value]
    if isinstance(value, str):
        return pattern.sub(_hexadecimal, value)
    return value


def _hexadecimal(mark: re.Match[str]) -> str:
    check_client()  # a text may have a million marks
    return f"{OPEN}{mark[0].encode().hex()}{CLOSE}"


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a rendered text; special tokens that were escaped are encoded one character at a time."""
    tokens: list[int] = []
    for i, part in enumerate(ESCAPED.split(text)):
        if i % 2:
            tokens += _letters(tokenizer, bytes.fromhex(part).decode())
        elif part:
            tokens += _tokens(tokenizer, part)
    return tokens


@functools.lru_cache(maxsize=8)  # each turn encodes the texts of a long conversation again
def _tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@functools.lru_cache(maxsize=256)  # a message may repeat one mark a million times
def _letters(tokenizer: Any, mark: str) -> list[int]:
    """Return the token ids of a special token's characters, encoded one at a time so that it stays text."""
    ids = [token for letter in mark for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert not set(ids) & set(tokenizer.all_special_ids), f"{mark!r} contains a character that is a special token"
    return ids


def _turns(tokenizer: Any, rendered: Rendered, tokens: list[int]) -> Iterator[int]:
    """Yield the indices of the first tokens that depend on the content of the first and of the last user message.

    One index if they are the same message; none for a message if the template refuses it with empty content.
    """
    messages, options = rendered.messages, {**rendered.options, "add_generation_prompt": False}
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    for i in sorted({users[0], users[-1]}) if users else ():
        other = [*messages[:i], {"role": "user", "content": ""}]
        with contextlib.suppress(ValueError):
            text = restored(render(tokenizer, other, options), rendered.texts)
            if text is not None:
                yield shared(_encode(tokenizer, text), tokens)


class TooLong(Exception):
    """Raised for a prompt of at least `tokens` tokens, which exceed the context.

    No ValueError, after which other forms of the conversation would be rendered.
    """

    def __init__(self, tokens: int):
        super().__init__(f"at least {tokens} tokens")


def check_length(tokenizer: Any, texts: Iterable[str], positions: int, others: int = 0) -> None:
    """Raise TooLong if texts have more than EXCESS times `positions` tokens, counted in pieces until that is certain.

    Texts of less than a piece together are not counted. others: number of further tokens. Raises ClientDisconnect as
    `check_client`.
    """
    texts, tokens = [*texts], others
    if sum(map(len, texts)) + others < PIECE:
        return
    for text in texts:
        for start in range(0, len(text), PIECE):
            check_client()
            if tokens > EXCESS * positions:
                raise TooLong(int(tokens / EXCESS))
            found = len(tokenizer.encode(text[start : start + PIECE], add_special_tokens=False))
            tokens += max(0, found - (CUT if start else 0))
    if tokens > EXCESS * positions:
        raise TooLong(int(tokens / EXCESS))
