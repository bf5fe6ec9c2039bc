"""Write the grammar of arguments between tags, as raw text or JSON, so that `tagged` reads each value back."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from .branches import Branch, SchemaDocument, branches
from .lark import LarkRules, containing
from .layouts import CallLayout
from .schema import Schema, Tools, dumps, types_of
from .structures import CONSTANTS, Structures, Style, check_key, excluded
from .tagged import TaggedCalls

CDATA = "<![CDATA["


class TaggedValues:
    """Adds the rules of the tagged arguments of the function `name` to a grammar. A body is a rule's right side."""

    def __init__(self, rules: LarkRules, format: TaggedCalls, layout: CallLayout, tools: Tools, name: str):
        assert layout.parameter, "tagged calls have tags"
        self._rules, self._format, self._parameter = rules, format, layout.parameter
        self._tools, self._name, self._python = tools, name, layout.python
        self._document = SchemaDocument(tools.parameters(name))

    def argument(self, key: str, schema: Any) -> str:
        """Return the body of one argument, which fits `schema`, with its tags. Raises ValueError if none can."""
        check_key(key, r"[^<>/\n\"]+")
        parameter, by_type = self._parameter, dict[str, list[str]]()
        if self._format.nested:
            value = self._structures("nested", self._format.nested).value(schema, self._close(key))
            by_type[""] = [value]
        else:
            for kind, body in self._values(key, schema):
                by_type.setdefault(self._type(kind), []).append(body)
        starts = (
            (self._rules.literal(parameter.before + key + parameter.after.replace("{type}", type)), bodies)
            for type, bodies in by_type.items()
        )
        return self._rules.either(f"{start} {self._rules.either(bodies)}" for start, bodies in starts)

    def any_argument(self, key: str) -> str:
        """Return the body of one argument with its tags; its value is any text that does not contain the end tag."""
        parameter = self._parameter
        close = self._close(key)
        mark = self._format.close.replace("{key}", key)
        types = {self._type(kind) for kind in ("string", "null", "boolean", "number", "array", "object")}
        starts = (parameter.before + key + parameter.after.replace("{type}", each) for each in sorted(types))
        return self._rules.either(
            f"{self._rules.literal(start)} {self._rules.raw(close, mark=mark)}" for start in starts
        )

    def _close(self, key: str) -> str:
        return self._parameter.close.replace("{key}", key)

    def _type(self, kind: str) -> str:
        """Return the type that the model writes with a value of this JSON type; "" if it writes none."""
        string, other = self._parameter.types
        return string if kind == "string" or not string else other or ("number" if kind == "integer" else kind)

    def _structures(self, kind: str, mark: str) -> Structures:
        return Structures(self._rules, self._document, Style(kind, mark))

    def _values(self, key: str, schema: Any) -> Iterator[tuple[str, str]]:
        """Yield (JSON type, body) of the values of an argument, each with the end tag after it. Raises ValueError."""
        types = types_of(schema, self._document.root)
        close, kinds = self._close(key), {self._type(kind) for kind in types}
        if not types or "string" in types or len(kinds) > 1:
            for branch in branches(schema, self._document.root):
                yield from ((branch.kind, body) for body in self._bodies(branch, key, types, close))
            return
        tight = self._python or not types <= {"array", "object"}
        value = self._rules.json(self._document.within(schema), tight=tight)
        yield min(types), self._closed(value, close)
        with suppress(ValueError):  # also as the template writes it, if that is possible
            for branch in branches(schema, self._document.root) if tight else ():
                yield from ((branch.kind, body) for body in self._python_values(branch, close))

    def _closed(self, value: str, close: str) -> str:
        """Return the body of `value`, a body that is no raw text, and the literal `close`.

        If the format has CDATA sections, the value may be in one.
        """
        plain = f"{value} {self._rules.literal(close)}"
        section = f"{self._rules.literal(CDATA)} {value} {self._rules.literal(']]>' + close)}"
        return f"({plain} | {section})" if self._format.cdata else plain

    def _python_values(self, branch: Branch, close: str) -> Iterator[str]:
        values = branch.values or {"null": (None,), "boolean": (True, False)}.get(branch.kind, ())
        for value in values:
            if value is None or isinstance(value, bool):
                yield self._rules.literal(CONSTANTS[value] + close)
        if self._python and branch.kind in ("array", "object"):
            schema = {"const": values[0]} if values else {"type": branch.kind, **branch.schema}
            with suppress(ValueError):
                yield self._closed(self._structures("python", "").value(schema), close)

    def _bodies(self, branch: Branch, key: str, types: set[str], close: str) -> Iterator[str]:
        if branch.kind == "string":
            yield from self._strings(branch, key, types, close)
            return
        schema: Schema = {"const": branch.values[0]} if branch.values else {"type": branch.kind, **branch.schema}
        if branch.kind in ("null", "boolean") and not branch.values:
            values = (None,) if branch.kind == "null" else (True, False)
            # One lexeme with what follows: a raw text could start alike.
            yield from (self._rules.literal(dumps(each) + close) for each in values)
        elif branch.kind in ("array", "object") and not branch.values and (not types or "string" in types):
            yield self._closed(self._structures("json", self._format.close).value(schema), close)
        else:
            value = self._rules.json(self._document.within(schema), tight=True)
            yield self._closed(value, close)
        yield from self._python_values(branch, close)

    def _strings(self, branch: Branch, key: str, types: set[str], close: str) -> Iterator[str]:
        mark = self._format.close
        without = [] if self._parameter.types[0] else excluded(types)
        if branch.values:
            (value,) = branch.values
            text, read = self._rules.literal(value + close), self._read(key, value)
            if mark not in value and (read == dumps(value)):
                yield text
            return
        patterns = branch.patterns()
        if self._format.cdata:
            section = self._rules.raw(f"]]>{close}", patterns=patterns, without=without, mark="]]>")
            yield f"{self._rules.literal(CDATA)} {section}"
            without = [*without, containing(CDATA)]
        yield self._rules.raw(close, patterns=patterns, without=without, mark=mark)

    def _read(self, key: str, text: str) -> str:
        """Return the JSON that the parser returns for a raw text between the tags of argument `key`."""
        return dumps(text) if self._parameter.types[0] else self._format.as_json(self._tools, self._name, key, text)
