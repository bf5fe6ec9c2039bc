"""Constrain answers to grammars, and limit the size of clients' grammars and the time to compile one."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

from ..grammar import Constraint, Gate, Grammar, GrammarError, compiled, is_compiled
from ..grammar.references import NAMED, keywords
from ..machine.errors import with_type
from .continued import begun_answer
from .fields import ModelInfo, Refused
from .forms import Message
from .frames import CONTENT, begun_in, ends_in_reasoning

T = TypeVar("T")
MAX_BYTES = 100_000  # of a schema, as JSON, or a list of choices
MAX_TEXT = 20_000  # characters of a regular expression or a Lark grammar
MAX_PROPERTIES = 2000  # of all objects together: the time to compile them grows with their square
MAX_FIXED = 4000  # characters of a const, a value of enum, a name, and of the shortest match of a pattern
LONGEST = 10**9  # characters; longer estimates are cut
MAX_SECONDS = 5.0  # to compile a grammar
COMPILERS = threading.Semaphore(2)  # the maximum of grammars that are compiled at once
ITEM = re.compile(r"\{(?P<count>\d+)(?:,\d*)?\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


class RequiredOutput(NamedTuple):
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
    info: ModelInfo,
    output: RequiredOutput,
    prompt: Sequence[int] = (),
    begun: Message | None = None,
    *,
    chat: bool = False,
) -> Constraint:
    """Return the compiled grammar of the answer to a prompt. Raises Refused if it cannot be enforced.

    prompt: token ids, which show whether the answer begins within reasoning; used only with `chat` or for calls.
    begun: the message of the assistant with which the prompt ends, and which the answer continues; None: there is
    none. chat: the answer is split into reasoning and content.
    """
    gate, how = output.gate, (output.grammar, info.tokenizer, info.vocab_size)
    if output.calls or chat:
        gate = _gate(info, gate, prompt, begun, calls=output.calls)
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


def _gate(info: ModelInfo, gate: Gate, prompt: Sequence[int], begun: Message | None, *, calls: bool) -> Gate:
    """Convert a gate of the content, or of tool calls, to one of the whole answer.

    That may begin with reasoning, its rest, or other frames. prompt, begun: as in `constraint_of`. The grammar of a
    content describes that of `begun` and of the answer together.
    """
    tokenizer = info.tokenizer
    begun = begun_answer([begun], tokenizer) if begun and not calls else {}
    content: str = begun.get("content") or ""
    if info.frames and not calls:
        if begun_in(info.frames, tokenizer.decode(prompt)) == CONTENT:
            return gate._replace(begun=content)
        opening = f"(?!{info.frames.reasoning})(?:{info.frames.content})"
        return gate._replace(after=(opening, *gate.after), patterns=True)
    if not tokenizer.has_thinking:
        return gate._replace(begun=content)
    end = tokenizer.think_end
    if ends_in_reasoning(tokenizer, prompt):
        return gate._replace(after=(re.escape(end) if gate.patterns else end, *gate.after))
    ended = tokenizer.decode(prompt[-16:]).rstrip().endswith(end)
    if content or ended or gate.after:
        return gate._replace(begun=content.rpartition(end)[2].lstrip("\n"))
    return gate._replace(opens=tokenizer.think_start, after=(end,))


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


def compiled_within(make: Callable[[], T], field: str, param: str) -> T:
    """Return make(), called on another thread, or raise its ValueError; any other exception becomes a ValueError.

    Raises Refused, with `param`, and `field` in the message: status 400 if make() takes longer than MAX_SECONDS (its
    thread continues, and the result is dropped), 503 if two other calls still run MAX_SECONDS after this one began.
    """
    if not COMPILERS.acquire(timeout=MAX_SECONDS):
        raise Refused(f"{field}: other grammars are being compiled; try again later", status=503, param=param)
    found: Future[T] = Future()
    # No daemon: if the process ended while Rust compiles, it would crash.
    threading.Thread(target=_run, args=(make, found), name="mlx-mtp grammar").start()
    try:
        return found.result(MAX_SECONDS)
    except TimeoutError:
        raise Refused(f"{field}: takes longer than {MAX_SECONDS:.0f} s to compile", param=param) from None


def _run(make: Callable[[], T], found: Future[T]) -> None:
    try:
        found.set_result(make())
    except BaseException as e:  # a panic of a Rust library is no Exception
        found.set_exception(e if isinstance(e, ValueError) else ValueError(f"cannot be compiled ({with_type(e)})"))
    finally:
        COMPILERS.release()


def check_schema(schema: Any) -> None:
    """Raise ValueError if a JSON schema, or a list of choices, exceeds a limit.

    The limits: MAX_BYTES of all as JSON, MAX_PROPERTIES in all objects together, MAX_FIXED characters of each text of
    `_fixed`. The message is "json_schema<path of the keyword at fault>: <reason>".
    """
    if (size := len(json.dumps(schema))) > MAX_BYTES:
        raise ValueError(f"json_schema: the JSON has {size} bytes; allowed are at most {MAX_BYTES}")
    properties = 0
    for path, name, value in keywords(schema):
        properties += len(value) if name == "properties" and isinstance(value, dict) else 0
        if properties > MAX_PROPERTIES:
            raise ValueError(f"json_schema{path}: allowed are at most {MAX_PROPERTIES} in all objects together")
        if (length := max(_fixed(name, value), default=0)) > MAX_FIXED:
            raise ValueError(
                f"json_schema{path}: needs a text of {length} characters; allowed are at most {MAX_FIXED}"
            )


def _fixed(name: str, value: Any) -> Iterator[int]:
    """Yield the number of characters of each text that a schema's keyword `name` with this value fixes.

    const: it, as JSON. enum: each value, as JSON. NAMED: each name. pattern, and each name of patternProperties: the
    shortest match, estimated. Nothing for other keywords.
    """
    if name == "const":
        yield len(json.dumps(value))
    elif name == "enum" and isinstance(value, list):
        yield from (len(json.dumps(each)) for each in value)
    elif name == "pattern" and isinstance(value, str):
        yield least_length(value)
    elif name in NAMED and isinstance(value, dict):
        yield from map(least_length if name == "patternProperties" else len, value)


def check_text(text: str) -> None:
    """Raise ValueError for a regular expression or a Lark grammar of more than MAX_TEXT characters.

    Also if its shortest match, by estimate, is longer than both MAX_FIXED characters and its own text.
    """
    if len(text) > MAX_TEXT:
        raise ValueError(f"{len(text)} characters; allowed are at most {MAX_TEXT}")
    if (length := least_length(text)) > max(MAX_FIXED, len(text)):
        raise ValueError(f"repetitions of {length} characters; allowed are at most {max(MAX_FIXED, len(text))}")


def least_length(pattern: str) -> int:
    """Estimate the length of a regular expression's shortest match in characters; the longest alternative counts."""
    groups, repeated = [[0, 0, 0]], False  # per open group: its length, that of alternatives before, of its last item
    for found in ITEM.finditer(pattern):
        sign, group = found[0], groups[-1]
        repeats = found["count"] is not None or sign in "?*+"
        if repeats and not repeated:
            count = int((found["count"] or str(int(sign == "+")))[:9])
            group[0] = min(group[0] + group[2] * (count - 1), LONGEST)
            group[2] = min(group[2] * count, LONGEST)
        elif sign == "(":
            groups.append([0, 0, 0])
        elif sign == "|":
            groups[-1] = [0, max(group[:2]), 0]
        elif sign == ")" and len(groups) > 1:
            length = max(groups.pop()[:2])
            groups[-1][0], groups[-1][2] = groups[-1][0] + length, length
        elif not repeats:
            group[0], group[2] = group[0] + 1, 1
        repeated = repeats
    return sum(max(group[:2]) for group in groups)
