"""Decode a text that no pool can hold, on mlx-lm's own caches: alone, a token in its turn."""

from ..decoding.cycle import Decoder
from ..decoding.loop import decode
from ..decoding.stats import Stats
from ..layers.target import Target
from ..tuning.plan import Fixed
from .sequence import Response, Sequence


class Lone:
    """A text and the loop that decodes it."""

    def __init__(self, model: Target, text: Sequence, *, chunk: int):
        self.text, prompt = text, [token for piece in text.segments for token in piece]
        text.segments, text.tokens = [], text.tokens + prompt
        decoder = Decoder(model, text.cache, text.picker, Fixed(0), Stats(), chunk, 0)
        self._steps = decode(decoder, prompt, text.left, ())

    def step(self) -> list[Response]:
        """Take a step; return its token."""
        token, logprobs, _ = next(self._steps)
        shown = self.text.show([token], 0, None if logprobs is None else logprobs[None])
        if self.text.over:
            self.take_out()
            shown[-1].prompt_cache, shown[-1].all_tokens = self.text.cache, list(self.text.cache.tokens)
        return shown

    def take_out(self) -> None:
        """End the text, and leave its cache as it stands."""
        self.text.over = True
        self._steps.close()
