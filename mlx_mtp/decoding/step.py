"""Run a step of n sequences as a pure function of arrays: propose drafts, verify them in one pass, accept.

One sequence is n = 1. Every sequence has R rows, whatever it accepted: drafts beyond a sequence's own limit are
verified but not accepted. A built step calls `step`; `mx.compile` records the same function for replay. `propose` and
`verify` are called separately where the host reads the drafts' confidence in between, and by the profiler.
"""

import mlx.core as mx

from ..cache.branches import hidden_of_tree
from ..cache.step_cache import CacheArrays
from ..cache.tree import RowTree
from ..layers.target import Target
from .accept import Passed, accept, accept_path
from .drafters.drafter import Frame
from .masks import Masks
from .members import Members
from .pick import pick
from .run import NO_DRAFTS, NONE_ACCEPTED, Drafts, Run
from .tree_choice import Candidates, merged_candidates


def step(
    frame: Frame, run: Run, arrays: CacheArrays, drafts: Drafts = NO_DRAFTS, limits: mx.array | None = None
) -> tuple[Run, CacheArrays]:
    """Propose, verify and accept after the rows of `run`; return the next run and the caches' arrays after it.

    arrays: the caches' arrays before it. drafts: those made before the step, for a plan whose drafter is not in it.
    limits: maximum accepted drafts per sequence, int32 [n]; None for no limit.
    """
    drafts = propose(frame, run, arrays, drafts)
    return verify(frame, run, drafts, limits), frame.cache.unload()


def forward(frame: Frame, run: Run, arrays: CacheArrays, drafts: Drafts = NO_DRAFTS) -> tuple[Passed, CacheArrays]:
    """Run a step up to the target's hidden rows; `choose` and `roll_back` complete it.

    With a grammar the host reads the drafts before the choice is submitted, because they decide the masks.
    """
    passed = read_rows(frame, run, propose(frame, run, arrays, drafts))
    return passed, frame.cache.unload()


def propose(frame: Frame, run: Run, arrays: CacheArrays, drafts: Drafts = NO_DRAFTS) -> Drafts:
    """Load the caches' arrays; return the drafts that the step's drafter makes after `run`, else `drafts`.

    With a stem these are the best of both trees.
    """
    frame.cache.load(arrays, frame.base + run.size, frame.base)
    if frame.drafter is None:
        return drafts
    proposed = frame.drafter.propose(frame, run, frame.asked)
    if frame.asked and frame.plan.stem:
        return merged_candidates(Candidates.of(drafts), Candidates.of(proposed)).joined().best(frame.asked)
    return proposed if frame.asked else drafts


def verify(frame: Frame, run: Run, drafts: Drafts, limits: mx.array | None = None) -> Run:
    """Return the run of the target's own tokens after the newest token and each draft; roll back rejected rows."""
    new = choose(frame.model, frame.members, read_rows(frame, run, drafts), limits)
    roll_back(frame, new, limits)
    return new


def read_rows(frame: Frame, run: Run, drafts: Drafts) -> Passed:
    """Append the newest token and each draft to the target's caches; return their rows as `Passed`."""
    model, cache = frame.model, frame.cache
    position, rows = cache.layers[0].offset + 1, run.newest()
    if drafts.tokens is not None:
        rows = mx.concatenate([rows, drafts.tokens], axis=1)
    if drafts.parents is None:
        return Passed(model.hidden(rows, cache.layers), position, drafts.tokens, drafts.each)
    tree = RowTree.of(drafts.parents, drafts.levels)
    hidden = hidden_of_tree(model, cache.layers, rows, tree)
    return Passed(hidden, position, drafts.tokens, (), tree, drafts.confidence)


def choose(
    model: Target, members: Members, passed: Passed, limits: mx.array | None = None, masks: Masks = None
) -> Run:
    """Return the run of the target's own tokens after rows it has read, with accepted drafts, at most `limits`."""
    hidden, position, drafted, _, tree, _ = passed
    tokens, logprobs = pick(model, hidden, position, drafted, members, masks, tree)
    if tree is not None:
        return accept_path(passed, tokens, logprobs, limits)
    accepted = NONE_ACCEPTED if len(members) == 1 else mx.zeros(len(members), mx.int32)
    if drafted is not None:
        accepted = accept(drafted, tokens)
    if limits is not None:
        accepted = mx.minimum(accepted, limits)
    return Run.of(hidden, tokens, accepted, drafted, logprobs)


def roll_back(frame: Frame, run: Run, limits: mx.array | None = None) -> None:
    """Lower the positions of the target's caches to the accepted rows of a run that was read last."""
    if run.path is not None:
        frame.cache.keep_path(run.path)
    if run.drafts is not None or limits is not None:
        frame.cache.rollback(run.size - 1 - run.accepted)
