"""Test draft vocabularies: counted from texts, written to a file, and read from it."""

import json
import shutil

import pytest
import tiny
from command_line import call

import mlx_mtp
from mlx_mtp.checkpoint import draft_vocab
from mlx_mtp.checkpoint.draft_vocab import most_frequent
from mlx_mtp.demo import demo_path


class Words:
    """A tokenizer of letters: 0 ends a sequence, 1 is in the chat template, 2 is an unused added token."""

    def __init__(self, size=13, first="a"):
        self.eos_token_ids, self.all_special_ids = {0}, [0]
        self.chat_template = "{{ '<|turn|>' + message }}"
        self.added_tokens_decoder = {0: "<|end|>", 1: "<|turn|>", 2: "<|unused|>"}
        self.vocab = {chr(ord(first) + i): i for i in range(size)}

    def get_vocab(self):
        return self.vocab


def test_the_most_frequent_and_the_lowest():
    words = Words()
    assert most_frequent(words, {}, 5, 13) == [0, 1, 2, 3, 4]
    assert most_frequent(words, {9: 5, 7: 5, 4: 1, 12: 6}, 4, 13) == [0, 1, 7, 12]
    assert most_frequent(words, {9: 5, 7: 5, 4: 1, 12: 6}, 7, 13) == [0, 1, 2, 4, 7, 9, 12]
    assert most_frequent(words, {12: 6, 11: 1}, 12, 12) == list(range(12))
    for size, vocab_size in ((1, 13), (14, 13), (13, 12)):
        with pytest.raises(ValueError, match=rf"size={size}: allowed are 2, .* to {vocab_size}"):
            most_frequent(words, {}, size, vocab_size)


def test_a_list_for_another_model(tmp_path):
    draft_vocab.write(tmp_path / "v.json", {3, 1}, 13, Words())
    listed = draft_vocab.read(tmp_path / "v.json")
    assert (listed.tokens, listed.vocab_size) == ((1, 3), 13)
    listed.check(13, Words())
    listed.check(13)
    with pytest.raises(ValueError, match=r"v\.json: made for a vocabulary of 13 tokens; the model has 14; make"):
        listed.check(14, Words())
    with pytest.raises(ValueError, match=r"v\.json: made with another tokenizer, \w{12}; the model's is \w{12}"):
        listed.check(13, Words(first="b"))


GOOD = {"format": 1, "vocab_size": 13, "tokenizer": "ab", "tokens": [1, 3]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format"', "not a draft vocabulary, no valid JSON"),
        (b"\xff\xfe", "not a draft vocabulary, no valid JSON"),
        (b"[" * 100_000, "not a draft vocabulary, no valid JSON"),
        ([1, 2], "format is 'list'; allowed is 1"),
        ({**GOOD, "format": 2}, "format is 2; allowed is 1"),
        ({**GOOD, "vocab_size": True}, "vocab_size is True; expected an integer of at least 1; make the file again"),
        ({**GOOD, "vocab_size": 0}, "vocab_size is 0; expected an integer of at least 1"),
        ({**GOOD, "tokenizer": None}, "tokenizer is None; expected a digest in hexadecimal digits; make the file"),
        ({**GOOD, "tokens": []}, "the tokens are empty; allowed is a list"),
        ({**GOOD, "tokens": None}, "the tokens are NoneType; allowed is a list"),
        ({**GOOD, "tokens": [1, 2.0]}, "token 1 of the list is 2.0; allowed are integers"),
        ({**GOOD, "tokens": [1, True]}, "token 1 of the list is True; allowed are integers"),
        ({**GOOD, "tokens": [4, 1, 4]}, "token 2 of the list is 4, once more; list each token once"),
        ({**GOOD, "tokens": [1, 13]}, "token 13 in the list; allowed are 0 to 12"),
        ({**GOOD, "tokens": [-1, 1]}, "token -1 in the list; allowed are 0 to 12"),
    ],
)
def test_damaged_files(content, message, tmp_path):
    file = tmp_path / "list.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError) as e:  # noqa: PT011 - the message is compared below
        draft_vocab.read(file)
    assert str(e.value).startswith(f"{file}: {message}")
    assert "\n" not in str(e.value)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A tiny checkpoint with the demo's tokenizer."""
    config = {**tiny.CONFIG, "vocab_size": 2048, "eos_token_id": 2}
    path = tiny.save(tmp_path_factory.mktemp("chatty"), config, tiny.random_weights(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path() / name, path)
    return path


@pytest.mark.filterwarnings("ignore")
def test_the_command_line_from_texts_to_text(chatty, tmp_path):
    texts = tmp_path / "texts"
    (texts / ".hidden").mkdir(parents=True)
    (texts / ".hidden" / "a.txt").write_text("zebra")
    (texts / "b.bin").write_bytes(b"\xff\xff")
    (texts / "c.py").write_text("import os\n" * 50 + "yield")
    out = tmp_path / "list.json"
    result = call("draft-vocab", "--model", chatty, "--out", out, "--size", 7, texts, "-", stdin="<|im_end|>" * 99)
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"skipped: {texts / 'b.bin'} is not UTF-8 text\n"
    model, tokenizer = mlx_mtp.load(chatty, draft_vocab=out)
    counted = tokenizer.encode("import os\n" * 50 + "yield") + [2] * 99
    listed = draft_vocab.read(out).tokens
    assert len(listed) == 7
    assert {0, 1, 2, *tokenizer.encode("import os\nyield")} - set(listed) <= set(tokenizer.encode("yield"))
    covered = sum(token in listed for token in counted) / len(counted)
    assert result.stdout.splitlines() == [
        f"{out}: 7 of 2,048 tokens",
        f"They are {covered:.1%} of the texts' {len(counted)}.",
    ]
    assert model.report.drafted_from == (7, 2048)
    flags = ("generate", "--model", chatty, "-m", 12, "--verbose", "False", "-p", "import")
    results = [call(*flags, "--draft-vocab", out), call(*flags, "--num-draft-tokens", 0)]
    assert results[0].stdout == results[1].stdout != ""
    assert [r.returncode for r in results] == [0, 0]


def test_refused_arguments_of_the_command(chatty, tmp_path):
    out, empty = tmp_path / "list.json", tmp_path / "empty"
    empty.mkdir()
    for arguments, message in (
        (["--size", 2], "Invalid value for '--size': size=2: allowed are 3"),
        (["--size", 2049], "Invalid value for '--size': size=2049: allowed are 3"),
        ([empty], f"no text in {empty}"),
        ([tmp_path / "none.txt"], "does not exist"),
        (["--out", tmp_path / "none" / "list.json"], "no such directory"),
    ):
        result = call("draft-vocab", "--model", chatty, "--out", out, *arguments)
        assert result.returncode == 2
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1
        assert message in result.stderr
    assert not out.exists()
    draft_vocab.write(out, [1], 2048, Words())
    result = call("generate", "--model", chatty, "--draft-vocab", out)
    assert f"error: {out}: made with another tokenizer" in result.stderr
    result = call("draft-vocab", "--model", chatty, "--out", out)
    assert (result.returncode, result.stdout) == (0, f"{out}: 512 of 2,048 tokens\n")
    assert draft_vocab.read(out).tokens == tuple(range(512))
