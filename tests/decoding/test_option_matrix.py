"""All combinations of the options that change the speed give the same tokens, or the same distribution."""

import functools
import itertools

import mlx.core as mx
import pytest
import tiny
from draws import Draws, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Listed, follow
from sweep import SWEEP, sampled, sweep

import mlx_mtp
from mlx_mtp.decoding.clock import Clock
from mlx_mtp.decoding.policy import LOOKUP_DRAFTS
from mlx_mtp.decoding.sampling import Sampling
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.demo import demo_path
from mlx_mtp.tuning.plan import Plan

PROMPT = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1]  # whose continuation has occurred before
TEMPERATURES = [{}, {"temp": 0.4}, {"temp": 1.0, "top_k": 3}, {"temp": 0.8, "top_p": 0.9, "min_p": 0.05}]
SPEED = {
    "adaptive": [True, False],
    "num_draft_tokens": sampled([0, 1, 3], range(4)),
    "draft_p_min": [0.0, 0.5],
    "prompt_lookup": [True, False, None],
    "tree": sampled([None, 0, 8], [None, 0, 2, 4, 16]),
    "draft_sampling": ["greedy", "coupled"],
}
TEXT = {
    "kv_bits": sampled([None, 4], [None, 4, 8]),
    "sampling": range(len(TEMPERATURES)),
    "draft_vocab": [False, True],
}


def allowed(case: dict) -> bool:
    """Return whether a combination is valid: prompt lookup needs drafts."""
    return not (case["prompt_lookup"] and case["num_draft_tokens"] == 0)


def pairs_of(options: dict) -> list[dict]:
    """Return a few combinations in which every two values of different options occur together."""
    names = list(options)
    product = [dict(zip(names, values, strict=True)) for values in itertools.product(*options.values())]
    product = [case for case in product if allowed(case)]
    meet = {frozenset(pair) for case in product for pair in itertools.combinations(case.items(), 2)}
    chosen = []
    while meet:
        new = [{frozenset(pair) for pair in itertools.combinations(case.items(), 2)} & meet for case in product[::7]]
        best = max(range(len(new)), key=lambda i: len(new[i]))
        if not new[best]:
            return chosen + [next(c for c in product if pair <= set(c.items())) for pair in meet]
        chosen.append(product[::7][best])
        meet -= new[best]
    return chosen


class Subjects:
    """Models with and without a reduced draft vocabulary, and their texts without any drafts."""

    def __init__(self, path):
        config = {**tiny.CONFIG, "head_dim": 32, "vocab_size": 5}
        directory = tiny.save(path, config, tiny.random_weights(config, seed=2))
        lists = {False: None, True: [0, 1, 3]}
        self.models = {reduced: mlx_mtp.load_model(directory, draft_vocab=lists[reduced]) for reduced in lists}
        self.plain = functools.cache(self._plain)

    def _plain(self, kv_bits: int | None, sampling: int) -> list[int]:
        return self.text(
            {"kv_bits": kv_bits, "sampling": sampling, "draft_vocab": False, "num_draft_tokens": 0}, Stats()
        )

    def text(self, case: dict, stats: Stats, n: int = 14 if SWEEP else 8) -> list[int]:
        options = {
            **case,
            **TEMPERATURES[case["sampling"]],
            "kv_group_size": 32,
            "quantized_kv_start": 0,
            "seed": 5,
            "max_tokens": n,
        }
        model = self.models[options.pop("draft_vocab")]
        del options["sampling"]
        tokens, _, drafted = zip(*mlx_mtp.generate_step(PROMPT, model, stats=stats, **options), strict=True)
        assert drafted.count(False) - 1 in (stats.cycles, stats.cycles - 1)  # the last cycle may have been cut
        assert not drafted[0]
        return [*tokens]

    def assert_same(self, case: dict) -> Stats:
        expected, stats = self.plain(case["kv_bits"], case["sampling"]), Stats()
        assert self.text(case, stats) == expected, case
        assert 0 < stats.wait_time <= stats.decode_time
        assert_adds_up(stats, case)
        return stats


def assert_adds_up(stats: Stats, case: dict) -> None:
    cycles, drafted = stats.cycles, [*stats.drafted, 0]
    assert sum(stats.lengths.values()) == cycles
    assert sum(k * n for k, n in stats.lengths.items()) == stats.every_draft[0]
    assert drafted == sorted(drafted, reverse=True)
    assert all(a <= d for a, d in zip(stats.accepted, stats.drafted, strict=True))
    assert stats.accepted == sorted(stats.accepted, reverse=True)
    assert stats.lookup_accepted <= stats.lookup_drafted
    assert stats.tree_accepted <= stats.tree_drafted
    assert stats.lookups + stats.trees + drafted[0] <= cycles <= stats.waits <= 2 * cycles
    assert (stats.waits == cycles) or case["draft_p_min"]
    assert 0 <= cycles + stats.every_draft[1] - (stats.generation_tokens - 1) <= LOOKUP_DRAFTS
    assert stats.built_late == {}
    if not case["adaptive"] and case["num_draft_tokens"] and case.get("tree"):
        assert (stats.trees, stats.waits) == (cycles - stats.lookups, cycles)
    elif not case["adaptive"] and case["num_draft_tokens"]:
        assert stats.waits == 2 * cycles - stats.lookups if case["draft_p_min"] else stats.waits == cycles
        assert drafted[0] == cycles - stats.lookups or case["draft_p_min"]
    if case["prompt_lookup"] is False or (case["prompt_lookup"] is None and not case["adaptive"]):
        assert stats.lookups == 0


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return Subjects(tmp_path_factory.mktemp("matrix"))


def test_pairs_of_options(subjects):
    for case in pairs_of(SPEED | TEXT):
        subjects.assert_same(case)


@sweep
@settings(max_examples=40, deadline=None, derandomize=True)
@given(case=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in (SPEED | TEXT).items()}))
def test_all_options(subjects, case):
    if allowed(case):
        subjects.assert_same(case)


@pytest.mark.parametrize("sampling", range(len(TEMPERATURES)))
def test_lookups_are_made_and_kept(subjects, sampling):
    """The tests above need lookups that find a match."""
    case = {"kv_bits": None, "sampling": sampling, "draft_vocab": False, "prompt_lookup": True, "adaptive": False}
    stats = subjects.assert_same({**case, "num_draft_tokens": 1, "draft_p_min": 0.0, "draft_sampling": "coupled"})
    assert stats.lookups > 0
    assert stats.lookup_drafted == LOOKUP_DRAFTS * stats.lookups
    assert stats.lookup_accepted > 0
    assert stats.drafted[0] > 0


HEADS, LOOKUP, SURE = Plan("heads", 1), Plan("lookup", 1), Plan("heads", 1, p_min=True)
LOOPS = {
    "lookup": [LOOKUP],
    "lookup behind heads": [HEADS, LOOKUP],
    "sure": [SURE],
    "all": [Plan("heads", 2), LOOKUP, Plan(), Plan("heads", 2, p_min=True)],
}


@pytest.mark.parametrize("case", ["lookup", "sure", pytest.param("lookup behind heads", marks=sweep)])
def test_draws_between_lookups_and_cuts(tiny_models, monkeypatch, case):
    """All paths of draws: a looked-up draft is a point mass, and a draft that is not verified has no effect."""
    model, plain = tiny_models(4, vocab_size=3 if case == "sure" else 2)
    options, prompt, n = {"temp": 0.9}, [1, 0, 1, 1, 0, 1, 1, 0], 3 if case != "sure" else 2
    draws, found, verified = Draws(), {}, set()
    draws.stand_in(monkeypatch)

    def run():
        control = Listed(LOOPS[case])
        follow(monkeypatch, control)
        own = {"draft_p_min": 0.45, "prompt_lookup": True, "num_draft_tokens": 1}
        # A processor keeps cycles from being built that are never used.
        own |= {"logits_processors": [lambda tokens, logits: logits], "max_tokens": n}
        text = tuple(token for token, _, _ in mlx_mtp.generate_step(prompt, model, **own, **options))
        verified.update((c.plan.source, c.verified) for c in control.cycles)
        return text

    for text, p in draws.paths(run):
        found[text] = found.get(text, 0.0) + p
    for text, p in reference(plain, prompt, n, Sampling(**options), []).items():
        assert found.get(text, 0.0) == pytest.approx(p, abs=1e-6), text
    assert verified >= {"lookup": {("lookup", 1)}, "sure": {("heads", 0), ("heads", 1)}}.get(case, set())


TOKENS = 40 if SWEEP else 20


@pytest.fixture(scope="module")
def demo():
    model, tokenizer = mlx_mtp.load(demo_path())
    model.set_dtype(mx.float32)
    prompt = tokenizer.encode("def read_lines(path):\n    def read_lines(path):\n")
    return (
        model,
        prompt,
        [t for t, _, _ in mlx_mtp.generate_step(prompt, model, max_tokens=TOKENS, num_draft_tokens=0)],
    )


TRACES = st.lists(st.one_of(st.none(), st.floats(1e-5, 1.0), st.sampled_from([1e-9, 1e3])), min_size=1, max_size=12)


@settings(max_examples=2, deadline=None, derandomize=True)
@given(trace=TRACES, p_min=st.sampled_from([0.0, 0.6]), k=st.integers(1, 3))
def test_adaptive_whatever_the_clock_says(demo, trace, p_min, k):
    assert_any_clock(demo, trace, p_min, k)


@sweep
@settings(max_examples=12, deadline=None)
@given(trace=TRACES, p_min=st.sampled_from([0.0, 0.3, 0.9]), k=st.integers(1, 3))
def test_adaptive_whatever_the_clock_says_at_length(demo, trace, p_min, k):
    assert_any_clock(demo, trace, p_min, k)


def assert_any_clock(demo, trace, p_min: float, k: int) -> None:
    """With random or missing seconds the plans change, but not the tokens."""
    model, prompt, truth = demo
    seconds, real, stats = itertools.cycle(trace), Clock.arrived, Stats()
    options = {"max_tokens": TOKENS, "num_draft_tokens": k, "draft_p_min": p_min, "stats": stats}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "arrived", lambda *args, **how: (real(*args, **how), next(seconds))[1])
        assert [token for token, _, _ in mlx_mtp.generate_step(prompt, model, **options)] == truth
    assert sum(stats.lengths.values()) == stats.cycles
