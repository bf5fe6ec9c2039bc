"""Run `verify-lossless` on a tiny model: it passes the correct product and finds planted faults."""

import math

import mlx.core as mx
import numpy as np
import pytest
import tiny
from mlx_lm.generate import StopSequences
from sweep import SWEEP, sampled

from mlx_mtp.cache.prompt_cache import PromptCache
from mlx_mtp.cache.ring import Ring
from mlx_mtp.decoding import pick, prefill, step
from mlx_mtp.lossless import check, prompts, rounding_judge
from mlx_mtp.lossless.check import CheckSettings, Verdict, conclude, verify
from mlx_mtp.lossless.compare import PLAIN, Comparison, Reference, Way, compare, compare_one_pass, drift, ways
from mlx_mtp.lossless.prompts import NamedPrompt, built_in, document, lengths
from mlx_mtp.lossless.rounding_judge import PASSES, OnePass
from mlx_mtp.lossless.wirings import Better

V, NEW = 5, 40
LONG = 60 if SWEEP else 36
SHORT = 28  # enough for the rings to wrap after the fixtures' prompts
FIXED = {"adaptive": False, "prompt_lookup": False}


class Letters:
    """A tokenizer of V tokens."""

    has_chat_template = False
    eos_token_ids = frozenset({V - 1})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % V for c in text][:24]

    def loop(self, tokens: list[int]) -> str:
        return "".join("abcde"[t] for t in tokens)


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(0)[0]


@pytest.fixture(scope="module")
def references(model):
    """References without drafts and without a fault; the rings of 40 slots wrap in all of them."""
    return [Reference(model, NamedPrompt("p", [1, 2, 3, 4, seed] * 5, stops=False), SHORT, ()) for seed in range(3)]


def found(references, way: Way) -> Comparison:
    """Return the differences up to the first text that diverges."""
    comparison = Comparison(way.name)
    for reference in references:
        if not comparison.diverged:
            compare(reference, way, comparison)
    return comparison


def all_ways():
    return ways(3, adaptive=True, p_min=0.5, lookup=True, compiled=False)


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def test_a_correct_product_passes(model, monkeypatch):
    texts = {"prose": prompts.BUILT_IN["texts"]["prose"]}
    monkeypatch.setattr(prompts, "BUILT_IN", {**prompts.BUILT_IN, "texts": texts})
    verdict = verify(model, Letters(), CheckSettings(3, max_tokens=4, draws=5, diagnose=False), quiet)
    names = ["one pass", "1 draft", "2 drafts", "3 drafts", "lookups", "p_min", "adaptive"]
    names += ["trees of 4 rows", "trees of 16 rows"]
    assert [c.way for c in verdict.greedy] == names
    assert [c.way for c in verdict.sampled] == [
        *("3 drafts, coupled", "3 drafts, greedy", "adaptive, coupled", "trees of 16 rows, coupled")
    ]
    texts = {c.prompts for c in verdict.greedy}
    assert texts == {len(built_in(model, Letters(), 4))}
    assert {c.tokens for c in verdict.greedy} == {verdict.greedy[0].tokens}
    assert not any(c.differences for c in (*verdict.greedy, *verdict.sampled))
    assert not verdict.diverged
    assert verdict.drift.share < 1
    assert [(f.mode, f.tokens) for f in verdict.fits] == [("coupled", 40)]
    assert len(verdict.agreement) == 3
    assert verdict.kept[0] >= verdict.kept[1]
    assert (verdict.dtype, verdict.broken) == ("float32", [])


def test_documents_wrap_the_rings(model):
    ring = Ring(8).slots
    assert lengths(model, 16) == {"up to window 8": ring - 8, "past window 8": 2 * ring - 8}
    for length in lengths(model, 16).values():
        assert len(document(Letters(), length)) == length
        assert length % ring != 0
        assert length // ring < (length + 16) // ring  # the new text continues past the last slot
    names = [p.name for p in built_in(model, Letters(), 16)]
    assert len(set(names)) == len(names) >= 6


@pytest.mark.parametrize("new", [1, 80, 160, 1000])
def test_documents_of_any_number_of_new_tokens_wrap_the_rings(model, new):
    ring, found = Ring(8).slots, lengths(model, new)
    assert 1 <= found["up to window 8"] <= ring <= found["up to window 8"] + new
    assert ring < found["past window 8"] <= 2 * ring <= found["past window 8"] + new


# Faults planted in the product, each with a way that must show it.


def accept_one_more(drafts, tokens):
    return mx.minimum(REAL_ACCEPT(drafts, tokens) + 1, drafts.shape[1])


REAL_ACCEPT, REAL_MASK, REAL_INDEX = step.accept, Ring.mask, Ring.index
REAL_ROLLBACK, REAL_PICK = PromptCache.rollback, step.pick
REAL_CHOICE = pick.choose_rows


def one_mask_less(ring, offset, rows, visible, start):
    mask = REAL_MASK(ring, offset, rows, visible, start)
    queries = offset + mx.arange(rows)[:, None]
    last = offset + (rows - 1)
    positions = last - (last - mx.arange(visible)[None]) % ring.slots
    return mask & (positions > queries - ring.window + 1)


def slots_too_few(ring, offset, rows):
    return ((offset + mx.arange(rows)) % (ring.slots - 1)).reshape(1, 1, rows, 1)


def rollback_of_one_less(cache, n):
    REAL_ROLLBACK(cache, mx.maximum(n - 1, 0))


def drawn_elsewhere(logits, options, keys, position, **more):
    return REAL_CHOICE(logits, options, keys, position + (logits.shape[1] > 1), **more)


GREEDY_PLANTS = {
    "accepts one draft too many": (step, "accept", accept_one_more),
    "accepts all drafts": (step, "accept", lambda drafts, tokens: mx.array([drafts.shape[1]])),
    "rolls nothing back": (PromptCache, "rollback", lambda cache, n: None),
    "rolls one row too few back": (PromptCache, "rollback", rollback_of_one_less),
    "a window one short": (Ring, "mask", one_mask_less),
    "a ring one slot short": (Ring, "index", slots_too_few),
}


@pytest.mark.parametrize("name", sampled([*GREEDY_PLANTS][:1], GREEDY_PLANTS))
def test_planted_divergences_are_found(references, monkeypatch, name):
    monkeypatch.setattr(*GREEDY_PLANTS[name])
    sure = ("2 drafts", "3 drafts", "lookups")
    comparisons = [found(references, way) for way in all_ways() if SWEEP or way.name in sure]
    shown = {c.way for c in comparisons if c.diverged}
    assert {*sure} <= shown
    verdict = Verdict("float32", greedy=comparisons)
    conclude(references[0].model, verdict)
    assert verdict.diverged
    assert all(way in verdict.broken[0] for way in shown)


def test_a_wrong_cache_changes_logprobs_before_tokens(references, monkeypatch):
    assert all(drift(reference, all_ways()[2]).share < 1 for reference in sampled(references[:1], references))
    monkeypatch.setattr(Ring, "mask", one_mask_less)
    verdict = Verdict("float32", drift=drift(references[0], all_ways()[2]))
    conclude(references[0].model, verdict)
    assert verdict.drift.share > 1000
    assert "what rounding explains" in verdict.broken[0]
    low = Verdict("bfloat16", drift=verdict.drift)
    conclude(references[0].model, low)
    assert (low.broken, len(low.warnings)) == ([], 1)


def test_an_output_past_its_stop_token_is_found(model, monkeypatch):
    reference = Reference(model, NamedPrompt("p", [1, 2, 3]), NEW, stops=())
    stop = reference.text[NEW // 2]
    reference = Reference(model, NamedPrompt("p", [1, 2, 3]), NEW, stops=(stop,))
    assert reference.text[-1] == stop
    assert not found([reference], all_ways()[2]).differences
    monkeypatch.setattr(StopSequences.Matcher, "advance", lambda *_: False)
    (difference,) = found([reference], all_ways()[2]).differences
    assert (difference.plain, difference.position, difference.near_tie) == (None, len(reference.text), False)


def test_wrong_plain_output_is_found(model, monkeypatch):
    """Plain decoding token by token is compared with one pass, too."""
    real = Ring.mask_of_one
    monkeypatch.setattr(Ring, "mask_of_one", lambda ring, positions, n: real(ring, positions[1:], n))
    comparison = Comparison("one pass")
    for seed in range(3):
        if not comparison.diverged:
            compare_one_pass(Reference(model, NamedPrompt("p", [1, 2, 3, 4, seed], stops=False), NEW, ()), comparison)
    assert comparison.diverged


@pytest.fixture(scope="module")
def drawn(model):
    plain = PLAIN.sampled(0.8, 3, "coupled")
    return [
        Reference(model, NamedPrompt("p", [1, 2, seed] * 9, stops=False), SHORT, (), plain)
        for seed in range(5 if SWEEP else 2)
    ]


@pytest.mark.parametrize("mode", sampled(["coupled"], ["coupled", "greedy"]))
def test_one_seed_gives_one_output(drawn, mode):
    for way in sampled(all_ways()[mode == "greedy" :: 3], all_ways()):
        assert not found(drawn, way.sampled(0.8, 3, mode)).differences


ELSEWHERE = "draws by another position's noise"


@pytest.mark.parametrize("plant", sampled([*[*GREEDY_PLANTS][1::4], ELSEWHERE], [*GREEDY_PLANTS, ELSEWHERE]))
def test_planted_divergences_of_sampled_output_are_found(drawn, monkeypatch, plant):
    """The judge includes the draw's noise, so a token that other noise would choose is not a near-tie."""
    monkeypatch.setattr(*GREEDY_PLANTS.get(plant, (pick, "choose_rows", drawn_elsewhere)))
    assert found(drawn, all_ways()[2].sampled(0.8, 3, "greedy")).diverged


# The judge.


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A model of six tokens in which 4 and 5 have the same logits up to rounding."""
    import mlx_mtp

    config = {**tiny.CONFIG, "vocab_size": 6}
    weights = tiny.random_weights(config, seed=1)
    weights["lm_head.weight"][5] = weights["lm_head.weight"][4] * (1 - 1e-7)
    return mlx_mtp.load_model(tiny.save(tmp_path_factory.mktemp("twins"), config, weights))


def other_twin(model, hidden, position, drafts, members, *masks):
    """Choose 5 instead of 4 in every cycle with drafts."""
    tokens, logprobs = REAL_PICK(model, hidden, position, drafts, members, *masks)
    return (tokens if drafts is None else mx.where(tokens == 4, 5, tokens)), logprobs


def test_the_comparison_continues_after_a_near_tie(twins, monkeypatch):
    texts = (Reference(twins, NamedPrompt("p", [1, 2, seed], stops=False), SHORT, ()) for seed in range(4, 10))
    reference = next(r for r in texts if r.text[1:].count(4) > 3)
    fours = [i for i, token in enumerate(reference.text) if token == 4 and i]
    monkeypatch.setattr(step, "pick", other_twin)
    comparison = found([reference], all_ways()[0])
    # The first token of a run is chosen without drafts.
    assert {d.position for d in comparison.differences} <= set(fours)
    assert len(comparison.differences) > 1
    assert all(d.near_tie and (d.plain, d.drafted) == (4, 5) for d in comparison.differences)
    assert all(d.judgement.gap < 1e-5 for d in comparison.differences)
    assert comparison.tokens == SHORT
    assert not comparison.diverged

    later = comparison.differences[1].position + 1

    def and_a_wrong_one(model, hidden, position, drafts, members, *masks):
        tokens, logprobs = other_twin(model, hidden, position, drafts, members, *masks)
        places = position + mx.arange(tokens.shape[1])
        return mx.where(places == len(reference.prompt.tokens) + later, (tokens + 1) % 4, tokens), logprobs

    for module in (step, prefill):
        monkeypatch.setattr(module, "pick", and_a_wrong_one)
    comparison = found([reference], all_ways()[0])
    assert [d.near_tie for d in comparison.differences] == [True, True, False]
    assert comparison.differences[-1].position == later
    assert comparison.diverged


def test_the_judge_measures_only_doubtful_positions(model, monkeypatch):
    tokens = [1, 2, 3, 4, 0, 1, 2, 2, 1]
    one_pass, passes = OnePass(model, tokens), []
    read = rounding_judge._read
    monkeypatch.setattr(rounding_judge, "_read", lambda *args: passes.append(args) or read(*args))
    row = one_pass.logits(6)
    best, second, *_, last = np.argsort(-row).tolist()
    judgement = one_pass.judge(6, (best, last))
    assert judgement.logits == (row[best], row[last])
    assert judgement.gap == pytest.approx(row[best] - row[last])
    assert len(passes) == PASSES
    assert one_pass.floor(6) <= judgement.tolerance < 1e-3 < judgement.gap
    # Neither token needs to be the best: the lower one is compared with the best.
    assert one_pass.judge(6, (second, last)).gap == pytest.approx(judgement.gap)
    noise = np.zeros(V, np.float32)
    noise[last] = judgement.gap
    assert one_pass.judge(6, (best, last), noise).gap < 1e-5
    assert type(model.model.embed_tokens).__call__(model.model.embed_tokens, mx.array([1])).shape == (1, 32)
    assert np.array_equal(OnePass(model, tokens).logits(6), row)  # the model is unchanged


@pytest.mark.parametrize("dtype", sampled([mx.float32, mx.bfloat16], [mx.float32, mx.float16, mx.bfloat16]))
def test_rounding_is_tolerated(tmp_path, dtype):
    """Other chunk sizes, or float32, change the two best logits by less than the tolerance."""
    import mlx_mtp

    config = {**tiny.CONFIG, "vocab_size": 32, "moe_layers_enum": "99"}
    weights = {name: w.astype(dtype) for name, w in tiny.random_weights(config, heads=0).items()}
    model = mlx_mtp.load_model(tiny.save(tmp_path, config, weights), mtp=False)
    tokens = np.random.default_rng(0).integers(0, 32, LONG).tolist()
    low = OnePass(model, tokens)
    assert low.dtype == dtype
    judged = []
    for position in range(1, LONG, 7):
        first, second = np.argsort(-low.logits(position))[:2].tolist()
        judged.append((position, first, second, low.judge(position, (first, second))))
    floors = [low.floor(position) for position, *_ in judged]
    model.set_dtype(mx.float32)
    high = OnePass(model, tokens)
    for position, first, second, judgement in judged:
        row = high.logits(position)
        moved = abs((row[first] - row[second]) - (judgement.logits[0] - judgement.logits[1]))
        assert moved <= 2 * judgement.tolerance
    scale = {mx.float32: 2.0**-24 * math.sqrt(32), mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}[dtype]
    assert all(5 * scale < floor < 300 * scale for floor in floors)


def test_faults_are_listed(model):
    verdict = Verdict("float32", agreement=[check.MIN_AGREEMENT / 2, 0.0])
    conclude(model, verdict)
    assert verdict.broken == [
        "the first head predicts the target's token in 1.0% of cases",
        "depth 2 predicts the target's token in 0.0% of cases",
    ]


@pytest.mark.parametrize(("share", "is_fault"), [(0.29, False), (0.3, True)])
def test_a_better_wiring_of_heads_that_are_rarely_right_is_a_warning(model, share, is_fault):
    """As on texts unlike those that the heads were trained on, where another wiring can be right more often."""
    verdict = Verdict("float32", agreement=[0.24, 0.2], better=[Better("enorm +1", [0.24, 0.2], [share, 0.2], 5.0)])
    conclude(model, verdict)
    found = f"wired or converted wrongly: right 24% / 20%, with enorm +1 {share:.0%} / 20%"
    assert verdict.broken == ([f"the heads are {found}"] if is_fault else [])
    assert verdict.warnings == (
        [] if is_fault else [f"the heads are perhaps {found}; both shares are too low to decide"]
    )
