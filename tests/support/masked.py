"""Decode a tiny model under a grammar of five tokens, by mlx_mtp and by cacheless forwards."""

import grammars
import mlx.core as mx
import numpy as np
from draws import draw

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.decoding.sampling import Sampling, key_at, random_key

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]
SAMPLING = {
    "greedy": {},
    "seeded": {"temp": 1.2, "seed": 5},
    "filtered": {"temp": 1.0, "top_p": 0.9, "min_p": 0.05, "top_k": 3, "seed": 1},
    "xtc": {"temp": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.1, "seed": 2},
}


def of_letters(pattern):
    return grammar.regex(pattern, tokenizer=grammars.letters())


def apply(constraint, answer, logits):
    """Return logits [1, V] with those of forbidden tokens set to -infinity, by numpy."""
    bits = np.unpackbits(grammars.mask(constraint, answer).view(np.uint8), bitorder="little")
    return mx.array(np.where(bits[: logits.shape[-1]] == 1, np.array(logits.astype(mx.float32)), -np.inf))


def reference(plain, prompt, n, made, processors=(), seed=None, **options):
    """Decode by cacheless forwards: processors, the mask, normalising, filters, the draw of the position."""
    vocab_size = plain(mx.array(prompt)[None]).shape[-1]
    sampling, constraint = Sampling(**options), grammars.constraint(made, vocab_size)
    key, answer = None if seed is None else random_key(seed), []
    while len(answer) < n and answer[-1:] != [grammars.END]:
        tokens = mx.array([*prompt, *answer])
        logits = plain(tokens[None])[:, -1]
        for process in processors:
            logits = process(tokens, logits)
        logits = apply(constraint, answer, logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        noise = mx.zeros(2, mx.uint32) if key is None else key_at(key, len(tokens))
        answer.append(int(draw(sampling, logprobs, noise).item()))
    return answer


def ours(model, n, made, k=3, prompt=PROMPT, **options):
    stats = mlx_mtp.Stats()
    options = {"adaptive": False, "num_draft_tokens": k, "max_tokens": n, **options}
    steps = mlx_mtp.generate_step(prompt, model, grammar=made, stats=stats, **options)
    return [token for token, *_ in steps], stats
