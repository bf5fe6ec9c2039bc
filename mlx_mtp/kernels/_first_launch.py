"""Run a kernel alone at its first launch, before a model's graph depends on it.

MLX compiles a launch's text when it evaluates the graph. A text that Metal refuses therefore fails the whole graph,
with the caches that it writes in place. A launch on zeros compiles the same text. Sizes and other numbers that
the host wrote (`keep`) are no zeros: with a size of 0 kernels would divide by zero and leave their arrays.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

LaunchKey = tuple[str, tuple[object, ...]]  # kernel; its variant: template arguments and threadgroup size
SHORT_OF_MEMORY = re.compile(r"malloc|allocate|out of memory|insufficient memory", re.IGNORECASE)


class Refusal(NamedTuple):
    """A kernel that could not be read, constructed, compiled or run: its name and variant, and the exception."""

    key: LaunchKey
    error: Exception


class KernelRefused(RuntimeError):
    """Raised before a graph is evaluated, if MLX cannot construct, compile or run kernels that are part of it.

    refusals: of this process; empty if only another rank has some. voted: every rank raises this, so none waits.
    """

    def __init__(self, refusals: list[Refusal], *, voted: bool = False):
        super().__init__("; ".join(str(r.error) for r in refusals) or "a kernel was refused on another rank")
        self.refusals, self.voted = refusals, voted

    @classmethod
    def of(cls, refusal: Refusal) -> "KernelRefused":
        """Return the exception of one refusal; it is also an instance of its error's class, if Python allows that."""
        return _both(type(refusal.error))([refusal])


@functools.cache
def _both(kind: type[Exception]) -> type[KernelRefused]:
    try:
        return type(kind.__name__, (KernelRefused, kind), {})
    except TypeError:  # a class with a memory layout of its own
        return KernelRefused


class Launch(NamedTuple):
    """A kernel launch that can be run again on zeros.

    inputs: those of the call; `note` replaces arrays, but those of `keep`, by (shape, dtype). how: the call's other
    arguments.
    maker, call: the `mx.fast.metal_kernel` that made the kernel, MLX's or the emulator's, and the kernel.
    ran: every variant with which the kernel's text has run; one set per text.
    """

    key: LaunchKey
    maker: Callable[..., Any]
    call: Callable[..., Any]
    inputs: list[Any]
    how: Mapping[str, Any]
    ran: set[tuple[object, ...]]

    @property
    def text(self) -> tuple[LaunchKey, int]:
        """The key and the identity of the kernel's text; launches with equal ones compile the same code."""
        return self.key, id(self.ran)

    @property
    def current(self) -> bool:
        """Whether the launch can run: Metal is available, and the kernel was made by the present `metal_kernel`."""
        return mx.metal.is_available() and self.maker is mx.fast.metal_kernel

    def run(self) -> Exception | None:
        """Evaluate the launch on zeros and add its variant to `ran`; return (not raise) its exception if it fails."""
        try:
            inputs = [mx.zeros(*given) if isinstance(given, tuple) else given for given in self.inputs]
            mx.eval(self.call(inputs=inputs, **self.how))
        except Exception as e:
            return e
        self.ran.add(self.key[1])
        return None


class _NotedLaunches(threading.local):
    """Launches that a thread has noted, one per variant and text, until they are run, marked as run or dropped."""

    def __init__(self):
        self.new: dict[tuple[LaunchKey, int], Launch] = {}


_thread = _NotedLaunches()
_known: dict[tuple[LaunchKey, int], Launch] = {}  # launches that have run
_kept: dict[int, mx.array] = {}  # the arrays of `keep`, by id
listeners: list[list[LaunchKey]] = []  # lists of nested `launched`, the innermost last


def keep(array: mx.array) -> mx.array:
    """Return `array`, whose values `run_new` will not replace by zeros; it is never released."""
    _kept[id(array)] = array
    return array


def is_noted(key: LaunchKey, ran: set[tuple[object, ...]]) -> bool:
    """Return whether this thread has noted a launch of the same variant and text; False in `launched`.

    False also while another thread is in `launched`. ran: the set that identifies the kernel's text. Of a model's
    equal launches, one per layer, one is enough.
    """
    return not listeners and (key, id(ran)) in _thread.new


def note(launch: Launch) -> None:
    """Keep a launch for this thread's `run_new`: its arrays of `keep`, and the shapes and dtypes of the others.

    Inside `launched` only its key is added to the innermost list. Outside, a kernel that has run when its call
    returns, as the emulator's, is marked as run instead of kept.
    """
    if listeners:
        listeners[-1].append(launch.key)
    elif getattr(launch.call, "runs_at_once", False):
        launch.ran.add(launch.key[1])
    else:
        replaced = [isinstance(x, mx.array) and id(x) not in _kept for x in launch.inputs]
        inputs = [(x.shape, x.dtype) if each else x for x, each in zip(launch.inputs, replaced, strict=True)]
        _thread.new[launch.text] = launch._replace(inputs=inputs)


@contextmanager
def launched() -> Iterator[list[LaunchKey]]:
    """Yield a list to which each launch inside the block adds its key (kernel, variant), repeated ones too.

    Launches of other threads add theirs as well; those of an inner block only to the inner list. `run_new` does not
    run any of them.
    """
    listeners.append([])
    try:
        yield listeners[-1]
    finally:
        listeners.pop()


def run_new() -> None:
    """Run all launches that this thread has noted, on zeros; then raise one KernelRefused if any failed.

    No launch stays noted. Launches that cannot run here (`Launch.current`) are skipped; one that lacks memory is no
    refusal, but is not marked as run either.
    """
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


def all_ran() -> None:
    """Mark as run what this thread has noted, and note it no longer; the caller has evaluated the graph of it."""
    for launch in _thread.new.values():
        launch.ran.add(launch.key[1])
        _known[launch.text] = launch
    _thread.new = {}


def run_again() -> list[Refusal]:
    """Run again, on zeros, the launches of all threads that ran in `run_new` or that `all_ran` marked.

    One launch per variant and text runs. Those that cannot run here (`Launch.current`) are skipped. Returns the
    failures, without those for lack of memory.
    """
    found = [(launch.key, launch.run()) for launch in _known.values() if launch.current]
    return [Refusal(key, error) for key, error in found if error is not None and not out_of_memory(str(error))]


def drop_new() -> None:
    """Drop the launches that this thread has noted, without running them."""
    _thread.new = {}


def out_of_memory(message: str) -> bool:
    """Return whether the message of an exception is about missing memory, not about a kernel."""
    return SHORT_OF_MEMORY.search(message) is not None
