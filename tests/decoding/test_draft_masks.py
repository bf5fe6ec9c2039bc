"""Drafts under a grammar are masked, counted apart from forced ones, and never change the text."""

from types import SimpleNamespace

import grammars
import mlx.core as mx
import numpy as np
import pytest
from masked import PROMPT, SAMPLING, of_letters, ours, reference
from plans import Listed, follow
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.decoding import build
from mlx_mtp.decoding.control import Controls
from mlx_mtp.decoding.cycle_masks import CycleMasks
from mlx_mtp.decoding.draft_sampling import HeadOutput
from mlx_mtp.decoding.redraft import redrafted
from mlx_mtp.decoding.sampling import whole_rows
from mlx_mtp.tuning.plan import Accepted, Fixed, Plan, by_depth

FREE, WORDS = "(a|b|c)+", "(cab{1,3}|aa|bc|ca){12,}"
HEADS, EACH = Plan("heads", 3), Plan("heads", 3, stepwise=True)
PROMPTS = [PROMPT, [2, 2, 1, 3, 0, 1, 2, 0], [3, 1]]


@pytest.fixture(autouse=True)
def _own(recorded_at_once, own_cache):
    """Separate costs, and recording at the first occurrence."""


@pytest.fixture
def walks(monkeypatch):
    """Of each sequence with a grammar in each cycle, (its drafts, the number of first ones that are allowed)."""
    found, real = [], CycleMasks.read

    def read(self, drafts):
        most = real(self, drafts)
        found.extend(([*drafts[i]], len(self._known[i])) for i, _ in self._guided() if len(drafts[i]) == self.k)
        return most

    monkeypatch.setattr(CycleMasks, "read", read)
    return found


CASES = [(how, replay) for how in SAMPLING for replay in (False, True)]


@pytest.mark.parametrize(
    ("plan", "case"),
    paired([HEADS, EACH, Plan("heads", 2, p_min=True)], sampled([("greedy", True), ("filtered", False)], CASES)),
)
def test_the_first_draft_is_allowed_and_stepwise_all_are(tiny_models, monkeypatch, walks, plan, case):
    (how, replay), (model, plain) = case, tiny_models(2)
    made, n = of_letters(WORDS), 24 if SWEEP else 16
    follow(monkeypatch, Listed([plan]))
    how = {"adaptive": True, "draft_p_min": 0.001, "compile_cycles": replay, "grammar_drafts": 0, **SAMPLING[how]}
    tokens, stats = ours(model, n, made, 3, **how)
    sampling = {name: how[name] for name in how if name in ("temp", "seed", "top_p", "min_p", "top_k")}
    if "xtc_probability" not in how:
        assert tokens == reference(plain, PROMPT, n, made, **sampling)
    assert len(walks) > 3
    for drafts, fits in walks:
        most = drafts.index(grammars.END) + 1 if grammars.END in drafts else len(drafts)
        assert fits >= (most if plan.stepwise else 1), drafts
    if not plan.stepwise:
        assert any(fits < len(drafts) for drafts, fits in walks)  # else the test shows nothing
    assert stats.grammar_drafted == 0
    assert not plan.p_min or sum(stats.drafted) < plan.k * stats.cycles  # cut at forbidden drafts


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("sampling", sampled([{"temp": 1.0, "seed": 4}], [{}, {"temp": 1.0, "seed": 4}]))
def test_sequences_of_a_batch_are_masked_each_by_its_own_grammar(tiny_models, monkeypatch, walks, sampling, replay):
    """Forced drafts of one sequence, drafts of the heads in another and in one without a grammar, in each cycle."""
    model, _ = tiny_models(2)
    patterns = ["((a|b)abcabc){9}", FREE, None]
    each = [pattern and of_letters(pattern) for pattern in patterns]
    expected = [ours(model, 14, made, 0, prompt, **sampling)[0] for made, prompt in zip(each, PROMPTS, strict=True)]
    control = Listed([HEADS, EACH])
    monkeypatch.setattr(Controls, "control", lambda *_: control)
    batch = mlx_mtp.BatchGenerator(model, max_tokens=14, num_draft_tokens=3, compile_cycles=replay, **sampling)
    stats = [mlx_mtp.Stats() for _ in PROMPTS]
    uids, tokens = batch.insert(PROMPTS, grammars=each, stats=stats), {}
    del walks[:]
    while responses := batch.next_generated():
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
    assert [tokens[uid] for uid in uids] == expected
    assert all(fits for _, fits in walks)
    for own, made in zip(stats, each, strict=True):
        assert (own.grammar_drafted > 0) == (made is each[0])
        assert own.grammar_accepted >= 0.9 * own.grammar_drafted
    assert all(sum(own.drafted) for own in stats)


def test_forced_tokens_and_drafts_of_the_heads_share_a_cycle(tiny_models, monkeypatch):
    """Two forced tokens and one of the heads after them: each is counted as what it is."""
    model, plain = tiny_models(2)
    made = of_letters("((a|b)cc){9}")
    for plan in (HEADS, EACH):
        follow(monkeypatch, Listed([plan]))
        tokens, stats = ours(model, 16, made, 3, adaptive=True)
        assert tokens == reference(plain, PROMPT, 16, made)
        assert stats.grammar_accepted == stats.grammar_drafted > 0
        assert stats.drafted[2] > 0
        assert stats.grammar_drafted + sum(stats.drafted) == 3 * stats.cycles
        assert stats.tokens_per_cycle == 1 + (stats.grammar_accepted + sum(stats.accepted)) / stats.cycles


def test_waits_are_counted_and_needed_only_after_free_tokens(tiny_models, monkeypatch):
    model, _ = tiny_models(2)
    follow(monkeypatch, Listed([EACH]))
    stats = ours(model, 24, of_letters("(a|b|c){60}"), 3, adaptive=True, grammar_drafts=0)[1]
    assert stats.waits == (1 + 3) * stats.cycles
    stats = ours(model, 24, of_letters("a{60}"), 3, adaptive=True, grammar_drafts=3)[1]
    assert stats.grammar_drafted == 3 * stats.cycles
    assert stats.waits == (1 + 1) * stats.cycles


def member(constraint):
    """Return a sequence without tokens, of which up to seven drafts are forced."""
    history = SimpleNamespace(tokens=np.array([], np.int32))
    return SimpleNamespace(finished=False, history=history, picker=SimpleNamespace(matcher=constraint.matcher(0, 7)))


def test_forced_drafts_stay_prescribed_while_another_sequences_drafts_are_read(monkeypatch):
    """Also where the grammar allows other tokens, as those of another style."""
    first, free = (member(grammars.constraint(of_letters(pattern), 5)) for pattern in ("c(a|b)c", "(a|b|c)+"))
    monkeypatch.setattr(first.picker.matcher, "drafts", lambda most: [2, 1, 2][:most])
    masks = CycleMasks([first, free], 3, drafted=True)
    masks.begin()
    assert (masks.forced, masks.first_unknown) == ([3, 0], 0)
    masks.read([[2], [1]])
    prescribed, own = (grammars.allowed(row) for row in np.array(masks.allowed[1]))
    assert (prescribed, own) == ([1], [0, 1, 2, 3, grammars.END])
    assert grammars.allowed(np.array(masks.rows[0])[1]) == [0, 1]


def test_masks_of_other_drafts_than_the_prescribed_ones():
    """A drafter that ignores its masks: the rows' masks are those of what it drafts."""
    constraint = grammars.constraint(of_letters("abc(a|b)c(ab)?"), 5)
    for drafts in ([3, 2, 0], [3, 1, 0], [3, 2], [3, 2, 2], [1, 2, 0]):
        masks = CycleMasks([member(constraint)], 3, drafted=True)
        masks.begin()
        assert masks.forced == [2]
        assert grammars.allowed(np.array(masks.allowed[2, 0])) == [0, 1]
        fits = masks.read([drafts])
        right = next((i for i, token in enumerate(drafts) if token not in ([3], [2], [0, 1])[i]), len(drafts))
        assert (fits, masks.forced[0]) == (right, min(right, 2))
        for i in range(right + 1):
            assert (np.array(masks.rows[0])[i] == grammars.mask(constraint, drafts[:i])).all()


def test_counts_by_depth():
    each = [Accepted(3, 3, 2), Accepted(1, 3, 2), Accepted(1, 3), Accepted(0, 0)]
    counts = by_depth(each, 3)
    assert counts["forced"] == ((0.5, 0.5), (0.25, 0.5), (0, 0))
    assert counts["depths"] == ((0.5, 0.5), (0, 0.25), (0, 0))


def test_a_drafter_without_the_allowed_tokens(tiny_models, monkeypatch):
    """A head whose vocabulary lacks the forced token: its draft is wrong, and the text the same."""
    model, plain = tiny_models(2)
    real = HeadOutput.logits

    def without_c(self):
        return whole_rows(real(self)[:, :2], mx.arange(2), 5)

    monkeypatch.setattr(HeadOutput, "logits", without_c)
    made = of_letters("((a|b)cc){9}")
    for how in ("greedy", "seeded"):
        tokens, stats = ours(model, 12, made, 2, grammar_drafts=1, **SAMPLING[how])
        assert tokens == reference(plain, PROMPT, 12, made, **SAMPLING[how])
        assert stats.grammar_drafted < stats.cycles


@pytest.mark.parametrize(("p_min", "drafts"), [(0.999, False), (1e-6, True)])
def test_improbable_drafts_that_the_grammar_allows_are_not_verified(tiny_models, p_min, drafts):
    model, _ = tiny_models(2)
    stats = ours(model, 12, of_letters("(a|b|c){60}"), 3, grammar_drafts=0, draft_p_min=p_min)[1]
    assert (sum(stats.drafted) > 0) == drafts


@pytest.mark.parametrize(
    ("k", "forced", "k_after"), [(2, [2], None), (2, [3], 3), (0, [1], 1), (2, [4, 0], None), (2, [5, 0], 5)]
)
def test_a_fixed_plan_is_replaced_by_more_forced_drafts_only(k, forced, k_after):
    """By the longest, if there are more of them over all sequences: as many verify the drafter's own behind them."""
    planned = Plan("heads", k)
    assert redrafted(Fixed(k), planned, forced) == (Plan("grammar", k_after) if k_after else planned)


def test_heads_do_not_read_during_cycles_of_the_grammars_drafts(tiny_models, monkeypatch):
    """Not even after a cycle with their own drafts. The text stays."""
    (model, plain), found, frame = tiny_models(2), [], build.Frame
    monkeypatch.setattr(build, "Frame", lambda *parts: found.append(frame(*parts)) or found[-1])
    follow(monkeypatch, Listed([Plan("heads", 1)]))
    made = of_letters("((a|b|c){4}abcabc){9}")
    tokens, stats = ours(model, 20, made, 3, adaptive=True)
    assert tokens == reference(plain, PROMPT, 20, made)
    reads = {(each.plan.source, each.drafter is not None) for each in found if each.plan.k}
    assert reads == {("grammar", False), ("heads", True)}
    assert stats.grammar_drafted > 0
    assert sum(stats.drafted) > 0
