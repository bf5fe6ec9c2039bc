"""Hostile requests by field: options of all APIs, and variables of the chat template."""

import inspect
from collections.abc import Sequence
from typing import Any

from hostile_bodies import MARKS, MB, SORTS, Make
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
    "\U0001f600",
    "\0",
    "../../etc/passwd",
    "http://127.0.0.1:1/",
    *MARKS,
)
NUMBERS = (0, -1, 1, 2, 0.5, -0.0, 1e308, -1e308, 5e-324, 2**31, -(2**31), 2**53 + 1, 2**63, -(2**63), 2**64, 10**400)


def scalar(d: Dice) -> Any:
    return d.choice([None, True, False, d.choice(NUMBERS), d.choice(WORDS), d.choice(WORDS), d.random()])


def value(d: Dice, depth: int = 3, names: Sequence[str] = ("a", "", "type", "text", "id")) -> Any:
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
    "bos_token", "eos_token", "raise_exception", "strftime_now", "range", "namespace", "loop", "self", "caller",
    "enable_thinking", "date_string", "custom_tools", "builtin_tools", "message", "kwargs", "cycler", "dict",
)  # fmt: skip


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
