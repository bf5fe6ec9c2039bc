"""Constrain the answer of a request to a grammar: where it applies in the answer, and its compiled form."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ..grammar import Constraint, Gate, Grammar, GrammarError, compiled, is_compiled
from .continued import begun_answer
from .fields import ModelInfo, Refused
from .forms import Message
from .frames import CONTENT, begun_in, ends_in_reasoning
from .grammar_limits import compiled_within


class Output(NamedTuple):
    """A grammar that an answer must match. field: path of the request field that requires it, for messages.

    param:  name of the request field, for the `param` of an error response.
    gate:   where the grammar applies within the content; `constraint_of` adds what may precede it, such as reasoning.
    calls:  the grammar describes tool calls, not the content.
    """

    grammar: Grammar
    field: str
    param: str
    gate: Gate = Gate()
    calls: bool = False


def constraint_of(
    info: ModelInfo, output: Output, prompt: Sequence[int] = (), begun: Message | None = None, *, chat: bool = False
) -> Constraint:
    """Return the compiled grammar of the answer to a prompt. Raises Refused if it cannot be enforced.

    prompt: token ids, which show whether the answer begins within reasoning; used only with `chat` or for calls.
    begun: the message of the assistant with which the prompt ends, and which the answer continues; None: there is
    none. chat: the answer is split into reasoning and content.
    """
    gate, how = output.gate, (output.grammar, info.tokenizer, info.vocab_size)
    if output.calls:
        gate = _call_gate(info, gate, prompt)
    elif chat:
        gate = _gate(info, gate, prompt, begun)
    try:
        # `is_compiled` makes llguidance's tokenizer if the load has not: that is not within the time to compile.
        make = partial(compiled, *how)
        found = make() if is_compiled(*how) else compiled_within(make, output.field, output.param)
        return found.behind(gate)
    except Refused:
        raise
    except GrammarError as e:
        reason = "the begun answer does not fit" if gate.begun else f"no text fits ({e})"
        raise Refused(f"{output.field}: {reason}", param=output.param) from None
    except ValueError as e:
        raise Refused(f"{output.field}: {e}", param=output.param) from e


def _gate(info: ModelInfo, gate: Gate, prompt: Sequence[int], begun: Message | None) -> Gate:
    """Convert a gate of the content to one of the whole answer, which may begin with reasoning or other frames.

    prompt, begun: as in `constraint_of`; the grammar describes the content of `begun` and of the answer together.
    """
    tokenizer = info.tokenizer
    begun = begun_answer([begun], tokenizer) if begun else {}
    content: str = begun.get("content") or ""
    if info.frames:
        if begun_in(info.frames, tokenizer.decode(prompt)) == CONTENT:
            return gate._replace(begun=content)
        opening = f"(?!{info.frames.reasoning})(?:{info.frames.content})"
        return gate._replace(after=(opening, *gate.after), patterns=True)
    if not tokenizer.has_thinking:
        return gate._replace(begun=content)
    if ends_in_reasoning(tokenizer, prompt):
        return gate._replace(after=(tokenizer.think_end, *gate.after))
    ended = tokenizer.decode(prompt[-16:]).rstrip().endswith(tokenizer.think_end)
    if content or ended or gate.after:
        return gate._replace(begun=content.rpartition(tokenizer.think_end)[2].lstrip("\n"))
    return gate._replace(opens=tokenizer.think_start, after=(tokenizer.think_end,))


def _call_gate(info: ModelInfo, gate: Gate, prompt: Sequence[int]) -> Gate:
    """Convert a gate of tool calls to one of the whole answer, which may begin with reasoning or its rest."""
    tokenizer = info.tokenizer
    if not tokenizer.has_thinking:
        return gate
    start, end = tokenizer.think_start, tokenizer.think_end
    if ends_in_reasoning(tokenizer, prompt):
        return gate._replace(after=(re.escape(end) if gate.patterns else end, *gate.after))
    ended = tokenizer.decode(prompt[-16:]).rstrip().endswith(end)
    return gate if ended or gate.after else gate._replace(opens=start, after=(end,))


def as_json(constraint: Constraint | None) -> Any:
    """Return a list, which JSON can express, from which `from_json` makes the same constraint; None for None."""
    made = constraint.grammar if constraint else None
    return constraint and made and [made.text, made.name, made.styles, constraint.gate]


def from_json(content: Any, tokenizer: Any, vocab_size: int) -> Constraint | None:
    """Return the constraint that `as_json` wrote, compiled for this tokenizer; None for None."""
    if content is None:
        return None
    text, name, styles, gate = content
    found = compiled(Grammar(text, name, tuple(styles)), tokenizer, vocab_size)
    values: Any = (tuple(value) if isinstance(value, list) else value for value in gate or ())
    return found.behind(Gate(*values))
