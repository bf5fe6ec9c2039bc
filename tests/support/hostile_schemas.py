"""48 schemas that recurse, are huge, deep or invalid, or have patterns that are slow in other engines."""

from typing import Any


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "string", **keywords}


def holds(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def nested(depth: int, around: Any) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = around(schema)
    return schema


def doubling(n: int, around: Any) -> dict[str, Any]:
    """A chain of definitions that each refer to the next one twice."""
    refs = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(n)]
    chain = {f"d{i}": around(ref, ref) for i, ref in enumerate(refs)}
    return {"$defs": {**chain, f"d{n}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def names(n: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": text() for i in range(n)}, **more}


NODE = {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}, "required": ["l", "r"]}
HOSTILE: dict[str, Any] = {
    # References
    "itself": {"$ref": "#"},
    "loop": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "missing": {"$ref": "#/$defs/none"},
    "remote": {"$ref": "http://127.0.0.1:1/s.json"},
    "file": {"$ref": "file:///etc/passwd"},
    "endless tree": NODE,
    "endless list": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "endless constants": {"type": "array", "items": {"const": "x"}, "minItems": 10**6},
    "allOf itself": {"allOf": [{"$ref": "#"}]},
    "anyOf itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "doubling properties": doubling(25, lambda a, b: {**NODE, "properties": {"l": a, "r": b}}),
    "doubling allOf": doubling(25, lambda a, b: {"allOf": [a, b]}),
    "doubling anyOf": doubling(25, lambda a, b: {"anyOf": [a, b]}),
    # Depth and size
    "deep": nested(26, holds),
    "too deep": nested(200, holds),
    "deep lists": nested(50, lambda schema: {"type": "array", "items": schema}),
    "deep anyOf": nested(15, lambda schema: {"anyOf": [schema, {"type": "null"}]}),
    "400 names": names(400),
    "3000 names": names(3000),
    "3000 required names": names(3000, required=[f"p{i}" for i in range(3000)]),
    "names alike": {"type": "object", "properties": {"a" * i: {} for i in range(1, 200)}},
    "3000 values": {"enum": [f"value {i}" for i in range(3000)]},
    "long value": {"enum": ["x" * 90_000]},
    "long constant": {"const": "\0" * 3000},
    "long name": holds({"type": "object", "properties": {"x" * 50_000: {}}, "required": ["x" * 50_000]}),
    "1500 branches": {"anyOf": [{"const": i} for i in range(1500)]},
    "million items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "nested counts": nested(8, lambda schema: {"type": "array", "items": schema, "minItems": 50, "maxItems": 50}),
    "billion letters": text(minLength=10**9),
    "trillion letters": text(maxLength=10**12),
    # Patterns
    "(a+)+": text(pattern="^(a+)+$"),
    "((a|a)*)*": text(pattern="^((a|a)*)*b$"),
    "nested repetition": text(pattern="^((a{1,100}){1,100}){1,100}$"),
    "fixed repetition": text(pattern="^((a{100}){100}){100}$"),
    "billion repetitions": text(pattern="^a{1000000000}$"),
    "exponential automaton": text(pattern="^(a|b)*a(a|b){25}$"),
    "exponential words": text(pattern="^(\\w|\\s)*x(\\w|\\s){40}$"),
    "letters of all scripts": text(pattern="^[\\p{L}\\p{N}]{500}$"),
    "look-ahead": text(pattern="^(?=.*a)(?=.*b).*$"),
    "no pattern": text(pattern="(("),
    "patterns of names": {"type": "object", "patternProperties": {f"^a{{{i}}}.*b$": {} for i in range(200)}},
    # Values of the wrong type
    "unknown type": {"type": "banana"},
    "numbers as types": {"type": [1, 2]},
    "list of properties": {"type": "object", "properties": []},
    "number of required": {"type": "object", "required": 5},
    "a list": [1, 2],
    "empty range": {"type": "integer", "minimum": 5, "maximum": 1},
    "huge numbers": {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
}
