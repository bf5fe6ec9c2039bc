"""Shorten the benchmarks' prompts, whose prefill takes most of a short benchmark's time."""

import json
from pathlib import Path

import pytest

from mlx_mtp.bench import subject

WHOLE = subject.FILE
LENGTH = 24  # characters


def shorten(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make `make_prompts` read only the first LENGTH characters of each prompt."""
    short = {kind: [text[:LENGTH] for text in texts] for kind, texts in json.loads(WHOLE.read_text()).items()}
    file = folder / "short_prompts.json"
    file.write_text(json.dumps(short))
    patch.setattr(subject, "FILE", file)
