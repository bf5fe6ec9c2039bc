"""Test whether a model sees: of two opposite pictures, each must have its own answer to the same question.

This tests the wiring from a picture's pixels to the model's logits: the image processor, the vision tower, and the
order and the positions of its features. It does not test whether drafting is exact.
A weaker condition is that the second answer gains probability, relative to the first, from the first picture to the
second. It finds fewer faults: with the columns of its features shuffled, `demo-vision` met this condition for up to
10 of 12 pairs, but had its own answer after both pictures for at most 2 pairs.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache.prompt_prefix import shared
from ..checkpoint.chat_template import encode_messages
from ..layers.target import Target
from ..pictures.image import Image
from ..pictures.prompt import opened
from .rounding_judge import OnePass

SIZE = 128  # pixels of a picture's height and width
HALF = 0.19  # half of a square's side, as a share of SIZE
GROUND = 240  # each RGB value of the ground
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (30, 70, 220),
    "yellow": (245, 210, 20),
    "black": (20, 20, 20),
    "purple": (140, 40, 170),
}
# Centres, as shares of width and height.
SIDES = {"left": (0.26, 0.5), "right": (0.74, 0.5), "top": (0.5, 0.26), "bottom": (0.5, 0.74)}
PLACES = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
ANSWER = {"enable_thinking": False, "add_generation_prompt": True}  # of chat templates
# Pairs that may fail. Of a model that sees colours alone, and favours either side at random after each picture, more
# pairs fail in 99.5% of cases.
MISSES = 1


@dataclass(frozen=True)
class PicturePair:
    """Two pictures of a square, as (colour, side); a question about both; and the answer about each, in their order.

    kind: what the pictures differ in, "sides" or "colours".
    """

    kind: str
    squares: tuple[tuple[str, str], tuple[str, str]]
    question: str
    answers: tuple[str, str]


def _pairs() -> Iterator[PicturePair]:
    for colour in ("red", "green", "blue"):
        for a, b in (("left", "right"), ("top", "bottom")):
            answers = f"The square is {PLACES[a]}.", f"The square is {PLACES[b]}."
            yield PicturePair("sides", ((colour, a), (colour, b)), "Where is the square?", answers)
    for side in ("left", "top"):
        for a, b in (("red", "blue"), ("green", "yellow"), ("black", "purple")):
            answers = f"The square is {a}.", f"The square is {b}."
            yield PicturePair("colours", ((a, side), (b, side)), "What colour is the square?", answers)


PAIRS = [*_pairs()]


def seen(model: Target, tokenizer: Any, pairs: Iterable[PicturePair] = PAIRS) -> dict[str, tuple[int, int]]:
    """Return, for each kind of pair, (the number of pairs that `sees` finds seen, the number of pairs).

    ValueError if the model cannot read a prompt with a picture, for instance without Pillow or a chat template.
    """
    found: dict[str, tuple[int, int]] = {}
    for pair in pairs:
        right, count = found.get(pair.kind, (0, 0))
        found[pair.kind] = right + sees(model, tokenizer, pair), count + 1
    return found


def sees(model: Target, tokenizer: Any, pair: PicturePair) -> bool:
    """Return whether after each picture of a pair its own answer is more likely than the other picture's answer.

    Compared are the probabilities of the first token in which the answers differ, after the tokens before it. A model
    whose logits do not depend on the picture fails, since the same answer is then more likely after both pictures.
    """
    first, second = (tokenizer.encode(answer, add_special_tokens=False) for answer in pair.answers)
    same, gaps = shared(first, second), []
    for square in pair.squares:
        pictures = opened(model, drawn(*square))
        message = {"role": "user", "content": pair.question, "pictures": pictures}
        tokens = [*encode_messages(tokenizer, [message], ANSWER, model.vision), *first[:same]]
        logits = OnePass(model, tokens, pictures).logits(len(tokens))
        gaps.append(float(logits[first[same]] - logits[second[same]]))
    return gaps[0] > 0 > gaps[1]


def drawn(colour: str, side: str) -> Image:
    """Return a picture of SIZE x SIZE pixels: a square of a colour on one side of a light ground."""
    pixels = np.full((SIZE, SIZE, 3), GROUND, np.uint8)
    columns, lines = (slice(*(round((at + by) * SIZE) for by in (-HALF, HALF))) for at in SIDES[side])
    pixels[lines, columns] = COLOURS[colour]
    return Image(pixels, hashlib.blake2b(pixels.data, digest_size=32).digest())
