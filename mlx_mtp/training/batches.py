"""Cut a recording's documents into training batches of packed rows."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .recording import Document, Recording


class Batch(NamedTuple):
    """B rows of L + 1 positions; each row is cut from documents that follow one another.

    hidden: the target's hidden states, float16 [B, L + 1, width]. tokens, choices, starts: int32 [B, L + 1]: the
    tokens, the target's most likely next token after each, and the index in the row where the token's document
    begins. counted: bool [B, L + 1], whether a draft of the token after this one is trained or measured. keys: a key
    of `mx.random` for each row, [B, 2].
    """

    hidden: mx.array
    tokens: mx.array
    choices: mx.array
    starts: mx.array
    counted: mx.array
    keys: mx.array


def batches(
    recording: Recording, documents: Sequence[Document], rows: int, length: int, seed: int
) -> Iterator[Batch]:
    """Yield the batches of one epoch: the documents are shuffled, joined and cut into rows, which are shuffled again.

    rows: B of `Batch`. length: L of `Batch`; the last position of a row is also the first one of the row that follows
    in the text. seed: of both orders. The last tokens, too few for a row, and the last shuffled rows, too few for a
    batch, are left out; if all documents together are too few for one batch, they are repeated. All positions are
    `counted`.
    """
    order = np.random.default_rng(seed).permutation(len(documents))
    total = sum(documents[i].end - documents[i].first for i in order)
    while total and total < rows * length + 1:
        order, total = np.concatenate([order, order]), 2 * total
    stream = np.concatenate([np.arange(documents[i].first, documents[i].end) for i in order])
    firsts = np.concatenate([np.full(d.end - d.first, d.first) for d in (documents[i] for i in order)])
    begin = np.arange(len(stream)) - (stream - firsts)  # of each position's document, in the stream
    count = (len(stream) - 1) // length
    windows = np.random.default_rng([seed, 1]).permutation(count)
    hidden, pairs = recording.arrays()
    for i in range(0, count - rows + 1, rows):
        at = windows[i : i + rows, None] * length + np.arange(length + 1)
        places = stream[at]
        starts = np.maximum(begin[at] - at[:, :1], 0).astype(np.int32)
        tokens = pairs[places]
        yield Batch(
            mx.array(hidden[places]),
            mx.array(tokens[..., 0]),
            mx.array(tokens[..., 1]),
            mx.array(starts),
            mx.ones(at.shape, mx.bool_),  # prompts train as well as answers
            mx.random.split(mx.random.key(seed * (count + 1) + i), rows),
        )


def alone(recording: Recording, document: Document) -> Batch:
    """Return a batch of one row with all tokens of a document, of which L + 1 is the number.

    A position is `counted` if the token after it is in the document's answer; the last position is, too.
    """
    hidden, pairs = recording.arrays()
    places = np.arange(document.first, document.end)
    return Batch(
        mx.array(hidden[places])[None],
        mx.array(pairs[places, 0])[None],
        mx.array(pairs[places, 1])[None],
        mx.zeros((1, len(places)), mx.int32),
        mx.array((places + 1 >= document.answer).tolist())[None],
        mx.random.key(0)[None],
    )
