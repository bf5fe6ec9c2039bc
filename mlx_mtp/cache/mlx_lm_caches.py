"""Wrap mlx-lm's own caches of a model without a port, and refuse a PromptCache in mlx-lm's functions."""

from typing import Any, NoReturn

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_lm_caches

from .layer_cache import LayerCache


class MlxLmCaches(LayerCache):
    """One entry of `PromptCache.layers` for mlx-lm's caches of all layers, with positions like `LinearKVCache`.

    No cycle is built ahead on it, so a stopped generation leaves it usable. After an interruption in the middle of a
    step it is not usable: the next read then raises ValueError.
    """

    name = "plain"
    is_mlx_lm = True

    def __init__(self, classes: list[str] | None = None, state: list | None = None, offset: int = 0):
        """Take the values of `config`; the arrays are set later through `parts`."""
        self.offset = self.limit = offset
        self.whole = True
        self.caches: list[Any] = []
        self._saved = (classes or [], state or [])

    def read(self, model: Any, tokens: mx.array) -> mx.array:
        """Read tokens [1, L] and return the logits [1, 1, V] of the last, unevaluated.

        Raises ValueError if an earlier read was interrupted, or `seek` could not set the position.
        """
        if not self.whole:
            raise ValueError("prompt_cache: interrupted in the middle of a step, or not trimmable; make a new one")
        self.whole = False
        if not self.caches:
            self.caches = mlx_lm_caches.make_prompt_cache(model)
        if tokens.shape[1] > 1:  # their logits are not computed
            model(tokens[:, :-1], cache=self.caches)
        logits = model(tokens[:, -1:], cache=self.caches)
        self.offset += tokens.shape[1]
        self.whole = True
        return logits

    @property
    def rewinds(self) -> bool:
        return self.whole and mlx_lm_caches.can_trim_prompt_cache(self.caches)

    def seek(self, offset: int, limit: int) -> None:
        """Return to `offset`; `limit` is ignored.

        If mlx-lm's caches cannot be trimmed, or `offset` is after the position, the next `read` raises ValueError.
        """
        if offset < self.offset and self.rewinds:
            mlx_lm_caches.trim_prompt_cache(self.caches, self.offset - offset)
            self.offset = offset
        self.whole = self.whole and offset == self.offset

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.caches)

    @property
    def parts(self) -> tuple[mx.array, ...]:
        """Always (): nothing needs `mx.eval`, because the logits depend on all arrays.

        Assigning a file's arrays creates mlx-lm's caches from these, unless they exist already.
        """
        return ()

    @parts.setter
    def parts(self, arrays: tuple[mx.array, ...]) -> None:
        classes, state = self._saved
        if not arrays or self.caches:
            return
        rest = iter(arrays)
        states = tree_unflatten([(name, next(rest) if kind == "array" else value) for name, kind, value in state])
        kinds = [_kind(name) for name in classes]
        self.caches = [kind.from_state(saved) for kind, saved in zip(kinds, states, strict=True)]

    def _state(self) -> list[tuple[str, Any]]:
        return tree_flatten([c.state for c in self.caches])  # type: ignore[return-value]

    def used(self) -> tuple[mx.array, ...]:
        return tuple(value for _, value in self._state() if isinstance(value, mx.array))

    @property
    def config(self) -> dict:
        state = [
            (name, "array", None) if isinstance(value, mx.array) else (name, "value", value)
            for name, value in self._state()
        ]
        classes = [type(c).__name__ for c in self.caches]
        return {"window": self.name, "classes": classes, "state": state, "offset": self.offset}

    @property
    def empty_config(self) -> dict:
        return {"window": self.name}


class ListOfOne:
    """Mixin that makes a PromptCache a list with itself as only member, as mlx-lm's functions on caches expect.

    An mlx_lm function that reads another member, a state or a mask gets a ValueError.
    """

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter((self,))

    def __getitem__(self, index: int) -> Any:
        return self if index in (0, -1) else self._refuse()  # an mlx_lm model indexes a list of layers

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "prompt_cache: mlx_mtp's, which mlx_lm cannot read; use mlx_mtp.save_prompt_cache and mlx_mtp.generate"
        )

    state = property(_refuse)  # read by mlx_lm's functions that save or evaluate caches
    make_mask = _refuse  # the first call of an mlx_lm model


def _kind(name: str) -> Any:
    """Return mlx-lm's cache class of this name; ValueError for any other name in a file."""
    kind = getattr(mlx_lm_caches, name, None)
    if not (isinstance(kind, type) and issubclass(kind, mlx_lm_caches._BaseCache)):
        raise ValueError(f"{name}: not a cache of mlx-lm's")
    return kind
