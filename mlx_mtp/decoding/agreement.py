"""Agree among ranks on what each cycle does: rank 0 decides by its clock and its user, and the others follow."""

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

import mlx.core as mx

from ..kernels import KernelRefused
from ..ranks.group import Ranks
from ..tuning.controller import Controller
from ..tuning.plan import Cycle, Fixed, Plan
from .text import Text

T = TypeVar("T", int, list[int])
CHECKED = 64  # last tokens of the text that are compared before each cycle


class Agreement:
    """Stands in for a generation's control on every rank: plans are those of rank 0's, one cycle before their time.

    sources: who may draft, in the same order on all ranks. ended: rank 0's user wants no more tokens.
    """

    def __init__(self, ranks: Ranks, control: Controller | Fixed, sources: Iterable[str]):
        self.ranks, self.control, self.ended = ranks, control, False
        self.sources = [*sources]
        self._plans: deque[Plan] = deque()

    def meet(self, text: Text, behind: int, refused: KernelRefused | None = None) -> None:
        """Receive the next cycle's plan, and compare the last tokens, while nothing is computed.

        behind: rows that the drafter has to read before it drafts.

        Raises on every rank RuntimeError where they differ, and KernelRefused where a rank has `refused` kernels of
        the cycle that was to begin.
        """
        said = [0, 0, 0, 0]
        if self.ranks.rank == 0:
            plan = self.control.plan(text.matched(), behind)
            source = self.sources.index(plan.source) if plan.k else 0
            said = [source, plan.k, int(plan.p_min), int(self.ranks.stopping)]
        tokens = text.tokens
        same = [len(tokens), zlib.crc32(tokens[-CHECKED:].tobytes()) >> 1]
        found = self.ranks.gather([*said, *same, int(refused is not None)])
        if odd := [str(rank) for rank, numbers in enumerate(found) if numbers[4:6] != found[0][4:6]]:
            raise RuntimeError(
                f"ranks: rank {', '.join(odd)} has other tokens than rank 0 after {found[0][4]} of them"
            )
        if any(numbers[6] for numbers in found):
            self._plans.clear()
            raise KernelRefused(refused.refusals if refused else [], voted=True)
        source, k, p_min, ended, *_ = found[0]
        self._plans.append(Plan(self.sources[source], k, bool(p_min)) if k else Plan())
        self.ended = self.ended or bool(ended)

    @property
    def paused(self) -> str:
        """Why rank 0 does not draft; "" on the other ranks."""
        return self.control.paused if isinstance(self.control, Controller) else ""

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        return self._plans.popleft()

    def observe(self, cycle: Cycle) -> None:
        if self.ranks.rank == 0:
            self.control.observe(cycle)


def agreed(ranks: Ranks | None, tokens: list[T], key: mx.array, options: Any) -> tuple[list[T], mx.array]:
    """Take a generation's prompt and key of draws from rank 0; ValueError where options, as text, differ."""
    if not ranks:
        return tokens, key
    ranks.check_alike("an option of a generation", options)
    tokens, words = ranks.broadcast([tokens, key.tolist()])
    return tokens, mx.array(words, mx.uint32)
