"""Hold the tokens of a prompt cache, and the shift of later rows' RoPE positions that its pictures cause."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..machine.stream import in_turn
from ..pictures.rows import Picture, Places, mark_ids, places_in, shift_at
from .layer_cache import LayerCache


class TokenRows:
    """Mixin of PromptCache: its tokens, and `trim`. A row of a picture is a negative token.

    places: the places of the pictures among the tokens; of the last picture some rows may be missing.
    pictures: the `Picture`s that were given with prompts, by `Picture.words`; `image` is None once all rows are read.
    features: `Picture.words` and the features [rows, H] of the picture that is being read, or None.
    """

    model: Any
    caches: list[LayerCache]
    backlog: list[mx.array]
    primed: int
    reach: int | None
    prefix: Any
    places: Places = ()
    features: tuple[tuple[int, ...], mx.array] | None = None

    def __init__(self):
        self.pictures: dict[tuple[int, ...], Picture] = {}
        self._tokens: list[int] = []

    @property
    def tokens(self) -> list[int]:
        """The tokens held. Assigning a list also sets `places` and `shift` of all caches, and drops read images.

        Raises ValueError for negative tokens that are no picture's.
        """
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: list[int]) -> None:
        self._tokens, self.places = tokens, places_in(tokens)
        self.place_rows()
        self.name_pictures(())

    @property
    def ids(self) -> list[int]:
        """The tokens held as the model's token ids: the id of the pictures' mark for each row of a picture."""
        return mark_ids(self._tokens, self.model.vision.mark) if self.places else self._tokens

    @property
    def offset(self) -> int:
        """Number of tokens held."""
        return len(self._tokens)

    @property
    def next_shift(self) -> int:
        """The number, 0 or less, added to the next row's number to get its RoPE position if that is a row of text."""
        return shift_at(self.places, self.offset) if getattr(self.model, "axes", ()) else 0

    def place_rows(self) -> None:
        """Set `shift` of all caches to `next_shift`, and `axes` to None."""
        shift = self.next_shift
        for c in self.caches:
            c.shift, c.axes = shift, None

    def name_pictures(self, pictures: Iterable[Picture]) -> None:
        """Add pictures to `pictures`; then set `image` to None in those whose rows have all been read."""
        known = {**self.pictures, **{picture.words: picture for picture in pictures}}
        for words in {place.words for place in self.places if place.end <= self.offset} & known.keys():
            known[words] = replace(known[words], image=None)
        self.pictures = known

    @property
    def pending_rows(self) -> int:
        """Number of rows, at the end of the backlog, that the heads must read before they draft."""
        return min(self._pending, self.reach or self._pending)

    @property
    def _pending(self) -> int:
        return sum(rows.shape[1] for rows in self.backlog)

    def settle(self, tokens: list[int]) -> None:
        """Set the cache's state between generations, with these tokens held; `PromptCache` implements it."""

    def is_trimmable(self) -> bool:
        """Return whether `trim` can drop any number of tokens.

        False with a recurrent state, a ring that may have wrapped, or caches of mlx-lm that cannot be trimmed.
        """
        return all(c.trims for c in self.caches)

    @in_turn()
    def trim(self, n: int) -> int:
        """Drop the last n tokens, or all if there are fewer; return the number dropped, 0 if not trimmable.

        If that would leave a part of a picture, the whole picture is dropped, so more than n tokens. `prefix` becomes
        None. A head may keep one row that it computed with a dropped token; no later token depends on that row.
        Raises ValueError for a negative n.
        """
        if n < 0:
            raise ValueError(f"n={n}: allowed is 0 or more")
        left = self.offset - min(n, self.offset)
        if left == self.offset or not self.is_trimmable():
            return 0
        left = next((place.first for place in self.places if place.first < left < place.end), left)
        dropped = self.offset - left
        kept = max(0, self._pending - dropped)
        self.backlog = [mx.concatenate(self.backlog, axis=1)[:, :kept]] if kept else []
        self.primed, self.prefix = min(self.primed, left), None
        self.settle(self.tokens[:left])
        return dropped
