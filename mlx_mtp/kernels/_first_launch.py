"""Run a kernel on its own the first time it is launched, before a model's graph depends on it.

MLX compiles a launch's text when it evaluates the graph, so a text that Metal refuses takes the whole graph with it,
and the caches that the graph writes in place. A launch on zeros compiles the same text and costs nothing else.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

Key = tuple[str, tuple[object, ...]]  # kernel, and what it ran with: template arguments, and threads of a group
SHORT_OF_MEMORY = re.compile(r"malloc|allocate|out of memory|insufficient memory", re.IGNORECASE)


class Refusal(NamedTuple):
    """A kernel that MLX could not construct, compile or run, and the exception."""

    key: Key
    error: Exception


class KernelRefused(RuntimeError):
    """Kernels were refused, and no graph was evaluated.

    refusals: of this process, none where only another rank has some. voted: every rank has raised this.
    """

    def __init__(self, refusals: list[Refusal], *, voted: bool = False):
        super().__init__("; ".join(str(r.error) for r in refusals) or "a kernel was refused on another rank")
        self.refusals, self.voted = refusals, voted

    @classmethod
    def of(cls, refusal: Refusal) -> "KernelRefused":
        """Make the exception of one refusal, which is of its error's class too."""
        return _both(type(refusal.error))([refusal])


@functools.cache
def _both(kind: type[Exception]) -> type[KernelRefused]:
    try:
        return type(kind.__name__, (KernelRefused, kind), {})
    except TypeError:  # a class that holds more than its arguments
        return KernelRefused


class Launch(NamedTuple):
    """A launch without its arrays. inputs: (shape, dtype) of each array, numbers as they are. maker, call: of MLX.

    ran: all that the kernel's text has run with.
    """

    key: Key
    maker: Callable[..., Any]
    call: Callable[..., Any]
    inputs: list[Any]
    how: Mapping[str, Any]
    ran: set[tuple[object, ...]]

    @property
    def text(self) -> tuple[Key, int]:
        """What tells it from other launches: its key, and the kernel's text."""
        return self.key, id(self.ran)

    @property
    def current(self) -> bool:
        """Whether there is a GPU, and `mx.fast.metal_kernel` is what it was: graphs are recorded without either."""
        return mx.metal.is_available() and self.maker is mx.fast.metal_kernel

    def run(self) -> Exception | None:
        """Evaluate the launch on zeros; return what MLX raises, None where it runs."""
        try:
            inputs = [mx.zeros(*given) if isinstance(given, tuple) else given for given in self.inputs]
            mx.eval(self.call(inputs=inputs, **self.how))
        except Exception as e:
            return e
        self.ran.add(self.key[1])
        return None


class _Thread(threading.local):
    """A thread's launches that are new."""

    def __init__(self):
        self.new: dict[tuple[Key, int], Launch] = {}


_thread = _Thread()
_known: dict[tuple[Key, int], Launch] = {}  # all that have run
listeners: list[list[Key]] = []  # of `launched`, the innermost last


def is_noted(key: Key, ran: set[tuple[object, ...]]) -> bool:
    """Whether a launch like this one is noted already: one of each runs, a model has one a layer."""
    return not listeners and (key, id(ran)) in _thread.new


def note(launch: Launch) -> None:
    """Note a launch that is new, or that a listener collects."""
    if listeners:
        listeners[-1].append(launch.key)
    elif getattr(launch.call, "runs_at_once", False):
        launch.ran.add(launch.key[1])
    else:
        shapes = [(x.shape, x.dtype) if isinstance(x, mx.array) else x for x in launch.inputs]
        _thread.new[launch.text] = launch._replace(inputs=shapes)


@contextmanager
def launched() -> Iterator[list[Key]]:
    """Yield the list to which each launch inside, none of which counts as one that has to run, adds its key."""
    listeners.append([])
    try:
        yield listeners[-1]
    finally:
        listeners.pop()


def run_new() -> None:
    """Run the launches of this thread that are new. Raises KernelRefused for those that do not run."""
    if not _thread.new:
        return
    new, _thread.new = _thread.new, {}
    refusals = []
    for launch in new.values():
        if not launch.current:
            continue
        error = launch.run()
        if error is None:
            _known[launch.text] = launch
        elif not out_of_memory(str(error)):
            refusals.append(Refusal(launch.key, error))
    if refusals:
        raise KernelRefused(refusals)


def note_evaluated() -> None:
    """Note that this thread has evaluated all that it launched."""
    for launch in _thread.new.values():
        launch.ran.add(launch.key[1])
        _known[launch.text] = launch
    _thread.new = {}


def run_again() -> list[Refusal]:
    """Run every launch that has run before; return those that do not run any more."""
    found = [(launch.key, launch.run()) for launch in _known.values() if launch.current]
    return [Refusal(key, error) for key, error in found if error is not None and not out_of_memory(str(error))]


def drop_new() -> None:
    """Note that what this thread launched was not evaluated."""
    _thread.new = {}


def out_of_memory(message: str) -> bool:
    """Tell whether an exception's message is about memory that there is not, so that it says nothing of a kernel."""
    return SHORT_OF_MEMORY.search(message) is not None
