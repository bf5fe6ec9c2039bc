"""Run the commands of `mlx-mtp chat` through a pipe, and what a terminal adds to them."""

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import call
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from thinking import thinks
from typed_lines import chat_of, typed

import mlx_mtp
from mlx_mtp.cli import conversation
from mlx_mtp.cli.chat_commands import COMMANDS, completions, named_file
from mlx_mtp.cli.chat_settings import NAMES, change, settings
from mlx_mtp.cli.line_editor import CommandCompleter, kept_history
from mlx_mtp.demo import demo_path
from mlx_mtp.session import ChatSession

QUESTION, OTHER = "What does os.path.join do?", "What does len do?"


@pytest.fixture(scope="module")
def demo_model():
    return mlx_mtp.load(demo_path())


@pytest.fixture
def chat(demo_model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    return chat_of(demo_model, 4)


def test_retry_and_edit_replace_the_last_turn(chat, capsys):
    for text in (OTHER, QUESTION):
        typed(chat, text)
    first = chat.session.messages
    typed(chat, "/retry")
    assert chat.session.messages == first  # greedy
    typed(chat, f"/edit {OTHER}")
    assert [m["content"] for m in chat.session.messages if m["role"] == "user"] == [OTHER, OTHER]
    assert chat.session.answers == 4
    assert "error" not in capsys.readouterr().err
    typed(chat, "/edit")
    assert "no terminal to edit in" in capsys.readouterr().err


def test_a_retry_repeats_the_prompt_of_a_given_cache_once(chat):
    chat.session._prefix_text = "About Python. "
    typed(chat, QUESTION)
    before = chat.session.messages
    typed(chat, "/retry")
    assert chat.session.messages == before
    assert chat.session.last_message == QUESTION
    assert before[0]["content"] == "About Python. " + QUESTION


def test_a_retry_without_an_answer_changes_nothing(chat, monkeypatch):
    typed(chat, QUESTION)
    before = chat.session.messages
    monkeypatch.setattr(chat.session, "ask", lambda *_: (each for each in ()))
    typed(chat, "/retry")
    assert chat.session.messages == before


def test_a_file_goes_with_the_next_message_only(chat, tmp_path):
    file = tmp_path / "two words.py"
    file.write_text("```\ncode\n```\n")
    for name in (str(file), f"'{file}'", str(file).replace(" ", "\\ ")):
        assert named_file(name, "/file") == file
    typed(chat, f"/file '{file}'")
    typed(chat, QUESTION)
    typed(chat, OTHER)
    sent = [m["content"] for m in chat.session.messages if m["role"] == "user"]
    assert sent == [f"two words.py:\n````\n```\ncode\n```\n````\n\n{QUESTION}", OTHER]


def test_errors_are_one_line(chat, tmp_path, capsys):
    binary, folder = tmp_path / "binary", tmp_path / "folder"
    binary.write_bytes(b"\xff\xfe")
    folder.mkdir()
    lines = ["/retry", "/edit", "/copy", "/file", f"/file {binary}", f"/file {folder}", "/file nothing", "/set x 1"]
    lines += ["/set top_p 2", "/set seed 1.5", "/set temp nan", "/set repetition_penalty -1", "/load nothing", "/wat"]
    for line in lines:
        typed(chat, line)
    out, err = capsys.readouterr()
    assert out == ""
    found = err.splitlines()
    assert len(found) == len(lines)
    assert all(line.startswith("error: ") and "Errno" not in line for line in found)
    assert found[6] == found[12] == "error: nothing: no such file or directory"
    assert "top_p=2.0: allowed is between 0 and 1" in found[8]
    assert "expected an integer" in found[9]
    assert "expected a number" in found[10]


def test_options_that_are_set_change_later_answers(chat, capsys):
    def answer(*commands):
        for command in commands:
            typed(chat, f"/set {command}")
        chat.session.reset()
        typed(chat, QUESTION)
        return chat.session.messages[-1]["content"]

    plain = answer("max_tokens 24", "seed 0")
    assert answer("temperature 2") != plain
    assert answer("temp 0") == plain
    assert answer("presence_penalty 50") != plain
    assert plain.startswith(answer("presence_penalty 0", "max_tokens 3"))
    assert "temperature 2.0" in capsys.readouterr().out


def test_every_option_is_shown_and_can_be_set(chat):
    assert [part.split()[0] for part in settings(chat.session, {}).split(" · ")] == NAMES
    for name in NAMES:
        value = {"top_p": "0.5", "min_p": "0.1", "xtc_threshold": "0.2", "xtc_probability": "0.3"}.get(name, "3")
        assert float(change(chat.session, chat.penalties, f"{name} {value}").split()[1]) == float(value)
        assert f"{name} {value}" in settings(chat.session, chat.penalties).replace(".0 ", " ")


def test_a_file_is_replaced_only_after_yes(chat, tmp_path, monkeypatch, capsys):
    file = tmp_path / "talk.json"
    typed(chat, OTHER)
    typed(chat, f"/save {file}")
    typed(chat, OTHER)
    typed(chat, f"/save {file}")
    assert len(json.loads(file.read_text())["messages"]) == 2
    assert "was not replaced" in capsys.readouterr().err
    chat.interactive = True
    for answer, kept in (("\n", 2), ("n\n", 2), ("yes\n", 4)):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(readline=lambda answer=answer: answer))
        typed(chat, f"/save {file}")
        assert len(json.loads(file.read_text())["messages"]) == kept


@pytest.mark.parametrize(("limit", "reason"), [(-1, "the context of 40 tokens is full"), (3, "cut at 3 tokens")])
def test_an_answer_that_a_limit_ends_has_a_notice(chat, monkeypatch, capsys, limit, reason):
    chat.quiet = False
    monkeypatch.setattr(ChatSession, "positions", 40)
    chat.session.change(max_tokens=limit)
    typed(chat, QUESTION)
    assert reason in capsys.readouterr().err
    if limit == -1:
        assert len(chat.session.cache.tokens) in (39, 40)
        typed(chat, QUESTION)  # an error, not an endless answer
        assert len(chat.session.messages) == 2


def test_the_last_answer_is_copied(chat, monkeypatch, tmp_path, capsys):
    program = tmp_path / "pbcopy"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    program.chmod(0o755)
    typed(chat, QUESTION)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    typed(chat, "/copy")
    assert (tmp_path / "copied").read_text() == chat.session.messages[-1]["content"]
    program.write_text("#!/bin/sh\nexit 3\n")
    typed(chat, "/copy")
    assert "/copy: pbcopy failed" in capsys.readouterr().err


def test_tab_completes_commands_words_and_paths(tmp_path):
    (tmp_path / "notes.txt").touch()
    completer = CommandCompleter(completions())

    def completed(text):
        found = completer.get_completions(Document(text), CompleteEvent())
        return [text[: len(text) + each.start_position] + each.text for each in found]

    assert completed("/s") == ["/set", "/system", "/save", "/stats"]
    assert completed("/set top_") == ["/set top_k", "/set top_p"]
    assert completed("/mtp o") == ["/mtp on", "/mtp off"]
    assert completed(f"/load {tmp_path}/no") == [f"/load {tmp_path}/notes.txt"]
    assert completed("/reset x") == completed("text /s") == completed("/s\n") == []
    assert completions().keys() == {*COMMANDS, "/exit"}


def test_history_is_kept_for_the_user_alone(monkeypatch, own_cache):
    kept_history().append_string("first")
    assert [*kept_history().load_history_strings()] == ["first"]
    file = own_cache / "chat" / "history"
    assert file.stat().st_mode & 0o77 == 0
    monkeypatch.setattr("mlx_mtp.cli.line_editor.LONGEST", 3)
    assert [*kept_history().load_history_strings()] == []
    file.unlink()
    file.mkdir()
    kept_history().append_string("only in memory")
    assert Path(file).is_dir()


def test_reasoning_is_separated_in_a_terminal(chat, monkeypatch, capsys):
    """Also if the template opened it; the notice of a limit then names it."""
    tokenizer = chat.session.tokenizer = copy.copy(chat.session.tokenizer)
    seen = []
    view = SimpleNamespace(add=lambda text, reasoning: seen.append((text, reasoning)), close=lambda: None)
    monkeypatch.setattr("mlx_mtp.cli.markdown_view.MarkdownView", lambda: view)
    monkeypatch.setattr(conversation, "unstyled", lambda: False)
    monkeypatch.setattr(conversation, "hidden_typing", conversation.contextlib.nullcontext)
    thinks(tokenizer, (2047,), (2046,))
    chat.interactive, chat.quiet = True, False
    ask = chat.session.ask

    def answered(texts):
        def asked(*args):
            for response, text in zip(ask(*args), texts, strict=False):
                yield replace(response, text=text)

        return asked

    monkeypatch.setattr(chat.session, "ask", answered(["<thi", "nk>a</think>", "b"]))
    typed(chat, OTHER)
    assert "".join(text for text, reasoning in seen if reasoning) == "a"
    assert "".join(text for text, reasoning in seen if not reasoning) == "b"
    seen.clear()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": OTHER}], add_generation_prompt=True)
    thinks(tokenizer, tuple(prompt[-1:]), (2046,))  # the template opens it
    monkeypatch.setattr(chat.session, "ask", answered(["a", "b", "c", "d"]))
    typed(chat, OTHER)
    assert {reasoning for _, reasoning in seen} == {True}
    assert "during its reasoning" in capsys.readouterr().err


def test_sampling_defaults_are_the_checkpoints(tmp_path):
    """In a chat they apply unless a flag is given; `generate` stays greedy, with a notice where the file differs."""
    for file in demo_path().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    advice = {"temperature": 2.0, "top_p": 0.9, "repetition_penalty": 1.1, "eos_token_id": [2, 0]}
    (tmp_path / "generation_config.json").write_text(json.dumps(advice))
    out = call("chat", "--quiet", "--model", tmp_path, "--top-p", "0.8", stdin="/set").stdout
    assert [value in out for value in ("temperature 2.0", "top_p 0.8", "repetition_penalty 1.1")] == [True] * 3
    results = [call("generate", "-m", 4, "--model", path, "-p", OTHER) for path in (tmp_path, demo_path())]
    assert "generation_config.json advises temp 2.0, top_p 0.9, repetition_penalty 1.1." in results[0].stderr
    assert "advises" not in results[1].stderr
    assert results[0].stdout.splitlines()[1] == results[1].stdout.splitlines()[1]


def test_help_lists_every_command(chat, capsys):
    typed(chat, "/help")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*COMMANDS, "/exit"]
