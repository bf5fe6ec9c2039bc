"""Run the commands of `mlx-mtp chat` through a pipe, and what a terminal adds to them."""

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import call
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

import mlx_mtp
from mlx_mtp.cli import conversation
from mlx_mtp.cli.chat_commands import COMMANDS, completions, execute, named_file
from mlx_mtp.cli.chat_settings import NAMES, change, settings
from mlx_mtp.cli.conversation import Chat
from mlx_mtp.cli.line_editor import CommandCompleter, kept_history
from mlx_mtp.cli.terminal import MessageReader
from mlx_mtp.demo import demo_path
from mlx_mtp.session import ChatSession

QUESTION, OTHER = "What does os.path.join do?", "What does len do?"


@pytest.fixture(scope="module")
def demo_model():
    return mlx_mtp.load(demo_path())


@pytest.fixture
def chat(demo_model, monkeypatch):
    """A chat without a terminal, of an empty conversation."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    session = ChatSession(*demo_model, max_tokens=4)
    return Chat(session, MessageReader(interactive=False, values={}), execute, name="", quiet=True, penalties={})


def test_retry_and_edit_replace_the_last_turn(chat, capsys):
    for text in (OTHER, QUESTION):
        chat._message(text, edits=False)
    first = chat.session.messages
    chat._command("/retry")
    assert chat.session.messages == first  # greedy
    chat._command("/edit", OTHER)
    assert [m["content"] for m in chat.session.messages if m["role"] == "user"] == [OTHER, OTHER]
    assert chat.session.answers == 4
    assert "error" not in capsys.readouterr().err
    chat._command("/edit")
    assert "no terminal to edit in" in capsys.readouterr().err


def test_a_retry_repeats_the_prompt_of_a_given_cache_once(chat):
    chat.session._prefix_text = "About Python. "
    chat._message(QUESTION, edits=False)
    before = chat.session.messages
    chat._command("/retry")
    assert chat.session.messages == before
    assert chat.session.last_message == QUESTION
    assert before[0]["content"] == "About Python. " + QUESTION


def test_a_retry_without_an_answer_changes_nothing(chat, monkeypatch):
    chat._message(QUESTION, edits=False)
    before = chat.session.messages
    monkeypatch.setattr(chat.session, "ask", lambda *_: (each for each in ()))
    chat._command("/retry")
    assert chat.session.messages == before


def test_a_file_goes_with_the_next_message_only(chat, tmp_path):
    file = tmp_path / "two words.py"
    file.write_text("```\ncode\n```\n")
    for name in (str(file), f"'{file}'", str(file).replace(" ", "\\ ")):
        assert named_file(name, "/file") == file
    chat._command("/file", f"'{file}'")
    chat._message(QUESTION, edits=False)
    chat._message(OTHER, edits=False)
    sent = [m["content"] for m in chat.session.messages if m["role"] == "user"]
    assert sent == [f"two words.py:\n````\n```\ncode\n```\n````\n\n{QUESTION}", OTHER]


def test_errors_are_one_line(chat, tmp_path, capsys):
    binary, folder = tmp_path / "binary", tmp_path / "folder"
    binary.write_bytes(b"\xff\xfe")
    folder.mkdir()
    lines = ["/retry", "/edit", "/copy", "/file", f"/file {binary}", f"/file {folder}", "/file nothing", "/set x 1"]
    lines += ["/set top_p 2", "/set seed 1.5", "/set temp nan", "/set repetition_penalty -1", "/load nothing", "/wat"]
    for line in lines:
        chat._command(*line.split(None, 1))
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
            chat._command("/set", command)
        chat.session.reset()
        chat._message(QUESTION, edits=False)
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
    chat._message(OTHER, edits=False)
    chat._command("/save", str(file))
    chat._message(OTHER, edits=False)
    chat._command("/save", str(file))
    assert len(json.loads(file.read_text())["messages"]) == 2
    assert "was not replaced" in capsys.readouterr().err
    chat.interactive = True
    for answer, kept in (("\n", 2), ("n\n", 2), ("yes\n", 4)):
        monkeypatch.setattr("sys.stdin", SimpleNamespace(readline=lambda answer=answer: answer))
        chat._command("/save", str(file))
        assert len(json.loads(file.read_text())["messages"]) == kept


@pytest.mark.parametrize(("limit", "reason"), [(-1, "the context of 40 tokens is full"), (3, "cut at 3 tokens")])
def test_an_answer_that_a_limit_ends_has_a_notice(chat, monkeypatch, limit, reason):
    notes = []
    monkeypatch.setattr(chat, "_note", notes.append)
    monkeypatch.setattr(ChatSession, "positions", 40)
    chat.session.change(max_tokens=limit)
    chat._message(QUESTION, edits=False)
    assert [note for note in notes if reason in note]
    if limit == -1:
        assert len(chat.session.cache.tokens) in (39, 40)
        chat._message(QUESTION, edits=False)  # an error, not an endless answer
        assert len(chat.session.messages) == 2


def test_the_last_answer_is_copied(chat, monkeypatch, tmp_path, capsys):
    program = tmp_path / "pbcopy"
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    program.chmod(0o755)
    chat._message(QUESTION, edits=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    chat._command("/copy")
    assert (tmp_path / "copied").read_text() == chat.session.messages[-1]["content"]
    program.write_text("#!/bin/sh\nexit 3\n")
    chat._command("/copy")
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


def test_history_is_kept_for_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path))
    kept_history().append_string("first")
    assert [*kept_history().load_history_strings()] == ["first"]
    file = tmp_path / "chat" / "history"
    assert file.stat().st_mode & 0o77 == 0
    monkeypatch.setattr("mlx_mtp.cli.line_editor.LONGEST", 3)
    assert [*kept_history().load_history_strings()] == []
    file.unlink()
    file.mkdir()
    kept_history().append_string("only in memory")
    assert Path(file).is_dir()


def test_reasoning_is_separated_in_a_terminal(chat, monkeypatch):
    """Also if the template opened it; the notice of a limit then names it."""
    tokenizer = chat.session.tokenizer
    seen, notes = [], []
    view = SimpleNamespace(add=lambda text, reasoning: seen.append((text, reasoning)), close=lambda: None)
    monkeypatch.setattr("mlx_mtp.cli.markdown_view.MarkdownView", lambda: view)
    monkeypatch.setattr(conversation, "unstyled", lambda: False)
    monkeypatch.setattr(conversation, "hidden_typing", conversation.contextlib.nullcontext)
    monkeypatch.setattr(chat, "_note", notes.append)
    for name, value in {"_think_start": "<think>", "_think_end": "</think>", "_think_start_tokens": (2047,)}.items():
        monkeypatch.setattr(tokenizer, name, value, raising=False)
    monkeypatch.setattr(tokenizer, "_think_end_tokens", (2046,), raising=False)
    chat.interactive = True
    ask = chat.session.ask

    def answered(texts):
        def asked(*args):
            for response, text in zip(ask(*args), texts, strict=False):
                yield replace(response, text=text)

        return asked

    monkeypatch.setattr(chat.session, "ask", answered(["<thi", "nk>a</think>", "b"]))
    chat._message(OTHER, edits=False)
    assert "".join(text for text, reasoning in seen if reasoning) == "a"
    assert "".join(text for text, reasoning in seen if not reasoning) == "b"
    seen.clear()
    prompt, _ = chat.session._tokens([{"role": "user", "content": OTHER}])
    monkeypatch.setattr(tokenizer, "_think_start_tokens", tuple(prompt[-1:]))  # the template opens it
    monkeypatch.setattr(chat.session, "ask", answered(["a", "b", "c", "d"]))
    chat._message(OTHER, edits=False)
    assert {reasoning for _, reasoning in seen} == {True}
    assert any("during its reasoning" in note for note in notes)


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
    chat._command("/help")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*COMMANDS, "/exit"]
