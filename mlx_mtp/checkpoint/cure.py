"""Name the command that adds missing MTP heads to a checkpoint."""

import re
from pathlib import Path
from shlex import quote

CARD = "README.md"
BASE = re.compile(r"^base_model:\s*(?:\n\s*-\s*)?['\"]?([\w.-]+/[\w.-]+)['\"]?\s*$", re.MULTILINE)
UNKNOWN = "RELEASED"  # the name of the released checkpoint in a command, if the model card does not state it


class NeverDrafts(UserWarning):
    """Warns that a model decodes plainly because its family has no port or no released heads; commands hide it."""


def base_model(path: Path) -> str:
    """Return the hub name of the first base model in a checkpoint's model card (README.md), else UNKNOWN."""
    try:
        header = re.match(r"---\n(.*?)\n---\n", (path / CARD).read_text("utf-8"), re.DOTALL)
    except (OSError, UnicodeDecodeError):
        return UNKNOWN
    found = BASE.search(header[1]) if header else None
    return found[1] if found else UNKNOWN


def adding_heads(path: Path) -> str:
    """Return the command that writes the base model's heads, in 8 bits, into a checkpoint directory."""
    return f"mlx-mtp convert --hf-path {base_model(path)} --mtp-only --mtp-path {quote(str(path))} --mtp-q-bits 8"
