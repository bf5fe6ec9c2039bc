"""State the largest value of each request field, and refuse larger ones before anything else reads them."""

from typing import Any, NamedTuple

from .fields import MAX_WORD, MOST_STOPS, Refused

MAX_TOOL_NAME = 256  # characters


class Size(NamedTuple):
    """The limits of a field's value; None: only those of a body and of the model's context.

    items: of a list, or members of an object. text: characters of all texts and names in it together. values: items
    and members of all lists and objects in it together.
    """

    items: int = 100
    text: int | None = 10_000
    values: int = 1000


CONVERSATION = Size(10_000, None, 1_000_000)
PROMPT = Size(1_000_000, None, 1_000_000)
NAME = Size(text=256)
WORDS = Size(MOST_STOPS, MOST_STOPS * MAX_WORD, MOST_STOPS)
TOKENS = Size(500_000, 5_000_000, 500_000)  # the vocabulary's size is a further limit
FORMAT = Size(2000, 200_000, 50_000)  # `grammar_limits` states those of the schema or grammar in it
TOOL = Size(100, 100_000, 10_000)
SIZES: dict[str, Size] = {
    **dict.fromkeys(("messages", "input"), CONVERSATION),
    "prompt": PROMPT,
    **dict.fromkeys(("system", "instructions", "images"), CONVERSATION),
    **dict.fromkeys(("model", "adapter", "guided_whitespace_pattern"), NAME),
    "tools": Size(1000, 1_000_000, 100_000),
    "tool_choice": Size(10, 300_000, 5000),
    "chat_template_kwargs": Size(64, 100_000, 10_000),
    **dict.fromkeys(("stop", "stop_sequences", "bad_words"), WORDS),
    "stop_token_ids": Size(256),
    **dict.fromkeys(("logit_bias", "allowed_token_ids"), TOKENS),
    **dict.fromkeys(("response_format", "text", "output_config", "output_format", "format"), FORMAT),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs"), FORMAT),
    "options": Size(100, 30_000, 1000),
}
OTHERS = Size()


def check_size(name: str, value: Any, size: Size | None = None, param: str | None = None) -> None:
    """Raise Refused, with `param` or the name, if a field's value exceeds `size`, by default the field's own."""
    size = size or SIZES.get(name, OTHERS)
    if isinstance(value, list | dict) and len(value) > size.items:
        raise _larger(name, f"{len(value)} items", size.items, param)
    text, values, pending = 0, 0, [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            text += len(each)
        elif isinstance(each, list | dict):
            text += sum(map(len, each)) if isinstance(each, dict) else 0
            values += len(each)
            pending += () if values > size.values else each.values() if isinstance(each, dict) else each
        if values > size.values:
            raise _larger(name, "its lists and objects have more values", size.values, param)
        if size.text is not None and text > size.text:
            raise _larger(name, "its texts have more characters", size.text, param)


def _larger(name: str, found: str, most: int, param: str | None) -> Refused:
    return Refused(f"{name}: {found}; allowed are at most {most:,}", param=param or name)
