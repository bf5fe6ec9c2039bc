"""Masks of trees are those after each row's path, and text with trees under grammars is that without drafts."""

import random
from types import SimpleNamespace

import grammars
import mlx.core as mx
import numpy as np
import pytest
from masked import PROMPT, SAMPLING, of_letters, ours, reference
from plans import Listed, follow
from sweep import sampled
from tree_drafts import TreeDrafts

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.decoding.control import Controls
from mlx_mtp.decoding.cycle_masks import CycleMasks
from mlx_mtp.decoding.run import NO_DRAFTS
from mlx_mtp.grammar.gate import Gate
from mlx_mtp.tuning.plan import Plan

PATTERNS = ["(a|b|c)+", "((a|b)abcabc){9}", "(cab{1,3}|aa|bc)*", "c(a|bb)c{2,3}"]
TREES = [Plan("lookup", 7, tree=True), Plan("grammar", 5, tree=True), Plan("heads", 7, tree=True)]
STEM = Plan("heads", 5, tree=True, stem=True)
RECORD = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["function", "class", "module"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def _own(recorded_at_once, own_cache):
    """Separate costs, and recording at the first occurrence."""


class WithChances(TreeDrafts):
    """Random trees with path probabilities, which a grammar does not mask."""

    def propose(self, frame, run, k):
        drafts = super().propose(frame, run, k)
        return drafts if not k else drafts._replace(confidence=mx.full(drafts.tokens.shape, 0.3))


def member(constraint, most=0):
    history = SimpleNamespace(tokens=np.array([], np.int32))
    return SimpleNamespace(
        finished=False, history=history, picker=SimpleNamespace(matcher=constraint.matcher(0, most))
    )


def grown(rng, constraint, answer, k):
    """Return the tokens and parents of a random tree, most of them allowed, with duplicates and forbidden nodes."""
    tokens, parents, paths = [], [], [[]]
    for _ in range(k):
        parents.append(rng.randrange(len(paths)))
        allowed = (
            grammars.allowed(grammars.mask(constraint, [*answer, *paths[parents[-1]]]))
            if fits(constraint, [*answer, *paths[parents[-1]]])
            else []
        )
        tokens.append(rng.choice(allowed) if allowed and rng.random() < 0.8 else rng.randrange(5))
        paths.append([*paths[parents[-1]], tokens[-1]])
    return tokens, parents, paths


def fits(constraint, answer):
    """Return whether a grammar allows an answer, in which nothing follows an end of text."""
    return grammars.END not in answer and all(
        token in grammars.allowed(grammars.mask(constraint, answer[:i])) for i, token in enumerate(answer)
    )


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("gate", [None, Gate(instead=("ab",))])
def test_each_rows_mask_is_that_of_a_new_matcher_behind_its_path(drafted, gate):
    """Of several sequences, one without a grammar; rows that cannot be reached keep any mask."""
    rng, reached = random.Random(3), 0
    constraints = [grammars.constraint(of_letters(pattern), 5) for pattern in PATTERNS]
    if gate:
        constraints[0] = constraints[0].behind(gate)
    for _ in range(15):
        members = [*(member(constraint, 4) for constraint in constraints), None]
        k = rng.randint(1, 15)
        masks = CycleMasks(members, k, drafted=drafted, tree=True)
        trees = [grown(rng, constraint, [], k) for constraint in constraints]
        masks.begin()
        stems = [[*forced] for forced in masks._known]
        masks.read([*([*tokens, *parents] for tokens, parents, _ in trees), [0] * 2 * k])
        rows = np.array(masks.rows)
        assert (rows[-1] == -1).all()
        for i, (constraint, (_, _, paths)) in enumerate(zip(constraints, trees, strict=True)):
            for row, path in enumerate(paths):
                if fits(constraint, path):
                    reached += row > 0
                    assert (rows[i, row] == grammars.mask(constraint, path)).all(), (path, row)
            on_stem = [n for n in range(len(stems[i]) + 1) if stems[i][:n] in paths]
            assert masks.forced[i] == max(on_stem)
    assert reached > 200


def test_a_stem_is_prescribed_and_its_masks_are_kept():
    constraint = grammars.constraint(of_letters("abc(a|b)c(ab)?"), 5)
    masks = CycleMasks([member(constraint, 7)], 4, drafted=True, tree=True)
    masks.begin()
    assert masks.forced == [2]
    assert [grammars.allowed(row) for row in np.array(masks.allowed[:, 0])[:3]] == [[3], [2], [0, 1]]
    masks.read([[3, 2, 0, 1, 0, 1, 2, 2]])
    assert masks.forced == [2]
    expected = [grammars.mask(constraint, path) for path in ([], [3], [3, 2], [3, 2, 0], [3, 2, 1])]
    assert (np.array(masks.rows[0]) == np.array(expected)).all()


def test_branches_are_choices_followed_by_what_they_force():
    constraint, tokenizer = grammars.constraint(grammar.json_schema(RECORD)), grammars.demo_tokenizer()
    found = constraint.matcher(most=15)
    found.follow(tokenizer.encode('{"ok":true,"kind":"', add_special_tokens=False))
    paths = [[]]
    for token, parent, _ in found.tree(15):
        paths.append([*paths[parent], token])
    texts = {tokenizer.decode(path) for path in paths}
    assert {f'{word}"}}' for word in ("function", "class", "module")} <= texts


@pytest.mark.parametrize(
    "made",
    [
        grammar.json_schema(RECORD),
        grammar.json_schema(RECORD, whitespace=4),
        grammar.regex("((red|green|blue)[0-9 ](yes|no)\n){2,9}"),
    ],
)
def test_proposed_trees_are_allowed_and_contain_the_forced_tokens(made):
    """At each place of a random walk: parents first, siblings differ, and no path is likelier than its parent's."""
    constraint, rng, branched = grammars.constraint(made), random.Random(1), 0
    used, masks, answer = constraint.matcher(most=15), np.empty((1, constraint.words), np.int32), []
    for _ in range(40):
        used.follow(answer)
        used.fill(masks)
        most = rng.choice([1, 3, 7, 15])
        tree, paths = used.tree(most), [[]]
        assert len(tree) <= most
        for i, (token, parent, chance) in enumerate(tree):
            assert 0 <= parent <= i
            assert 0 < chance <= (tree[parent - 1].probability if parent else 1)
            paths.append([*paths[parent], token])
        assert len({(*path,) for path in paths}) == len(paths)
        forced = constraint.matcher()
        forced.follow(answer)
        forced = forced._parser.deep_copy().compute_ff_tokens()[:most]
        assert forced in paths
        for path in paths[1:]:
            assert path[-1] in grammars.allowed(grammars.mask(constraint, [*answer, *path[:-1]]))
        branched += len({each.parent for each in tree}) < len(tree)
        possible = [t for t in grammars.allowed(masks[0]) if t not in constraint.eos]
        likely = [path for path in paths[1:] if not {*path} & {*constraint.eos}]
        answer = [*answer, *(rng.choice(likely) if likely and rng.random() < 0.6 else [rng.choice(possible or [0])])]
        if not possible:
            used.restart()
            answer = []
    assert branched > 2


CASES = [(pattern, how, replay) for pattern in PATTERNS for how in SAMPLING for replay in (False, True)]


@pytest.mark.parametrize(("pattern", "how", "replay"), sampled([*CASES[::5]], CASES))
def test_text_with_trees_is_that_of_plain_masked_decoding(tiny_models, monkeypatch, pattern, how, replay):
    """Trees of copies, of the grammar, of a toy drafter in the step and before it, with a stem, and chains."""
    model, plain = tiny_models(2)
    made, n = of_letters(pattern), 30
    expected = reference(plain, PROMPT, n, made, **SAMPLING[how])
    for in_step in (True, False):
        drafter = WithChances().grow(model, [[*PROMPT, *expected]], 5, 0.8, in_step=in_step)
        monkeypatch.setattr(model, "drafter", drafter, raising=False)
        plans = [*TREES, *([STEM] if in_step else []), Plan("lookup", 3), Plan(), TREES[0], TREES[2]]
        follow(monkeypatch, Listed(plans))
        options = {"adaptive": True, "prompt_lookup": True, "compile_cycles": replay, "grammar_drafts": 0}
        tokens, stats = ours(model, n, made, 15, **options, **SAMPLING[how])
        assert tokens == expected
        assert stats.waits <= 2 * stats.cycles
        assert stats.cycles < len(tokens)
        assert not replay or not in_step or stats.compiled_cycles
    monkeypatch.delattr(model, "drafter")


@pytest.mark.parametrize("replay", [False, True])
def test_sequences_of_a_batch_have_trees_under_their_own_grammars(tiny_models, monkeypatch, replay):
    model, _ = tiny_models(2)
    each = [of_letters(PATTERNS[1]), None, of_letters(PATTERNS[0])]
    prompts = [PROMPT, [2, 2, 1, 3, 0, 1, 2, 0], [3, 1]]
    expected = [ours(model, 14, made, 0, prompt)[0] for made, prompt in zip(each, prompts, strict=True)]
    drafter = WithChances().grow(model, [[*PROMPT, *expected[0]]], 1, in_step=True)
    monkeypatch.setattr(model, "drafter", drafter, raising=False)
    control = Listed([*TREES, STEM])
    monkeypatch.setattr(Controls, "control", lambda *_: control)
    batch = mlx_mtp.BatchGenerator(model, max_tokens=14, num_draft_tokens=7, compile_cycles=replay)
    uids, tokens = batch.insert(prompts, grammars=each), {}
    while responses := batch.next_generated():
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
    assert [tokens[uid] for uid in uids] == expected
    assert drafter.drafted
    monkeypatch.delattr(model, "drafter")


def test_an_error_of_a_grammar_ends_an_answer_with_trees(tiny_models, monkeypatch):
    model, plain = tiny_models(2)
    real = grammar.Matcher.fill_tree

    def fill_tree(self, *how):
        if self.size >= 7:
            raise grammar.GrammarError("grammar: too complex")
        real(self, *how)

    monkeypatch.setattr(grammar.Matcher, "fill_tree", fill_tree)
    follow(monkeypatch, Listed([TREES[0]]))
    tokens = []
    steps = mlx_mtp.generate_step(PROMPT, model, grammar=of_letters(PATTERNS[0]), prompt_lookup=True, max_tokens=30)
    with pytest.raises(grammar.GrammarError, match="too complex"):
        tokens += (token for token, *_ in steps)
    assert len(tokens) >= 7
    assert tokens == reference(plain, PROMPT, len(tokens), of_letters(PATTERNS[0]))


def test_a_tree_is_neither_cut_nor_masked_draft_by_draft(tiny_models, monkeypatch):
    model, _ = tiny_models(2)
    for how in ({"p_min": True}, {"stepwise": True}):
        follow(monkeypatch, Listed([Plan("heads", 3, tree=True, **how)]))
        with pytest.raises(AssertionError, match="only chains"):
            ours(model, 12, of_letters("(a|b|c)+"), 3, adaptive=True)
    with pytest.raises(AssertionError, match="paths"):
        NO_DRAFTS._replace(parents=mx.zeros((1, 1), mx.int32)).sure(0.5)
