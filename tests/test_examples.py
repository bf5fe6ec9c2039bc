"""Run the programs of examples/ on the demo, as learners do, in this process."""

import io
import runpy
import sys
from pathlib import Path

import pytest

import mlx_mtp
from mlx_mtp.demo import demo_path

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def demo():
    return mlx_mtp.load(demo_path())


@pytest.fixture
def run(monkeypatch, capsys, demo):
    """Run a program with these arguments; the demo, which they all load, is loaded once."""
    load = mlx_mtp.load
    monkeypatch.setattr(mlx_mtp, "load", lambda path: demo if path == demo_path() else load(path))

    def run(name, *arguments, typed=""):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def text(demo, question, max_tokens):
    model, tokenizer = demo
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
    return mlx_mtp.generate(model, tokenizer, prompt, max_tokens=max_tokens, num_draft_tokens=0)


def test_every_example_is_run_here():
    assert {file.name for file in EXAMPLES.glob("*")} == {
        "chat.py",
        "convert_and_prove.py",
        "sampling.py",
        "streaming.py",
        "threads.py",
    }


def test_chat(run, demo):
    asked = "What does os.getcwd do?"
    shown = run("chat.py", typed=f"{asked}\nWhat does abs do?\n\n")
    assert shown.startswith(f"> {text(demo, asked, 60)}\n(17 prompt tokens, 0 of them already read)\n> ")
    assert shown.endswith(", 30 of them already read)\n> ")
    assert run("chat.py", typed="") == "> "  # the end of what is typed is no error


def test_streaming(run, demo):
    shown = run("streaming.py")
    assert shown.startswith(text(demo, "What does os.path.split do?", 8))
    assert "passes of the model" in shown


def test_sampling(run):
    shown = run("sampling.py")
    assert shown.count(": the same without drafts") == 3
    assert "NOT" not in shown
    assert not any(c.isdigit() for c in shown.rpartition("---")[2].partition("\n")[2])


def test_threads(run, demo):
    shown = run("threads.py")
    for prompt in ("def read_lines(path):", "class Stack:", "import os\n"):
        assert f"---\n{prompt}{mlx_mtp.generate(*demo, prompt, max_tokens=8)}\n" in shown


def test_convert_and_prove(run, tmp_path):
    shown = run("convert_and_prove.py", demo_path(), tmp_path / "new")
    assert (tmp_path / "new" / "mtp.safetensors").exists()
    assert shown.count(": 8 tokens compared, 0 near-ties") == 5
