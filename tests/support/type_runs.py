"""Compare drafted text with mlx-lm's greedy text, for tiny checkpoints of any model type."""

import random
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.cache import make_prompt_cache

import mlx_mtp
from mlx_mtp.decoding.drafters.drafter import Drafter
from mlx_mtp.decoding.run import NO_DRAFTS, Drafts
from mlx_mtp.tuning.plan import Role

# Each repeats itself, so that a lookup copies; one is longer than a window of 8, one is shorter.
PROMPTS = [
    [3, 4, 5, 6, 7, 8, 3, 4, 5],
    [9, 2, 9, 2, 9],
    [11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13, 15, 16, 11, 12],
]


class Wrong(Drafter):
    """Drafts each sequence's true continuation, with one wrong draft at each place in turn, in random order, or none.

    accepted: the numbers of drafts before the wrong one, in all cycles.
    """

    source, role = "oracle", Role.MODEL
    reads_hidden = in_step = False

    def __init__(self, texts: list[list[int]], vocab: int, most: int, seed: int):
        self.texts, self.vocab, self.most, self.random = texts, vocab, most, random.Random(seed)
        self.accepted: set[int] = set()
        self.next: list[int] = []

    def propose(self, frame: Any, run: Any, k: int) -> Drafts:
        if not k:
            return NO_DRAFTS
        last = run.last.tolist()
        return Drafts(mx.array([self.drafts(m, last[i], k) for i, m in enumerate(frame.members)], mx.int32))

    def drafts(self, member: Any, last: int, k: int) -> list[int]:
        if member is None:
            return [0] * k
        known = member.history.tokens.tolist()
        text = next((text for text in self.texts if text[: len(known)] == known), self.texts[0])
        end = member.base + last + 2
        drafts = (text[end : end + k] + [0] * k)[:k]
        self.next = self.next or self.random.sample(range(k + 1), k + 1)
        if (at := min(self.next.pop(), k)) < k:
            drafts[at] = (drafts[at] + 1) % self.vocab
        self.accepted.add(at)
        return drafts


class Reader(Drafter):
    """Reads streams and never drafts."""

    most = 0

    def __init__(self, reads: tuple[int, ...]):
        self.reads = reads

    def propose(self, frame: Any, run: Any, k: int) -> Drafts:
        return NO_DRAFTS


class Noting:
    """Mixin of a layer: appends each output's stream to `notes`, before the first one also its input."""

    notes: list[mx.array]

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.notes:
            self.notes.append(next(a for a in (*args, *options.values()) if isinstance(a, mx.array)))
        output = super().__call__(*args, **options)  # type: ignore[misc]
        self.notes.append(output[0] if isinstance(output, tuple) else output)
        return output


def plain_streams(model: Any, tokens: mx.array) -> list[mx.array]:
    """Return the stream before the first layer of mlx-lm's model, and after each layer: [1, L, H] each."""
    notes: list[mx.array] = []
    for layer in model.layers:
        layer.__class__ = type("Layer", (Noting, type(layer)), {"notes": notes})
    model(tokens, cache=make_prompt_cache(model))
    for layer in model.layers:
        layer.__class__ = type(layer).__bases__[1]
    return notes


def streams(model: Any, tokens: mx.array, number: int) -> mx.array:
    """Return hidden rows [1, L, H] that end with the streams before the first layer and after each of `number`."""
    model.drafter = Reader(tuple(range(number + 1)))
    try:
        return model.hidden(tokens, mlx_mtp.make_prompt_cache(model).layers)
    finally:
        model.drafter = None


def plain_text(model: Any, prompt: list[int], n: int) -> list[int]:
    """Return n greedy tokens of mlx-lm's model with mlx-lm's caches, read in the passes of `mlx_lm.generate`."""
    cache, tokens = make_prompt_cache(model), mx.array([prompt[-1:]])
    found: list[int] = []
    model(mx.array([prompt[:-1]]), cache=cache)
    for _ in range(n):
        tokens = mx.argmax(model(tokens, cache=cache)[:, -1:], axis=-1)
        found.append(int(tokens.item()))
    return found


def loaded(path: Path, **options: Any) -> tuple[Any, Any]:
    """Return a checkpoint's model as this package loads it, and as mlx-lm does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mlx_mtp.load_model(path, **options), mlx_lm_utils.load_model(path)[0]


def drafted(model: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    return [int(token) for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=n, adaptive=False, **options)]


def with_lookup(model: Any, prompt: list[int], n: int, **options: Any) -> list[int]:
    return drafted(model, prompt, n, prompt_lookup=True, **options)


def with_drafter(model: Any, drafter: Wrong, prompt: list[int], n: int, **options: Any) -> list[int]:
    model.drafter = drafter
    try:
        return drafted(model, prompt, n, num_draft_tokens=drafter.most, prompt_lookup=False, **options)
    finally:
        model.drafter = None


def with_wrong(
    model: Any, text: list[int], prompt: list[int], n: int, k: int, seed: int, **options: Any
) -> list[int]:
    """Decode n tokens with drafts of which some are wrong. text: the true tokens from the cache's first one on."""
    return with_drafter(model, Wrong([text], model.vocab_size, k, seed), prompt, n, **options)


def together(model: Any, prompts: list[list[int]], truths: list[list[int]], k: int, seed: int) -> list[list[int]]:
    """Decode the prompts in one batch with drafts of which some are wrong."""
    texts: list[list[int]] = [[] for _ in prompts]
    full = [prompt + truth for prompt, truth in zip(prompts, truths, strict=True)]
    model.drafter = Wrong(full, model.vocab_size, k, seed)
    try:
        batch = mlx_mtp.BatchGenerator(model, adaptive=False, num_draft_tokens=k)
        batch.insert(prompts, [len(truth) for truth in truths])
        while responses := batch.next_generated():
            for response in responses:
                texts[response.uid].append(response.token)
        batch.close()
    finally:
        model.drafter = None
    return texts


def resumed(model: Any, file: Path, prompt: list[int], truth: list[int], at: int, k: int) -> list[int]:
    """Decode with drafts of which some are wrong; save and load the cache after `at` tokens."""
    cache, text = mlx_mtp.make_prompt_cache(model), prompt + truth
    first = with_wrong(model, text, prompt, at, k, at, prompt_cache=cache)
    mlx_mtp.save_prompt_cache(file, cache)
    again = mlx_mtp.load_prompt_cache(file, model)
    return first + with_wrong(model, text, (prompt + first)[-1:], len(truth) - at, k, at, prompt_cache=again)
