"""Small calls that launch every kernel."""

from functools import partial

import mlx.core as mx
import mlx.nn as nn
import moe_blocks
import numpy as np
from exact import draw

from mlx_mtp.bench import kernels_cases
from mlx_mtp.decoding import logit_rules
from mlx_mtp.decoding.logit_rules import LogitRules
from mlx_mtp.decoding.sampling import Sampling
from mlx_mtp.kernels import choose_rows, verify_head_top
from mlx_mtp.kernels.matrix_order import matrix_sums
from mlx_mtp.layers.experts import Mixture
from mlx_mtp.layers.products import Dense

ROWS = 3
SMALL = kernels_cases.SMALL


def called(site):
    """Return a call of the site's kernels with the fewest rows that it supports, at least ROWS."""
    x = mx.random.normal((min(rows for rows in site.candidates if rows >= ROWS), site.width))
    mx.eval(site.ours(x))  # creates its caches, once
    return lambda: list(site.ours(x))


def chosen():
    options = Sampling(temp=1.0, top_p=0.9, min_p=0.01, xtc_probability=1.0, xtc_threshold=0.2, top_k=5)
    logits, key = mx.random.normal((1, ROWS, 70)), mx.array([[7, 3]], mx.uint32)
    return lambda: [choose_rows(logits, [options], key, mx.array([12]))]


def changed():
    rules = LogitRules(logit_bias={3: 1.0}, repetition_penalty=1.3, frequency_penalty=0.5)
    logits, drafts = mx.random.normal((1, ROWS, 70)), mx.array([[3] * (ROWS - 1)])
    masks = mx.full((1, ROWS, 3), -1, mx.int32)
    return lambda: [logit_rules.changed(logits, [rules], [np.array([1, 3], np.int32)], drafts, masks)]


def head(quantized):
    x, weights = draw("affine", 4, 64, (160, 256), ROWS, mx.float32)
    return partial(verify_head_top, x, weights if quantized else mx.random.normal((160, 256)), 5)


# By the kernels that a call launches; created in `kernels_cases.in_type(mx.float32)`.
CALLS = {
    "verify_qmm": lambda: called(SMALL["verify_qmm"]()),
    "verify_qmm_heads": lambda: called(SMALL["verify_qmm_heads"]()),
    "matrix_qmm": lambda: called(SMALL["matrix_qmm"]()),
    "matrix_glu": lambda: called(SMALL["matrix_glu"]()),
    "matrix_heads": lambda: called(SMALL["matrix_heads"]()),
    "matrix_head verify_head_merge": lambda: called(SMALL["matrix_head"]()),
    "verify_glu": lambda: called(SMALL["verify_glu"]()),
    "verify_gemv": lambda: called(SMALL["verify_gemv"]()),
    "verify_dot": lambda: called(Dense(nn.Linear(1024, 1, bias=False))),
    "delta_inputs gated_delta_verify gated_norm": lambda: called(SMALL["gated_delta_verify"]()),
    "mamba2_verify": lambda: called(SMALL["mamba2_verify"]()),
    "verify_attention attention_merge": lambda: called(SMALL["verify_attention"]()),
    "latent_scores latent_values attention_merge": lambda: called(SMALL["verify_latent_attention"]()),
    "moe_route moe_glu moe_down": lambda: called(SMALL["verify_moe"]()),
    "moe_route moe_relu2 moe_down": lambda: called(Mixture(moe_blocks.make("nemotron_h")[0])),
    "verify_head verify_head_merge": lambda: head(quantized=True),
    "verify_head_dense verify_head_merge": lambda: head(quantized=False),
    "choose_rows": chosen,
    "change_logits": changed,
    "matrix_order": lambda: lambda: [matrix_sums()],
    "add_norm": lambda: called(SMALL["add_norm"]()),
    "norm_rope": lambda: called(SMALL["norm_rope"]()),
}
