"""Recompute an EAGLE-3 head's drafts from scratch: the paper's formulas over all rows, with no cache."""

import drafters
import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


def rope(x: mx.array) -> mx.array:
    """Return x [heads, T, D] rotated by positions 0..T-1."""
    half = x.shape[-1] // 2
    angles = mx.arange(x.shape[1])[:, None] * 1e4 ** (-mx.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return mx.concatenate([a * mx.cos(angles) - b * mx.sin(angles), b * mx.cos(angles) + a * mx.sin(angles)], axis=-1)


def rms(x: mx.array, weight: mx.array) -> mx.array:
    return x / mx.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def forward(w: dict, layer: str, e: mx.array, g: mx.array, *, normed_residual: bool) -> mx.array:
    """Return the drafter layer's output for all rows [T, H], by the paper's formulas."""
    h = rms(g, w[f"{layer}.hidden_norm.weight"])
    x = mx.concatenate([rms(e, w[f"{layer}.input_layernorm.weight"]), h], axis=-1)
    D = drafters.CONFIG["head_dim"]
    q, k, v = (x @ w[f"{layer}.self_attn.{n}_proj.weight"].T for n in "qkv")
    q, k, v = (t.reshape(len(t), -1, D).swapaxes(0, 1) for t in (q, k, v))
    if f"{layer}.self_attn.q_norm.weight" in w:
        q, k = (rms(t, w[f"{layer}.self_attn.{n}_norm.weight"]) for t, n in ((q, "q"), (k, "k")))
    k, v = (mx.repeat(t, q.shape[0] // t.shape[0], axis=0) for t in (rope(k), v))
    scores = rope(q) @ k.swapaxes(1, 2) / D**0.5
    weights = mx.softmax(mx.where(create_causal_mask(len(x)), scores, -mx.inf), axis=-1)
    out = (weights @ v).swapaxes(0, 1).reshape(len(x), -1) @ w[f"{layer}.self_attn.o_proj.weight"].T
    x = (h if normed_residual else g) + out
    y = rms(x, w[f"{layer}.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (gate * mx.sigmoid(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T


def streams(plain, tokens: list[int], counts) -> mx.array:
    """Return the target's residual stream after each of `layers`, concatenated [T, 3 * H], without a cache."""
    seen, layers = [plain.model.embed_tokens(mx.array(tokens)[None])], plain.model.layers

    class Tap:
        def __init__(self, layer):
            self.layer, self.use_sliding = layer, getattr(layer, "use_sliding", False)

        def __call__(self, *args, **kwargs):
            seen.append(self.layer(*args, **kwargs))
            return seen[-1]

    plain.model.layers = [Tap(layer) for layer in layers]
    plain(mx.array(tokens)[None])
    plain.model.layers = layers
    return mx.concatenate([seen[i][0] for i in counts], axis=-1)


def drafts_from_scratch(plain, w, tokens, k, **options):
    """Return k drafts after `tokens`; the target has read all but the last. options: of `logits_along`."""
    drafts: list[int] = []
    for logits in logits_along(plain, w, tokens, drafts, k, **options):
        drafts.append(mx.argmax(logits).item())
    return drafts


def logits_along(plain, w, tokens, drafts, k, *, layer, counts, new, read=None):
    """Yield the logits of k drafts after tokens, each after those that `drafts` has by then.

    They are -infinity for tokens that the head lacks. read: `streams` of a longer text that begins with these tokens.
    """
    aux = streams(plain, tokens[:-1], counts) if read is None else read[: len(tokens) - 1]
    if new:
        aux = rms(aux, w["input_norm.weight"])
        aux = mx.concatenate([rms(a, w[f"fc_norm.{i}.weight"]) for i, a in enumerate(mx.split(aux, 3, -1))], axis=-1)
    g = aux @ w["fc.weight"].T
    for _ in range(k):
        e = plain.model.embed_tokens(mx.array((tokens + drafts)[1 : 1 + len(g)]))
        out = forward(w, layer, e, g, normed_residual=new)[-1:]
        own = rms(out, w["norm.weight"]) @ w["lm_head.weight"].T
        ids = mx.arange(own.shape[-1]) + w["d2t"]
        yield mx.put_along_axis(mx.full((drafters.CONFIG["vocab_size"],), -mx.inf), ids, own[0], axis=0)
        g = mx.concatenate([g, rms(out, w["norm.weight"]) if new else out])
