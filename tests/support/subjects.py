"""Tiny models of several kinds with cacheless references, for tests of any plan after any other."""

import functools

import drafters
import eagle_scratch
import families
import mlx.core as mx
import tiny
from oracle import Spy
from scratch import drafts_from_scratch, target_rows

import mlx_mtp
from mlx_mtp.cache.prompt_cache import PromptCache
from mlx_mtp.tuning.plan import Plan

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]
PLANS = {
    "plain": Plan(),
    "heads": Plan("heads", 3),
    "lookup": Plan("lookup", 2),
    "sure": Plan("heads", 3, p_min=True),
}


class Subject:
    """A tiny model with its cacheless reference. name: a family, or "eagle" (three layers' rows, recycled)."""

    def __init__(self, name: str, tiny_models, path):
        self.name = name
        if name == "step3p5":
            self.model, self.plain = tiny_models(2, vocab_size=5)
        elif name == "eagle":
            directory, self.plain = families.headless(path / "target", drafters.HEADLESS["llama_sliding"], 0)
            self.weights = drafters.weights(drafters.CONFIG, families.H)
            drafter = tiny.save(path / "drafter", drafters.CONFIG, self.weights)
            self.model = mlx_mtp.load_model(directory, draft_model=drafter)
        else:
            directory, _, self.plain = families.build(name, path)
            self.model = mlx_mtp.load_model(directory)
        self.k = min(3, self.model.max_draft_tokens)
        self.truth = functools.cache(self._truth)
        self.read = functools.cache(self._read)

    def _truth(self, prompt: tuple[int, ...], n: int = 60, expected: tuple[int, ...] = ()) -> list[int]:
        return tiny.greedy(self.plain, list(prompt), n, expected)

    def _read(self, tokens: tuple[int, ...]) -> PromptCache:
        """Return a cache of exactly these tokens."""
        cache = mlx_mtp.make_prompt_cache(self.model)
        list(mlx_mtp.generate_step(list(tokens), self.model, prompt_cache=cache, max_tokens=0, num_draft_tokens=0))
        return cache

    def scratch(self, known: list[int], k: int, rows=None) -> list[int]:
        """Return k drafts after known tokens, computed without a cache. rows: as in `drafts_from_scratch`."""
        if self.name == "eagle":
            options = {"layer": "midlayer", "counts": self.model.spec.capture, "new": False}
            return eagle_scratch.drafts_from_scratch(self.plain, self.weights, known, k, **options)
        return drafts_from_scratch(self.model, self.plain, known, k, rows)

    def assert_drafts(self, spy: Spy, text: list[int], least: int = 1, most: int = 10**9) -> None:
        """Compare up to `most` of the drafts that a spy recorded, of at least `least`, with those from scratch."""
        found = spy.drafts(text)
        assert len(found) >= least
        rows = None if self.name == "eagle" else target_rows(self.plain, text)
        for known, drafts in found[:: -(-len(found) // most) or 1]:
            assert drafts == self.scratch(text[:known], len(drafts), rows), f"{known} tokens"


def subjects(tiny_models, tmp_path_factory):
    """Return subjects by name, each created once."""
    return functools.cache(lambda name: Subject(name, tiny_models, tmp_path_factory.mktemp("subject")))


def quantizable_model(tiny_models):
    """Return a model of head size 32, and its tokens by plain decoding, which quantization changes."""
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    return model, functools.cache(lambda options: text_of(model, PROMPT, 0, prompt_lookup=False, **dict(options)))


def steps(model, prompt, k, **options):
    options = {"max_tokens": 60, "draft_p_min": 0.25, "prompt_lookup": True} | options
    return mlx_mtp.generate_step(prompt, model, num_draft_tokens=k, **options)


def text_of(model, prompt, k, **options) -> list[int]:
    return [token for token, _, _ in steps(model, prompt, k, **options)]


def assert_same_rows(model, ours: PromptCache, theirs: PromptCache, rtol=1e-3, atol=1e-4) -> None:
    """Compare the target's keys, values and recurrent states at the same position."""
    mixers = iter(m for layer in model.layers for _, m in layer.named_modules() if hasattr(m, "_replay"))
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert a.offset == b.offset == ours.offset
        if a.is_state:
            mixer = next(mixers)
            pairs = [(a.state(mixer._replay), b.state(mixer._replay)), (rows_before(a), rows_before(b))]
        else:
            last = range(max(0, a.offset - (a.window or a.offset)), a.offset)
            slots = mx.array([p % a.ring.slots if hasattr(a, "ring") else p for p in last])
            pairs = [
                (mx.take(p, slots, axis=2), mx.take(q, slots, axis=2)) for p, q in zip(a.parts, b.parts, strict=True)
            ]
        for x, y in pairs:
            assert mx.allclose(x, y, rtol=rtol, atol=atol), type(a).__name__


def rows_before(cache) -> mx.array:
    """Return the rows that a recurrent layer's convolution, of four taps, reads before the next row."""
    blank = mx.zeros((1, 1, cache.parts[2].shape[2]))
    return cache.convolved(blank, 4)[:, :3]
