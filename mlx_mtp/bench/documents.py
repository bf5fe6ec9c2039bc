"""What another engine measured of Step-3.5-Flash with its MTP heads, as published: `documents.csv`, which names it."""

import csv
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parent / "documents.csv"


@dataclass(frozen=True)
class Published:
    """One line: speeds in tokens/s, acceptance as accepted of all drafted, context in thousands ("32k").

    kv_cache, mtp_kv_cache: types of the target's and of the heads' caches; the latter empty where it is the same.
    """

    machine: str
    weights: str
    kv_cache: str
    mtp_kv_cache: str
    context: str
    num_draft_tokens: int
    plain_tok_s: float
    mtp_tok_s: float
    speedup: float
    acceptance: float
    tokens_per_cycle: float
    cycle_cost_in_plain_steps: float

    @property
    def context_tokens(self) -> int:
        return 1024 * int(self.context.removesuffix("k"))


def source() -> str:
    """Where the figures are from."""
    return FILE.read_text().splitlines()[0].removeprefix("# source: ")


def published() -> list[Published]:
    """Every line of the table."""
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    types = Published.__annotations__
    return [Published(**{name: types[name](value) for name, value in row.items()}) for row in csv.DictReader(lines)]
