"""Check what ships: the wheel's contents, and rules that a careless file would break."""

import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
import zlib
from pathlib import Path

import pytest

import mlx_mtp
from mlx_mtp.demo import demo_path

ROOT = Path(__file__).parents[1]


def test_kernels_is_not_a_python_package():
    """It would shadow Hugging Face's `kernels` from a checkout."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_every_kernel_has_its_row():
    readme = (ROOT / "kernels" / "README.md").read_text()
    ops = {p.stem for p in (ROOT / "kernels").glob("*.metal")}
    assert {op for op in ops if f"`{op}`" in readme} == ops


def test_version_is_stated_once():
    """In `_version.py`, from which the build takes it; the changelog's newest release is this one, or the next."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert (ROOT / settings["tool"]["hatch"]["version"]["path"]) == Path(mlx_mtp._version.__file__)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] in (mlx_mtp.__version__, "Unreleased")


def test_the_demo_is_a_raw_checkpoint_of_at_most_16_mb():
    files = list(demo_path().iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= {f.name for f in files}
    assert sum(f.stat().st_size for f in files) <= 16_000_000
    assert json.loads((demo_path() / "config.json").read_text())["model_type"] == "step3p5"


def test_importing_prints_and_downloads_nothing():
    code = "import mlx_mtp, sys; assert 'torch' not in sys.modules; assert 'mlx_mtp.cli' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`((?:mlx_mtp|kernels|tests|bench)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path


def test_wheel_from_sdist(tmp_path, monkeypatch):
    """The build backend's functions build both in this process, without compression."""
    backend = pytest.importorskip("hatchling.build", reason="needs the package `hatchling` (the dev extra)")
    real = zlib.compressobj
    monkeypatch.setattr(zlib, "compressobj", lambda level=0, *options: real(0, *options))
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / backend.build_sdist(str(tmp_path))) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    monkeypatch.chdir(unpacked)
    wheel = tmp_path / backend.build_wheel(str(tmp_path))
    assert wheel.name.split("-")[1] == mlx_mtp.__version__
    names = zipfile.ZipFile(wheel).namelist()
    assert "mlx_mtp/kernels/metal/README.md" in names
    assert "mlx_mtp/demo/checkpoint/model.safetensors" in names
    assert {f"mlx_mtp/bench/{file}" for file in ("prompts.json", "kernels_shapes.json")} <= set(names)
    roofline = {f"mlx_mtp/bench/roofline/{file}" for file in ("chips.csv", "launches.csv", "fitted.json")}
    assert {"mlx_mtp/bench/page.css", *roofline} <= set(names)
    for folder in ("native", "strict"):
        files = (ROOT / "mlx_mtp" / "emulator" / folder).rglob("*")
        assert {str(p.relative_to(ROOT)) for p in files if p.is_file()} <= set(names)
    assert not [n for n in names if n.startswith(("tests/", "bench/", "kernels/"))]
