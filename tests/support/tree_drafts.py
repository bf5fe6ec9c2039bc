"""Drafters that draft random trees with parts of given texts, controls that plan them, and the contents of caches."""

import random
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from plans import Script, follow

import mlx_mtp
from mlx_mtp.decoding.drafters.drafter import Drafter
from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.decoding.run import NO_DRAFTS, Drafts
from mlx_mtp.tuning.plan import Plan

SHAPES = ("any", "any", "chain", "deep", "star", "twins")


class Trees:
    """Mixin of a drafter: random trees, or chains where the plan has no tree, of the tokens of the texts or others.

    texts: prompts with their answers; that of a sequence begins with its history. right: the share of right tokens.
    in_step: the drafts of a number are the same in every cycle, as part of the step, and of the first text. drafted:
    (tokens, parents, depths) of each tree.
    """

    trees = True
    drafted: list[tuple]

    def grow(self, model: Any, texts: list[list[int]], seed: int = 0, right: float = 0.6, *, in_step=False) -> Any:
        """Draft trees of these texts from now on; return the drafter."""
        self.vocab, self.random, self.right, self.in_step = model.vocab_size, random.Random(seed), right, in_step
        self.texts, self.known = texts, mx.array([max(token, 0) for token in texts[0]] + [0] * 64, mx.int32)
        self.grown_by: dict[tuple, tuple] = {}
        self.drafted = []
        return self

    def grown(self, k: int, *, tree: bool) -> tuple[list[int], list[int], list[int]]:
        """Return parents, depths, and what is added to the text's token, of k nodes."""
        if self.in_step and (k, tree) in self.grown_by:
            return self.grown_by[k, tree]
        kind, parents, depths = self.random.choice(SHAPES) if tree else "chain", [], [0]
        for i in range(k):
            rows = {"chain": [i], "deep": range(max(0, i - 1), i + 1), "star": [0], "twins": [i // 2 * 2]}
            parents.append(self.random.choice([*rows.get(kind, range(i + 1))]))
            depths.append(depths[parents[-1]] + 1)
        wrong = [0 if self.random.random() < self.right else self.random.randint(1, self.vocab - 1) for _ in range(k)]
        self.grown_by[k, tree] = parents, depths[1:], wrong
        return self.grown_by[k, tree]

    def drafts(self, frame: Any, run: Any, k: int) -> Drafts:
        if not k:
            return NO_DRAFTS
        n, tree = run.tokens.shape[0], frame.plan.tree
        parents, depths, wrong = np.array([self.grown(k, tree=tree) for _ in range(n)], np.int32).swapaxes(0, 1)
        if self.in_step:
            tokens = mx.take(self.known, frame.cache.layers[0].offset[:, None] + mx.array(depths))
        else:  # the step has not rolled back
            found = []
            for member, last, own in zip(frame.members, run.last.tolist(), depths, strict=True):
                text, newest = self.text_of(member), (member.base if member else 0) + last + 1
                found.append([text[min(newest + depth, len(text) - 1)] for depth in own])
            tokens = mx.array(found)
        tokens = ((tokens + mx.array(wrong)) % self.vocab).astype(mx.int32)
        if not tree:
            return Drafts(tokens)
        self.drafted.append((tokens, parents, depths))
        chances = 0.5 ** mx.array(depths)  # plans with a stem compare them with those of copies
        return Drafts(tokens, chances, parents=mx.array(parents), levels=k if self.in_step else int(depths.max()))

    def text_of(self, member: Any) -> list[int]:
        known = member.history.tokens.tolist() if member else []
        return next((text for text in self.texts if text[: len(known)] == known), self.texts[0]) + [0] * 64


class TreeDrafts(Trees, Drafter):
    """Random trees without a model."""

    most = 15
    windows = ()
    reads_hidden = False

    def propose(self, frame, run, k):
        return self.drafts(frame, run, k)


class TreeHeads(Trees, Heads):
    """Random trees instead of the heads' drafts, which are in `noted` with the target's positions."""

    def __init__(self, model):
        super().__init__(model)
        self.own, self.most, self.noted = self.most, 15, []

    def propose(self, frame, run, k):
        chain = frame._replace(plan=replace(frame.plan, tree=False))
        own = super().propose(chain, run, min(k, self.own))
        if k:
            self.noted.append((frame.cache.layers[0].offset, own.tokens))
        return self.drafts(frame, run, k)


class TreeScript(Script):
    """Random plans, among them trees of 1 to `most` drafts."""

    def __init__(self, seed: int, *, most: int = 15, max_lookup: int = 15):
        super().__init__(seed, max_drafts=most, max_lookup=max_lookup)

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        if self.random.random() < 0.6:
            return Plan(
                "heads", self.random.choice([3, 7, 11, 15, self.random.randint(1, self.max_drafts)]), tree=True
            )
        return super().plan(matched, pending)


@contextmanager
def drafted_by(model: Any, drafter: Any, control: Any):
    """Draft with `drafter` by the plans of `control` in this block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "drafter", drafter)
        patch.setattr(model, "mtp_saved", None, raising=False)
        follow(patch, control)
        yield


def contents(cache: Any) -> list[np.ndarray]:
    """Return what a cache at rest holds: keys and values of each position in reach, states, convolutions' rows."""
    found = []
    mixers = iter(m for layer in cache.model.layers for _, m in layer.named_modules() if hasattr(m, "_replay"))
    for c in cache.layers:
        if c.is_state:
            mixer = next(mixers)
            found.append(np.array(c.state(mixer._replay)))
            found.append(np.array(c.convolved(mx.zeros((1, 0, c.parts[2].shape[2])), mixer.conv_kernel_size)))
        else:
            last = [
                *range(min(c.keep, c.offset)),
                *range(max(c.keep, c.offset - ((c.window or c.offset) - c.keep)), c.offset),
            ]
            slots = mx.array([c.ring.slot(p) if hasattr(c, "ring") else p for p in last])
            found += [np.array(mx.take(part, slots, axis=2)) for part in c.parts]
    return found


def assert_equal(ours: Any, theirs: Any) -> None:
    """Assert that two caches at rest hold the same tokens and, bit for bit, the same contents."""
    assert ours.tokens == theirs.tokens
    assert ours.offset == theirs.offset
    for a, b in zip(contents(ours), contents(theirs), strict=True):
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()


def decoded(model: Any, prompt: list[int], n: int, cache: Any = None, *, close: int | None = None, **options: Any):
    """Return (tokens, cache) of a generation of at most n tokens, which is closed after `close` of them."""
    cache = cache or mlx_mtp.make_prompt_cache(model)
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, prompt_cache=cache, **options)
    if close is None:
        return [token for token, *_ in steps], cache
    tokens = [next(steps)[0] for _ in range(close)]
    steps.close()
    return tokens, cache
