"""Describe the sequences of a step: how each one's tokens are chosen."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .history import TokenHistory
from .sampling import Picker


class Member(Protocol):
    """One sequence of a step.

    picker: chooses its tokens. history: its tokens that the host has read. base: position of its first row in the
    previous run. finished: its tokens are not used any more.
    """

    @property
    def picker(self) -> Picker: ...

    @property
    def history(self) -> TokenHistory: ...

    @property
    def base(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    def fail(self, error: Exception) -> None:
        """Handle an error of this sequence's own sampler, processors or grammar: end the sequence, or raise it."""
        ...


Members = Sequence[Member | None]  # by row of a pass; None for a free slot


class Single(NamedTuple):
    """The member of a step of one sequence; `fail` raises the error."""

    picker: Picker
    history: TokenHistory = TokenHistory()
    base: int = 0
    finished: bool = False

    def fail(self, error: Exception) -> None:
        raise error
