"""Decode a text that no pool can hold, token by token in its turn: on mlx-lm's own caches, or on changing ones."""

from ..decoding.cycle import Decoder
from ..decoding.loop import decode
from ..decoding.stats import Stats
from ..layers.target import Target
from ..tuning.plan import Fixed
from .sequence import Response, Sequence


def is_lone(text: Sequence) -> bool:
    """Tell whether a text's caches are mlx-lm's, or will be quantized while it decodes."""
    cache, due = text.cache, text.cache.quantizing
    read = cache.offset + sum(map(len, text.segments))
    reaches = due is not None and read <= due.start and (text.left < 0 or due.start < read + text.left)
    return cache.is_mlx_lm or reaches


class Lone:
    """A text and the loop that decodes it."""

    def __init__(self, model: Target, text: Sequence, *, chunk: int):
        self.text, prompt = text, [token for piece in text.segments for token in piece]
        text.segments, text.tokens = [], text.tokens + prompt
        stats = Stats(num_draft_tokens=text.k)
        decoder = Decoder(model, text.cache, text.picker, Fixed(text.k), stats, chunk, text.k)
        self._steps = decode(decoder, prompt, text.left, ())

    def step(self) -> list[Response]:
        """Take a step; return its token."""
        token, logprobs, drafted = next(self._steps)
        shown = self.text.show([token], int(drafted), None if logprobs is None else logprobs[None])
        if self.text.over:
            self.take_out()
        return self.text.hand_over(shown)

    def take_out(self) -> None:
        """End the text, and leave its cache as it stands."""
        self.text.over = True
        self._steps.close()
