"""Render a checkpoint's chat template, and tokenize a prompt whose state a saved cache holds."""

import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..cache.prompt_prefix import PromptPrefix, shared
from ..machine.errors import first_line
from ..pictures.rows import place
from .template_limits import TemplateStopped

# The last runs of a prompt, whose tokens depend on what follows: a token can join a sign with the letters after it.
LAST_RUNS = re.compile(r"(\w+|\s+|[^\w\s]+){1,2}\Z")
PROBES = ("a", " a", "\n", ".", "1")  # texts that may follow; the template's own ending may not
TYPED = "\ufdd7"  # stands for a picture's mark in a message's text; a noncharacter
NO_TOKEN = 2**62  # stands for the token of TYPED; no token, and no row of a picture
NO_TEMPLATE = "pictures need a chat template, which writes a mark for each; there is none, or it is ignored"
VARIABLES = {"tools", "documents"}  # arguments of apply_chat_template that the template reads


@functools.cache
def reserved_names() -> frozenset[str]:
    """Return the names that no variable of a chat template may have: arguments of the functions that render one.

    One of them is `chat_template`, a template that would replace the checkpoint's.
    """
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    methods = TokenizerWrapper.apply_chat_template, PreTrainedTokenizerBase.apply_chat_template
    names = {name for each in (*methods, render_jinja_template) for name in inspect.signature(each).parameters}
    return frozenset({*names, "messages"} - VARIABLES)


def render(tokenizer: Any, messages: list[dict], options: dict[str, Any]) -> str:
    """Return the text of these messages in the chat template.

    A part of a message's content with the key "picture" reaches the template as {"type": "image"}. options: the
    template's arguments. ValueError, in one line, if the template fails or its text is not valid UTF-8.
    TemplateStopped, only after `isolate`, if the template breaks a limit.
    """
    try:
        text = tokenizer.apply_chat_template(
            [_bare(message) for message in messages], **{**options, "tokenize": False}
        )
    except TemplateStopped:
        raise
    except Exception as e:  # a template is a program that may raise anything
        raise ValueError(f"the chat template refuses this conversation ({first_line(e)})") from e
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates: Python's representation of bytes that are not UTF-8
        raise ValueError("the prompt is not valid UTF-8 text") from None
    return text


def _bare(message: dict) -> dict:
    """Return a message in which {"type": "image"} replaces each part of the content with the key "picture"."""
    if not isinstance(content := message.get("content"), list):
        return message
    return {**message, "content": [{"type": "image"} if "picture" in part else part for part in content]}


def parts_with_pictures(messages: list[dict]) -> list[Any]:
    """Return a list of the values under "picture" in the parts of the messages, the first message's first."""
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    return [part["picture"] for content in contents for part in content if "picture" in part]


def pictures_of(messages: list[dict]) -> list[Any]:
    """Return a list of all pictures that messages have in a list under "pictures", the first message's first."""
    return [picture for message in messages for picture in message.get("pictures", ())]


def encode_messages(tokenizer: Any, messages: list[dict], options: dict[str, Any], vision: Any) -> list[int]:
    """Return the tokens of messages in the chat template, with those of their pictures.

    messages: dicts with "role", "content" (a str) and, if any, "pictures": a list of `Picture`s, which precede the
    text. A picture's mark that a text contains stays a plain token. options: the template's arguments. vision: the
    model's `Vision`; without pictures it is not used. Raises ValueError if the template fails, and for pictures
    without a chat template, or one that does not write a mark for each.
    """
    if not (pictures := pictures_of(messages)):
        return tokenizer.encode(render(tokenizer, messages, options), add_special_tokens=False)
    if not tokenizer.has_chat_template:
        raise ValueError(NO_TEMPLATE)
    written, tokens = tokenizer.convert_ids_to_tokens(vision.mark), list[int]()
    text = render(tokenizer, [_with_parts(message, written) for message in messages], options)
    for part in text.split(TYPED):
        tokens += [NO_TOKEN, *tokenizer.encode(part, add_special_tokens=False)]
    placed = place(tokens[1:], pictures, vision.mark)
    return [vision.mark if token == NO_TOKEN else token for token in placed]


def about_pictures(tokenizer: Any, pictures: Sequence[Any], vision: Any) -> list[int]:
    """Return the tokens of a prompt that asks to describe `Picture`s. vision, ValueError: as in `encode_messages`."""
    message = {"role": "user", "content": "Describe what you see.", "pictures": pictures}
    return encode_messages(tokenizer, [message], {"add_generation_prompt": True}, vision)


def _with_parts(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a message for the template, in whose text TYPED replaces `mark`, the text of a picture's mark.

    With pictures, its content is a list: {"type": "image"} for each, then the text; otherwise the text alone.
    """
    text, pictures = message["content"].replace(mark, TYPED), message.get("pictures", ())
    parts: list[Any] = [{"type": "image"} for _ in pictures]
    return {"role": message["role"], "content": [*parts, {"type": "text", "text": text}] if parts else text}


def prompt_tokens(prefix: PromptPrefix, tokenizer: Any, text: str, vision: Any = None) -> list[int]:
    """Return the tokens of a saved prompt followed by `text`, in the chat template if prefix and tokenizer have one.

    In the template both are one message of the user, with the generation prompt. vision: the model's `Vision`, needed
    if the prefix has pictures. ValueError if the template fails, or for pictures without a template.
    """
    text = prefix.prompt + text
    if not (prefix.template and tokenizer.has_chat_template):
        if prefix.images:
            raise ValueError(NO_TEMPLATE)
        return tokenizer.encode(text)
    system = {"role": "system", "content": prefix.system_prompt}
    messages: list[dict[str, Any]] = [] if prefix.system_prompt is None else [system]
    messages.append({"role": "user", "content": text, "pictures": prefix.pictures})
    options = {**prefix.template_config, "add_generation_prompt": True}
    return encode_messages(tokenizer, messages, options, vision)


def stable_tokens(prefix: PromptPrefix, tokenizer: Any, vision: Any = None) -> list[int]:
    """Return the first tokens of a saved prompt, as far as no text that follows is expected to change them.

    `prompt_tokens` also begins with them for each of PROBES as the text, and for the prompt without its last runs.
    vision: as in `prompt_tokens`.
    """
    tokens = prompt_tokens(prefix, tokenizer, "", vision)
    shortened = replace(prefix, prompt=LAST_RUNS.sub("", prefix.prompt))
    kept = shared(tokens[:-1], prompt_tokens(shortened, tokenizer, "", vision))
    for text in PROBES:
        kept = shared(tokens[:kept], prompt_tokens(prefix, tokenizer, text, vision))
    return tokens[:kept]
