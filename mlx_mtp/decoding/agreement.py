"""Agree among ranks on the plan of each cycle: rank 0 decides for all, by its own measurements."""

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeVar

import mlx.core as mx

from ..kernels import KernelRefused
from ..ranks.group import Ranks
from ..tuning.controller import Controller
from ..tuning.plan import Cycle, Fixed, Plan
from .history import TokenHistory

T = TypeVar("T", int, list[int])
CHECKED = 64  # last tokens of the sequence that are compared before each cycle


class Agreement:
    """A generation's control on every rank: `meet` receives a plan of rank 0, `plan` returns and removes the oldest.

    sources: names of the drafters, in the same order on all ranks. stopping: rank 0 has ended the generation.
    """

    def __init__(self, ranks: Ranks, control: Controller | Fixed, sources: Iterable[str]):
        self.ranks, self.control, self.stopping, self.sources = ranks, control, False, [*sources]
        self._plans: deque[Plan] = deque()

    def meet(self, history: TokenHistory, pending_rows: int, refused: KernelRefused | None = None) -> None:
        """Receive rank 0's next plan, which `plan` then returns, set `stopping`, and compare the last tokens.

        All ranks must call this, between computations. pending_rows: rows that the drafter must read before it
        drafts; only rank 0's number is used. refused: this rank's refused kernels. Raises on every rank: RuntimeError
        if the number of tokens or the last CHECKED tokens differ; KernelRefused, which drops all plans, if any rank
        has refused kernels.
        """
        decision = [0, 0, 0, 0]
        if self.ranks.rank == 0:
            plan = self.control.plan(history.matched(), pending_rows)
            source = self.sources.index(plan.source) if plan.k else 0
            how = plan.p_min + 2 * plan.stepwise + 4 * plan.tree + 8 * plan.stem
            decision = [source, plan.k, how, int(self.ranks.stopping)]
        tokens = history.tokens
        same = [len(tokens), zlib.crc32(tokens[-CHECKED:].tobytes()) >> 1]
        found = self.ranks.gather([*decision, *same, int(refused is not None)])
        if odd := [str(rank) for rank, numbers in enumerate(found) if numbers[4:6] != found[0][4:6]]:
            raise RuntimeError(
                f"ranks: the tokens of rank {', '.join(odd)} differ from the {found[0][4]} of rank 0; "
                "use the same model, mlx and mlx_mtp on all ranks"
            )
        if any(numbers[6] for numbers in found):
            self._plans.clear()
            raise KernelRefused(refused.refusals if refused else [], voted=True)
        source, k, how, stopping, *_ = found[0]
        flags = (how & bit > 0 for bit in (1, 2, 4, 8))
        self._plans.append(Plan(self.sources[source], k, *flags) if k else Plan())
        self.stopping = self.stopping or bool(stopping)

    @property
    def paused(self) -> str:
        """Why rank 0's control has paused drafting; "" if it drafts, and always on the other ranks."""
        return self.control.paused if isinstance(self.control, Controller) else ""

    @property
    def trees_paused(self) -> str:
        """Why rank 0's control does not use trees; "" if it may, and always on the other ranks."""
        return self.control.trees_paused if isinstance(self.control, Controller) else ""

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        return self._plans.popleft()

    def observe(self, cycle: Cycle) -> None:
        if self.ranks.rank == 0:
            self.control.observe(cycle)


def agreed(ranks: Ranks | None, tokens: list[T], key: mx.array, options: Any) -> tuple[list[T], mx.array]:
    """Return rank 0's prompt tokens (or segments) and random key, uint32 [2]; the given ones without ranks.

    Raises ValueError on every rank if `options` (compared as text) differ between ranks.
    """
    if not ranks:
        return tokens, key
    ranks.check_alike("an option of a generation", options)
    tokens, words = ranks.broadcast([tokens, key.tolist()])
    return tokens, mx.array(words, mx.uint32)
