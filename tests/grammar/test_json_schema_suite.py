"""The JSON Schema Test Suite (MIT, draft 2020-12): what is taken accepts no invalid instance.

The files in `support/fixtures/json_schema_suite` are those of the suite in jsonschema's source archive.
"""

import json
from pathlib import Path

import grammars

from mlx_mtp import grammar

FILES = sorted((Path(__file__).parents[1] / "support/fixtures/json_schema_suite").glob("*.json"))


def accepts(constraint, value) -> bool:
    """Return whether any usual way to write a value is accepted."""
    encode = grammars.demo_tokenizer().encode
    for separators in ((", ", ": "), (",", ":")):
        for ascii_only in (True, False):
            text = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
            tokens, parser = encode(text, add_special_tokens=False), constraint.parser.deep_copy()
            if parser.try_consume_tokens(tokens) == len(tokens) and parser.is_accepting():
                return True
    return False


def test_the_suite():
    groups = [group for file in FILES for group in json.loads(file.read_text())]
    taken, valid, accepted = 0, 0, 0
    for group in groups:
        try:
            constraint = grammars.constraint(grammar.json_schema(group["schema"]))
        except ValueError:
            continue
        taken += 1
        for test in group["tests"]:
            fits = accepts(constraint, test["data"])
            assert test["valid"] or not fits, (group["description"], test)
            valid, accepted = valid + test["valid"], accepted + (fits and test["valid"])
    assert len(groups) == 368
    assert taken >= 164
    assert accepted >= 0.92 * valid
