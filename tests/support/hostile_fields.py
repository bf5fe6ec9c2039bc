"""Hostile requests by field: options, variables of the chat template, grammars, tools, and past messages."""

import inspect
import json
from typing import Any

from hostile_bodies import MARKS, MB, SORTS, Make
from hostile_schemas import HOSTILE
from hostile_wire import CHATS, PATHS, Attack, Dice, ask, asked, post
from transformers import PreTrainedTokenizerBase

from mlx_mtp.serve.field_table import FIELDS
from mlx_mtp.serve.ollama_fields import FIELDS as OLLAMA
from mlx_mtp.serve.ollama_fields import SAMPLING, SYSTEM

APIS = ("chat", "completions", "responses", "messages")
WORDS = (
    "a",
    "",
    "auto",
    "none",
    "true",
    "1",
    "é",
    "\ud83d\ude00",
    "\0",
    "../../etc/passwd",
    "http://127.0.0.1:1/",
    *MARKS,
)
NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 5e-324, 2**31, -(2**31), 2**53 + 1, 2**63, -(2**63), 2**64, 10**400)


def scalar(d: Dice) -> Any:
    return d.choice([None, True, False, d.choice(NUMBERS), d.choice(WORDS), d.choice(WORDS), d.random()])


def value(d: Dice, depth: int = 3, names: tuple[str, ...] = ("a", "", "type", "text", "id")) -> Any:
    """Return a small random JSON value."""
    kind = d.choice(["scalar", "list", "object"]) if depth else "scalar"
    if kind == "list":
        return [value(d, depth - 1, names) for _ in range(d.randrange(4))]
    if kind == "object":
        return {d.choice(names): value(d, depth - 1, names) for _ in range(d.randrange(4))}
    return scalar(d)


def huge(d: Dice) -> Any:
    """Return a JSON value of many parts, of great depth or of great length."""
    n, sort = d.size(100_000), SORTS[d.choice(list(SORTS))]
    deep: Any = []
    for _ in range(d.choice([50, 60, 900])):
        deep = [deep]
    return d.choice(
        [
            lambda: [scalar(d)] * n,
            lambda: list(range(n)),
            lambda: {str(i): i for i in range(n)},
            lambda: [sort(d, d.size(MB))] * 3,
            lambda: [f"{i} {sort(d, 999)[:999]}" for i in range(d.size(3000))],
            lambda: sort(d, d.size(3 * MB)),
            lambda: deep,
            lambda: 10**3000,
        ]
    )()


def with_field(api: str, name: str, given: Any) -> Attack:
    """Return a request with a field of FIELDS, whose name may have a dot."""
    outer, _, inner = name.partition(".")
    return post(PATHS[api], {**asked(api), **({outer: {inner: given}} if inner else {outer: given})})


def options(d: Dice, make: Any) -> Attack:
    """Return a request with one to four fields of any treatment, each with a value that `make` returns."""
    api, given = d.choice(APIS), {}
    for name in d.sample(list(FIELDS), d.choice([1, 1, 2, 4])):
        outer, _, inner = name.partition(".")
        given[outer] = {inner: make(d)} if inner else make(d)
    return post(PATHS[api], {**asked(api), "stream": d.random() < 0.2, **given})


def ollama_options(d: Dice) -> Attack:
    make, api = d.choice([value, huge]), d.choice(["ollama", "generate"])
    given = {name: make(d) for name in d.sample([*SAMPLING, *SYSTEM, "num_predict", "x"], 2)}
    fields = {d.choice(OLLAMA): make(d)} if d.random() < 0.5 else {"options": given}
    return post(PATHS[api], {**asked(api), **fields})


def costly(d: Dice, name: str, given: Any) -> Attack:
    """Return a request of 50 tokens with an option that may cost time for each of them."""
    api = d.choice([each for each in APIS if FIELDS[name].treatment(each) == "honoured"])
    return ask(api, **{name: given, "max_output_tokens" if api == "responses" else "max_tokens": 50})


OPTIONS: dict[str, Make] = {
    "any value": lambda d: options(d, value),
    "any value of any field": lambda d: options(d, value),
    "any huge value": lambda d: options(d, huge),
    "any huge value of any field": lambda d: options(d, huge),
    "ollama": ollama_options,
    "long bad words": lambda d: costly(d, "bad_words", ["a" * d.size(480_000)] * 60),
    "many bad words": lambda d: costly(d, "bad_words", [f"{i} a" for i in range(d.size(100_000))]),
    "bad words alike": lambda d: costly(d, "bad_words", ["a" * i for i in range(1, d.size(64) + 1)]),
    "long stops": lambda d: costly(d, "stop", ["a" * d.size(300_000)] * 64),
    "many stops": lambda d: costly(d, "stop", ["a " * i + "b" for i in range(1, d.size(5000))]),
    "stop tokens": lambda d: costly(d, "stop_token_ids", list(range(d.size(MB)))),
    "allowed tokens": lambda d: costly(d, "allowed_token_ids", [7] * d.size(3 * MB)),
    "logit bias": lambda d: costly(d, "logit_bias", {str(i): d.uniform(-100, 100) for i in range(d.size(300_000))}),
    "choices": lambda d: ask(
        "chat", n=d.choice([64, 72, 73, 10**6]), logprobs=True, top_logprobs=d.choice([20, 10**6])
    ),
    "penalties": lambda d: costly(d, "repetition_penalty", d.choice([1.5, 1e-30, 1e30, -1])),
    "wide penalties": lambda d: ask("chat", presence_penalty=2, presence_context_size=d.choice([2**31 - 1, 2**62])),
    "long answers": lambda d: ask(
        d.choice(CHATS), max_tokens=d.choice([2**31 - 1, -1]), max_output_tokens=2**31 - 1, ignore_eos=True
    ),
    "long names": lambda d: ask(d.choice(CHATS), **{"x" * d.size(2 * MB): 1}),
    "many unknown fields": lambda d: ask(d.choice(CHATS), **{f"field_{i}": i for i in range(d.size(100_000))}),
    "model": lambda d: ask(d.choice(CHATS), model=value(d)),
}

ENDLESS = (
    "{{ 9**(9**9) }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}a{% endfor %}{% endfor %}",
    "{{ 'a' * 10**9 }}",
    "{{ [0] * 10**9 }}",
    "{{ 'a' | center(10**9) }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ('a' * 50000) | replace('a', 'a' * 50000) }}",
    "{{ range(10**8) | list | sum }}",
    "{{ '%1000000000d' | format(1) }}",
)
ARGUMENTS = tuple(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
VARIABLES = (
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "range",
    "namespace",
    "loop",
    "self",
    "caller",
)
VARIABLES += (
    "enable_thinking",
    "date_string",
    "custom_tools",
    "builtin_tools",
    "message",
    "kwargs",
    "cycler",
    "dict",
)


def template(d: Dice, **variables: Any) -> Attack:
    api = d.choice(["chat", "responses", "messages"])
    return post(PATHS[api], {**asked(api), "chat_template_kwargs": variables})


TEMPLATES: dict[str, Make] = {
    "own template": lambda d: template(d, chat_template="{{ no_such_name() }}"),
    "endless template": lambda d: template(d, chat_template=d.choice(ENDLESS))._replace(hangs=True),
    "another field": lambda d: ask("chat", chat_template=d.choice(ENDLESS))._replace(hangs=True),
    "in a list": lambda d: template(d, chat_template=[d.choice(ENDLESS)])._replace(hangs=True),
    "ollama": lambda d: ask("ollama", template=d.choice(ENDLESS)),
    "argument": lambda d: template(d, **{d.choice(ARGUMENTS): value(d)}),
    "arguments": lambda d: template(d, **{name: value(d) for name in d.sample(ARGUMENTS, 4)}),
    "huge argument": lambda d: template(d, **{d.choice(ARGUMENTS): huge(d)}),
    "variable": lambda d: template(d, **{d.choice(VARIABLES): value(d)}),
    "huge variable": lambda d: template(d, **{d.choice(VARIABLES): huge(d)}),
    "names": lambda d: template(d, **{f"v{i}": i for i in range(d.size(200_000))}),
    "strange names": lambda d: template(
        d, **{d.choice(["", "__class__", "é", "a b", "None", "\0", "a" * 99_999]): 1}
    ),
    "no object": lambda d: ask("chat", chat_template_kwargs=value(d)),
}

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

TYPES = (
    "text",
    "image",
    "image_url",
    "input_image",
    "input_text",
    "output_text",
    "input_audio",
    "file",
    "input_file",
)
TYPES += ("document", "tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use", "search_result")
TYPES += (
    "web_search_tool_result",
    "container_upload",
    "mcp_tool_use",
    "function_call",
    "function_call_output",
    "message",
)
TYPES += (
    "reasoning",
    "computer_call",
    "computer_call_output",
    "mcp_list_tools",
    "item_reference",
    "refusal",
    "video_url",
)
NAMES = (
    "text",
    "id",
    "name",
    "input",
    "content",
    "source",
    "image_url",
    "url",
    "data",
    "media_type",
    "call_id",
    "tool_use_id",
)
NAMES += (
    "arguments",
    "output",
    "status",
    "action",
    "summary",
    "role",
    "thinking",
    "signature",
    "file",
    "file_data",
    "title",
)


def block(d: Dice) -> dict[str, Any]:
    """Return a random JSON object of at most 400 characters, mostly with a type that some vendor has."""
    found = {d.choice(NAMES): value(d, 2, NAMES) for _ in range(d.randrange(5))}
    found |= {"type": d.choice([*TYPES, *TYPES, *TYPES, value(d, 1)])} if d.random() < 0.95 else {}
    return found if len(json.dumps(found)) <= 400 else block(d)


def past(d: Dice, api: str, content: list[Any], role: str = "user") -> Attack:
    """Return a conversation with blocks in a past message; they must not be refused."""
    talk = [
        {"role": "user", "content": "Hello"},
        {"role": role, "content": content},
        {"role": "assistant", "content": "Yes."},
    ]
    if role == "assistant":
        talk.pop()
    given = asked(api)
    name = "input" if api == "responses" else "messages"
    return post(PATHS[api], {**given, name: [*talk, *given[name]]})._replace(answers=(200,))


def items(d: Dice) -> Attack:
    given = asked("responses")
    found = [
        {"role": "user", "content": "Hello"},
        *[block(d) for _ in range(2)],
        {"role": "assistant", "content": "Yes."},
    ]
    return post(PATHS["responses"], {**given, "input": [*found, *given["input"]]})._replace(answers=(200,))


def in_result(d: Dice, api: str) -> Attack:
    """Return a conversation with blocks in the result of a past tool call."""
    content, given = [block(d)], asked(api)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content},
    ]
    if api == "messages":
        use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        talk[1]["content"] = [use]
        talk[2] = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]}
    talk.append({"role": "assistant", "content": "Yes."})
    return post(PATHS[api], {**given, "messages": [*talk, *given["messages"]]})._replace(answers=(200,))


HISTORIES: dict[str, Make] = {
    "chat": lambda d: past(d, "chat", [block(d)]),
    "chat of the assistant": lambda d: past(d, "chat", [block(d)], "assistant"),
    "messages": lambda d: past(d, "messages", [block(d)]),
    "messages of the assistant": lambda d: past(d, "messages", [block(d)], "assistant"),
    "responses": lambda d: past(d, "responses", [block(d)]),
    "items": items,
    "more items": items,
    "result": lambda d: in_result(d, "chat"),
    "result of messages": lambda d: in_result(d, "messages"),
    "many blocks": lambda d: past(d, d.choice(["chat", "messages", "responses"]), [block(d)] * d.size(3))._replace(),
    "pictures": lambda d: past(d, "chat", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}] * 30),
    "any message": lambda d: post(PATHS["chat"], {**asked("chat"), "messages": [value(d), *asked("chat")["messages"]]}),
    "any newest block": lambda d: ask(d.choice(CHATS), [block(d)]),
    "any calls": lambda d: post(
        PATHS["chat"],
        {**asked("chat"), "messages": [{"role": "assistant", "tool_calls": value(d)}, *asked("chat")["messages"]]},
    ),
    "huge newest block": lambda d: ask(d.choice(CHATS), [{"type": d.choice(TYPES), d.choice(NAMES): huge(d)}]),
    "ollama": lambda d: post(
        PATHS["ollama"],
        {**asked("ollama"), "messages": [{"role": "user", "content": "a", d.choice(NAMES): value(d)}, *asked("ollama")["messages"]]},
    )._replace(answers=(200,)),
}  # fmt: skip
