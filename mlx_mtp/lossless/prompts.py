"""Create the prompts: questions, code and prose, a single token, and documents that end at window boundaries."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache.ring import MAX_ROWS
from ..checkpoint.chat_template import about_pictures, render
from ..layers.target import Target
from ..pictures.rows import Picture

BUILT_IN = json.loads(Path(__file__).with_name("prompts.json").read_text("utf-8"))
SOURCE = 400  # tokens of this package's source code, on which the heads alone are tested
LONGEST = 8192  # tokens; longer windows are not tested
NO_WINDOW = 240  # tokens of a document without windows: caches grow after it


@dataclass(frozen=True)
class NamedPrompt:
    """A named prompt. tokens: ids, and negative numbers for rows of its `pictures`. stops: end at stop tokens."""

    name: str
    tokens: list[int]
    stops: bool = True
    pictures: tuple[Picture, ...] = ()


def built_in(model: Target, tokenizer: Any, max_tokens: int) -> list[NamedPrompt]:
    """Return the prompts for a check: chats, other texts, one token, and documents for the model's windows.

    Without a chat template there are no chats. ValueError if the tokenizer encodes a document to no tokens.
    """
    chats = enumerate(BUILT_IN["chats"] if tokenizer.has_chat_template else (), 1)
    prompts = [NamedPrompt(f"chat {i}", chat(tokenizer, question)) for i, question in chats]
    prompts += [NamedPrompt(name, tokenizer.encode(text)) for name, text in BUILT_IN["texts"].items()]
    word = tokenizer.encode(BUILT_IN["texts"]["prose"], add_special_tokens=False)[:1]
    prompts.append(NamedPrompt("one token", word, stops=False))
    documents = lengths(model, max_tokens).items()
    return prompts + [NamedPrompt(name, document(tokenizer, length), stops=False) for name, length in documents]


def pictured(model: Target, tokenizer: Any, pictures: Sequence[Picture]) -> list[NamedPrompt]:
    """Return a prompt about each picture and, if there are several pictures, one about all of them."""
    groups: dict[str, tuple[Picture, ...]] = {f"picture {i}": (picture,) for i, picture in enumerate(pictures, 1)}
    if len(pictures) > 1:
        groups["all pictures"] = tuple(pictures)
    vision = model.vision
    return [
        NamedPrompt(name, about_pictures(tokenizer, each, vision), pictures=each) for name, each in groups.items()
    ]


def lengths(model: Target, max_tokens: int) -> dict[str, int]:
    """Return document lengths in tokens, by the document's name.

    For each window up to LONGEST, of the target or the heads, there are two: in one a ring cache first wraps within
    the `max_tokens` new tokens, in the other within the prompt. Without such a window there is one, of NO_WINDOW.
    """
    windows = {w for w in (*model.windows(), *model.head_windows()) if isinstance(w, int) and w <= LONGEST}
    found = {}
    for window in sorted(windows):
        ring = window + 2 * MAX_ROWS
        found[f"up to window {window}"] = max(1, ring - max_tokens // 2)
        found[f"past window {window}"] = max(ring + 1, 2 * ring - max_tokens // 2)
    return found or {"document": NO_WINDOW}


def document(tokenizer: Any, length: int) -> list[int]:
    """Return the first `length` tokens of a text whose paragraphs are similar but not equal.

    ValueError if the tokenizer encodes a paragraph to no tokens.
    """
    tokens, section = [], 0
    while len(tokens) < length:
        section += 1
        text = BUILT_IN["document"].format(section, section + 7, section + 7)
        found = tokenizer.encode(text, add_special_tokens=not tokens)
        if not found:
            raise ValueError("the tokenizer encodes a paragraph of text to no tokens; use the model's own tokenizer")
        tokens += found
    return tokens[:length]


def source(tokenizer: Any) -> list[int]:
    """Return the first tokens, at most SOURCE, of this directory's .py files, which the target did not write."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    text = "\n".join(file.read_text("utf-8") for file in files)
    return tokenizer.encode(text[: 8 * SOURCE])[:SOURCE]


def chat(tokenizer: Any, question: str) -> list[int]:
    """Return a question's tokens in the chat template."""
    text = render(tokenizer, [{"role": "user", "content": question}], {"add_generation_prompt": True})
    return tokenizer.encode(text, add_special_tokens=False)
