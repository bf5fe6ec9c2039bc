"""Keep a model's adapters, and put one of them into the model at a time.

An adapter replaces modules and arrays of the model. Everything that reads a module when it builds a graph, kernel
sites included, therefore computes the model alone while no adapter is selected.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..machine.stream import in_turn


class AdaptedPart(NamedTuple):
    """A module or an array of the model that an adapter replaces.

    path: its path in the model, for messages. parent, key: the module or list that contains it, and its place there.
    before, after: the object at this place without and with the adapter.
    """

    path: str
    parent: Any
    key: Any
    before: Any
    after: Any


@dataclass(frozen=True)
class Adapter:
    """The parts of one adapter, or of a sum of several. fingerprint: digest of its files."""

    name: str
    fingerprint: str
    parts: list[AdaptedPart]

    def insert(self) -> None:
        for part in self.parts:
            part.parent[part.key] = part.after

    def remove(self) -> None:
        for part in self.parts:
            part.parent[part.key] = part.before


class Adapters:
    """The adapters of one model by name. selected: the name of the one in the model; None for the model alone.

    A generation keeps the adapter that was selected when it began.
    """

    def __init__(self) -> None:
        self.known: dict[str, Adapter] = {}
        self.selected: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.known)

    @property
    def fingerprint(self) -> str:
        """Digest of the selected adapter; "" for the model alone."""
        return "" if self.selected is None else self.known[self.selected].fingerprint

    def name_of(self, fingerprint: str | None) -> str | None:
        """Return the name of the adapter with this digest; None if there is none."""
        return next((name for name, adapter in self.known.items() if adapter.fingerprint == fingerprint), None)

    @in_turn()
    def select(self, name: str | None) -> None:
        """Put this adapter into the model instead of the selected one; None: the model alone.

        Raises ValueError for an unknown name. A prompt cache must be used with the adapter that it was computed with.
        """
        if name is not None and name not in self.known:
            raise ValueError(f"adapter={name!r}: allowed are {', '.join(map(repr, (*self.known, None)))}")
        if name == self.selected:
            return
        if self.selected is not None:
            self.known[self.selected].remove()
        self.selected = name
        if name is not None:
            self.known[name].insert()

    @contextmanager
    def using(self, name: str | None) -> Iterator[None]:
        """Context in which an adapter is selected; at its end the one selected before is selected again."""
        before = self.selected
        self.select(name)
        try:
            yield
        finally:
            self.select(before)


def adapters_now(model: Any) -> Callable[[], AbstractContextManager]:
    """Return a function whose contexts select the adapter of a model that is selected now."""
    adapters = model.runtime.adapters
    return partial(adapters.using, adapters.selected)


def shape_of(linear: Any) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear layer, also of one that adapters wrap."""
    while "linear" in linear:
        linear = linear["linear"]
    size, width = linear.weight.shape[-2:]
    return size, width * 32 // linear.bits if "scales" in linear else width
