"""Hold README.md and docs/ to the code: names, options, flags, figures and commands are those that there are."""

import html
import inspect
import re
import shlex
from pathlib import Path

import click
import pytest
import readme_commands
from command_line import command_of, flags
from sweep import sampled, sweep

import mlx_mtp
from bench import which_model
from docs import commands as docs_commands
from mlx_mtp.cli.chat_commands import HELP
from mlx_mtp.decoding.options import EXPLANATION

ROOT = Path(__file__).parents[1]
PAGES = {page.name: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
README = PAGES["README.md"]


def test_the_readme_is_short_and_links_every_page():
    lines = README.splitlines()
    assert len(lines) < 100
    assert README.count("CLONE_URL") == 1
    assert {name for name in PAGES if name != "README.md" and f"docs/{name}" not in README} == set()
    assert re.search(r"pip install -e '\.\[test\]' && pytest.*$", README, re.MULTILINE), "which .ci/run runs"


@pytest.mark.parametrize("name", PAGES)
def test_files_and_pages_that_are_named_exist(name):
    for path in re.findall(r"`((?:mlx_mtp|kernels|tests|bench|docs|examples)/[\w./-]*)`", PAGES[name]):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("name", PAGES)
def test_commands_that_are_shown_are_taken(name):
    """In an indented block or between backticks: there is such a command, and it has the flags that it is given."""
    blocks = re.findall(r"^    [^`\n]*?\bmlx-mtp ([a-z][^`\n]*?)(?:  .*| +#.*|\)?)$", PAGES[name], re.MULTILINE)
    shown = blocks + re.findall(r"`mlx-mtp ([a-z][^`]*)`", PAGES[name])
    assert shown
    for text in shown:
        command, words = command_of(shlex.split(text))
        known = flags(command)
        for word in words:
            assert not word.startswith("-") or word in (known | {"-"}), text


def test_every_command_in_the_readme_has_a_rule_by_which_ci_runs_it():
    """One each, none left over; no command of ours is skipped, or would download a model."""
    shown = readme_commands.commands(README)
    rules = [readme_commands.rule_of(command) for command in shown]
    assert readme_commands.INSTALL in shown
    assert {id(rule) for rule in rules} == {id(rule) for rule in readme_commands.RULES.values()}
    for command, rule in zip(shown, rules, strict=True):
        if command.startswith("mlx-mtp "):
            assert not rule.skipped
            run = f"{readme_commands.on_demo(command)} {rule.more}"
            assert "zai-org" not in run
            found, words = command_of(shlex.split(run.partition(" & ")[0])[1:])
            assert {word for word in words if word.startswith("-")} <= flags(found)


def test_the_conversation_and_the_program_in_the_readme_are_found():
    question, answer = readme_commands.conversation(README)
    assert question == "What does os.path.join do?"
    assert answer.startswith("Join two or more pathname components")
    assert answer.endswith("ends with a separator.\n")
    assert len(readme_commands.programs(README)) == 1


def test_the_picture_of_the_chat_shows_the_readmes_answer_and_needs_no_font_from_the_web():
    """`python docs/chat_picture.py` draws it."""
    assert "](docs/chat.svg)" in README
    picture = (ROOT / "docs" / "chat.svg").read_text()
    texts = re.findall(r"<text [^>]*>(.*?)</text>", picture, re.DOTALL)
    shown = "".join(html.unescape(text).replace("\xa0", " ").strip() + "\n" for text in texts)
    question, answer = readme_commands.conversation(README)
    assert all(f"{line}\n" in shown for line in (question, *answer.splitlines()))
    assert re.search(r"^63 tok, .* · context 77/2,048 · ", shown, re.MULTILINE)
    assert "url(" not in re.sub(r"url\(#", "", picture)


@pytest.mark.parametrize("repository", sampled(["XiaomiMiMo/MiMo-7B-RL"], which_model.MODELS))
def test_memory_in_the_table_of_models(repository):
    assert which_model.row(repository) in README.splitlines()


def test_the_table_of_models_has_each_once():
    assert re.findall(r"^\| [\w ]+ \| `([\w-]+/[\w.-]+)` \|", README, re.MULTILINE) == list(which_model.MODELS)


def test_python_page_has_every_name_and_option():
    page = PAGES["python.md"]
    for name in set(mlx_mtp.__all__) - {"__version__"}:
        assert f"`{name}`" in page or f"mlx_mtp.{name}(" in page, name
    for text in (EXPLANATION, inspect.getdoc(mlx_mtp.load), inspect.getdoc(mlx_mtp.make_prompt_cache)):
        options = re.search(r"^\w+(?:, \w+)*: .*\Z", text.strip(), re.MULTILINE | re.DOTALL)
        assert options
        for line in options[0].splitlines():
            assert not line or f"\n    {line}\n" in page, line


@sweep
@pytest.mark.parametrize("name", ["README.md", "python.md"])
def test_python_that_is_shown_runs(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.print", lambda *_, **__: None)
    inside = {"__name__": "shown"}
    for block in re.findall(r"```python\n(.*?)```", PAGES[name], re.DOTALL):
        exec(compile(block, name, "exec"), inside)
    assert {"model", "tokenizer"} <= inside.keys()


def test_the_commands_page_is_generated_from_the_command_line():
    """Run `python docs/commands.py` after a change of a command's help, options or defaults."""
    page = PAGES["commands.md"]
    assert page == docs_commands.page(page)
    assert all(f"\n    {line}\n" in page for line in HELP.splitlines())


def test_the_commands_page_has_each_commands_own_flags_and_defaults():
    sections = dict(
        re.findall(r"^## `mlx-mtp ([\w -]+)`\n(.*?)(?=^## |\Z)", PAGES["commands.md"], re.MULTILINE | re.DOTALL)
    )
    assert sections.keys() == {name for name, _ in docs_commands.commands()}
    for name, command in docs_commands.commands():
        options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        listed = re.findall(r"^- `([^`]+)`: ", sections[name], re.MULTILINE)
        assert [re.findall(r"-[\w-]+", flags) for flags in listed] == [[*p.opts, *p.secondary_opts] for p in options]
    assert "- `--seed`: Seed of the draws.  [default: 0]\n" in sections["chat"]
    assert "  [default: -1]\n" in sections["serve"]
    assert "  [default: 100]\n" in sections["generate"]
