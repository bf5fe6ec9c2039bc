"""Make the prompts: questions, code and prose, one token alone, and documents that end where windows do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cache.ring import MAX_ROWS
from ..layers.target import Target
from ..session import render

CHATS = (
    "How do I read a text file line by line in Python?",
    "Name three rivers and say, in a sentence each, through which cities they flow.",
)
TEXTS = {
    "code": 'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "prose": "The lighthouse had stood on the cliff for two hundred years when the keeper first noticed that",
    "repeats": "name,year,copies\nalpha,1990,3\nbeta,1991,3\ngamma,1992,3\ndelta,1993,3\nepsilon,",
}
DOCUMENT = """Section {}. The library opens at nine in the morning and closes at six. Whoever wants to borrow a book
brings a card to the desk; whoever returns one late pays ten cents for every day. Here is the rule as code:

def fine(days):
    if days <= {}:
        return 0
    return 10 * (days - {})

"""
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
    prompts = []
    if tokenizer.has_chat_template:
        prompts = [Prompt(f"chat {i}", chat(tokenizer, question)) for i, question in enumerate(CHATS, 1)]
    prompts += [Prompt(name, tokenizer.encode(text)) for name, text in TEXTS.items()]
    prompts.append(Prompt("one token", tokenizer.encode(TEXTS["prose"], add_special_tokens=False)[:1], stops=False))
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
        found = tokenizer.encode(DOCUMENT.format(section, section + 7, section + 7), add_special_tokens=not tokens)
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
