"""Make what is generated from: nine kinds of prompts, padded to a context's length, or random tokens."""

import json
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..session import render

FILE = Path(__file__).parent / "prompts.json"


@dataclass(frozen=True)
class BenchPrompt:
    """Token ids of one prompt of a category; context: the length it was padded to, 0 where it was not."""

    category: str
    tokens: list[int]
    context: int = 0


def make_prompts(
    tokenizer: Any, vocab_size: int, *, each: int, context: int = 0, only: Iterable[str] = ()
) -> list[BenchPrompt]:
    """Make `each` prompts of every category (or of `only` these), padded in front to `context` tokens, 0: as is.

    tokenizer: None makes them of random tokens, in a category of their own.
    Raises ValueError for an unknown category, or a context that is shorter than a prompt.
    """
    if tokenizer is None:
        length = context or 128
        drawn: Any = mx.random.randint(0, vocab_size, (each, length), key=mx.random.key(0)).tolist()
        return [BenchPrompt("random_tokens", tokens, context) for tokens in drawn]
    known: dict[str, list[str]] = json.loads(FILE.read_text())
    if unknown := sorted(set(only) - known.keys()):
        raise ValueError(f"categories={unknown[0]}: allowed are {', '.join(known)}")
    chosen = [(name, text) for name in known if not only or name in only for text in known[name][:each]]
    return [BenchPrompt(name, padded(tokenizer, text, context), context) for name, text in chosen]


def padded(tokenizer: Any, text: str, context: int) -> list[int]:
    """Encode a message with as much text in front as fits into `context` tokens."""
    tokens = encode(tokenizer, text)
    if not context:
        return tokens
    if len(tokens) > context:
        raise ValueError(f"contexts={context}: a prompt alone has {len(tokens)} tokens; allowed is that or more")
    best, characters = tokens, 3 * (context - len(tokens))
    for _ in range(8):  # corrections of the padding's length
        found = encode(tokenizer, f"{filler(characters)}\n\n{text}")
        if len(best) < len(found) <= context:
            best = found
        missing = context - len(found)
        if 0 <= missing < 4:
            break
        per_token = characters / max(1, len(found) - len(tokens))
        characters = max(0, characters + int(missing * per_token) - (missing < 0))
    return best


def encode(tokenizer: Any, text: str) -> list[int]:
    """Encode a message, through the chat template where there is one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    messages = [{"role": "user", "content": text}]
    return tokenizer.encode(render(tokenizer, messages, {"add_generation_prompt": True}), add_special_tokens=False)


def filler(characters: int) -> str:
    """Read the first so many characters of the running Python's standard library, file after file."""
    text = ""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(text) >= characters:
            break
        text += file.read_text(errors="replace")
    return text[:characters]
