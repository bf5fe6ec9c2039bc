"""Choose tokens under a grammar: masks made while the pass runs, and plans for tokens that the grammar forces."""

from time import perf_counter

import mlx.core as mx
import numpy as np

from ..tuning.controller import Controller
from ..tuning.plan import Plan
from .decoder import Decoder
from .drafters.drafter import Frame
from .masks import mask_rows
from .prefill import evaluated
from .run import Run
from .step import Passed, choose, roll_back


def forced_plan(d: Decoder, planned: Plan, max_drafts: float) -> Plan | None:
    """Return a plan that verifies drafts of the grammar after the tokens that were read; None to keep `planned`.

    max_drafts: maximum number of drafts. Raises GrammarError.
    """
    matcher, control = d.picker.matcher, d.control
    if matcher is None or not (most := int(min(matcher.most, max_drafts))):
        return None
    matcher.follow(d.history.tokens)
    if not (forced := len(matcher.drafts(most))):
        return None
    plan = control.redraft(planned, forced) if isinstance(control, Controller) else Plan("grammar", forced)
    return plan if plan.source == "grammar" else None


def choose_allowed(d: Decoder, frame: Frame, passed: Passed) -> Run:
    """Submit the target's pass; return the run chosen from its rows under masks, unevaluated and rolled back.

    The host reads the drafts and makes the masks while the device computes the pass.
    """
    drafts, waited = submit_pass(passed)
    if waited is not None:
        d.stats.add_time(0.0, waited)
    masks = [mask_rows(d.picker.matcher, d.history.tokens, drafts[0])]
    if d.compiled:
        run = d.compiled.choose(frame, passed, None, masks, d.stats)
    else:
        run = choose(frame.model, frame.members, passed, masks=masks)
    roll_back(frame, run)
    return run


def submit_pass(passed: Passed) -> tuple[list[list[int]], float | None]:
    """Submit the target's pass; return each sequence's drafts, and the seconds waited for them, None without any.

    It waits for the drafts only, not for the pass.
    """
    if passed.drafts is None:
        evaluated(mx.async_eval, passed.hidden)
        return [[] for _ in range(passed.hidden.shape[0])], None
    evaluated(mx.async_eval, passed.drafts)
    evaluated(mx.async_eval, passed.hidden)
    tic = perf_counter()
    drafts = evaluated(np.array, passed.drafts).tolist()
    return drafts, perf_counter() - tic
