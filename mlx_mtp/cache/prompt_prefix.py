"""Describe the prompt whose state a saved cache holds, and compare token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..pictures.rows import Picture, pictures_from_json


@dataclass(frozen=True)
class PromptPrefix:
    """The start of a first message, which later text continues; stored in the file of the cache that holds its state.

    template:  whether the chat template is used, with the variables `template_config`.
    model, eos_token: --model and --eos-token of the command that made the file; None: its default.
    images:    `pictures_as_json` of the pictures before the prompt: their digests and sizes, no pixels.
    """

    prompt: str
    system_prompt: str | None = None
    template: bool = True
    template_config: dict[str, Any] = field(default_factory=dict)
    model: str | None = None
    eos_token: str | None = None
    images: list[Any] = field(default_factory=list)

    def __post_init__(self):
        pictures_from_json(self.images)  # raises ValueError for those of a damaged file

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures before the prompt, by position, with `image` None; () if there are none."""
        return pictures_from_json(self.images)

    def check(self, **requested: Any) -> None:
        """Raise ValueError if a requested value, by field name, differs from this prefix's.

        Values that count as False (None, "", False) are not compared.
        """
        for name, value in requested.items():
            if value and value != (own := getattr(self, name)):
                raise ValueError(f"{name}={value!r}: the prompt cache was made with {own or None!r}; leave it out")


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two lists of token ids."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
