"""Wrap mlx-lm's own caches of a whole model without a port, and let mlx-lm's functions on caches take ours."""

from typing import Any, NoReturn

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_lm_caches

from .layer_cache import LayerCache


class MlxLmCaches(LayerCache):
    """One entry of `PromptCache.layers` that stands for all layers' caches, with the positions of `LinearKVCache`.

    Nothing is built ahead on it, so a generation that is stopped leaves it whole; one that is interrupted in the
    middle of a step does not, and reading on is then a ValueError.
    """

    name = "plain"
    is_mlx_lm = True

    def __init__(self, classes: list[str] | None = None, state: list | None = None, offset: int = 0):
        """Take `config`'s values; the arrays are filled in by setting `parts`."""
        self.offset = self.limit = offset
        self.whole = True
        self.caches: list[Any] = []
        self._saved = (classes or [], state or [])

    def read(self, model: Any, tokens: mx.array) -> mx.array:
        """Read tokens [1, L]; return the logits [1, 1, V] after the last. Raises ValueError after an interruption."""
        if not self.whole:
            raise ValueError("prompt_cache: it was interrupted in the middle of a step; make a new one")
        self.whole = False
        if not self.caches:
            self.caches = mlx_lm_caches.make_prompt_cache(model)
        if tokens.shape[1] > 1:  # these rows' logits are never computed
            model(tokens[:, :-1], cache=self.caches)
        logits = model(tokens[:, -1:], cache=self.caches)
        self.offset += tokens.shape[1]
        self.whole = True
        return logits

    @property
    def rewinds(self) -> bool:
        return self.whole and mlx_lm_caches.can_trim_prompt_cache(self.caches)

    def seek(self, offset: int, limit: int) -> None:
        """Step back to `offset`; caches that cannot are not whole any more."""
        if offset < self.offset and self.rewinds:
            mlx_lm_caches.trim_prompt_cache(self.caches, self.offset - offset)
            self.offset = offset
        self.whole = self.whole and offset == self.offset

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.caches)

    @property
    def parts(self) -> tuple[mx.array, ...]:
        """Return nothing to compute: the logits depend on all that the caches hold."""
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
    """Mixin that makes a PromptCache the only member of a list, for mlx-lm's functions on lists of caches."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter((self,))

    def __getitem__(self, index: int) -> Any:
        return self if index in (0, -1) else self._refuse()  # what a model of mlx_lm's takes for another layer's

    @property
    def state(self) -> NoReturn:
        """Refuse to be saved or computed by mlx_lm."""
        self._refuse()

    def make_mask(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be read by a model of mlx_lm's, which asks for a mask first."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        """Raise ValueError: mlx_lm knows neither the heads' caches nor what joins them."""
        raise ValueError(
            "prompt_cache: mlx_mtp's, with MTP heads; use mlx_mtp.save_prompt_cache and mlx_mtp.generate"
        )


def _kind(name: str) -> Any:
    """Find mlx-lm's class of caches of this name, and nothing else that a file may name."""
    kind = getattr(mlx_lm_caches, name, None)
    if not (isinstance(kind, type) and issubclass(kind, mlx_lm_caches._BaseCache)):
        raise ValueError(f"{name}: not a cache of mlx-lm's")
    return kind
