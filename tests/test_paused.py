"""Paused drafting is reported as paused wherever drafts are reported, and not as rejected drafts."""

import io
import json
import logging
import re
import runpy
import sys
from pathlib import Path

import pytest
from command_line import call
from rich.console import Console
from served import serving

import mlx_mtp
from mlx_mtp.bench import decode
from mlx_mtp.bench.decode_tables import overall, rows, settings
from mlx_mtp.bench.doctor_page import decoding
from mlx_mtp.bench.subject import open_subject
from mlx_mtp.cli.verify_tables import _ways
from mlx_mtp.demo import demo_path
from mlx_mtp.lossless.compare import Comparison, Reference, compare, ways
from mlx_mtp.lossless.prompts import NamedPrompt
from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.plan import PLAIN

ROOT = Path(__file__).parents[1]
WORDS = "drafting paused: costs 3.8 plain steps, gains 3.6 tokens"
FAILED = re.compile(r"\b0(\.0)?%|\b0 of 0\b|\b0/0\b|/0%")  # looks like rejected drafts
QUESTION, CODE = "What does os.path.join do?", "def read_lines(path):"


@pytest.fixture(autouse=True)
def _paused(monkeypatch):
    """Pause drafting in every adaptive generation from its first cycle on."""

    def plan(self, matched=0, pending=0):
        self.paused = WORDS.removeprefix("drafting paused: ")
        return PLAIN

    monkeypatch.setattr(Controller, "plan", plan)


@pytest.fixture(scope="module")
def demo():
    return mlx_mtp.load(demo_path())


def assert_paused(shown: str) -> None:
    assert WORDS in shown
    assert not FAILED.search(shown), shown


def in_columns(table) -> str:
    console = Console(file=io.StringIO(), width=250)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("command", "stdin"),
    [
        (("generate", "-p", QUESTION, "-m", 6), ""),
        (("generate", "-p", QUESTION, "-m", 6, "--report"), ""),
        (("chat", "-m", 6), QUESTION),
        (("chat", "-m", 6, "--quiet"), f"{QUESTION}\n/stats\n"),
    ],
)
def test_commands(command, stdin):
    result = call(*command, stdin=stdin)
    assert result.returncode == 0, result.stderr
    assert_paused(result.stdout)


@pytest.mark.parametrize("together", [1, 3])
def test_a_batch_notes_it_for_each_sequence(demo, together):
    """Also in a batch."""
    model, tokenizer = demo
    whole, each = mlx_mtp.Stats(), [mlx_mtp.Stats() for _ in range(together)]
    batch = mlx_mtp.BatchGenerator(model, stats=whole)
    batch.insert([tokenizer.encode(CODE)] * together, [8] * together, stats=each)
    while batch.next_generated():
        pass
    for stats in (whole, *each):
        assert_paused(stats.summary)


def test_a_stream_that_is_not_read_to_its_end(demo):
    """The reason is available while tokens arrive."""
    responses = mlx_mtp.stream_generate(*demo, CODE, max_tokens=20)
    stats = [next(responses) for _ in range(5)][-1].stats
    assert_paused(stats.summary)


def test_the_server(caplog):
    """In the server's log and in each API's response."""
    with serving(options={}) as client:
        user = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 6}
        with caplog.at_level(logging.INFO, "mlx_mtp.serve"):
            answers = [
                client.post("/v1/chat/completions", json=user).json()["usage"],
                client.post("/v1/chat/completions", json={**user, "n": 2}).json()["usage"],
                client.post("/v1/completions", json={"prompt": CODE, "max_tokens": 6}).json()["usage"],
                client.post("/v1/messages", json=user).json()["usage"],
                client.post("/v1/responses", json={"input": QUESTION, "max_output_tokens": 6}).json()["usage"],
            ]
    assert [usage["mlx_mtp"]["paused"] for usage in answers] == [WORDS] * 5
    lines = [message for message in caplog.messages if "prompt" in message]
    assert len(lines) == 6
    for line in lines:
        assert_paused(line)


def test_the_tables_of_bench_decode_and_doctor():
    """A result written by a version without reasons can be shown."""
    session = decode.open_session(open_subject(None, kernels="off"), (), 1, 0.0)
    session.loops = [loop for loop in session.loops if loop.name in (decode.PLAIN, decode.ADAPTIVE)]
    prompt = decode.BenchPrompt("code", session.subject.tokenizer.encode(CODE), 0)
    decode.measure(session, [prompt], decode.LoopSettings(max_tokens=6), lambda *_: None)
    found = decode.as_result(session, {})
    (setting,) = settings(found)
    plain, adaptive = rows(found, setting)
    assert plain.paused == ""
    assert f"drafting paused: {adaptive.paused}" == WORDS
    assert_paused(in_columns(overall(found, setting)))
    assert_paused("\n".join(decoding({"decode": found})))
    for entry in found["entries"]:
        del entry["paused"]
    assert "paused" not in in_columns(overall(json.loads(json.dumps(found)), setting))


def test_the_table_of_verify_lossless(demo):
    model, tokenizer = demo
    reference = Reference(model, NamedPrompt("code", tokenizer.encode(CODE)), max_tokens=8, stops=())
    *_, way = ways(3, adaptive=True, p_min=0.0, lookup=False, compiled=False)
    compare(reference, way, found := Comparison(way.name))
    shown = in_columns(_ways("greedy", [found]))
    assert_paused(shown)


def test_examples_and_the_program_in_the_readme(demo, monkeypatch, capsys):
    monkeypatch.setattr(mlx_mtp, "load", lambda path: demo)
    monkeypatch.setattr(sys, "argv", ["streaming.py"])
    runpy.run_path(str(ROOT / "examples/streaming.py"), run_name="__main__")
    assert_paused(capsys.readouterr().out)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {"__name__": "shown"})
    assert_paused(capsys.readouterr().out)


@pytest.mark.parametrize("n", [1, 2])
def test_why_trees_do_not_pay_is_reported(demo, monkeypatch, n):
    monkeypatch.setattr(Controller, "trees_paused", "trees do not pay: one costs 3.0 plain steps, gains 2.0 tokens")
    (model, tokenizer), stats = demo, mlx_mtp.Stats()
    batch = mlx_mtp.BatchGenerator(model, max_tokens=6, stats=stats)
    batch.insert([tokenizer.encode(QUESTION)] * n)
    while batch.next_generated():
        pass
    assert stats.trees_paused == Controller.trees_paused
    assert_paused(stats.summary)
    assert "trees" not in stats.summary
    stats.paused = ""  # else this is the reason for trees, too
    assert stats.summary.endswith(f"; {Controller.trees_paused}")
