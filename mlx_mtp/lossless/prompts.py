"""Make the prompts: questions, code and prose, one token alone, and documents that end where windows do."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache.ring import MAX_ROWS
from ..layers.target import Target
from ..session import render

BUILT_IN = json.loads(Path(__file__).with_name("prompts.json").read_text("utf-8"))
SOURCE = 400  # tokens of this package's own source, which the heads alone are tried on
LONGEST = 8192  # tokens; windows that are longer are not filled
NO_WINDOW = 240  # tokens of a document where there is none: caches grow behind it


@dataclass(frozen=True)
class Prompt:
    """Token ids to continue; with `stops` until the model ends its text."""

    name: str
    tokens: list[int]
    stops: bool = True


def built_in(model: Target, tokenizer: Any, max_tokens: int) -> list[Prompt]:
    """Make prompts for a model; those through a chat template only where its tokenizer has one."""
    chats = enumerate(BUILT_IN["chats"] if tokenizer.has_chat_template else (), 1)
    prompts = [Prompt(f"chat {i}", chat(tokenizer, question)) for i, question in chats]
    prompts += [Prompt(name, tokenizer.encode(text)) for name, text in BUILT_IN["texts"].items()]
    word = tokenizer.encode(BUILT_IN["texts"]["prose"], add_special_tokens=False)[:1]
    prompts.append(Prompt("one token", word, stops=False))
    documents = lengths(model, max_tokens).items()
    return prompts + [Prompt(name, document(tokenizer, length), stops=False) for name, length in documents]


def lengths(model: Target, max_tokens: int) -> dict[str, int]:
    """Choose the documents' lengths: rings end in the middle of the new text of one, in the prompt of another."""
    windows = {w for w in (*model.windows(), *model.head_windows()) if isinstance(w, int) and w <= LONGEST}
    found = {}
    for window in sorted(windows):
        ring = window + 2 * MAX_ROWS
        found[f"up to window {window}"] = max(1, ring - max_tokens // 2)
        found[f"past window {window}"] = 2 * ring - max_tokens // 2
    return found or {"document": NO_WINDOW}


def document(tokenizer: Any, length: int) -> list[int]:
    """Make a text of so many tokens, whose paragraphs are alike, but not the same."""
    tokens, section = [], 0
    while len(tokens) < length:
        section += 1
        text = BUILT_IN["document"].format(section, section + 7, section + 7)
        found = tokenizer.encode(text, add_special_tokens=not tokens)
        if not found:
            raise ValueError("the tokenizer makes no tokens of a text")
        tokens += found
    return tokens[:length]


def source(tokenizer: Any) -> list[int]:
    """Encode the beginning of a text that no model made: this file, and those beside it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    text = "\n".join(file.read_text("utf-8") for file in files)
    return tokenizer.encode(text[: 8 * SOURCE])[:SOURCE]


def chat(tokenizer: Any, question: str) -> list[int]:
    """Encode a question as the chat template writes it, or where there is none as it is, on a line of its own."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(f"{question}\n")
    text = render(tokenizer, [{"role": "user", "content": question}], {"add_generation_prompt": True})
    return tokenizer.encode(text, add_special_tokens=False)
