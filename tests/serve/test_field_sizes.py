"""Every field of every API has limits: a huge value gets a prompt answer, and its error is one line."""

import re
import time
from pathlib import Path

import pytest
from api_bodies import APIS, HI
from sweep import sampled

from mlx_mtp.serve.field_table import FIELDS
from mlx_mtp.serve.fields import (
    MAX_MESSAGE,
    MAX_WORD,
    MOST_STOPS,
    OTHERS,
    SIZES,
    TOOL,
    FieldSize,
    Refused,
    check_size,
)
from mlx_mtp.serve.ollama_fields import CHAT, GENERATE, SAMPLING, SYSTEM
from mlx_mtp.serve.structured import check_text
from mlx_mtp.serve.token_rules import bad_words_of, vocabulary

PAGE = (Path(__file__).parents[2] / "docs/serve.md").read_text()
NAMES = {
    **{api: [n for n, f in FIELDS.items() if f.treatment(api) in ("honoured", "refused")] for api in [*APIS][:4]},
    "ollama chat": [*CHAT, *(f"options.{name}" for name in (*SAMPLING, *SYSTEM, "num_predict"))],
    "ollama generate": [*GENERATE, *(f"options.{name}" for name in (*SAMPLING, *SYSTEM, "num_predict"))],
}
TEXTS = ("messages", "input", "prompt", "system", "instructions")  # bounded by the model's context, see the prompts


def deep(depth, inner=()):
    for _ in range(depth):
        inner = {"a": [inner]}
    return inner


HUGE = {
    "text": "x" * 600_000,
    "JSON text": "[" * 90_000,
    "pattern": "(((a{99999}){99999}){99999}){99999}",
    "numbers": [*range(100_000)],
    "texts": ["ab" * 300] * 1000,
    "empty lists": [[]] * 100_000,
    "names": {f"n{i}": i for i in range(20_000)},
    "ids": {str(i): 1 for i in range(60_000)},
    "tools": [{"type": "function", "name": "f", "function": {"name": "f", "parameters": {}}}] * 1001,
    "long tool": [
        {"name": "f", "function": {"name": "f", "description": "d" * 200_000}, "description": "d" * 200_000}
    ],
    "deep": deep(30),
    "deep schema": {"type": "json_schema", "schema": deep(30), "json_schema": {"schema": deep(30)}},
    "one member": {"type": "x" * 300_000, "name": ["y" * 90_000]},
    "integer": 10**400,
    "negative integer": -(10**400),
    "float": 1e308,
    "negative": -1e308,
    "-1": -1,
    "true": True,
}


@pytest.fixture(scope="module")
def info(one_layer):
    return one_layer.service.info


def error_of(parse, body, info):
    """Return the error with which a body is refused, None if it is accepted; any other exception is raised."""
    try:
        parse(body, info)
    except Refused as e:
        return e
    return None


@pytest.mark.parametrize("kind", sampled(["text", "ids", "deep schema", "negative integer"], [*HUGE]))
def test_every_field_takes_or_refuses_a_huge_value_at_once(info, kind):
    for api, (parse, body) in APIS.items():
        for name in NAMES[api]:
            if name in TEXTS and isinstance(HUGE[kind], str):
                continue
            outer, _, inner = name.partition(".")
            begun = time.process_time()
            error = error_of(parse, {**body, outer: {inner: HUGE[kind]} if inner else HUGE[kind]}, info)
            if error:
                assert outer in str(error) or inner in str(error), (api, name)
                assert len(str(error)) < 500, (api, name)
                assert str(error).isprintable(), (api, name)
                assert error.status < 500, (api, name)
            assert time.process_time() - begun < 5, (api, name)


def test_the_page_lists_the_sizes():
    rows = re.findall(
        r"^\| (.*?) \| ([\d,]+) \| ([\d,]+|the body and the context) \| ([\d,]+) \|$", PAGE, re.MULTILINE
    )
    sizes = [FieldSize(*(None if n[0] == "t" else int(n.replace(",", "")) for n in row[1:])) for row in rows]
    found = {name: size for row, size in zip(rows, sizes, strict=True) for name in re.findall(r"`(\w+)`", row[0])}
    assert found == {**SIZES, "tools": TOOL}
    assert [size for row, size in zip(rows, sizes, strict=True) if "other" in row[0]] == [OTHERS]
    assert [size for row, size in zip(rows, sizes, strict=True) if row[0] == "`tools`"] == [SIZES["tools"]]
    assert f"{MAX_WORD} characters" in PAGE
    assert f"{MAX_MESSAGE} characters" in PAGE


@pytest.mark.parametrize(
    ("value", "counted"),
    [
        ("x" * 11, "characters"), ({"x" * 11: 1}, "characters"), ([["x" * 6, {"a": "x" * 4}]], "characters"),
        ([1] * 4, "items"), ({str(i): 1 for i in range(4)}, "items"), ([[1, 2, 3], [1, 2]], "values"),
    ],
)  # fmt: skip
def test_sizes_are_counted_in_all_that_a_value_contains(value, counted):
    with pytest.raises(Refused, match=f"f: .*{counted}"):
        check_size("f", value, FieldSize(3, 10, 6))
    check_size("f", value, FieldSize(4, 11, 7))


@pytest.mark.parametrize("field", ["bad_words", "stop"])
def test_words_at_their_limits(info, field):
    parse, body = APIS["chat"]
    most = [f"{i:02}" + "w" * (MAX_WORD - 2) for i in range(MOST_STOPS)]
    parse({**body, field: most}, info)
    for wrong in ([*most, "w"], ["w" * (MAX_WORD + 1)], [""], [5]):
        with pytest.raises(Refused, match=field):
            parse({**body, field: wrong}, info)


def test_words_have_at_most_as_many_starts_as_tokens_can_complete(info):
    words = tuple(chr(97 + i % 26) * (MAX_WORD - 1) + chr(65 + i % 26) + str(i) for i in range(MOST_STOPS))
    found = sum(map(len, bad_words_of(info.tokenizer, words).ranges.values()))
    assert 0 < found <= MOST_STOPS * vocabulary(info.tokenizer).longest


def test_patterns_have_a_length_at_once():
    with pytest.raises(ValueError, match="repetitions of 1000000000 characters"):
        check_text("(" * 5000 + "a" + "{99999})" * 1000)


def test_only_the_first_unknown_fields_are_named(one_layer):
    names = {f"f{i}": i for i in range(5000)}
    found = one_layer.post("/v1/messages", json={"messages": HI, "max_tokens": 1, **names})
    assert found.status_code == 200
    assert found.headers["X-MLX-MTP-Warning"].count("unknown field '") == 20
    assert "4980 more fields are unknown" in found.headers["X-MLX-MTP-Warning"]
