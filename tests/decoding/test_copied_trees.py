"""Trees of several copies, and of copies joined with a drafter's tree, against plain tries."""

import math
from types import SimpleNamespace

import copied_texts
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.decoding.drafters.lookup import BRANCHES, OTHER, UNFOLLOWED, Copied, Lookup
from mlx_mtp.decoding.history import TokenHistory
from mlx_mtp.decoding.run import Drafts, Run
from mlx_mtp.decoding.step import propose
from mlx_mtp.tuning.plan import SHORTEST, Plan

TOKENS = st.lists(st.sampled_from([0, 1, 2]), max_size=30)


def paths(drafts: Drafts, row: int = 0) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each node of a sequence's tree; parents must come first."""
    found: list[tuple[int, ...]] = [()]
    for i, (token, parent) in enumerate(zip(drafts.tokens[row].tolist(), drafts.parents[row].tolist(), strict=True)):
        assert 0 <= parent <= i
        found.append((*found[parent], token))
    return found[1:]


def votes(known: list[int], accepted: list[int], k: int) -> dict[tuple[int, ...], float]:
    """Return the chance of each path that copies propose. known: the host's tokens; accepted: the device's."""
    whole, tried = known + accepted, []
    for length, start in TokenHistory(known).matches(len(known)):
        text = [*whole]
        for _ in range(k):
            text.append(text[start - len(known)])
        follows = text[start : start + len(accepted)] == accepted
        tried.append((length + len(accepted), follows, text[len(whole) :]))
    some = any(follows for _, follows, _ in tried)
    copies = [(length if some else UNFOLLOWED, text) for length, follows, text in tried if follows or not some]
    chances = {(): 1.0}
    for _, text in copies:
        for depth in range(k):
            path, above = tuple(text[: depth + 1]), tuple(text[:depth])
            each = [(length + depth - 1, tuple(other)) for length, other in copies]
            mine = sum(vote for vote, other in each if other[: depth + 1] == path)
            chances[path] = chances[above] * mine / (sum(v for v, o in each if o[:depth] == above) + OTHER)
    return {path: chance for path, chance in chances.items() if path}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_tree_has_the_most_probable_paths_of_a_plain_trie(data):
    """Also where the tokens that only the device has continue some copies, or none."""
    run = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=SHORTEST, max_size=6))
    known = [token for _ in range(3) for token in (*data.draw(TOKENS), *run)]
    rows = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=5))
    last, k = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.integers(1, 15))
    expected = votes(known, rows[: last + 1], k)
    member = SimpleNamespace(history=TokenHistory(known), base=len(known) - 1)
    frame = SimpleNamespace(plan=Plan("lookup", k, tree=True), members=[member])
    drafts = Lookup(15).propose(frame, Run(None, mx.array([rows]), mx.array([last])), k)
    assert drafts.levels == drafts.k == k
    found = [*zip(paths(drafts), drafts.confidence[0].tolist(), strict=True)]
    proposed = {path: chance for path, chance in found if chance}
    assert len(proposed) == sum(chance > 0 for _, chance in found)  # equal paths are joined
    assert len(proposed) == min(k, len(expected))
    for path, chance in proposed.items():
        assert chance == pytest.approx(expected[path], rel=1e-4)
    if k <= BRANCHES:
        left = [chance for path, chance in expected.items() if path not in proposed]
        assert max(left, default=0) <= min(proposed.values()) * 1.0001
    assert len({path for path in proposed if not any(path == other[:-1] for other in proposed)}) <= BRANCHES


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2]), min_size=4, max_size=20), st.integers(1, 15))
def test_one_continuation_is_the_chain(text, k):
    """A text that only repeats itself, so that all copies continue alike."""
    known = [*range(3, 9), *text, *range(3, 9), *text, *range(3, 9), *text[:-1]]
    history, run = TokenHistory(known), (mx.array([text[-1], 1]), mx.array([0]))
    copies = history.matches(len(known))
    chain = Copied.of(history, len(known), copies[:1], *run, k).chain()
    tokens, chances, parents = (
        part[0].tolist() for part in Copied.of(history, len(known), copies[:1], *run, k).tree()
    )
    assert tokens == chain.tolist()
    assert parents == [*range(k)]
    assert all(0 < b < a for a, b in zip([1, *chances], chances, strict=False))


def test_sequences_have_their_own_trees():
    """With copies, a free slot, without copies, and with a copy that a picture follows."""
    pictured = [5, 6, 7, 7, -3, -3, -3, 8, 5, 6, 7]
    histories = [
        TokenHistory([1, 2, 3, 4, 9, 1, 2, 3, 7, 9, 1, 2]),
        TokenHistory([1, 2, 3, 4]),
        TokenHistory([max(token, 0) for token in pictured], pictured),
    ]
    members = [SimpleNamespace(history=h, base=len(h.tokens) - 1) for h in histories]
    members.insert(1, None)
    frame = SimpleNamespace(plan=Plan("lookup", 3, tree=True), members=members)
    run = Run(None, mx.array([[3, 0], [0, 0], [5, 5], [7, 7]]), mx.array([0, -1, 0, 0]))
    drafts = Lookup(15).propose(frame, run, 3)
    assert drafts.tokens.shape == drafts.parents.shape == drafts.confidence.shape == (4, 3)
    assert drafts.tokens[3].tolist() == [0, 0, 0]  # the picture's rows
    assert drafts.confidence[3].min() > 0
    for row in (1, 2):
        assert drafts.tokens[row].tolist() == drafts.confidence[row].tolist() == [0, 0, 0]
    for i, member in enumerate(members):
        frame.members, own = [member], Run(None, run.tokens[i : i + 1], run.accepted[i : i + 1])
        assert paths(Lookup(15).propose(frame, own, 3)) == paths(drafts, i)


def trie(rng: np.random.Generator, k: int) -> Drafts:
    """Return a random tree with path probabilities, some of them 0."""
    parents, chances = [], [1.0]
    for i in range(k):
        parents.append(int(rng.integers(0, i + 1)))
        chances.append(chances[parents[-1]] * float(rng.choice([0, 0.25, 0.5, 1.0], p=[0.1, 0.3, 0.3, 0.3])))
    tokens = mx.array(rng.integers(0, 2, (1, k)), mx.int32)
    return Drafts(tokens, mx.array([chances[1:]], mx.float32), parents=mx.array([parents], mx.int32), levels=k)


@pytest.mark.parametrize("seed", range(30))
def test_equal_paths_of_two_trees_are_joined(seed):
    rng = np.random.default_rng(seed)
    first, second = trie(rng, int(rng.integers(1, 9))), trie(rng, int(rng.integers(1, 9)))
    k = int(rng.integers(1, first.k + second.k + 1))
    expected: dict[tuple[int, ...], float] = {}
    for each in (first, second):
        for path, chance in zip(paths(each), each.confidence[0].tolist(), strict=True):
            expected[path] = max(expected.get(path, 0.0), chance)
    cache, drafter = SimpleNamespace(load=lambda *_: None), SimpleNamespace(propose=lambda *_: second)
    plan = SimpleNamespace(stem=True)
    frame = SimpleNamespace(cache=cache, base=0, asked=k, plan=plan, drafter=drafter)
    best = propose(frame, Run(None, mx.array([[0]]), None), None, first)
    pairs = zip(paths(best), best.confidence[0].tolist(), strict=True)
    found = dict(sorted(pairs, key=lambda pair: pair[1]))  # a path that is joined to another one has probability 0
    assert best.k == k
    assert best.levels >= max(map(len, found))
    chosen = sorted((chance for chance in found.values() if chance), reverse=True)
    wanted = sorted((chance for chance in expected.values() if chance), reverse=True)[:k]
    assert chosen == pytest.approx(wanted)
    assert all(math.isclose(expected[path], chance, rel_tol=1e-5) for path, chance in found.items() if chance)


@pytest.mark.parametrize("name", copied_texts.AMBIGUOUS)
def test_several_copies_give_more_tokens_a_pass_than_one(name):
    """Of the first 1,100 tokens of texts with ambiguous repeats: 1.15 times as many with 16 rows."""
    chain, tree = copied_texts.rates(copied_texts.AMBIGUOUS[name](), 16, tokens=1100)
    assert tree >= 1.15 * chain
