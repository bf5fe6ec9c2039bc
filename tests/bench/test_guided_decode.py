"""`bench decode --grammar`: the loops write one text per grammar, with drafts counted by their source."""

import json

import pytest
from command_line import call

from mlx_mtp.bench import decode, grammars, result
from mlx_mtp.bench.decode import FREE, PLAIN
from mlx_mtp.bench.decode_tables import overall, rows
from mlx_mtp.bench.subject import open_subject
from mlx_mtp.tuning.costs import Costs

LOOPS = [FREE, PLAIN, "heads", "forced", "both"]


@pytest.fixture(autouse=True)
def one_warm_up(monkeypatch):
    monkeypatch.setattr(decode, "WARMUPS", 1)


def test_the_five_schemas_can_be_honoured_and_each_has_a_prompt():
    prompts = grammars.guided_prompts(open_subject(), grammars.BUILT_IN)
    assert len({prompt.category for prompt in prompts}) == len(prompts) == 5
    assert len({tuple(prompt.tokens) for prompt in prompts}) == 5
    assert all(prompt.grammar is not None for prompt in prompts)


def test_loops_under_a_schema(tmp_path, monkeypatch):
    monkeypatch.setattr(Costs, "steps", lambda _, plan: 1 + 0.01 * plan.k)  # by measured costs no draft may pay
    schema, out = tmp_path / "flags.json", tmp_path / "out.json"
    keys = ["dark_mode", "offline"]
    properties = {key: {"type": "boolean"} for key in keys}
    schema.write_text(json.dumps({"type": "object", "properties": properties, "required": keys}))
    done = call("bench", "decode", "--grammar", schema, "--rounds", 1, "-m", 14, "--cooldown", 0, "--out", out)
    assert done.returncode == 0, done.stderr
    found = result.read(out, "decode")
    entries = {entry["contender"]: entry for entry in found["entries"]}
    assert [*entries] == found["options"]["contenders"] == LOOPS
    assert {entry["category"] for entry in found["entries"]} == {"flags"}
    texts = {name: entry["text"] for name, entry in entries.items()}
    assert {texts[name] for name in LOOPS[1:]} == {texts[PLAIN]} != {texts[FREE]}
    assert not found["differences"]
    for name, entry in entries.items():
        in_trees = sum(entry["tree_drafted"]) if name == "both" else 0  # forced drafts begin a tree
        assert (sum(entry["grammar_drafted"]) + in_trees > 0) == (name in ("forced", "both"))
        assert (sum(map(sum, entry["drafted"])) > 0) <= (name in ("heads", "both"))
    row = {row.contender: row for row in rows(found, (0, None, None))}["forced"]
    assert row.tokens_per_cycle == 1 + entries["forced"]["grammar_accepted"][0] / entries["forced"]["cycles"][0]
    assert row.accepted == entries["forced"]["grammar_accepted"][0]
    assert overall(found, (0, None, None)).row_count == 5


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--drafts", "1"), "--drafts"),
        (("--contexts", "64"), "--contexts"),
        (("--categories", "translation"), "--categories"),
        (("--prompts", 1), "--prompts"),
    ],
)
def test_options_that_do_not_fit(more, word):
    assert word in call("bench", "decode", "--grammar", "builtin", *more).stderr


def test_a_grammar_that_cannot_be_read_or_honoured_is_one_line(tmp_path):
    wrong = tmp_path / "x.lark"
    wrong.write_text("start: missing")
    for name, word in ((tmp_path / "none.json", "none.json"), (wrong, "lark: ")):
        assert word in call("bench", "decode", "--grammar", str(name)).stderr
