"""Training examples of a block drafter: stretches of streams, and the tokens to draft behind random slots."""

from collections.abc import Iterable, Iterator

import mlx.core as mx
import numpy as np

from .block_network import DRAFTS, WINDOW, Anchors
from .written_streams import Streams

STRETCH = 64  # slots that may be anchors; the drafter also reads the WINDOW slots before
BEHIND = DRAFTS - 1  # slots after them, whose states the loss reads


def drafts_known(streams: Streams) -> np.ndarray:
    """Return bool [S, T, DRAFTS]: whether the slot's token is written and its document has the tokens to draft."""
    ahead = np.arange(1, DRAFTS + 1) + np.arange(streams.tokens.shape[1])[:, None]
    starts = np.pad(streams.starts, ((0, 0), (0, DRAFTS)), constant_values=-1)
    return (starts[:, ahead] == streams.starts[..., None]) & streams.written[..., None]


def gathered(streams: Streams, known: np.ndarray, places: np.ndarray, anchors: np.ndarray) -> Anchors:
    """Return Anchors of stretches `places` [N, 2], (stream, first slot), with anchors [N, A] counted from there."""
    stream, first = places[:, :1], places[:, 1:]
    begin = first - WINDOW  # of the slots that are read; negative ones are of no document
    slots = np.clip(begin + np.arange(WINDOW + STRETCH + BEHIND), 0, streams.tokens.shape[1] - 1)
    states = streams.states[stream, slots]
    at = first + anchors
    ahead = np.minimum(at[..., None] + np.arange(1 + DRAFTS), streams.tokens.shape[1] - 1)
    since = np.maximum(streams.starts[stream, at] - begin, np.maximum(-begin, 0))
    tokens, weight = streams.tokens[stream[..., None], ahead], known[stream, at].astype(np.float32)
    return Anchors(*map(mx.array, (states.astype(np.float32), at - begin, since, tokens, weight)))


def batches(
    texts: Iterable[Streams], rng: np.random.Generator, rows: int, anchors: int, passes: int
) -> Iterator[Anchors]:
    """Yield random anchors of `rows` stretches: all in random order, `passes` times for each text."""
    for streams in texts:
        known = drafts_known(streams)
        count = known[..., 0].reshape(len(known), -1, STRETCH).sum(axis=-1)
        stream, part = np.nonzero(count >= anchors // 2)
        places = np.stack([stream, part * STRETCH], axis=1)
        for _ in range(passes):
            rng.shuffle(places)
            for i in range(0, len(places) - rows + 1, rows):
                chosen = places[i : i + rows]
                usable = known[chosen[:, :1], chosen[:, 1:] + np.arange(STRETCH), 0]
                order = np.argsort(rng.random(usable.shape) + ~usable, axis=1)[:, :anchors]
                yield gathered(streams, known, chosen, order)


def every_slot(streams: Streams, known: np.ndarray, rows: int) -> Iterator[tuple[tuple, Anchors]]:
    """Yield (index of its slots in [S, T], Anchors) of all parts of the streams, every slot an anchor."""
    for first in range(0, known.shape[1], STRETCH):
        for i in range(0, len(known), rows):
            stream = np.arange(i, min(i + rows, len(known)))
            places = np.stack([stream, np.full_like(stream, first)], axis=1)
            slots = np.tile(np.arange(STRETCH), (len(stream), 1))
            yield (stream, slice(first, first + STRETCH)), gathered(streams, known, places, slots)


def cycles(right: np.ndarray, usable: np.ndarray) -> int:
    """Return the number of cycles that decode all usable slots [S, T], if `right` drafts behind each are accepted."""
    count = 0
    for row, known in zip(right, usable, strict=True):
        slot = 0
        while slot < len(row):
            count += int(known[slot])
            slot += 1 + int(row[slot] * known[slot])
    return count
