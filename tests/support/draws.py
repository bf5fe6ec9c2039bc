"""Draw one row as mlx-lm's filters do, and enumerate all paths of a generation's random draws."""

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from mlx_mtp.decoding import draft_sampling, pick
from mlx_mtp.decoding.sampling import Sampling

SAMPLERS = {
    "temperature": {"temp": 0.7},
    "hot": {"temp": 2.5},
    "top_p": {"temp": 1.0, "top_p": 0.8},
    "min_p": {"temp": 1.0, "min_p": 0.2},
    "top_k": {"temp": 1.0, "top_k": 2},
    "all": {"temp": 1.3, "top_p": 0.95, "min_p": 0.05, "top_k": 2},
    "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.2},
    "xtc_of_two": {"temp": 1.0, "top_k": 2, "xtc_probability": 0.5, "xtc_threshold": 0.2},
}


def draw(options: Sampling, logprobs, key):
    """Return a token [1] for one row of logprobs [1, V] by mlx-lm's filters, in its order, and noise of the key."""
    if options.greedy:
        return mx.argmax(logprobs, axis=-1)
    coin, dice = mx.random.split(key)
    parts = dict(parts_of(logprobs, options))
    kept = parts[mx.random.uniform(key=coin).item() < options.xtc_probability]
    scores = kept.astype(mx.float32) * (1.0 / options.temp) + mx.random.gumbel(logprobs.shape, key=dice)
    return mx.argmax(scores, axis=-1)


class Draws:
    """Replaces random draws: follows a path of choices and multiplies their probabilities."""

    def __init__(self, xtc: float = 0.0):
        self.path, self.sizes, self.xtc = [], [], xtc

    def stand_in(self, monkeypatch):
        for module in (pick, draft_sampling):
            monkeypatch.setattr(module, "choose_rows", self.choose_rows)

    def restart(self):
        self.taken, self.probability = 0, 1.0

    def choose(self, probabilities) -> int:
        options = [i for i, p in enumerate(probabilities) if p > 1e-12]
        if self.taken == len(self.path):
            self.path.append(0)
            self.sizes.append(len(options))
        choice = options[self.path[self.taken]]
        self.taken += 1
        self.probability *= probabilities[choice]
        return choice

    def gumbel_max(self, scores, key=None):
        return mx.array([self.choose(np.array(mx.softmax(scores.astype(mx.float32), axis=-1))[0])])

    def choose_rows(self, logits, options, keys, position, fused):
        """Choose each row's token along the path, with the probabilities of what mlx-lm's filters keep."""
        tokens = []
        for rows, own in zip(logits, options, strict=True):
            for row in rows[:, None]:
                if own.greedy:
                    tokens.append(mx.argmax(row, axis=-1))
                    continue
                kept = dict(parts_of(row - mx.logsumexp(row, axis=-1, keepdims=True), own))
                hit = bool(self.xtc) and self.choose([self.xtc, 1 - self.xtc]) == 0
                tokens.append(self.gumbel_max(kept[hit].astype(mx.float32) / own.temp))
        return mx.concatenate(tokens).reshape(logits.shape[:2])

    def paths(self, run):
        """Call `run` once per path; yield (result, probability)."""
        self.path, self.sizes = [], []
        while True:
            self.restart()
            result = run()
            del self.path[self.taken :], self.sizes[self.taken :]
            yield result, self.probability
            while self.path and self.path[-1] + 1 == self.sizes[-1]:
                self.path.pop()
                self.sizes.pop()
            if not self.path:
                return
            self.path[-1] += 1


def reference(plain, prompt, n, options: Sampling, processors):
    """Return the probability of each sequence of n tokens, by cacheless forwards and mlx-lm's filters."""
    texts = {(): 1.0}
    for _ in range(n):
        longer = {}
        for text, p in texts.items():
            tokens = mx.array([*prompt, *text])
            logits = plain(tokens[None])[:, -1]
            for process in processors:
                logits = process(tokens, logits)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            for token, q in enumerate(distribution(logprobs, options)):
                longer[(*text, token)] = p * float(q)
        texts = longer
    return texts


def parts_of(logprobs, s: Sampling):
    """Yield (whether XTC applies, logprobs [1, V] after all filters) for both sides of its coin."""
    if 0 < s.top_p < 1:
        logprobs = apply_top_p(logprobs, s.top_p)
    if s.min_p > 0:
        logprobs = apply_min_p(logprobs, s.min_p, s.min_tokens_to_keep)
    cut = apply_xtc(logprobs, 1.0, s.xtc_threshold, list(s.xtc_special_tokens)) if s.xtc_probability else logprobs
    for hit, part in ((True, cut), (False, logprobs)):
        yield hit, apply_top_k(part, s.top_k) if s.top_k > 0 else part


def distribution(logprobs, s: Sampling):
    total = 0
    for hit, part in parts_of(logprobs, s):
        weight = s.xtc_probability if hit else 1 - s.xtc_probability
        total = total + weight * mx.softmax(part / s.temp, axis=-1)
    return np.array(total)[0]
