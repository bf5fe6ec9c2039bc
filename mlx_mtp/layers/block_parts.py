"""Compute what DFlash2 and DSpark add to a block drafter: convolutions, a candidate selector, Markov and confidence
heads.

Sources: z-lab's DFlash2, and DSpark in the package `speculators`, whose tensor names are used here.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


class DynamicConv(nn.Module):
    """Two causal convolutions along the block, before and behind a sub-layer.

    Each kernel is a fixed part of every channel plus a part, shared by `group` channels, that is computed from x, the
    first one's input. Row i reads rows i, i-1, .. of its own block, zeros before row 0.
    """

    def __init__(self, width: int, taps: int, group: int):
        super().__init__()
        self.group = group
        self.base_kernel = mx.zeros((2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)

    def __call__(self, x: mx.array, inner: Callable[[mx.array], mx.array]) -> mx.array:
        """Return the convolved output of `inner` for the convolved normed rows x [n, b, H]."""
        base = self["base_kernel"]
        dynamic = self["kernel_projection"](x).reshape(*x.shape[:2], *base.shape[:2], -1, 1)
        kernels = (base.reshape(*dynamic.shape[2:-1], self.group) + dynamic).flatten(-2)
        for place in range(2):
            found = x * kernels[:, :, place, 0]
            for tap in range(1, base.shape[1]):
                # Rows before the block are zeros.
                found = found + mx.pad(x, [(0, 0), (tap, 0), (0, 0)])[:, :-tap] * kernels[:, :, place, tap]
            x = found if place else inner(found)
        return x


class CandidateSelector(nn.Module):
    """Scores of each row's likeliest tokens: logit + <predecessor[token before] * project(h), successor[token]>.

    top: candidates of a row. The codebooks [V, rank] are arrays, which no conversion quantizes.
    """

    def __init__(self, width: int, vocab: int, rank: int, top: int):
        super().__init__()
        self.top = top
        self.predecessor_codebook = mx.zeros((vocab, rank))
        self.successor_codebook = mx.zeros((vocab, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def candidates(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """Return tokens of the greatest logits per row, int32 [n, b, top], unordered, and these logits in float32.

        There are fewer than `top` if the logits are fewer.
        """
        top = min(self.top, logits.shape[-1])
        tokens = mx.argpartition(-logits, top - 1, axis=-1)[..., :top]
        values = mx.take_along_axis(logits, tokens, axis=-1)
        return tokens.astype(mx.int32), values.astype(mx.float32)

    def edges(self, projected: mx.array, before: mx.array, tokens: mx.array) -> mx.array:
        """Return scores [n, top] to add to the logits of `tokens` [n, top], given tokens `before` [n, 1].

        projected: `hidden_projection` of the row [n, r].
        """
        context = (self["predecessor_codebook"][before[:, 0]] * projected)[:, None]
        return (context * self["successor_codebook"][tokens]).sum(axis=-1).astype(mx.float32)


class MarkovHead(nn.Module):
    """A bias of each row's logits, given the token before: markov_w2(f(markov_w1[before])).

    kind: "vanilla": f is the identity; "gated": f multiplies by a gate of row and token; "rnn": f also reads the row
    and a state that passes along the block.
    """

    KINDS = ("vanilla", "gated", "rnn")

    def __init__(self, kind: str, width: int, vocab: int, draft_vocab: int, rank: int):
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def __call__(self, before: mx.array, row: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """Return (bias [n, draft_vocab], next state) of rows [n, H].

        before: `markov_w1` of the tokens before, [n, r]. The state is [n, r] for kind "rnn", where None stands for
        zeros; the other kinds return it unchanged.
        """
        if self.kind == "gated":
            before = mx.sigmoid(self.gate_proj(mx.concatenate([row, before], axis=-1))) * before
        if self.kind == "rnn":
            state = mx.zeros_like(before) if state is None else state
            joint = self.joint_proj(mx.concatenate([state, before, row], axis=-1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            state, before = gate * state + (1 - gate) * mx.tanh(candidate), mx.tanh(output)
        return self.markov_w2(before), state


class ConfidenceHead(nn.Module):
    """The probability that the target accepts a row's draft, from the row and, with a rank above 0, a second input.

    The second input is `markov_w1` of the token before, of `rank` values.
    """

    def __init__(self, width: int, rank: int):
        super().__init__()
        self.with_markov = rank > 0
        self.proj = nn.Linear(width + rank, 1)

    def __call__(self, row: mx.array, before: mx.array | None) -> mx.array:
        """Return probabilities, float32 [n, 1], for rows [n, H]; before: the second input [n, rank], or None."""
        features = row if before is None or not self.with_markov else mx.concatenate([row, before], axis=-1)
        return mx.sigmoid(self.proj(features).astype(mx.float32))
