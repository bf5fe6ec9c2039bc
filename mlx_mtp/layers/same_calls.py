"""Recognize classes of modules whose calls are the same code as a known function."""

from collections.abc import Callable
from types import CodeType
from typing import Any

from mlx_lm.models import starcoder2
from mlx_lm.models.activations import swiglu


def gated_call(self: Any, x: Any) -> Any:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))  # without a docstring, as in mlx-lm


class SameCalls(tuple[Callable[..., Any], ...]):
    """Functions; `in` is True for a class whose `__call__` has the code and the globals of one of them."""

    def __contains__(self, kind: Any) -> bool:
        return any(_same(kind.__call__, known) for known in self)


# Attention of rotated queries on rotated keys, without norms.
ATTENTIONS = SameCalls([starcoder2.Attention.__call__])


def _same(call: Any, known: Any) -> bool:
    code = getattr(call, "__code__", None)
    if code is None or _unplaced(code) != _unplaced(known.__code__):
        return False
    return all(call.__globals__.get(name) is known.__globals__.get(name) for name in code.co_names)


def _unplaced(code: CodeType) -> CodeType:
    """Return code without its name and its place in a file."""
    return code.replace(co_name="", co_firstlineno=1, co_linetable=b"")
