"""Convert prompts to token ids between the marks of SmolLM2's chat template."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from . import prompts

TRAINING, HELD_OUT = 40_000, 700  # prompts
OPENING = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
ANSWER, QUESTION, CLOSE = "\n<|im_start|>assistant\n", "\n<|im_start|>user\n", "<|im_end|>"
SPECIAL = "<|endoftext|>", "<|im_start|>", CLOSE


class Markup(NamedTuple):
    """Token ids of the chat template.

    opening: the system message and the mark of the first user's message. answer, question: what follows `close`
    before an answer and before a further user's message. close: the token that ends a message. special: the tokens
    that end what the model writes; `close` is one of them.
    """

    opening: list[int]
    answer: list[int]
    question: list[int]
    close: int
    special: list[int]


def markup_of(tokenizer: Tokenizer) -> Markup:
    """Return the markup in a tokenizer's ids."""
    opening, answer, question = (tokenizer.encode(text).ids for text in (OPENING, ANSWER, QUESTION))
    special = [tokenizer.encode(token).ids[0] for token in SPECIAL]
    return Markup(opening, answer, question, special[-1], special)


def contexts(tokenizer: Tokenizer, texts: Sequence[str], markup: Markup) -> torch.Tensor:
    """Return int64 [prompts, width]: for each prompt, the tokens up to its answer, and -1 in the rest of the row."""
    encodings = tokenizer.encode_batch(list(texts))
    rows = [[*markup.opening, *encoding.ids, markup.close, *markup.answer] for encoding in encodings]
    width = max(map(len, rows))
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


class Pools(NamedTuple):
    """The `contexts` of three lists of prompts; no prompt is in two of the lists."""

    training: torch.Tensor
    held_out: torch.Tensor
    test: torch.Tensor


def pools(tokenizer: Tokenizer, markup: Markup) -> Pools:
    """Return TRAINING prompts for training, HELD_OUT prompts about held-out topics, and the test questions."""
    questions = prompts.TEST_QUESTIONS
    held_out = prompts.draw(HELD_OUT, questions, seed=2, held_out=True)
    training = prompts.draw(TRAINING, {*questions, *held_out}, seed=1, held_out=False)
    return Pools(*(contexts(tokenizer, texts, markup) for texts in (training, held_out, questions)))
