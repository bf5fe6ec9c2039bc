"""State what a step has to know of each of its sequences."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .sampling import Picker
from .text import Text


class Member(Protocol):
    """One sequence of a step: how its tokens are chosen, and what the host has read of it.

    base: the position of its first row in the run before.
    """

    @property
    def picker(self) -> Picker: ...

    @property
    def text(self) -> Text: ...

    @property
    def base(self) -> int: ...

    def fail(self, error: Exception) -> None:
        """Take what its own sampler or processor raised."""
        ...


Members = Sequence[Member | None]  # by row of a pass; None where a slot is free


class Single(NamedTuple):
    """The member of a step of one sequence."""

    picker: Picker
    text: Text = Text()
    base: int = 0

    def fail(self, error: Exception) -> None:
        raise error
