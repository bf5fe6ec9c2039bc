"""Provide the grammars of `bench decode --grammar`, each with a prompt: five schemas, or the grammar of a file."""

import json
from pathlib import Path
from typing import Any

from .. import grammar
from ..grammar import compiled
from ..machine.errors import first_line
from .subject import BenchPrompt, Subject, encode

BUILT_IN = "builtin"
FILE = Path(__file__).parent / "schemas.json"
PROMPT = "Answer with an example."  # of a grammar from a file


def guided_prompts(subject: Subject, name: str) -> list[BenchPrompt]:
    """Return a prompt for each grammar, with the grammar's name as category. name: BUILT_IN, or the path of a file.

    BUILT_IN has five JSON schemas. A file whose name ends in .lark is a grammar in llguidance's dialect of Lark, any
    other one a JSON schema. Raises ValueError for a model without a tokenizer, an unreadable file, or a grammar that
    is invalid or not supported.
    """
    if subject.tokenizer is None:
        raise ValueError("grammar: needs a tokenizer; random weights have none: give a checkpoint with --model")
    if name == BUILT_IN:
        known = json.loads(FILE.read_text("utf-8")).items()
        made = [(of, entry["prompt"], grammar.json_schema(entry["schema"])) for of, entry in known]
    else:
        try:
            text = Path(name).read_text("utf-8")
        except OSError as e:
            raise ValueError(f"grammar: {name} cannot be read ({first_line(e)}); give a file, or {BUILT_IN}") from e
        made = [(Path(name).stem, PROMPT, (grammar.lark if name.endswith(".lark") else grammar.json_schema)(text))]
    tokenizer: Any = subject.tokenizer
    return [
        BenchPrompt(of, encode(tokenizer, prompt), grammar=compiled(each, tokenizer, subject.model.vocab_size))
        for of, prompt, each in made
    ]
