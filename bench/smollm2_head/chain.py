"""Compute an MTP head's chain of drafts at all positions of joined conversations, its loss and its right drafts.

Depths, masks and loss are those of `mlx_mtp.training` for one recycled head: at each depth, position i reads the
token at i + 1 and predicts the token at i + 2.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from .network import Sizes, attend, layer_of, linear, rms_norm, run_layer
from .target import Target
from .write import Written

DEPTHS = 3  # drafts of a cycle in the training
AT_ONCE = 32  # rows that the target reads together
LATER = 0.7  # weight of a depth's loss relative to the depth before
SOFT = 0.5  # weight of the target's distribution in the loss; the rest is that of its most likely token
Head = Mapping[str, torch.Tensor]  # parameters by the names in `MTPHead`


class Drafted(NamedTuple):
    """The tokens that a head drafts.

    ranks: int64 [V], each token's index among the drafted tokens, -1 for other tokens. rows: the rows of the target's
    LM head for the drafted tokens.
    """

    ranks: torch.Tensor
    rows: torch.Tensor


class Reading(NamedTuple):
    """Rows of written text, and what the target computes for them.

    tokens, starts: int64 [B, L], and answers: bool [B, L]; as in `Written`. hidden: normed hidden rows [B, L, width],
    float32 or float16. choices: int64 [B, L], the most likely token after each position.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    answers: torch.Tensor
    hidden: torch.Tensor
    choices: torch.Tensor

    def rows(self, chosen: torch.Tensor | slice) -> "Reading":
        """Return some of the rows."""
        return Reading(*(part[chosen] for part in self))


def read(target: Target, written: Written) -> Reading:
    """Return the reading of all rows at once, with hidden rows in float32."""
    tokens, starts = written.tokens.long(), written.starts.long()
    return Reading(tokens, starts, written.answers, *target.read(tokens, masks(starts, 1)[0]))


def record(target: Target, written: Written) -> Reading:
    """Return the reading with hidden rows in float16, computed for AT_ONCE rows after the other."""
    parts = []
    for part in zip(*(array.split(AT_ONCE) for array in written), strict=True):
        reading = read(target, Written(*part))
        parts.append(reading._replace(hidden=reading.hidden.half()))
    return Reading(*(torch.cat(kind) for kind in zip(*parts, strict=True)))


def masks(starts: torch.Tensor, depths: int = DEPTHS) -> list[torch.Tensor]:
    """Return for each depth j the mask of the head's attention, bool [B, 1, L, (j + 1) * L], depth 0's keys first.

    A position attends to the rows of depth 0 of its conversation up to j positions before, and to one row of each
    later depth: those of its own cycle.
    """
    length = starts.shape[1]
    query, key = (torch.arange(length, device=starts.device).view(shape) for shape in ((-1, 1), (1, -1)))
    inside = key >= starts[..., None]
    found = []
    for depth in range(depths):
        seen, own = (key <= query - depth) & inside, (key == query).expand_as(inside)
        cycle = [(key == query - depth + earlier) & inside for earlier in range(1, depth)]
        found.append(torch.cat([seen, *cycle, own], -1)[:, None] if depth else (seen | own)[:, None])
    return found


def chain(target: Target, head: Head, reading: Reading, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Return for each depth the normed outputs of a head, float32 [B, L, width].

    hidden: the input of depth 0, the reading's hidden rows or noisy ones. The outputs at the last position, which has
    no next token, and at depth j of a conversation's first j positions are meaningless.
    """
    sizes, turns = target.sizes, target.turns_of(0, hidden.shape[1])
    embeddings = rms_norm(target.embedding[following(reading.tokens)], head["enorm.weight"], sizes)
    outputs, earlier = [], []
    for mask in masks(reading.starts):
        joined = torch.cat([embeddings, rms_norm(hidden, head["hnorm.weight"], sizes)], -1)
        x = linear(joined, head["eh_proj.weight"].to(target.dtype))
        attention = partial(_attend_earlier, earlier, mask, sizes)
        x = run_layer(x, layer_of(head, "block.", target.dtype), sizes, turns, attention)
        outputs.append(rms_norm(x, head["norm.weight"], sizes))
        hidden = torch.cat([torch.zeros_like(x[:, :1]), outputs[-1][:, :-1]], 1)
    return outputs


def _attend_earlier(
    earlier: list, mask: torch.Tensor, sizes: Sizes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Append keys and values to those of earlier depths, and return the attention of q to all of them."""
    earlier.append((k, v))
    return attend(mask, sizes, q, *(torch.cat(kind, 2) for kind in zip(*earlier, strict=True)))


def following(x: torch.Tensor) -> torch.Tensor:
    """Return the values [B, L, ...] of the next positions; the last is repeated.

    The length stays L, because PyTorch's attention is faster with masks whose width 8 divides.
    """
    return torch.cat([x[:, 1:], x[:, -1:]], 1)


def loss(target: Target, head: Head, drafted: Drafted, reading: Reading, noise: float) -> tuple[torch.Tensor, ...]:
    """Return (the loss of `mlx_mtp.training.loss.chain_loss`, a scalar; the share of right drafts, [DEPTHS]).

    noise: deviation of normal noise on the hidden rows, as a share of each row's root mean square.
    """
    hidden, starts = reading.hidden.float(), reading.starts
    size = hidden.pow(2).mean(-1, keepdim=True).sqrt()
    outputs = chain(target, head, reading, hidden + noise * size * torch.randn_like(hidden))
    place = torch.arange(starts.shape[1], device=starts.device)
    inside = (following(starts) == starts) & (place < starts.shape[1] - 1)
    labels = drafted.ranks[following(reading.choices)]
    with torch.no_grad():
        theirs = linear(following(hidden), drafted.rows).softmax(-1).mul_(SOFT).to(target.dtype)
    total, right = torch.zeros((), device=starts.device), []
    for depth, output in enumerate(outputs):
        asked = inside & (place - depth >= starts)
        used, logits = asked & (labels >= 0), linear(output, drafted.rows)
        ours = logits.log_softmax(-1)
        hard = ours.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        each = -((1 - SOFT) * hard + (ours * theirs).sum(-1))
        total = total + LATER**depth * (each * used).sum() / used.sum().clamp(min=1)
        right.append(((logits.detach().argmax(-1) == labels) & asked).sum() / asked.sum().clamp(min=1))
    return total / sum(LATER**depth for depth in range(DEPTHS)), torch.stack(right)


@torch.no_grad()
def hits(target: Target, head: Head, drafted: Drafted, reading: Reading) -> torch.Tensor:
    """Return what `mlx_mtp.training.measure` counts for the cycle at each position, bool [B, L - DEPTHS, 1 + DEPTHS].

    Column 0: the cycle is measured, because all its drafts are in the conversation and its first one is in an answer.
    Column 1 + j: it is measured, and its drafts 0 to j all equal the target's choices.
    """
    count = reading.tokens.shape[1] - DEPTHS
    right = (reading.starts[:, DEPTHS:] == reading.starts[:, :count]) & reading.answers[:, 2 : 2 + count]
    labels, found = drafted.ranks[reading.choices], [right]
    for depth, output in enumerate(chain(target, head, reading, reading.hidden.float())):
        best = linear(output[:, depth : depth + count], drafted.rows).argmax(-1)
        right = right & (best == labels[:, 1 + depth : 1 + depth + count])
        found.append(right)
    return torch.stack(found, -1)
