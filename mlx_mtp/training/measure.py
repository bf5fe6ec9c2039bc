"""Measure, on held-out documents, the share of the heads' drafts that equal the target's own choices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .batches import alone
from .chain import chain
from .recording import Document, Recording

DRAWS = 1000  # of the bootstrap
BLOCK = 64  # positions that the bootstrap draws together, because neighbours are alike
INTERVAL = 2.5, 97.5  # percentiles


@dataclass(frozen=True)
class MeanShare:
    """A mean over positions, and the ends of its 95% interval from a bootstrap over blocks of BLOCK positions."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of a model's heads on held-out documents.

    depths: for each draft of a cycle, the share that equals the target's most likely token, of the positions where
    all earlier drafts of the cycle do. cycle: mean accepted drafts of a cycle, plus 1 for the target's own token.
    positions: the number of measured positions.
    """

    depths: tuple[MeanShare, ...]
    cycle: MeanShare
    positions: int


def measure(model: Any, recording: Recording, documents: Sequence[Document], depths: int) -> Acceptance:
    """Return the acceptance of `model.mtp` at the positions of the documents' answers.

    Target and heads read the tokens of the documents, also where the target's choice or a draft was another token.
    depths: drafts of a cycle; a document's last positions, which lack recorded choices for all drafts, are left out.
    ValueError if no position is measured.
    """
    counts = np.concatenate([counts_of(model, recording, document, depths) for document in documents])
    if not counts[:, 0].sum():
        raise ValueError("no position of the held-out texts can be measured; give more or longer texts")
    draws = np.random.default_rng(0).integers(0, len(counts), (DRAWS, len(counts)))
    sums = counts[draws].sum(axis=1)
    total = counts.sum(axis=0)
    shares = tuple(_share(total[d + 1], total[d], sums[:, d + 1], sums[:, d]) for d in range(depths))
    cycle = _share(total.sum(), total[0], sums.sum(axis=1), sums[:, 0])
    return Acceptance(shares, cycle, int(total[0]))


def _share(part: float, whole: float, parts: np.ndarray, wholes: np.ndarray) -> MeanShare:
    low, high = np.percentile(parts / np.maximum(wholes, 1), INTERVAL)
    return MeanShare(float(part / max(whole, 1)), float(low), float(high))


def counts_of(model: Any, recording: Recording, document: Document, depths: int) -> np.ndarray:
    """Return counts [n, 1 + depths] for a document's n blocks of BLOCK positions; the last block may be shorter.

    Column 0 is the number of measured positions, column 1 + j the number of those at which drafts 0 to j all equal
    the target's choices. A document of at most `depths` tokens is one block of zeros.
    """
    given = alone(recording, document)
    hidden = given.hidden.astype(model.no_hidden().dtype)
    count = given.tokens.shape[1] - depths  # positions whose last draft has a choice to compare with
    if count < 1:
        return np.zeros((1, depths + 1))
    outputs = chain(model, model.capture(hidden[:, :-1]), given.tokens[:, 1:], given.starts[:, :-1], depths)
    right = given.counted[0, 1 : 1 + count]
    found = [right]
    for depth, output in enumerate(outputs):
        number = min(depth, len(model.mtp) - 1)
        rows = output[:, depth : depth + count]
        best = mx.argmax(model.draft_logits(number, rows)[0], axis=-1)
        right = right & (model.mtp[number].token(best) == given.choices[0, 1 + depth : 1 + depth + count])
        found.append(right)
    each = np.array(mx.stack(found, axis=1))
    return np.array([each[i : i + BLOCK].sum(axis=0) for i in range(0, count, BLOCK)])
