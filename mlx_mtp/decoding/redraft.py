"""Replace a cycle that was built ahead by one with drafts that grammars force."""

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from ..grammar import GrammarError
from ..tuning.controller import Controller
from ..tuning.plan import Plan
from .build import build
from .control import most_together
from .drafters.forced import Forced
from .flight import Flight
from .seating import Seating
from .sequence import Sequence as Decoded


def with_forced(seating: Seating, last: Flight, new: Flight, most: float = math.inf) -> Flight:
    """Return the cycle after `last`, which was read: `new`, or one with drafts of grammars (`Matcher.drafts`).

    It is `new` if no grammar forces a draft, if the control keeps the plan, or if building `new` changed the
    sequences of the step or the drafter's caches. most: maximum number of drafts.
    """
    if new.before is None or not any(s.most_forced for s in new.active):
        return new
    most = min(most, most_together(len(new.rows)), seating.model.runtime.most_drafts(len(new.rows)))
    forced = [_forced(sequence, most) for sequence in new.rows]
    active = [count for count, s in zip(forced, new.rows, strict=True) if s and not s.finished]
    plan = redrafted(new.control, new.plan, active) if any(active) else new.plan
    if plan == new.plan:
        return new
    tic = perf_counter()
    seating.cache.restore(new.before)
    other = Flight(new.rows, plan, new.control, new.before, prefilled=new.prefilled, late=True, forced=forced)
    build(seating, other, last.run, max(s.base for s in new.active))
    other.built = perf_counter() - tic
    return other


def _forced(sequence: Decoded | None, most: float) -> int:
    """Return the number of drafts of a sequence's `Matcher.drafts`: at most `most` and its matcher's `most`.

    0 without a grammar, for a free slot or a finished sequence, and if a GrammarError ends the sequence.
    """
    matcher = sequence.picker.matcher if sequence and not sequence.finished else None
    if sequence is None or matcher is None or not (most := int(min(matcher.most, most))):
        return 0
    try:
        matcher.follow(sequence.history.tokens)
        return len(matcher.drafts(most))
    except GrammarError as e:
        sequence.fail(e)
        return 0


def redrafted(control: Any, planned: Plan, forced: Sequence[int]) -> Plan:
    """Return `planned`, or a plan of drafts that grammars force. forced: their number in each sequence.

    A Controller compares estimates; with another control the forced drafts are the plan if they are more in sum.
    """
    if isinstance(control, Controller):
        return control.redraft(planned, forced)
    return Plan(Forced.source, max(forced)) if sum(forced) > planned.k * len(forced) else planned
