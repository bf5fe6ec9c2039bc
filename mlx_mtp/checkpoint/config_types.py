"""Check that the numbers of a config.json are numbers, before anything is computed with them."""

from dataclasses import fields
from typing import Any, get_args, get_type_hints

NO_NUMBERS = str, bool, dict  # of JSON's types; a list may hold a number's values by layer, and null mean none


def check_types(args: Any) -> None:
    """Raise TypeError, which names field and value, where a dataclass of mlx-lm's has no number for one."""
    hints = get_type_hints(type(args))
    for field in fields(args):
        kinds, value = get_args(hints[field.name]) or (hints[field.name],), getattr(args, field.name)
        if not {int, float} & {*kinds} or value is field.default or type(value) in kinds:
            continue
        if isinstance(value, NO_NUMBERS):
            raise TypeError(f"{field.name} is {value!r}, expected {'a number' if float in kinds else 'an integer'}")
