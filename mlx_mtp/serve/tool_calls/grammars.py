"""Make grammars of tool calls: the text of a model's format around arguments that fit the tools' schemas."""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ...grammar.equivalent import equivalent
from ...grammar.forms import SEPARATORS, Grammar, composed, json_schema
from .branches import ANNOTATIONS, SchemaDocument
from .call_format import CallFormat
from .default_layouts import layouts_of
from .gemma import GemmaCalls
from .json_calls import JsonCalls
from .lark import LarkRules, pattern
from .layouts import CallLayout
from .schema import Schema, Tools, dumps
from .structures import Structures, Style, check_key, sequence
from .tagged import TaggedCalls
from .tagged_values import TaggedValues

# What varies in a rendered call: ids, and numbers of calls.
VARIES = re.compile(r"(?P<long>call_[0-9a-f]{24})|(?P<short>call0000[0-9])|(?<!\w)[0-9]+(?!\w)")
PATTERNS = {"long": "/[A-Za-z0-9_-]{1,40}/", "short": "/[A-Za-z0-9]{9}/", None: "/0|[1-9][0-9]{0,2}/"}
SPREAD = 40  # maximum white space between the tokens of JSON, if the template writes it in lines


class OfferedTools(NamedTuple):
    """The tools that an answer may call. forced: it must call one. one: it has at most one call.

    strict: names of the tools whose arguments must fit their schemas.
    """

    tools: Tools
    forced: bool
    one: bool
    strict: Collection[str]


def call_grammar(tokenizer: Any, format: CallFormat, offer: OfferedTools) -> Grammar:
    """Return the grammar of a text of tool calls, as the model's chat template writes them.

    The text is the whole answer if a call is forced; otherwise it follows the text of `call_mark` in an answer.
    Raises ValueError if no layout is known, and, with the tool's name, for a strict schema that cannot be honoured.
    """
    layouts = layouts_of(tokenizer, format)
    special, ends = special_tokens(tokenizer), {*tokenizer.eos_token_ids}
    offer = offer._replace(tools=Tools(_written(offer, name) for name in offer.tools.names))
    spread, ascii = (any(getattr(layout, name) for layout in layouts) for name in ("spread", "ascii"))

    def write(spaces: Mapping[str, Any]) -> str:
        spaces = {**spaces, "json_allow_general_unicode_escapes": ascii}
        return CallWriter(LarkRules(special, spaces), format, offer, ends).text(layouts)

    return composed(write, "tools", whitespace=SPREAD if spread else SEPARATORS)


def _written(offer: OfferedTools, name: str) -> dict[str, Any]:
    """Return a tool in OpenAI's form; if it is strict, its schema has supported keywords only.

    Raises ValueError, with the tool's name, for a strict schema that cannot be enforced.
    """
    schema = offer.tools.parameters(name)
    if name in offer.strict:
        schema = object_schema(schema)
        try:
            json_schema(schema)
        except ValueError as e:
            raise ValueError(f"tool {name!r}{str(e).removeprefix('json_schema')}") from None
        schema = equivalent(schema)
    return {"function": {"name": name, "parameters": schema}}


def call_mark(tokenizer: Any, format: CallFormat) -> tuple[str, bool]:
    """Return the text behind which the grammar of a call begins in an answer, and whether it is literal.

    Otherwise it is a regular expression. A call without a mark begins only at the start of an answer.
    """
    found = [_mark(layout, format) for layout in layouts_of(tokenizer, format)]
    if len(set(found)) == 1 and found[0] in format.marks:
        return found[0], True
    marked = ("to=functions.", *format.marks)
    texts = [pattern(mark) if mark.startswith(marked) else rf"\A\s*{pattern(mark)}" for mark in found]
    return "|".join(dict.fromkeys(texts)), False


def _mark(layout: CallLayout, format: CallFormat) -> str:
    """Return the text with which calls of a layout begin: `first`, else a mark of the format, else `start`.

    `start` is cut before an id or a number that varies.
    """
    marks = sorted(format.marks, key=len, reverse=True)
    fixed = VARIES.split(layout.start)[0]
    return layout.first or next((mark for mark in marks if layout.start.startswith(mark)), fixed)


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the special added tokens by their texts; llguidance does not accept them as text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): id for id, token in added.items() if getattr(token, "special", False)}


def object_schema(parameters: Schema) -> Schema:
    """Return the schema of a function's arguments: an object that forbids undeclared members.

    That is unless `parameters` has a keyword that states what other members may be. Without this limit a model could
    add parameters without end.
    """
    stated = {"additionalProperties", "patternProperties", "$ref", "anyOf", "oneOf", "allOf", "unevaluatedProperties"}
    closed = {} if stated & set(parameters) else {"additionalProperties": False}
    return {"properties": {}, **closed, **parameters, "type": "object"}


def _check_root(parameters: Schema) -> None:
    """Raise ValueError, with the keyword, for a schema of arguments that cannot be written without JSON.

    It may have type, properties, required, additionalProperties and annotations, and require declared properties
    only. Undeclared members are never written, whatever additionalProperties states.
    """
    known = {"type", "properties", "required", "additionalProperties", *ANNOTATIONS}
    if others := set(parameters) - known:
        raise ValueError(f"{sorted(others)[0]} is not supported with this model's tool calls")
    if missing := set(parameters.get("required", ())) - set(parameters.get("properties", ())):
        raise ValueError(f"required: {sorted(missing)[0]!r} is not among its properties")


class CallWriter:
    """Writes the grammar of calls. ends: ids of the tokens that end an answer, which no grammar contains.

    A body is the right side of a rule in Lark.
    """

    def __init__(self, rules: LarkRules, format: CallFormat, offer: OfferedTools, ends: set[int]):
        self._rules, self._format, self._offer, self._ends = rules, format, offer, ends

    def text(self, layouts: tuple[CallLayout, ...]) -> str:
        return self._rules.text(self._rules.either(self._answer(layout) for layout in layouts))

    def _answer(self, layout: CallLayout) -> str:
        """Return the body of an answer of calls or, if none is forced, of what follows the mark of a call.

        In the second case further calls belong to it only if they begin without such a mark.
        """
        start, offer, mark = layout.start, self._offer, _mark(layout, self._format)
        space, between = "", layout.between or ""
        ends = any(id in self._ends for id in self._rules.special_ids(between))
        further = bool(between) and not offer.one and not ends
        if not offer.forced:
            start = start[start.index(mark) + len(mark) :]
            further = further and mark not in between
        else:
            space = self._before(layout)
        calls = [self._call(layout, name) for name in offer.tools.names]
        if getattr(self._format, "shared", False) and not offer.forced:
            calls.append(self._rules.literal("all\n") + " " + self._rules.free(mark))
        call = self._rules.either(calls)
        body = f"{space}{self._varied(start)} {call}"
        if further:
            body += f" ({self._varied(between)} {call})*"
        return f"{body} {self._varied(self._without_end(layout.end))}"

    def _before(self, layout: CallLayout) -> str:
        """Return the body of what may precede the calls of an answer: white space, or a lead; "" if nothing may."""
        names = self._offer.tools.names
        leads = [self._rules.literal(lead.format(name=name)) for lead in layout.leads for name in names]
        spaces = [] if layout.start[:1].isspace() else ["/[ \\n]{1,2}/"]
        return f"({' | '.join([*spaces, *dict.fromkeys(leads)])})? " if spaces or leads else ""

    def _call(self, layout: CallLayout, name: str) -> str:
        """Return the body of a call, from its name to the end of its arguments."""
        quoted = isinstance(self._format, JsonCalls) and layout.start.endswith('"')
        written = dumps(name)[1:-1] if quoted else name
        arguments, empty = self._arguments(layout, name)
        if layout.empty is None or not empty:
            return f"{self._varied(layout.head, written)} {arguments}"
        without = self._varied(layout.empty, written)
        return self._rules.either((f"{self._varied(layout.head, written)} {arguments}", without))

    def _arguments(self, layout: CallLayout, name: str) -> tuple[str, bool]:
        """Return the body of a function's arguments, and whether a call may have none (for JSON always True).

        Raises ValueError, with the tool's name, for a strict schema that cannot be written.
        """
        tools, strict = self._offer.tools, name in self._offer.strict
        if isinstance(self._format, JsonCalls):
            return self._rules.json(object_schema(tools.parameters(name)) if strict else {"type": "object"}), True
        parameters = tools.parameters(name) if strict else {}
        try:
            return self._written(layout, name, strict), not parameters.get("required")
        except ValueError as e:
            raise ValueError(f"tool {name!r}: {e}") from None

    def _written(self, layout: CallLayout, name: str, strict: bool) -> str:
        """Return the body of a tool's arguments in a format that does not write them as one JSON object.

        strict: the arguments must fit the schema; otherwise any declared arguments are allowed, with any values.
        Raises ValueError for a strict schema, or a parameter's name, that cannot be written in this format.
        """
        tools, format = self._offer.tools, self._format
        properties, required = tools.properties(name), set(tools.parameters(name).get("required", ()))
        if strict:
            _check_root(tools.parameters(name))
        ordered = sorted(properties, key=str.lower) if layout.by_key else list(properties)
        if isinstance(format, TaggedCalls):
            values = TaggedValues(self._rules, format, layout, tools, name)
            if not strict:
                return f"({self._rules.either(map(values.any_argument, ordered))})*" if ordered else ""
            members = [(values.argument(key, properties[key]), key in required) for key in ordered]
            return sequence(self._rules, members, layout.separator and dumps(layout.separator))
        document = SchemaDocument(tools.parameters(name) if strict else {})
        bodies = [self._member(layout, document, key, properties[key] if strict else {}) for key in ordered]
        if strict:
            members = [(body, key in required) for key, body in zip(ordered, bodies, strict=True)]
            return sequence(self._rules, members, dumps(layout.separator))
        member = self._rules.either(bodies) if bodies else ""
        return f"({member} ({dumps(layout.separator)} {member})*)?" if member else ""

    def _member(self, layout: CallLayout, document: SchemaDocument, key: str, schema: Any) -> str:
        """Return the body of one argument, key and value, of a format without tags. Raises ValueError."""
        rules, format = self._rules, self._format
        if isinstance(format, GemmaCalls):
            check_key(key, r"[^\s:{}\[\],]+")
            values = Structures(rules, document, Style("gemma", format.quote), by_key=layout.by_key)
            return f"{rules.literal(key + ':')} {values.value(schema)}"
        check_key(key, r"[\w.$-]+(?: +[\w.$-]+)*")
        quote = "" if getattr(format, "escaped", True) else layout.quote
        values = Structures(rules, document, Style("python", ""), quote=quote)
        return f"{rules.literal(key + '=')} {values.value(schema)}"

    def _varied(self, text: str, name: str = "") -> str:
        """Return the body of `name` and then `text`; a pattern replaces each call id and number in `text`."""
        bodies, at, before = [], 0, name
        for match in VARIES.finditer(text):
            bodies += [self._rules.literal(before + text[at : match.start()]), PATTERNS[match.lastgroup]]
            at, before = match.end(), ""
        return " ".join(filter(None, [*bodies, self._rules.literal(before + text[at:])]))

    def _without_end(self, text: str) -> str:
        """Return a text without the tokens at its end that end an answer: they need no rule."""
        while (mark := self._rules.last_mark(text)) and mark[1] in self._ends:
            text = text.removesuffix(mark[0])
        return text
