"""Hostile requests with grammars, JSON schemas, regular expressions and tools."""

import json
from typing import Any

from hostile_bodies import MB, SORTS, Make
from hostile_fields import APIS, WORDS, huge, value
from hostile_schemas import HOSTILE
from hostile_wire import CHATS, Attack, Dice, ask

REGEXES = (
    "(a+)+$",
    "((a|a)*)*b",
    "((a{1,100}){1,100}){1,100}",
    "a{1000000000}",
    "(a|b)*a(a|b){25}",
    "(" * 5000 + "a" + ")" * 5000,
    "[\\p{L}\\p{N}]{5000}",
    "(?i)" + "(a|b|c|d)?" * 5000,
    "|".join(f"word{i}" for i in range(20_000)),
    "(.*)(.*)(.*)(.*)=",
    "(?=a)b",
    "((",
    "",
    "\\w{1,2000}\\s{1,2000}",
)
GRAMMARS_OF_LARK = (
    "start: start start | ",
    "start: a\na: b\nb: a",
    "start: " + " | ".join(f'"{i}"' for i in range(30_000)),
    "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"',
    "start: " + "(" * 3000 + '"a"' + ")" * 3000,
    'start: "a"~1000000000',
    'start: ("a" | "a" "a")*',
    "start: /(a|b)*a(a|b){30}/",
    "%import common.NUMBER\nstart: NUMBER",
    '%import "/etc/passwd"\nstart: "a"',
    "start: %json {}",
    "start: %json " + json.dumps(HOSTILE["doubling allOf"]),
    "\0" * 1000,
    "start: " + '"a" ' * 100_000,
)


def schema(d: Dice) -> Any:
    """Return a hostile JSON schema: one of HOSTILE, alone, as a property, or in an allOf; or a random value."""
    found = HOSTILE[d.choice(list(HOSTILE))]
    names = ("type", "properties", "items", "allOf", "anyOf", "not", "enum", "pattern", "$ref", "minimum", "maxItems")
    return d.choice(
        [
            lambda: found,
            lambda: {"type": "object", "properties": {"a": found}, "required": ["a"]},
            lambda: {"allOf": [found, HOSTILE[d.choice(list(HOSTILE))]]},
            lambda: {"enum": [f"value {i}" for i in range(d.size(10_000))]},
            lambda: {
                "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(d.size(40))]
            },
            lambda: {"oneOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(d.size(300))]},
            lambda: {"type": "object", "patternProperties": {f"^(a|b)*a.{{{i}}}$": {} for i in range(d.size(60))}},
            lambda: {"type": "string", "pattern": d.choice(REGEXES)},
            lambda: {"not": {"not": {"not": found}}},
            lambda: value(d, 5, names),
        ]
    )()


def structured(d: Dice, given: Any) -> Attack:
    """Return a request for JSON of a schema in one of the fields for it."""
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": given, "strict": True}}
    flat = {"type": "json_schema", "name": "a", "schema": given}
    fields: list[tuple[str, dict[str, Any]]] = [
        ("chat", {"response_format": named}),
        ("chat", {"guided_json": given}),
        ("completions", {"guided_json": json.dumps(given)}),
        ("chat", {"structured_outputs": {"json": given}}),
        ("responses", {"text": {"format": flat}}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": given}}}),
        ("ollama", {"format": given}),
        ("chat", {"tool_choice": "required", "tools": [function("a", given)]}),
    ]
    api, more = d.choice(fields)
    return ask(api, **more)


GRAMMARS: dict[str, Make] = {
    "schema": lambda d: structured(d, schema(d)),
    "another schema": lambda d: structured(d, schema(d)),
    "two schemas": lambda d: structured(d, {"anyOf": [schema(d), schema(d)]}),
    "regex": lambda d: ask(d.choice(APIS), guided_regex=d.choice(REGEXES)),
    "long regex": lambda d: ask("chat", guided_regex=SORTS[d.choice(list(SORTS))](d, d.size(5 * MB))),
    "grammar": lambda d: ask(d.choice(APIS), guided_grammar=d.choice(GRAMMARS_OF_LARK)),
    "long grammar": lambda d: ask("chat", guided_grammar="start: " + SORTS[d.choice(list(SORTS))](d, d.size(5 * MB))),
    "choices": lambda d: ask("chat", guided_choice=d.choice([[f"a{i}" for i in range(d.size(200_000))], huge(d)])),
    "white space": lambda d: ask("chat", guided_json={}, guided_whitespace_pattern=d.choice(REGEXES)),
    "in thinking": lambda d: ask("chat", guided_json=schema(d), enable_thinking=True),
}


def function(name: Any, parameters: Any, description: Any = "a") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def with_tools(d: Dice, tools: list[dict[str, Any]], **more: Any) -> Attack:
    """Return a request with tools, in the form of any API, with any choice among them."""
    api = d.choice(CHATS)
    inner = [each.get("function", each) for each in tools]
    if api == "responses":
        tools = [{"type": "function", **each} for each in inner]
    elif api == "messages":
        tools = [
            {"name": f.get("name"), "description": f.get("description"), "input_schema": f.get("parameters")}
            for f in inner
        ]
    choice = d.choice([None, "auto", "required", {"type": "function", "function": {"name": "f0"}}, {"type": "any"}])
    return ask(api, tools=tools, **({"tool_choice": choice} if choice else {}), **more)


TOOLS: dict[str, Make] = {
    "many": lambda d: with_tools(d, [function(f"f{i}", {}) for i in range(d.size(10_000))]),
    "alike": lambda d: with_tools(d, [function("f0", {}) for _ in range(d.size(300))]),
    "huge description": lambda d: with_tools(d, [function("f0", {}, "a b " * d.size(5 * MB))]),
    "huge name": lambda d: with_tools(d, [function("f" * d.size(MB), {})]),
    "strange name": lambda d: with_tools(d, [function(d.choice([*WORDS, "a b", "<f>", '"', 1, None, {}]), {})]),
    "many parameters": lambda d: with_tools(
        d, [function("f0", {"properties": {f"p{i}": {} for i in range(d.size(20_000))}})]
    ),
    "schema": lambda d: with_tools(d, [function("f0", schema(d))]),
    "schemas": lambda d: with_tools(d, [function(f"f{i}", schema(d)) for i in range(d.size(20))]),
    "deep": lambda d: with_tools(d, [function("f0", json.loads('{"items":' * 55 + "{}" + "}" * 55))]),
    "any": lambda d: ask(d.choice(CHATS), tools=d.choice([value(d), [value(d) for _ in range(5)], huge(d)])),
    "any choice": lambda d: ask(d.choice(CHATS), tools=[function("f0", {})], tool_choice=value(d)),
    "any function": lambda d: ask("chat", tools=[{"type": "function", "function": value(d)}]),
}
