"""Make any callable that given files call raise at its n-th call; a watched run lists the callables."""

import functools
import inspect
import random
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

SKIPPED = {"__exit__", "call_soon"}  # a resource is never released, a task never runs: no code can handle that
GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # resumed, not called


class Broken(Exception):
    """Raised only by these tests."""


class Calls:
    """Counts the calls from `files` in threads that start within `watched()`.

    raises: (name, n): call n of the callable with this name in `seen` raises Broken, once.
    armed:  whether calls are counted.
    stack:  names of the active functions when it raised, None before.
    """

    armed = False

    def __init__(self, *files: str, raises: tuple[str, int] | None = None):
        self.files, self.raises = {inspect.getsourcefile(sys.modules[file]) for file in files}, raises
        self.seen: dict[str, int] = {}
        self.stack: list[str] | None = None

    @contextmanager
    def watched(self):
        threading.setprofile(self._note)
        try:
            yield self
        finally:
            threading.setprofile(None)

    def _note(self, frame, event, arg):
        caller = frame if event == "c_call" else frame.f_back if event == "call" else None
        if not self.armed or caller is None or caller.f_code.co_filename not in self.files:
            return
        if event == "call" and frame.f_code.co_flags & GENERATORS:
            return
        called = arg.__qualname__ if event == "c_call" else frame.f_code.co_qualname
        if called.rpartition(".")[2] in SKIPPED:
            return
        name = f"{Path(caller.f_code.co_filename).stem}.{caller.f_code.co_name} calls {called}"
        self.seen[name] = self.seen.get(name, 0) + 1
        if self.stack is None and (name, self.seen[name]) == self.raises:
            self.stack = list(_functions(caller))
            raise Broken(name)


class RandomFailures:
    """While `armed`, one in `every` calls of the functions and methods in these modules raises Broken."""

    armed = False

    def __init__(self, monkeypatch, *modules: str, every: int, seed: int):
        self.every, self.count, self._random = every, 0, random.Random(seed)
        for module in map(sys.modules.get, modules):
            for name, value in vars(module).copy().items():
                if _is_called(value):
                    monkeypatch.setattr(module, name, self._raising(value))
                elif inspect.isclass(value) and value.__module__ == module.__name__:
                    for method, function in vars(value).copy().items():
                        if _is_called(function) and not method.startswith("__"):
                            monkeypatch.setattr(value, method, self._raising(function))

    def _raising(self, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if self.armed and not self._random.randrange(self.every):
                self.count += 1
                raise Broken(function.__qualname__)
            return function(*args, **kwargs)

        return call


def _is_called(value) -> bool:
    """Return whether a value is a plain or generator function."""
    return inspect.isfunction(value) and not value.__code__.co_flags & GENERATORS & ~inspect.CO_GENERATOR


def _functions(frame):
    while frame is not None:
        yield frame.f_code.co_qualname
        frame = frame.f_back
