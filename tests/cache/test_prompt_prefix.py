"""Prefill the start of a prompt once: chats and commands continue it with the tokens of a single run."""

import itertools
import os
import re
import sys

import mlx.core as mx
import pytest
from command_line import call, one_line_error
from lanes import LANES, lanes_apart
from letter_chats import LETTERS, PLAIN, REWRITING, VOCAB, answer, make_session, make_tokenizer
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.cache.file import save_prompt_cache
from mlx_mtp.cache.prompt_prefix import PromptPrefix
from mlx_mtp.checkpoint.chat_template import prompt_tokens, stable_tokens
from mlx_mtp.decoding.prompt_file import load_prompt_cache
from mlx_mtp.demo import demo_path

BOTH = ("What does os.path", ".join do?")
START = "abcdefghij]abc[abcabc]a"
TURNS = ["hgf", "d", "efghabcdefghij"]


@pytest.fixture
def model(tiny_models):
    return tiny_models(2, vocab_size=len(VOCAB))[0]


def cache_of(model, tmp_path, template=PLAIN, prefix=PromptPrefix(START), **layout):  # noqa: B008 - it is frozen
    """Return a cache that has read a prefix, after saving and loading it."""
    cache = mlx_mtp.make_prompt_cache(model, **layout)
    list(
        mlx_mtp.generate_step(
            stable_tokens(prefix, make_tokenizer(template)), model, max_tokens=0, prompt_cache=cache
        )
    )
    cache.prefix = prefix
    save_prompt_cache(tmp_path / "cache", cache)
    return load_prompt_cache(tmp_path / "cache", model)


def conversation(session, start=""):
    texts = [start + TURNS[0], *TURNS[1:]]
    return [answer(session, text) for text in texts]


@pytest.mark.parametrize(("template", "layout"), paired([PLAIN, REWRITING], [{}, {"max_kv_size": 9}]))
def test_a_chat_that_begins_with_a_cache(model, tmp_path, template, layout):
    expected = conversation(make_session(model, template, **layout), START)
    cache = cache_of(model, tmp_path, template, **layout)
    held = cache.offset
    session = make_session(model, template, prompt_cache=cache)
    for _ in range(2 if SWEEP or template == PLAIN else 1):
        reused = []
        for text, tokens in zip(TURNS, expected, strict=True):
            assert answer(session, text) == tokens
            reused.append(session.turn.reused)
        assert reused[0] == held > 0
        session.reset()
    assert session.messages == []


def test_a_conversation_continues_after_a_failed_turn(model, tmp_path, monkeypatch):
    session = make_session(model, prompt_cache=cache_of(model, tmp_path))
    hidden, calls = type(model).hidden, []

    def failing(self, tokens, cache):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no")
        return hidden(self, tokens, cache)

    monkeypatch.setattr(type(model), "hidden", failing)
    with pytest.raises(RuntimeError):
        answer(session, TURNS[0])
    monkeypatch.undo()
    session.reset()
    assert conversation(session) == conversation(make_session(model), START)


def test_a_turn_that_is_too_long_is_refused_and_the_next_one_is_not(model, tmp_path):
    session = make_session(model, prompt_cache=cache_of(model, tmp_path), max_context=60)
    first = answer(session, "hgf")
    reused = session.cache.offset
    with pytest.raises(
        ValueError, match=r"max_context=60: .* tokens after .* in the cache and max_tokens=14 are more"
    ):
        answer(session, "a" * 30)
    assert session.cache.offset == reused
    plain = make_session(model)
    assert [first, answer(session, "d")] == [answer(plain, START + "hgf"), answer(plain, "d")]
    assert session.turn.reused == reused


def test_system_prompts_and_variables_are_those_of_the_cache(model, tmp_path):
    prefix = PromptPrefix(START, "ij", template_config={"x": 1})
    session = make_session(model, prompt_cache=cache_of(model, tmp_path, prefix=prefix))
    expected = make_session(model, system_prompt="ij")
    assert conversation(session) == conversation(expected, START)
    for given in ({"system_prompt": "ji"}, {"template_config": {"x": 2}}):
        with pytest.raises(ValueError, match="the prompt cache was made with"):
            make_session(model, prompt_cache=cache_of(model, tmp_path, prefix=prefix), **given)
    cache = cache_of(model, tmp_path, prefix=PromptPrefix(START, template=False))
    with pytest.raises(ValueError, match="does not contain the start of a conversation"):
        make_session(model, prompt_cache=cache)


def test_no_token_that_is_kept_depends_on_what_follows():
    """Cut a text at every character, with the demo's tokenizer, whose tokens have several characters."""
    _, tokenizer = mlx_mtp.load(demo_path(), lazy=True)
    text = "What does os.path.join(a, b)  do?\n\n    return  self.x10\n"
    for template in (True, False):
        kept = 0
        for end in range(len(text)):
            tokens = stable_tokens(PromptPrefix(text[:end], template=template), tokenizer)
            whole = prompt_tokens(PromptPrefix(text, template=template), tokenizer, "")
            assert whole[: len(tokens)] == tokens, text[:end]
            kept += len(tokens)
        assert kept > len(text) * len(whole) / 4


@pytest.fixture(scope="module")
def demo():
    return mlx_mtp.load(demo_path())


@pytest.fixture
def once(demo, monkeypatch):
    """Load the demo once for all commands."""
    monkeypatch.setattr(sys.modules["mlx_mtp.checkpoint.load"], "load", lambda *_, **__: demo)


FLAGS = [["--system-prompt", "Be brief."], ["--ignore-chat-template"], [], ["--kv-bits", "8"]]


@pytest.mark.parametrize("flags", sampled(FLAGS[:1], FLAGS), ids=" ".join)
def test_the_commands_give_the_text_of_one_run(once, tmp_path, flags):
    file = tmp_path / "c"
    start, rest = ("def read_", "lines(path):") if "--ignore-chat-template" in flags else BOTH
    made = call("cache-prompt", "-p", start, "--prompt-cache-file", file, *flags)
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("Prompt: ")
    expected = call("generate", "--quiet", "-m", 16, "-p", start + rest, *flags)
    again = [] if flags == ["--ignore-chat-template"] else flags
    for drafts in (0, 3):
        found = call(
            *("generate", "--quiet", "-m", 16, "-p", rest, "--prompt-cache-file", file, "--num-draft-tokens", drafts),
            *again,
        )
        assert found.stdout == expected.stdout
        assert len(found.stdout) > 40


def test_a_file_without_a_prefix_is_continued_unchanged(once, demo, tmp_path):
    model, tokenizer = demo
    cache = mlx_mtp.make_prompt_cache(model)
    tokens = tokenizer.encode("def read_lines(path):\n")
    list(mlx_mtp.generate_step(tokens[:5], model, max_tokens=0, prompt_cache=cache))
    save_prompt_cache(tmp_path / "c", cache)
    rest = tokenizer.decode(tokens[5:])
    found = call("generate", "--quiet", "-m", 12, "-p", rest, "--prompt-cache-file", tmp_path / "c")
    expected = call("generate", "--quiet", "-m", 12, "-p", "def read_lines(path):\n", "--ignore-chat-template")
    assert found.stdout == expected.stdout


def test_errors_of_the_commands(once, tmp_path, monkeypatch):
    file = tmp_path / "c"
    assert call("cache-prompt", "--quiet", "-p", "What does", "--prompt-cache-file", file).stdout == ""
    damaged = tmp_path / "damaged"
    damaged.write_bytes(file.read_bytes()[:-1])
    for flags, message in (
        (["--prompt-cache-file", damaged], "damaged"),
        (["--prompt-cache-file", file, "--kv-bits", 4], "--kv-bits 4: the prompt cache in .* was made without it"),
        (["--prompt-cache-file", file, "--max-kv-size", 9], "--max-kv-size 9"),
        (["--prompt-cache-file", file, "--mtp-kv-bits", 8], "--mtp-kv-bits 8"),
        (["--prompt-cache-file", file, "--kv-group-size", 32], "--kv-group-size 32"),
        (["--prompt-cache-file", file, "--system-prompt", "x"], "made with None"),
        (["--max-context", 20], "max_context=20: .* tokens and max_tokens=100 are more"),
        (["--cache-limit", "nan"], "allowed is 0 to 1048576 GB"),
        (["--cache-limit", "-1"], "allowed is 0 to 1048576 GB"),
    ):
        line = one_line_error(call("generate", "--quiet", *flags), 1 if damaged in flags else 2)
        assert re.search(message, line), line
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)
    for place in (tmp_path, tmp_path / "no" / "c", closed / "c"):
        line = one_line_error(call("cache-prompt", "-p", "x", "--prompt-cache-file", place), 2)
        assert "--prompt-cache-file" in line
    one_line_error(call("cache-prompt", "-p", "x " * 99, "--prompt-cache-file", file, "--max-context", 20), 2)


def test_the_model_is_the_files(demo, tmp_path, monkeypatch):
    """The file names model and end-of-text token, valid in any working directory; another model's name is checked."""
    loaded = []
    monkeypatch.setattr(
        sys.modules["mlx_mtp.checkpoint.load"], "load", lambda path, **o: (loaded.append((path, o)), demo)[1]
    )
    (tmp_path / "model").symlink_to(demo_path())
    monkeypatch.chdir(tmp_path)
    call(
        "cache-prompt", "-p", "What does os.path", "--prompt-cache-file", "c", "--model", "model", "--eos-token", "x"
    )
    monkeypatch.chdir("/")
    flags = ["--prompt-cache-file", tmp_path / "c"]
    for command, stdin in ((["generate", "-m", 1], ""), (["chat"], "")):
        for named in ([], ["--model", demo_path()]):
            result = call(*command, *flags, *named, stdin=stdin)
            assert result.returncode == 0, result.stderr
            assert loaded[-1][0] == (named[1] if named else tmp_path / "model")
            assert loaded[-1][1]["tokenizer_config"] == {"eos_token": "x"}


def test_a_cache_without_heads_is_reported(once, tmp_path):
    flags = ["--prompt-cache-file", tmp_path / "c"]
    call("cache-prompt", "-p", "What does os.path", "--num-draft-tokens", 0, *flags)
    found = call("generate", "-p", ".join do?", "-m", 5, *flags)
    assert "holds no state of the heads: decoding plainly" in found.stderr
    assert "MTP:" not in found.stdout
    chat = call("chat", *flags, stdin=".join do?\n/stats\n")
    assert "MTP off" in chat.stdout


@pytest.mark.parametrize(("made", "used"), sampled([LANES], itertools.permutations(LANES)))
def test_a_file_of_another_lane_is_read_again_with_a_notice(once, demo, tmp_path, made, used):
    file, (model, _) = tmp_path / "c", demo
    start = ("generate", "-m", 8, "--prompt-cache-file", file)
    with lanes_apart(model):
        model.runtime.lane = made
        call("cache-prompt", "-p", BOTH[0], "--prompt-cache-file", file)
        assert "read again" not in call(*start, "-p", BOTH[1]).stderr
        model.runtime.lane = used
        expected = call("generate", "--quiet", "-m", 8, "-p", "".join(BOTH)).stdout
        found = call(*start, "-p", BOTH[1], "--prefill-step-size", 5)
        (notice,) = [line for line in found.stderr.splitlines() if "lane" in line]
        assert re.fullmatch(rf"{file} was made in another lane than {used}: its \d+ tokens are read again\.", notice)
        assert expected.strip() in found.stdout
        quiet = call(*start, "-p", BOTH[1], "--quiet")
        assert (quiet.stdout, quiet.stderr) == (expected, "")
        refused = one_line_error(call(*start, "-p", BOTH[1], "--max-kv-size", 9), 2)
        assert "--max-kv-size 9" in refused
        assert "read again" in call("chat", "--prompt-cache-file", file, stdin=f"{BOTH[1]}\n").stderr


def test_a_command_restores_the_cache_limit(once):
    before = mx.set_cache_limit(5 * 10**8)
    try:
        call("generate", "--quiet", "-m", 1, "--cache-limit", 0.001)
        assert mx.set_cache_limit(0) == 5 * 10**8
    finally:
        mx.set_cache_limit(before)


def test_the_letters_are_in_the_vocabulary():
    assert set("".join([START, *TURNS])) <= set(LETTERS)
