"""Text that the target writes greedily, many documents at once, with the states that a block drafter reads."""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx_lm.models.step3p5 import Step3p5Attention
from tokenizers import Tokenizer

from . import self_written
from .activations import sigmoid
from .layers import MASKED, mlp, moe
from .network import DemoModel
from .tokenizer import SPECIAL_TOKENS

PROMPT, ANSWER = 96, 128  # maximum tokens of a document's parts
LONGEST_FRAGMENT = 400  # characters
BATCH = 256  # streams at once


@dataclass(frozen=True)
class Streams:
    """S streams of T tokens, each of documents one after another: a prompt, and what the target wrote.

    tokens, starts: int32 [S, T]; the start is the slot where the token's document begins. written: bool [S, T],
    whether the target chose the token. states: float16 [S, T, taps * H], the residual stream after the tapped layers.
    """

    tokens: np.ndarray
    starts: np.ndarray
    written: np.ndarray
    states: np.ndarray


@dataclass
class _Row:
    """The document that a stream is at: the rest of its prompt, and the number of tokens written."""

    prompts: Iterator[list[int]]
    prompt: deque[int] = field(default_factory=deque)
    start: int = 0
    count: int = ANSWER

    def token(self, slot: int, last: int, choice: int) -> tuple[int, int, bool]:
        """Return (token, start, written) of a slot, from the token before it and the target's choice behind that."""
        ended = self.count >= ANSWER or (self.count > 0 and last < len(SPECIAL_TOKENS))
        if not self.prompt and ended:
            self.prompt, self.start, self.count = deque(next(self.prompts)[-PROMPT:]), slot, 0
        if self.prompt:
            return self.prompt.popleft(), self.start, False
        self.count += 1
        return choice, self.start, True


def prompts(corpus: dict[str, list], tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Yield tokens of prompts without end: those of `self_written`, and lines from the middle of code."""
    rng = random.Random(seed)
    texts, code = self_written.prompts(corpus, rng), corpus["code"]
    while True:
        for _ in range(3):
            yield tokenizer.encode(next(texts)).ids
        lines = rng.choice(code).splitlines(keepends=True)
        first = rng.randrange(len(lines))
        fragment = "".join(lines[first : first + rng.randint(1, 6)])[:LONGEST_FRAGMENT]
        if ids := tokenizer.encode(fragment).ids:
            yield ids


def write(model: DemoModel, texts: Iterator[list[int]], taps: Sequence[int], *, streams: int, slots: int) -> Streams:
    """Return streams of prompts from `texts` with the model's greedy answers, as it writes each document alone."""
    parts = [_write(model, texts, taps, min(BATCH, streams - i), slots) for i in range(0, streams, BATCH)]
    names = ("tokens", "starts", "written", "states")
    return Streams(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _write(model: DemoModel, texts: Iterator[list[int]], taps: Sequence[int], streams: int, slots: int) -> Streams:
    documents = [_Row(texts) for _ in range(streams)]
    tokens, starts = np.zeros((2, streams, slots), np.int32)
    written = np.zeros((streams, slots), bool)
    states = np.zeros((streams, slots, len(taps) * model.args.hidden_size), np.float16)
    caches = [
        _Cache(layer.self_attn, layer.window or PROMPT + ANSWER, streams, slots) for layer in model.model.layers
    ]
    choice = np.zeros(streams, np.int32)
    for t in range(slots):
        for i, document in enumerate(documents):
            tokens[i, t], starts[i, t], written[i, t] = document.token(t, int(tokens[i, t - 1]), int(choice[i]))
        best, row = _step(model, caches, tokens[:, t : t + 1], starts[:, t], t, taps)
        choice, states[:, t] = np.array(best), np.array(row)
    return Streams(tokens, starts, written, states)


def _step(
    model: DemoModel, caches: list["_Cache"], tokens: np.ndarray, starts: np.ndarray, slot: int, taps: Sequence[int]
) -> tuple[mx.array, mx.array]:
    """Append tokens [B, 1] to the caches; return the choices [B] behind them, and the tapped states [B, taps * H]."""
    h, since, found = model.model.embed_tokens(mx.array(tokens)), mx.array(starts), []
    for i, (layer, cache) in enumerate(zip(model.model.layers, caches, strict=True)):
        h = h + cache.attention(layer.input_layernorm(h), slot, since)
        y = layer.post_attention_layernorm(h)
        h = h + (moe(layer.mlp, y) if layer.is_moe_layer else mlp(layer.mlp, y))
        found += [h] if i + 1 in taps else []
    best = model.logits(h)[:, 0].argmax(axis=-1)
    row = mx.concatenate(found, axis=-1)[:, 0].astype(mx.float16)
    mx.eval(best, row, [(cache.keys, cache.values) for cache in caches])
    return best, row


class _Cache:
    """Keys and values of one layer; all streams are at the same slot. Positions are slots, for RoPE is relative."""

    def __init__(self, attention: Step3p5Attention, window: int, rows: int, slots: int):
        self.layer, self.window = attention, window
        shape = (rows, attention.num_kv_heads, slots, attention.head_dim)
        self.keys, self.values = mx.zeros(shape), mx.zeros(shape)

    def attention(self, x: mx.array, slot: int, since: mx.array) -> mx.array:
        """Append rows x [B, 1, H] at `slot`; return the layer's output, which reads the slots from `since` [B] on."""
        m, B = self.layer, len(x)
        by_head = (B, 1, -1, m.head_dim)
        q = m.rope(m.q_norm(m.q_proj(x).reshape(by_head)).swapaxes(1, 2), offset=slot)
        self.keys[:, :, slot] = m.rope(m.k_norm(m.k_proj(x).reshape(by_head)).swapaxes(1, 2), offset=slot)[:, :, 0]
        self.values[:, :, slot] = m.v_proj(x).reshape(B, -1, m.head_dim)
        first = max(0, slot + 1 - self.window)
        mask = mx.where(mx.arange(first, slot + 1) >= since[:, None], 0.0, MASKED)[:, None, None]
        keys, values = self.keys[:, :, first : slot + 1], self.values[:, :, first : slot + 1]
        q = q.reshape(B, m.num_kv_heads, -1, m.head_dim) * m.scale
        out = mx.softmax(q @ keys.swapaxes(-1, -2) + mask, axis=-1) @ values
        out = out.reshape(B, 1, m.num_heads, m.head_dim) * sigmoid(m.g_proj(x))[..., None]
        return m.o_proj(out.reshape(B, 1, -1))
