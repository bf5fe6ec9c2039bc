"""Define the options of a tuning, and their limits."""

from dataclasses import dataclass

import mlx.core as mx

FEWEST = 2000  # tokens with which a training starts
PEAK = 1e-3  # learning rate, up to the following hidden sizes
NEW_WIDTH, OWN_WIDTH = 576, 128  # new heads: measured with SmolLM2, the model's own ones with the demo
RANK_WIDTH = 10 * OWN_WIDTH  # the best rate of low-rank updates is about ten times as high (arXiv 2405.09673)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class TuneSettings:
    """The options of a tuning.

    tokens: number to record, up to the end of a document; fewer if the texts end. epochs: passes over them. new: make
    a new head instead of training the model's. depths: consecutive drafts that a new head is trained for.
    draft_vocab: number of tokens that a new head drafts; None for all. bits: of a new head; None does not quantize
    it. rows: of a batch; None chooses at most 8, as memory allows. dtype: type of the weights in training. rank: of
    low-rank updates of the heads' quantized weights, which are then trained alone; None trains all weights. rate: the
    peak learning rate; None as `peak_rate`. seed: of the texts that the model writes, of the order of documents, and
    of noise.
    """

    tokens: int = 200_000
    epochs: float = 4.0
    new: bool = False
    depths: int = 2
    draft_vocab: int | None = 8192
    bits: int | None = 8
    rows: int | None = None
    dtype: str = "float32"
    rate: float | None = None
    rank: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for a value that is not allowed, or `rank` together with `new`."""
        limits = {"tokens": (FEWEST, 1 << 40), "depths": (1, 3), "epochs": (0.01, 1e6), "seed": (0, 2**31 - 1)}
        limits |= {"draft_vocab": (1, 1 << 40), "rows": (1, 1 << 20), "rank": (1, 1 << 20), "rate": (1e-12, 1e38)}
        for name, (low, high) in limits.items():
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise ValueError(f"{name}={value}: allowed are {low} to {high}")
        if self.new and self.rank is not None:
            raise ValueError(f"rank={self.rank}: a new head is trained whole; allowed is None")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: allowed are {', '.join(DTYPES)}")
        if self.bits not in (None, 2, 3, 4, 5, 6, 8):
            raise ValueError(f"bits={self.bits}: allowed are 2, 3, 4, 5, 6, 8 and None")

    def peak_rate(self, width: int) -> float:
        """Return the peak learning rate for heads of a model with this hidden size: `rate`, or a default.

        The default falls in proportion to the size, as the best rate of Adam does (Yang et al., arXiv 2203.03466).
        """
        highest = NEW_WIDTH if self.new else OWN_WIDTH if self.rank is None else RANK_WIDTH
        return self.rate or PEAK * min(1.0, highest / width)
