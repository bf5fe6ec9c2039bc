"""Sample with a seed, with mlx_lm's samplers and processors, and with a processor of your own.

    python examples/sampling.py [MODEL]

Drafting changes none of these texts: each is drawn twice, with and without it.
"""

import sys

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import mlx_mtp
from mlx_mtp.demo import demo_path

model, tokenizer = mlx_mtp.load(sys.argv[1] if len(sys.argv) > 1 else demo_path())
most = model.max_draft_tokens  # 0 for a model without heads


def no_digits(tokens: mx.array, logits: mx.array) -> mx.array:
    """Forbid tokens with a digit; an mlx_lm logits processor. tokens: ids so far [T]; logits: [1, V]."""
    return mx.where(DIGITS, -mx.inf, logits)


DIGITS = mx.array([any(c.isdigit() for c in tokenizer.decode([token])) for token in range(model.vocab_size)])

WAYS = {
    "options": {"temp": 0.8, "top_p": 0.95, "top_k": 40},
    "mlx_lm's": {"sampler": make_sampler(0.8, min_p=0.05), "logits_processors": make_logits_processors(None, 1.2)},
    "a processor of our own": {"temp": 0.8, "logits_processors": [no_digits]},
}
for name, options in WAYS.items():
    # `seed` makes draws reproducible, in any thread.
    options |= {"max_tokens": 10, "seed": 7}
    drafted, plain = (
        mlx_mtp.generate(model, tokenizer, "def read_lines(path):", num_draft_tokens=k, **options) for k in (most, 0)
    )
    print(f"--- {name}: {'the same' if drafted == plain else 'NOT THE SAME'} without drafts\n{drafted}")
