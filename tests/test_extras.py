"""Messages and pages name pyproject.toml's extras, in the form that installs them from a clone."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_line import one_line_error
from sweep import sampled

from mlx_mtp.emulator.compile import INSTALL
from mlx_mtp.machine.errors import install

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "kernels/README.md"]


def test_the_tests_have_every_extra_of_users():
    assert EXTRAS["test"][0] == "mlx-mtp[plot,serve,emulate,gguf,vision]"
    assert EXTRAS["emulate"][0].startswith("ziglang")
    assert EXTRAS["grammar"][0] in EXTRAS["serve"]


@pytest.mark.parametrize("extra", ["serve", "plot", "emulate", "gguf", "grammar", "vision"])
def test_the_instruction(extra):
    assert extra in EXTRAS
    assert install(extra).startswith(f"pip install -e '.[{extra}]'")
    assert extra != "emulate" or install(extra) == INSTALL


def test_what_is_named_works_from_a_clone():
    """No name that only an index would have, and no extra that there is not."""
    for file in (*PAGES, *(ROOT / "mlx_mtp").rglob("*.py")):
        text = " ".join(file.read_text().split())
        assert "mlx-mtp[" not in text, file
        for extra in re.findall(r"pip install (?:-e )?'?\.?\[(\w+)\]", text):
            assert extra in EXTRAS, file
            assert f"pip install -e '.[{extra}]'" in text, file
        for extra in re.findall(r"\binstall\('(\w+)'\)", text):
            assert extra in EXTRAS, file


@pytest.mark.parametrize("module", sampled(["starlette"], ["starlette", "uvicorn", "prometheus_client"]))
def test_serve_without_its_extra(module):
    program = f"import sys; sys.modules[{module!r}] = None; from mlx_mtp.__main__ import main; main()"
    command = [sys.executable, "-c", program, "serve", "--model", "demo"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    line = one_line_error(result)
    assert line.startswith(f"error: {module}")
    assert " is missing: pip install -e '.[serve]'" in line
    assert result.stdout == ""
