"""Estimate the memory, disk and time that a training needs, and choose the number of rows of a batch that fits."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..decoding.graph_memory import nbytes
from ..machine.memory import available
from .batches import Batch
from .heads import Workshop
from .loss import chain_loss
from .optimize import Trainer
from .reading import read
from .recording import bytes_per_token

STATES = 3  # arrays per trained parameter besides itself: the gradient and AdamW's two averages
BLOCK = 14  # values of a layer's inputs and outputs per position and hidden value that the gradient needs
VOCAB = 6  # arrays of logits per depth that live at once
TRIED = 64  # tokens of the timed read
ROOM = 0.8  # share of the available memory that a training may use


@dataclass(frozen=True)
class Estimate:
    """What a training is estimated to need.

    memory: bytes besides the loaded model's. disk: bytes of what is recorded. seconds: of recording and of training
    steps, without measurements. rows: of a batch. checkpoint: whether a depth's intermediate values are computed
    again for its gradient instead of being kept.
    """

    memory: int
    disk: int
    seconds: float
    rows: int
    checkpoint: bool

    def __str__(self) -> str:
        again = ", with gradient checkpointing" if self.checkpoint else ""
        return (
            f"about {duration(self.seconds)}, {self.memory / 1e9:.2f} GB of memory besides the model's{again}, "
            f"{self.disk / 1e9:.2f} GB of disk; batches of {self.rows} rows"
        )


def memory_of(workshop: Workshop, rows: int, length: int, *, checkpoint: bool) -> int:
    """Return the estimated bytes that a training step needs besides the model's own.

    These are the heads in training, their gradients, AdamW's state, the float copy of the LM head, and intermediate
    values for `rows` rows of `length` positions. checkpoint: as in `chain`.
    """
    parameters: Any = tree_flatten(workshop.trained.trainable_parameters())
    trained = sum(w.nbytes for _, w in parameters)
    fixed = nbytes(workshop.trained.parameters()) + workshop.teacher.weight.nbytes
    size = workshop.model.width
    weights: Any = tree_flatten(workshop.trained.mtp[0].block.parameters())
    layer = sum(w.shape[0] for _, w in weights if w.ndim == 2)
    kept = layer + BLOCK * size if not checkpoint else 4 * size
    depths = workshop.depths
    # With checkpointing one depth's intermediate values exist at a time.
    values = depths * kept + (layer + BLOCK * size if checkpoint else 0)
    logits = VOCAB * workshop.teacher.weight.shape[0] * (1 if checkpoint else depths)
    return STATES * trained + fixed + 4 * rows * length * (values + logits)


def fit(workshop: Workshop, rows: int | None, length: int) -> tuple[int, bool]:
    """Return (rows of a batch, whether to checkpoint) whose `memory_of` is at most ROOM of the available memory.

    rows: the user's number, which is returned unchanged; None chooses the most of 8, 4, 2 and 1 that fit.
    Checkpointing is chosen if that number does not fit without. ValueError if nothing fits.
    """
    room = int(ROOM * available().bytes)
    for tried in (rows,) if rows else (8, 4, 2, 1):
        for checkpoint in (False, True):
            if memory_of(workshop, tried, length, checkpoint=checkpoint) <= room:
                return tried, checkpoint
    needed = memory_of(workshop, rows or 1, length, checkpoint=True)
    smaller = "give a smaller batch, or " if rows and rows > 1 else ""
    raise ValueError(
        f"training needs {needed / 1e9:.1f} GB and {room / 1e9:.1f} GB can be used; {smaller}"
        "use a smaller draft vocabulary for new heads, low-rank updates (rank) for quantized heads"
    )


def estimate(
    workshop: Workshop, tokens: int, seen: int, rows: int, length: int, *, checkpoint: bool, write: bool
) -> Estimate:
    """Return the estimate for recording `tokens` tokens and training on `seen` tokens, those of all epochs.

    It is computed from two timed computations: the target reads TRIED tokens, and the gradient of a row of `length`
    positions. rows, checkpoint: of the training. write: the target writes the texts itself, which is assumed to take
    four times as long as reading them.
    """
    model = workshop.model
    width = model.no_hidden().shape[-1]
    began = time.perf_counter()
    mx.eval(read(model, [i % model.vocab_size for i in range(TRIED)]))
    reading = (time.perf_counter() - began) / TRIED
    given = {"teacher": workshop.teacher, "ranks": workshop.ranks, "depths": workshop.depths}
    loss = partial(chain_loss, model=model, **given, checkpoint=checkpoint)
    trainer = Trainer(workshop.trained, loss, steps=1, peak=0.0)
    batch = _blank(length, width)
    trainer.gradients(*batch)
    began = time.perf_counter()
    trainer.gradients(*batch)
    step = (time.perf_counter() - began) / length
    seconds = tokens * reading * (5 if write else 1) + seen * step
    memory = memory_of(workshop, rows, length, checkpoint=checkpoint)
    return Estimate(memory, tokens * bytes_per_token(width), seconds, rows, checkpoint)


def _blank(length: int, width: int) -> Batch:
    rows, zeros = mx.ones((1, length + 1, width), mx.float16), mx.zeros((1, length + 1), mx.int32)
    return Batch(rows, zeros, zeros, zeros, mx.ones(zeros.shape, mx.bool_), mx.random.key(0)[None])


def duration(seconds: float) -> str:
    """Return a time in seconds as text: in seconds below 90, in hours from 5,400 on, else in minutes."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"
