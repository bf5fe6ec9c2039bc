"""Run README.md's commands as a new user does: in a clone, in the environment of its install command.

python3 tests/support/readme_commands.py CLONE

Commands are read from README.md; each needs a rule here. Commands that would download a model run on the demo. Needs
only Python's standard library.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
PROGRAMS = "git|python3?|pip|sudo|mlx-mtp"
DEMO = "mlx_mtp/demo/checkpoint"
MODELS = {"zai-org/GLM-4.7-Flash": DEMO, "YOUR_CONVERSION": "converted"}
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[serve]'"
BASH = "/bin/bash"
PORT = 18462  # of the server
REMOVED = ("PYTHONPATH", "VIRTUAL_ENV", "MLX_MTP_CLANG")  # environment variables


@dataclass(frozen=True)
class Rule:
    """How to run a command of README.md, and what to expect.

    skipped: why it is not run; "" runs it. more: further flags, to shorten it. before: shell commands to run first.
    chats: whether README.md's question is its input, and the answer in its output. code: its exit code. prints: a
    part of its output. shown: whether README.md has each line of its output.
    """

    skipped: str = ""
    more: str = ""
    before: str = ""
    chats: bool = False
    code: int = 0
    prints: str = ""
    shown: bool = False


RULES = {  # by regular expressions of whole commands
    r"git clone CLONE_URL .*": Rule(skipped="CLONE is one"),
    re.escape(INSTALL): Rule(skipped="run first, for all others"),
    r"python3 -m venv .* pip install -e '\.\[test\]' && pytest .*": Rule(skipped="a section of .ci/run"),
    r"sudo sysctl .*": Rule(skipped="a setting of a Mac"),
    r"python bench/which_model\.py": Rule(shown=True),
    r"mlx-mtp chat.*": Rule(chats=True),
    r"mlx-mtp models .*": Rule(),
    r"mlx-mtp pull .*": Rule(code=1, prints=f"error: {DEMO}: already on this machine"),
    r"mlx-mtp inspect .*": Rule(prints="MTP heads  3 found"),
    r"mlx-mtp convert .* --mlx-path .*": Rule(prints="MTP heads  3"),
    r"mlx-mtp convert .* --mtp-only .*": Rule(
        before=f"mlx-mtp convert --hf-path {DEMO} --mlx-path converted -q && rm converted/mtp.safetensors",
        prints="converted/mtp.safetensors",
    ),
    r"mlx-mtp verify-lossless .*": Rule(
        more="--max-tokens 2 --draws 20 --num-draft-tokens 1 --no-diagnose", prints="lossless in float32: "
    ),
    r"mlx-mtp generate .*": Rule(prints="MTP: "),
    r"mlx-mtp serve .*": Rule(
        more=f"--port {PORT} & curl -s --retry 60 --retry-delay 1 --retry-connrefused 127.0.0.1:{PORT}/health"
        " && kill $! && wait $!",
        prints='{"status":"ok"}',
    ),
    r"mlx-mtp bench decode .*": Rule(more="--rounds 1 --max-tokens 4", prints="tok/s over plain"),
}
NO_CLANG = "no clang 16 or newer: pip install -e '.[emulate]'"
WITHOUT_EXTRAS = {  # commands that need an extra, which is not installed, on a machine without clang
    "mlx-mtp bench kernels --emulate": Rule(code=1, prints=f"error: {NO_CLANG}"),
    "mlx-mtp doctor": Rule(prints=f"kernels not checked: {NO_CLANG}"),
}


def commands(page: str) -> list[str]:
    """Return the shell commands of a page, in order: those in blocks, and those in backticks with an argument."""
    block = rf"^    ((?:{PROGRAMS}) .*?)(?: {{2,}}# .*)?$"
    found = re.findall(rf"{block}|`((?:{PROGRAMS}) [^`\n]+)`", page, re.MULTILINE)
    shown = [in_block or inline for in_block, inline in found if in_block or not re.fullmatch(r"mlx-mtp \S+", inline)]
    return list(dict.fromkeys(shown))


def programs(page: str) -> list[str]:
    """Return the Python programs of a page."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def conversation(page: str) -> tuple[str, str]:
    """Return the question and the answer of a page's conversation."""
    shown = re.search(r"^    > (.*)\n((?:    .*\n)+?)    \d+ tok, ", page, re.MULTILINE)
    assert shown, "no conversation"
    return shown[1], re.sub(r"^    ", "", shown[2], flags=re.MULTILINE)


def rule_of(command: str) -> Rule:
    """Return the rule of a command; each must have exactly one."""
    found = [rule for pattern, rule in RULES.items() if re.fullmatch(pattern, command)]
    assert len(found) == 1, f"{command!r} in README.md: {len(found)} rules in {Path(__file__).name}, expected one"
    return found[0]


def on_demo(command: str) -> str:
    """Return a command with the demo instead of models that would be downloaded."""
    words = shlex.join(MODELS.get(word, word) for word in shlex.split(command))
    return words.replace("--model glm", f"--model {DEMO}")


def run(command: str, rule: Rule, clone: Path, path: str) -> None:
    """Run a command in a clone; exit with a message if the result differs from its rule."""
    page = README.read_text()
    question, answer = conversation(page)
    env = {name: value for name, value in os.environ.items() if name not in REMOVED}
    env |= {"PATH": path, "HF_HUB_OFFLINE": "1", "MLX_MTP_CACHE": str(clone / "cache")}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": clone, "env": env}
    tic = time.monotonic()
    done = subprocess.run([BASH, "-c", command], input=question + "\n" if rule.chats else "", **how)
    print(f"{time.monotonic() - tic:5.1f} s  {command.splitlines()[0]}", flush=True)
    lines = done.stdout.splitlines()
    faults = {
        f"exit code {done.returncode}, expected {rule.code}": done.returncode != rule.code,
        f"expected {bool(rule.code):d} lines of error": sum(map(is_error, lines)) != bool(rule.code),
        f"expected {rule.prints!r}": rule.prints not in done.stdout,
        "expected README.md's answer": rule.chats and answer not in done.stdout,
        "README.md lacks a line of it": rule.shown and not set(lines) <= set(page.splitlines()),
    }
    if found := [fault for fault, present in faults.items() if present]:
        sys.exit(f"{done.stdout}\n{command}: {'; '.join(found)}")


def is_error(line: str) -> bool:
    return line.startswith("error: ") or line.startswith("Traceback")


def main(clone: Path) -> None:
    """Run all commands of README.md in a clone."""
    page, path = README.read_text(), os.environ["PATH"]
    run(INSTALL, Rule(), clone, path)
    own = str(clone / ".venv" / "bin")
    for command in commands(page):
        rule = rule_of(command)
        if rule.skipped:
            print(f"skipped  {command}: {rule.skipped}", flush=True)
        else:
            shell = " && ".join(filter(None, [rule.before, f"{on_demo(command)} {rule.more}".strip()]))
            run(shell, rule, clone, f"{own}:{path}")
    for program in programs(page):
        run(f"python -c {shlex.quote(program)}", Rule(), clone, f"{own}:{path}")
    for command, rule in WITHOUT_EXTRAS.items():
        run(command, rule, clone, own)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
