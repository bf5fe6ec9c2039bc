"""Read the chat template of a checkpoint that is not loaded."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from .gguf.cached import is_gguf
from .gguf.header import read

DEFAULT = "default"  # the name of the template that is used, of several


def stored_template(path: Path) -> str:
    """Return the chat template in a checkpoint's directory or a GGUF file; "" without one.

    A file of the template alone replaces the one in a JSON file, as in transformers.
    """
    if is_gguf(path):
        with suppress(ValueError, OSError):
            return default_template(read(path).metadata.get("tokenizer.chat_template"))
        return ""
    with suppress(OSError, UnicodeDecodeError):
        return (path / "chat_template.jinja").read_text("utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        with suppress(OSError, ValueError, RecursionError, AttributeError):
            found = json.loads((path / name).read_text("utf-8")).get("chat_template")
            if template := default_template(found):
                return template
    return ""


def default_template(found: Any) -> str:
    """Return the template that is used of a tokenizer's `chat_template`, in any of its forms; "" without one."""
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
    found = found.get(DEFAULT) if isinstance(found, dict) else found
    return found if isinstance(found, str) else ""
