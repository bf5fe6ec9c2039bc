"""Flags that constrain answers, of `generate` and, for each message, of `chat`."""

import json
import re

import pytest
from command_line import call, one_line_error

SCHEMA = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "bad.json").write_text('{"uniqueItems": true}')
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "rules.lark").write_text('start: "yes" | "no"')
    return tmp_path


def test_generate(files):
    cases = {
        ("--json-schema", files / "schema.json"): r'\[\s*"(red|green)".*\]',
        ("--regex", "[0-9]{3}"): r"[0-9]{3}",
        ("--grammar", files / "rules.lark"): r"yes|no",
    }
    for flags, pattern in cases.items():
        result = call("generate", "--quiet", "-m", 40, *flags)
        assert re.fullmatch(pattern, result.stdout.strip(), re.DOTALL), (flags, result.stdout, result.stderr)


def test_chat_constrains_every_answer(files):
    result = call("chat", "--quiet", "-m", 40, "--json-schema", files / "schema.json", stdin="a\nb\n")
    answers = [json.loads(line) for line in re.findall(r"\[.*?\]", result.stdout, re.DOTALL)]
    assert len(answers) == 2
    assert {word for answer in answers for word in answer} <= {"red", "green"}


def test_mistakes_are_one_line(files):
    assert "uniqueItems" in one_line_error(call("generate", "--json-schema", files / "bad.json"))
    assert "regex" in one_line_error(call("generate", "--regex", "("))
    two = one_line_error(call("generate", "--json", "--regex", "a"), 2)
    assert "--json and --regex" in two
    assert "bytes" in one_line_error(call("generate", "--grammar", files / "bytes"), 2)
