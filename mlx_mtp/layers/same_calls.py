"""Recognize modules that compute the same as a known class."""

from types import CodeType
from typing import Any


class SameCalls(tuple[type, ...]):
    """Classes; `in` is also True for a class whose `__call__` has the code and the globals of one of them."""

    def __contains__(self, kind: Any) -> bool:
        return any(kind is known or _same(kind.__call__, known.__call__) for known in self)


def _same(call: Any, known: Any) -> bool:
    code = getattr(call, "__code__", None)
    if code is None or _unplaced(code) != _unplaced(known.__code__):
        return False
    return all(call.__globals__.get(name) is known.__globals__.get(name) for name in code.co_names)


def _unplaced(code: CodeType) -> CodeType:
    """Return code without its place in a file."""
    return code.replace(co_firstlineno=1, co_linetable=b"")
