"""Sequences of a batch with their own limits of drafts, independent of the generator's limit."""

import itertools

import families
import mlx.core as mx
import pytest
from sweep import sampled

import mlx_mtp
from mlx_mtp.batch.generator import BatchGenerator
from mlx_mtp.decoding.driver import Driver
from mlx_mtp.decoding.options import draft_count

PROMPTS = [[1, 2, 3, 0, 2, 4], [2, 2, 1], [3, 0, 1, 2, 2, 1, 0], [4, 1], [0, 1, 2, 3]]
NAMES = ["three heads", "one head"]


@pytest.fixture(scope="module")
def model_of(tiny_models, tmp_path_factory):
    """Return models by name: one with three chained heads, one with a recycled head for up to seven drafts."""
    one = mlx_mtp.load_model(families.build("mimo", tmp_path_factory.mktemp("mimo"))[0])
    return {"three heads": tiny_models(0)[0], "one head": one}.get


def tokens_of(batch, uids) -> list[list[int]]:
    found = {uid: [] for uid in uids}
    while responses := batch.next_generated():
        for r in responses:
            found[r.uid].append(r.token)
    return [found[uid] for uid in uids]


@pytest.mark.parametrize(
    ("name", "default", "adaptive"),
    sampled(
        [("three heads", 0, False), ("one head", 1, True), ("three heads", None, True), ("one head", None, False)],
        itertools.product(NAMES, [0, 1, 2, "most", None], [False, True]),
    ),
)
def test_each_sequence_has_its_own_limit(model_of, name, default, adaptive):
    """With others and alone: tokens of plain decoding, counts per depth, and their sum in the generator's stats."""
    model = model_of(name)
    most = model.max_draft_tokens
    default = most if default == "most" else default
    alone = [[t for t, *_ in mlx_mtp.generate_step(p, model, max_tokens=10, num_draft_tokens=0)] for p in PROMPTS]
    for limits in sampled([[0, 1, None, most, most]], [[0, 1, None, most, most], [most, 0], [0, 1], [most], [None]]):
        whole, each = mlx_mtp.Stats(), [mlx_mtp.Stats() for _ in limits]
        batch = BatchGenerator(model, num_draft_tokens=default, adaptive=adaptive, stats=whole)
        n = len(limits)
        uids = batch.insert(PROMPTS[:n], [10] * n, num_draft_tokens=limits, stats=each)
        assert tokens_of(batch, uids) == alone[:n]
        batch.close()
        own = draft_count(default, model, None)
        expected = [own if limit is None else limit for limit in limits]
        assert [s.num_draft_tokens for s in each] == [len(s.drafted) for s in each] == expected
        assert all(len(s.accepted) == len(s.drafted) == len(s.by_depth) for s in (whole, *each))
        for depth in range(most):
            for kind in ("drafted", "accepted"):
                counted = [getattr(s, kind)[depth : depth + 1] for s in each]
                assert getattr(whole, kind)[depth : depth + 1] in ([sum(map(sum, counted))], [])
        assert whole.cycles == sum(s.cycles for s in each)
        assert whole.num_draft_tokens == len(whole.drafted) == max(own, *expected)
        if not adaptive:
            assert all(s.drafted[limit - 1] > 0 for s, limit in zip(each, expected, strict=True) if limit)


def test_a_lone_sequence_may_draft_more_than_the_generator(model_of):
    """The smallest case: one prompt, three drafts, a generator of one."""
    stats = mlx_mtp.Stats()
    batch = BatchGenerator(model_of("three heads"), num_draft_tokens=1, adaptive=False)
    uids = batch.insert(PROMPTS[:1], [12], num_draft_tokens=[3], stats=[stats])
    alone = mlx_mtp.generate_step(PROMPTS[0], model_of("three heads"), max_tokens=12, num_draft_tokens=0)
    assert tokens_of(batch, uids) == [[t for t, *_ in alone]]
    assert stats.drafted[2] > 0


def test_a_cache_with_fewer_heads_lowers_the_default_only(model_of):
    """As for `generate_step`: None means the cache's heads, a larger number is refused."""
    model = model_of("three heads")
    batch, stats = BatchGenerator(model, adaptive=False), mlx_mtp.Stats()
    cache = mlx_mtp.make_prompt_cache(model, num_draft_tokens=1)
    uids = batch.insert(PROMPTS[:1], [12], [cache], stats=[stats])
    alone = mlx_mtp.generate_step(PROMPTS[0], model, max_tokens=12, num_draft_tokens=0)
    assert tokens_of(batch, uids) == [[t for t, *_ in alone]]
    assert stats.num_draft_tokens == 1 == len(stats.drafted)
    with pytest.raises(ValueError, match=r"^num_draft_tokens=2: allowed is 0 to 1 .* of prompt_cache"):
        batch.insert(PROMPTS[:1], [12], [cache], num_draft_tokens=[2])


def test_lookups_follow_the_sequences_own_limit(model_of, monkeypatch):
    """A drafting sequence uses lookups also in a generator without drafts, a plain one never."""
    join, lookups = Driver.join, []
    monkeypatch.setattr(Driver, "join", lambda d, s, run: lookups.append(s.max_lookup) or join(d, s, run))
    model = model_of("three heads")
    for default, limit in ((0, 2), (2, 0), (0, None)):
        batch = BatchGenerator(model, num_draft_tokens=default, prompt_lookup=True if limit == 2 else None)
        tokens_of(batch, batch.insert(PROMPTS[:1], [4], num_draft_tokens=[limit]))
    assert [most > 0 for most in lookups] == [True, False, False]
    with pytest.raises(ValueError, match=r"^prompt_lookup=True: not with num_draft_tokens=0"):
        BatchGenerator(model, num_draft_tokens=0, prompt_lookup=True).insert(PROMPTS[:1])


@pytest.mark.parametrize("default", [0, 1, None])
@pytest.mark.parametrize("name", NAMES)
def test_limits_that_are_refused(model_of, name, default):
    """Numbers above the model's and other types are refused, and nothing is queued."""
    model, n = model_of(name), len(PROMPTS)
    batch = BatchGenerator(model, num_draft_tokens=default)
    for limit in (model.max_draft_tokens + 1, 99, -1, True, 1.0, "1", mx.array(1)):
        with pytest.raises(ValueError, match=r"^num_draft_tokens=.*: allowed is 0 to"):
            batch.insert(PROMPTS, num_draft_tokens=[*[1] * (n - 1), limit])
    for limits in (2, 0, "2"):
        with pytest.raises(ValueError, match=rf"^num_draft_tokens={limits!r}: expected a list"):
            batch.insert(PROMPTS, num_draft_tokens=limits)
    assert batch.next() == ([], [])


def test_stats_given_twice_are_refused(model_of):
    one, other = mlx_mtp.Stats(), mlx_mtp.Stats()
    batch = BatchGenerator(model_of("three heads"), stats=one)
    for stats in ([one, other], [other, other]):
        with pytest.raises(ValueError, match=r"^stats: one Stats is given for two prompts"):
            batch.insert(PROMPTS[:2], stats=stats)
    assert batch.next() == ([], [])
