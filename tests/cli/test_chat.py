"""Run `mlx-mtp chat` through pipes, with signals, and in a real terminal."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import call
from prompt_toolkit.data_structures import Point, Size
from prompt_toolkit.layout.screen import Char
from sweep import sampled, sweep

from mlx_mtp.cli import conversation_file, progress
from mlx_mtp.cli.chat_figures import footer
from mlx_mtp.cli.line_editor import _reflowed
from mlx_mtp.cli.progress import PromptProgress, stages
from mlx_mtp.cli.terminal import StopOnInterrupt
from mlx_mtp.session import ChatSession, Turn

COMMAND = [sys.executable, "-m", "mlx_mtp", "chat"]
QUESTIONS = ["What does os.path.join do?", "What does len do?"]


def test_piped_conversation():
    lines = [QUESTIONS[0], "", "/stats", "/mtp off", QUESTIONS[1], "/mtp", "/wat", "h", "x" * 300, "/reset now", "r"]
    lines += ["/stats", "/exit now", "no"]
    result = call("chat", "-m", 6, "--pipeline", stdin="\n".join(lines))
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    footers = [line for line in result.stdout.splitlines() if " reused · " in line]
    assert len(footers) == 3
    # Measured costs decide which depths are drafted, and whether trees are.
    shares = r"(( \d+(/(\d+|-)){2}%)?(, trees \d+/\d+)?|, nothing drafted)"
    figures = r"6 tok, [\d.]+/s · prompt [\d.]+/s, 0/15 reused · [\d.]+/cycle"
    assert re.fullmatch(figures + shares + r" · context \d+/2,048 · [\d.]+ GB", footers[0])
    assert "/cycle" not in footers[1]
    assert ", 0/" not in footers[1]
    assert "1 turn · 6 tokens" in result.stdout
    assert "0 turns · 0 tokens" in result.stdout
    assert result.stdout.count("MTP off\n") == 3
    assert "/reset" in result.stdout
    assert "unknown command /wat" in result.stderr
    assert "/reset takes no argument" in result.stderr


def test_the_text_does_not_depend_on_drafting():
    switched = "\n".join([QUESTIONS[0], "/mtp off", QUESTIONS[1], "/mtp on", QUESTIONS[0], "/exit", "never read"])
    plain = "\n".join([QUESTIONS[0], QUESTIONS[1], QUESTIONS[0]])
    texts = [call("chat", "-m", 8, "--quiet", "--no-mtp", stdin=plain)]
    texts.append(call("chat", "-m", 8, "--quiet", stdin=switched))
    assert texts[0].stderr == texts[1].stderr == ""
    printed = [line for line in texts[1].stdout.splitlines() if not line.startswith("MTP o")]
    assert printed == texts[0].stdout.splitlines()


def test_a_loaded_conversation_continues_exactly(tmp_path):
    """With sampling, a system prompt and an answer dropped by /reset, the draws of the seed continue too."""
    file, command = tmp_path / "talk.json", ["chat", "--quiet", "--temp", 2, "-m", 5]
    lines = ["/system Be  brief.", QUESTIONS[1], "/reset", QUESTIONS[0], f"/save {file}", QUESTIONS[1]]
    whole = call(*command, stdin="\n".join(lines)).stdout.splitlines()
    saved = whole.index(f"{file}: 3 messages saved")
    again = call(*command, stdin=f"/load {file}\n{QUESTIONS[1]}\n/system\n").stdout.splitlines()
    assert again == [f"{file}: 3 messages loaded", *whole[saved + 1 :], "Be  brief."]
    kept = json.loads(file.read_text())
    assert [message["role"] for message in kept["messages"]] == ["system", "user", "assistant"]


BAD = {
    "nothing": (None, "No such file"),
    "text": ("hello", "not a conversation, no JSON"),
    "object": ("{}", 'expected {"messages": ['),
    "newer": ('{"messages": [], "format": 2}', 'expected {"messages": ['),
    "roles": ('[{"role": "assistant", "content": ""}]', "message 1: role is 'assistant', expected 'user'"),
    "parts": ('[{"role": "user", "content": [1]}, 2]', "message 1: content is not a string"),
    "half a character": (r'[{"role": "user", "content": "\ud800"}]', "message 1: content is not a string"),
    "more": ('[{"role": "user", "content": "", "name": ""}]', "message 1: expected {"),
    "no answer": ('[{"role": "user", "content": "a"}]', "message 1 has no answer"),
    "answers": ('{"messages": [], "answers": -1}', "answers is -1"),
}


def test_bad_files_leave_the_conversation_unchanged(tmp_path):
    session = SimpleNamespace(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    for name, (text, why) in BAD.items():
        file = tmp_path / name
        if text is not None:
            file.write_text(text)
        with pytest.raises((ValueError, OSError)) as caught:
            conversation_file.load(file, session)
        assert why in str(caught.value)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="exists and contains no conversation"):
        conversation_file.save(tmp_path / "text", session)
    assert (tmp_path / "text").read_text() == "hello"
    lines = ["/load", "/save", f"/load {tmp_path / 'roles'}", f"/save {tmp_path / 'none' / 'x'}", "/system"]
    result = call("chat", "--quiet", stdin="\n".join(lines))
    assert (result.returncode, result.stdout) == (0, "No system prompt.\n")
    errors = result.stderr.splitlines()
    assert len(errors) == 4
    assert all(line.startswith("error: ") for line in errors)


def test_seeded_turns():
    stdin = "\n".join([QUESTIONS[0], QUESTIONS[0]])
    command = ["chat", "--quiet", "--temp", 1, "-m", 4]
    runs = {call(*command, *flags, stdin=stdin).stdout for flags in ([], ["--seed", 0])}
    assert len(runs) == 1
    assert runs != {call(*command, "--seed", 1, stdin=stdin).stdout}


@pytest.mark.parametrize("flags", [["--nope"], ["--temp", "-1"], ["-m", "0"], ["--num-draft-tokens", "9"]])
def test_bad_flags(flags):
    result = call("chat", *flags)
    assert result.returncode == 2
    assert next(line for line in result.stderr.splitlines() if "demo" not in line).startswith("error: ")
    assert "Traceback" not in result.stderr


def test_an_interrupt_ends_the_answer_but_not_the_chat(monkeypatch):
    """After an interrupt during an answer the chat reads the next lines of the pipe."""
    ask = ChatSession.ask

    def pressed(session, *args):
        for i, response in enumerate(ask(session, *args)):
            if i == 3:
                signal.raise_signal(signal.SIGINT)
            yield response

    monkeypatch.setattr(ChatSession, "ask", pressed)
    result = call("chat", "-m", 60, stdin=f"{QUESTIONS[0]}\n/stats\n")
    assert result.returncode == 0, result.stderr
    assert "(stopped)" in result.stderr
    assert re.search(r"\n1 turn · [4-8] tokens", result.stdout)


@sweep
def test_interrupted_process():
    endless = [*COMMAND, "-m", "-1", "--temp", "3", "--seed", "4"]  # about 1,400 tokens, long enough for the signal
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(endless, text=True, **pipes)
    process.stdin.write("def \n")
    process.stdin.flush()
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    out, err = process.communicate("/stats\n", timeout=60)
    assert process.returncode == 0, err
    assert "1 turn " in out
    assert "Traceback" not in err


READY, BUSY = "\x1b[?2004h", "\x1b[?2004l"  # the open line editor requests marked pastes


class Terminal:
    """A chat process with its own terminal."""

    def __init__(self, *flags, **changes):
        self.screen, end = pty.openpty()
        self.settings = termios.tcgetattr(self.screen)
        env = {**os.environ, "TERM": "xterm", **changes}
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}  # of a test runner
        self.process = subprocess.Popen([*COMMAND, *flags], stdin=end, stdout=end, stderr=end, env=env)
        os.close(end)
        self.text = ""

    def wait_for(self, text, after=0):
        """Read until `text` appears after the first `after` characters; return the position after it."""
        while text not in self.text[after:]:
            self.read(f"no {text!r} in {self.text[after:]!r}")
        return self.text.index(text, after) + len(text)

    def wait_for_more(self, characters, after):
        """Read until `characters` more characters follow the first `after`."""
        while len(self.text) < after + characters:
            self.read(f"no {characters} characters")

    def read(self, otherwise):
        """Append the program's next output to the text; fail with the message `otherwise` if there is none."""
        assert select.select([self.screen], [], [], 30)[0], otherwise
        self.text += os.read(self.screen, 4096).decode(errors="replace")

    def type(self, keys):
        """Send keys; return the length of the text before them."""
        os.write(self.screen, keys.encode())
        return len(self.text)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.screen)


RESTLESS = ["-m", "512", "--temp", "3", "--prefill-step-size", "64"]


@pytest.fixture(scope="module")
def opened():
    terminal = Terminal(*RESTLESS)
    terminal.wait_for(READY)
    yield terminal
    terminal.close()


@pytest.fixture
def terminal(opened):
    """The module's shared chat at an empty prompt, restarted if it has ended, without its earlier output."""
    if opened.process.poll() is not None:
        opened.close()
        opened.__init__(*RESTLESS)
        opened.wait_for(READY)
    since = opened.type("/help\r")
    opened.wait_for(READY, opened.wait_for("leaves.", since))
    opened.text = ""
    return opened


def test_in_a_terminal(terminal):
    terminal.type(f"\x1b[200~{QUESTIONS[0]}\n{QUESTIONS[1] * 200}\x1b[201~")  # a paste of two lines
    since = terminal.type("\r")
    terminal.wait_for("Reading", since)
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for(READY, terminal.wait_for("stopped; the message is left out", since))
    for _ in range(8):  # on a slow machine an answer may end by itself before the signal arrives
        began = terminal.type("go on\r")
        terminal.wait_for_more(60, terminal.wait_for(BUSY, began))
        terminal.process.send_signal(signal.SIGINT)
        since = terminal.wait_for(READY, terminal.wait_for(" reused", began))
        if "(stopped)" in terminal.text[began:]:
            break
    else:
        pytest.fail("no answer could be stopped")
    terminal.type("half a line\x03\x03")
    terminal.wait_for(READY, terminal.wait_for("/exit, Ctrl-D or another Ctrl-C leaves", since))
    assert "Traceback" not in terminal.text
    assert "\x1b[6n" not in terminal.text  # a terminal without a reply would show a warning


def test_errors_are_wrapped_at_words(terminal):
    termios.tcsetwinsize(terminal.screen, (24, 60))
    began = terminal.type("/set wrong 1\r")
    terminal.wait_for(READY, terminal.wait_for("error: ", began))
    printed = terminal.text[terminal.text.index("error: ", began) :]
    lines = printed.partition("and a value")[0].splitlines()
    assert all(len(line) <= 60 for line in lines), lines
    assert "presence_penalty" in printed
    assert printed.count("\n") >= 4
    termios.tcsetwinsize(terminal.screen, (0, 0))


def test_keys_of_the_editor(terminal):
    began = terminal.type("\x1b[200~\tif\x1b[201~")
    terminal.wait_for("if", began)
    assert "^I" not in terminal.text
    start = terminal.type("\x03\x12len")  # Ctrl-C while searching ends the search, not the prompt
    terminal.wait_for("reverse-i-search", start)
    began = terminal.type("\x03")
    terminal.wait_for(">", began)
    terminal.type("/stats\r")
    terminal.wait_for(READY, terminal.wait_for(" turn", began))
    assert "another Ctrl-C" not in terminal.text


def test_a_paste_during_an_answer_is_one_message(terminal):
    began = terminal.wait_for(BUSY, terminal.type("def \r"))
    marked = terminal.wait_for(READY, began)
    paste = "\x1b[200~/one\n" + "two " * 1100 + "\n/end\x1b[201~"
    threading.Thread(
        target=terminal.type, args=[paste], daemon=True
    ).start()  # writing may block until the chat reads
    ended = terminal.wait_for(" reused", began)
    assert marked < ended
    terminal.wait_for("/end", ended)
    assert "unknown command" not in terminal.text
    terminal.type("\x03")


def test_commands_typed_during_an_answer_run_after_it(terminal):
    began = terminal.wait_for(BUSY, terminal.type("def \r"))
    terminal.wait_for_more(20, began)
    terminal.type("/mtp off\r/mtp on\rhalf a line\x03")
    ended = terminal.wait_for(" reused", began)
    terminal.wait_for("half a line", terminal.wait_for("MTP on", terminal.wait_for("MTP off", ended)))
    terminal.type("\x03")


@pytest.mark.parametrize("keys", sampled(["def \r"], ["", "def \r"]))
def test_terminated_processes_restore_the_terminal(terminal, keys):
    """At the prompt, and during an answer, which hides typed keys."""
    began = terminal.type(keys)
    if keys:
        terminal.wait_for_more(60, terminal.wait_for(BUSY, began))
    terminal.process.terminate()
    assert terminal.process.wait(timeout=20) == 143
    assert termios.tcgetattr(terminal.screen) == terminal.settings


@pytest.mark.parametrize("env", sampled([{"TERM": "dumb"}], [{"TERM": "dumb"}, {"NO_COLOR": "1"}]), ids=str)
def test_plain_terminals(env):
    """Also, a message typed during the load is not shown there, and is answered after it."""
    terminal = Terminal("-m", "5", **env)
    terminal.wait_for("No --model given")
    terminal.type(QUESTIONS[0] + "\r")
    loaded = terminal.wait_for("/help")
    assert QUESTIONS[0] not in terminal.text[:loaded]
    terminal.wait_for(">", terminal.wait_for("GB", terminal.wait_for(">", loaded)))
    terminal.type("\x04")
    if "TERM" in env:
        assert "\x1b" not in terminal.text
    assert not re.search(r"\x1b\[(0;)?[12]m", terminal.text)
    assert terminal.process.wait(timeout=20) == 0
    terminal.close()


def test_the_cursor_is_found_after_a_resize():
    """Two rows of 50 and 30 characters, the cursor at the end of the second, in 20 columns: 3 rows and 2."""
    rows = {0: {i: Char("x") for i in range(50)}, 1: {i: Char("x") for i in range(30)}}
    size = SimpleNamespace(get_size=lambda: Size(rows=24, columns=20))
    screen = SimpleNamespace(data_buffer=rows)
    renderer = SimpleNamespace(_last_screen=screen, _cursor_pos=Point(x=30, y=1), output=size)
    assert _reflowed(renderer) == Point(x=10, y=4)


@pytest.mark.parametrize(("columns", "parts"), [("80", 3), ("30", 2)])
def test_progress_fits_the_terminal_and_shows_a_stop(monkeypatch, columns, parts):
    monkeypatch.setenv("COLUMNS", columns)
    with PromptProgress(shown=True, chunk=8) as progress:
        progress(0, 100)
        progress.stopping()
        assert len(progress._bar.columns) == parts
        assert progress._bar.tasks[0].description == "(stopping)"
        progress(100, 100)
        assert progress._bar is None


def test_a_wait_before_the_prefill_is_shown_until_the_answer(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with PromptProgress(shown=True, chunk=8) as waiting:
        waiting.begin()
        waiting._timer.join(10)
        assert waiting._bar.live.is_started
        waiting.end()
        waiting.begin()
        assert waiting._bar is None
    printed = capsys.readouterr().err
    assert "Reading" in printed
    assert "0/0" not in printed  # the number of tokens is not known yet


def test_stages_are_lines_without_a_terminal(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 2.0, 7.5, 8.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with stages(quiet=False) as report:
        for stage, done in (("texts", 0), ("texts", 1), ("texts", 2), ("heads", 0)):
            report(stage, done, 3)
    assert capsys.readouterr().err == "1 s: texts, 0 of 3\n8 s: texts, 2 of 3\n8 s: heads, 0 of 3\n"
    with stages(quiet=True) as report:
        report("texts", 0, 3)
    assert capsys.readouterr() == ("", "")


def test_a_stop_is_shown_at_once_and_a_second_raises():
    seen, session = threading.Event(), SimpleNamespace(stopping=False)
    with StopOnInterrupt(session, seen.set):
        signal.raise_signal(signal.SIGINT)
        assert seen.wait(10)
        assert session.stopping
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_footer_gives_the_reason_only_if_drafting_is_paused():
    last: Any = SimpleNamespace(generation_tokens=9, generation_tps=5.0)
    turn = Turn(prompt_tokens=3, reused=0)
    assert "paused" not in footer(turn, last)
    turn.stats.paused = "costs 1.3 plain steps, gains 1.1 tokens"
    first, second = footer(turn, last).splitlines()
    assert first.endswith(" GB")
    assert second == "drafting paused: costs 1.3 plain steps, gains 1.1 tokens"
