"""Hold the workflow's commands to the command line: they parse, and run in the order that a hosted Mac needs."""

import re
import shlex
from pathlib import Path

import pytest
import readme_commands
import yaml
from command_line import command_of

from mlx_mtp.bench import compile_jobs, doctor
from mlx_mtp.cli.doctor import check_flags, check_ops

README = readme_commands.README.read_text()
WORKFLOW = yaml.safe_load((Path(__file__).parents[1] / ".github" / "workflows" / "ci.yml").read_text())
STEPS = {job: described["steps"] for job, described in WORKFLOW["jobs"].items()}


def commands_of(step):
    """Each command of a step's shell line, as words."""
    return [shlex.split(part) for part in re.split(r"&&|\|\||;|\n", step.get("run", "")) if part.strip()]


OURS = [words[1:] for steps in STEPS.values() for step in steps for words in commands_of(step) if "mlx-mtp" in words]


def position(*start):
    """The number of the macOS job's step that runs a command which begins with these words."""
    (found,) = [i for i, s in enumerate(STEPS["macos"]) for c in commands_of(s) if c[: len(start)] == [*start]]
    return found


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_commands_are_taken_by_the_command_line(words):
    command, arguments = command_of(words)
    given = command.make_context(command.name, [*arguments]).params
    assert command.name == "doctor"
    check_flags(given)
    check_ops(given["op"], compile_jobs.OPS if given["compile_only"] else doctor.OPS)


def test_the_hosted_mac_compiles_first_then_checks_bits_then_runs_the_metal_tests():
    order = [position("mlx-mtp", "doctor", flag) for flag in ("--compile-only", "--bits-only")]
    order.append(position("pytest", "-m", "metal"))
    assert order == sorted(order)
    assert min(order) > position("pip", "install", "-e", ".[test]")
    for step in order[1:]:  # a kernel that was refused keeps no other check from running
        assert STEPS["macos"][step]["if"] == "${{ !cancelled() }}"


@pytest.mark.parametrize("flag", ["--compile-only", "--bits-only"])
def test_reports_are_uploaded_whatever_happens(flag):
    at = position("mlx-mtp", "doctor", flag)
    (words,) = [words for words in commands_of(STEPS["macos"][at]) if words[0] == "mlx-mtp"]
    upload = STEPS["macos"][at + 1]
    assert upload["uses"].startswith("actions/upload-artifact@")
    assert upload["if"] == "always()"
    assert upload["with"]["path"] in (f"{words[words.index('--out') + 1]}{end}" for end in (".json", ".*"))


def test_each_hosted_image_runs_and_keeps_reports_of_its_own():
    job = WORKFLOW["jobs"]["macos"]
    assert job["strategy"] == {"fail-fast": False, "matrix": {"image": ["macos-15", "macos-26"]}}
    assert job["runs-on"] == "${{ matrix.image }}"
    names = [step["with"]["name"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert all(name.endswith("-${{ matrix.image }}") for name in names)  # an upload replaces no other of its name
    assert len({*names}) == len(names) == 2


def test_the_steps_fit_into_the_jobs_time():
    job = WORKFLOW["jobs"]["macos"]
    assert sum(step.get("timeout-minutes", 0) for step in job["steps"]) < job["timeout-minutes"]


def test_it_installs_as_the_readme_says():
    (shown,) = re.findall(r"^ *(python3 -m venv .*pip install -e '\.\[test\]') && pytest", README, re.MULTILINE)
    (run,) = [step["run"] for step in STEPS["macos"] if "pip install" in step.get("run", "")]
    assert run == shown
