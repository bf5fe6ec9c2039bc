"""Import Pillow when it is first needed, since it is an optional dependency."""

from functools import cache
from types import ModuleType
from typing import Any

from ..machine.errors import install

LACKING = f"pictures need Pillow: {install('vision')}"


@cache
def pillow() -> ModuleType:
    """Return Pillow's module `PIL.Image`; ValueError that states how to install Pillow if it is missing."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(LACKING) from None
    return Image


def is_pillow(source: Any) -> bool:
    """Return whether an object is one of Pillow's images; False without Pillow."""
    try:
        return isinstance(source, pillow().Image)
    except ValueError:
        return False
