"""Check a tokenizer's small files, which an interrupted copy leaves out or cuts, without loading the tokenizer."""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..machine.errors import one_line

SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (SETTINGS, "special_tokens_map.json", "added_tokens.json")  # JSON objects


def checked_settings(path: Path) -> dict[str, Any]:
    """Return the settings in tokenizer_config.json of a checkpoint's directory; {} without this file.

    Raises ValueError, which names the file, for one of FILES that is no JSON object, a chat template that is no text,
    and settings of another type than transformers takes.
    """
    found = {name: _json_object(path / name) for name in FILES if (path / name).is_file()}
    if (path / TEMPLATE).is_file():
        with one_line(f"{TEMPLATE}: damaged"):
            (path / TEMPLATE).read_text("utf-8")
    settings = found.get(SETTINGS, {})
    for name in PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES:
        token = settings.get(name)
        if not isinstance(token, str | None) and not (isinstance(token, dict) and "__type" in token):
            raise ValueError(f"{SETTINGS}: {name}={repr(token)[:80]} is no token")
    if not isinstance(longest := settings.get("model_max_length"), int | float | None):
        raise ValueError(f"{SETTINGS}: model_max_length={repr(longest)[:80]} is no number")
    return settings


def _json_object(file: Path) -> dict[str, Any]:
    with one_line(f"{file.name}: damaged"):
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    return found
