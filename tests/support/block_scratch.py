"""Recompute a block drafter's drafts from scratch: the papers' formulas over all rows, with no cache."""

import block_drafters
import mlx.core as mx
import numpy as np
from eagle_scratch import rms, rope, streams


def visible(config: dict, layer: int, T: int, rows: int) -> mx.array:
    """Return the context rows (of T) and block rows that each row attends to, bool [rows, T + rows]."""
    c, seen = block_drafters.options(config), np.ones((rows, T + rows), bool)
    query, key = T + np.arange(rows)[:, None], np.arange(T + rows)[None]
    sliding, window = c["layer_types"][layer] == "sliding_attention", c["sliding_window"]
    kind = " ".join(c["architectures"])
    if "Muse" in kind:
        return mx.array(abs(query - key) <= window if sliding else seen)
    if "speculators_model_type" in c:
        near = (key >= T - window) & ((key <= query) | c["sliding_window_non_causal"])
        return mx.array(near if sliding else seen)
    causal = c.get("is_causal", sliding)
    near = (query - key < window) | (key >= T) if sliding else seen
    return mx.array(near & (key <= query) if causal else near & seen)


def rotated(x: mx.array, first: int) -> mx.array:
    """x [heads, n, D] rotated by positions first, first + 1, .."""
    blank = mx.zeros((x.shape[0], first, x.shape[2]))
    return rope(mx.concatenate([blank, x], axis=1))[:, first:]


def convolved(w: dict, name: str, x: mx.array, group: int, inner):
    base, projection = w[f"{name}.base_kernel"], w[f"{name}.kernel_projection.weight"]
    taps = base.shape[1]
    dynamic = (x @ projection.T).reshape(len(x), 2, taps, -1)

    def conv(y, index):
        rows = []
        for i in range(len(y)):
            row = mx.zeros_like(y[0])
            for tap in range(min(taps, i + 1)):
                kernel = base[index, tap] + mx.repeat(dynamic[i, index, tap], group)
                row = row + kernel * y[i - tap]
            rows.append(row)
        return mx.stack(rows)

    return conv(inner(conv(x, 0)), 1)


def outputs(w: dict, config: dict, context: mx.array, block: mx.array) -> mx.array:
    """The drafter's normed rows [b, H] of a block's embeddings, behind the target's states [T, taps * H]."""
    c, T, b = block_drafters.options(config), len(context), len(block)
    muse = "encoder.fc.weight" in w
    fc, norm = ("encoder.fc", "encoder.output_norm_enc") if muse else ("fc", "hidden_norm")
    g, x = rms(context @ w[f"{fc}.weight"].T, w[f"{norm}.weight"]), block
    D, rep = c["head_dim"], c["num_attention_heads"] // c["num_key_value_heads"]

    def heads(rows, name):
        return (rows @ w[name].T).reshape(len(rows), -1, D).swapaxes(0, 1)

    for i in range(c["num_hidden_layers"]):
        p = f"layers.{i}."

        def attention(y, p=p, i=i):
            both = mx.concatenate([g, y])
            q = rotated(rms(heads(y, f"{p}self_attn.q_proj.weight"), w[f"{p}self_attn.q_norm.weight"]), T)
            k = rotated(rms(heads(both, f"{p}self_attn.k_proj.weight"), w[f"{p}self_attn.k_norm.weight"]), 0)
            v = heads(both, f"{p}self_attn.v_proj.weight")
            k, v = (mx.repeat(t, rep, axis=0) for t in (k, v))
            scores = mx.where(visible(config, i, T, b), q @ k.swapaxes(1, 2) / D**0.5, -mx.inf)
            out = (mx.softmax(scores, axis=-1) @ v).swapaxes(0, 1).reshape(b, -1)
            return out @ w[f"{p}self_attn.o_proj.weight"].T

        def mlp(y, p=p):
            gate, up = (y @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            return (gate * mx.sigmoid(gate) * up) @ w[f"{p}mlp.down_proj.weight"].T

        for before, name, part in (("input", "attention", attention), ("post_attention", "mlp", mlp)):
            y = rms(x, w[f"{p}{before}_layernorm.weight"])
            two = f"{p}{name}_conv.base_kernel" in w
            x = x + (convolved(w, f"{p}{name}_conv", y, c["conv_group_size"], part) if two else part(y))
    return rms(x, w["norm.weight"])


def drafts(plain, w: dict, config: dict, known: list[int], k: int) -> tuple[list[int], list[float]]:
    """k greedy drafts behind known tokens, of which the target has read all but the last; and DSpark's confidence."""
    c, head = block_drafters.options(config), plain.lm_head
    counts = c.get("aux_hidden_state_layer_ids") or [i + 1 for i in c["target_layer_ids"]]
    context = streams(plain, known[:-1], counts)
    anchored = "markov_rank" in c
    tokens = [known[-1], *[c["mask_token_id"]] * (k - anchored)]
    embedded = plain.model.embed_tokens(mx.array(tokens)) * c.get("input_embedding_scale", 1.0)
    rows = outputs(w, config, context, embedded)[-k:]
    logits = rows @ w["lm_head.weight"].T if "lm_head.weight" in w else head(rows)
    logits = logits * c.get("output_multiplier", 1.0)
    if cap := c.get("final_logit_softcapping"):
        logits = cap * mx.tanh(logits / cap)
    found, sure, before = [], [], known[-1]
    for row, scores in zip(rows, logits, strict=True):
        if anchored:
            e = w["markov_head.markov_w1.weight"][before]
            scores = scores + w["markov_head.markov_w2.weight"] @ e
            joint = mx.concatenate([row, e])
            sure.append(mx.sigmoid(w["confidence_head.proj.weight"] @ joint + w["confidence_head.proj.bias"]).item())
        if "selector_rank" in c:
            best = mx.argsort(-scores)[: c["selector_top_k"]]
            s = "candidate_selector."
            mixed = w[f"{s}predecessor_codebook"][before] * (w[f"{s}hidden_projection.weight"] @ row)
            edges = w[f"{s}successor_codebook"][best] @ mixed
            before = best[mx.argmax(scores[best] + edges)].item()
        else:
            before = mx.argmax(scores).item()
            before += w["d2t"][before].item() if "d2t" in w else 0
        found.append(before)
    return found, sure
