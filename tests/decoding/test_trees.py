"""Trees of drafts, right or wrong in any place: the text and the caches are those of plain decoding, bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace

import families
import lora
import mlx.core as mx
import numpy as np
import pytest
from draws import Draws, reference
from mlx_lm.sample_utils import make_sampler
from picture_prompts import A, C, generated, pictured, tokens_of
from plans import Listed
from subjects import PROMPT, quantizable_model, subjects
from sweep import sampled
from tree_drafts import TreeDrafts, TreeHeads, TreeScript, assert_equal, decoded, drafted_by

import mlx_mtp
from mlx_mtp.cache.tree import RowTree
from mlx_mtp.decoding.accept import Passed, accept_path
from mlx_mtp.decoding.logit_rules import LogitRules, changed
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.pick import pick
from mlx_mtp.decoding.run import NO_DRAFTS, Drafts
from mlx_mtp.decoding.sampling import Picker, Sampling, random_key
from mlx_mtp.serve.token_rules import bad_words_of
from mlx_mtp.tuning.plan import Plan

N = 24
EVERY = ["step3p5", "eagle", *families.FAMILIES]
NAMES = ["step3p5", "nemotron_h_latent", "glm_moe_dsa_shared"]
PLAIN = {"num_draft_tokens": 0}
SORTS = {("heads", True), ("heads", False), ("lookup", False)}
DRAFTED = {"num_draft_tokens": 15, "prompt_lookup": True}


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


def trees(model, text, seed, kind=TreeDrafts, **how):
    """Return a block in which random trees with parts of this text are drafted, and its control."""
    control, own = TreeScript(seed), kind.__new__(kind)
    own.__init__(model) if kind is TreeHeads else None
    return drafted_by(model, own.grow(model, [text], seed, **how), control), control, own


@pytest.mark.parametrize("seed", sampled([1], range(8)))
@pytest.mark.parametrize("name", sampled(NAMES, EVERY))
def test_every_end_leaves_the_caches_of_plain_decoding(subject, name, seed, tmp_path):
    """At every number of tokens the generation ends by itself, is closed, or stops at a token; then it continues."""
    model = subject(name).model
    text, _ = decoded(model, PROMPT, N, **PLAIN)
    block, control, drafter = trees(model, PROMPT + text, seed)
    with block:
        for n in sampled([5, 12], range(1, N - 1)):
            _, plain = decoded(model, PROMPT, n, **PLAIN)
            stop = {"stop_tokens": [text[n - 1]]} if text[n - 1] not in text[: n - 1] else {"max_tokens": n}
            for how in ({"max_tokens": n}, {"close": n}, stop):
                options = {**DRAFTED, **how}
                tokens, cache = decoded(model, PROMPT, options.pop("max_tokens", N), **options)
                assert tokens == text[:n]
                assert_equal(cache, plain)
            if n % 3 == 0:
                mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
                cache = mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)
                assert_equal(cache, plain)
            more, _ = decoded(model, text[n - 1 : n], N - n, cache, **DRAFTED)
            assert more == text[n:]
            again, _ = decoded(model, text[n - 1 : n], N - n, plain, **DRAFTED)
            assert again == text[n:]
    assert any(c.plan.tree and c.accepted > 1 for c in control.cycles)
    assert {(c.plan.source, c.plan.tree) for c in control.cycles if c.plan.k} == SORTS
    assert len(drafter.drafted) > 20


class Pieces:
    """A byte-level tokenizer of 13 tokens."""

    added_tokens_decoder = MappingProxyType({})
    pieces = ("a", "b", "ab", "ba", "aa", "bb", "aba", "c", "bc", "cb", "ca", "abc", "bca")

    def __len__(self):
        return len(self.pieces)

    def convert_ids_to_tokens(self, ids):
        return [self.pieces[i] for i in ids]


HOT = {"temp": 1.5, "seed": 7}
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2}
SIZES = {"repetition_context_size": 7, "presence_context_size": 0, "frequency_context_size": 3}
RULES = {
    "penalties": {**PENALTIES, **SIZES},
    "bias": {"logit_bias": {1: -2.0, 3: 1.5}},
    "banned": {"banned": {2, 4}, "early": {0, 1, 3}, "until": len(PROMPT) + 9},
    "words": {"bad_words": bad_words_of(Pieces(), ("aab", "bab", "cabc")), "prompt": len(PROMPT)},
}
OPTIONS = {
    "seed": HOT,
    "filters": {**HOT, "top_k": 9, "top_p": 0.9, "min_p": 0.03},
    "xtc": {**HOT, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    "sampler": {"sampler": make_sampler(temp=1.2, top_p=0.9), "seed": 5},
    "logprobs": {"logprobs": True},
    "drawn logprobs": {**HOT, "logprobs": True},
    "greedy penalties": {"logits_processors": [LogitRules(**PENALTIES, **SIZES)]},
    **{name: {**HOT, "logits_processors": [LogitRules(**rules)]} for name, rules in RULES.items()},
    "every rule": {**HOT, "logits_processors": [LogitRules(**{k: v for r in RULES.values() for k, v in r.items()})]},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(subject, option):
    model, options = subject("mimo").model, {**OPTIONS[option]}
    for seed in range(sampled([2], [30])[0]):
        wanted = [*mlx_mtp.generate_step(PROMPT, model, max_tokens=N, **PLAIN, **options)]
        text = [token for token, *_ in wanted]
        block, control, _ = trees(model, PROMPT + text, seed, right=0.8)
        with block:
            found = [*mlx_mtp.generate_step(PROMPT, model, max_tokens=N, **DRAFTED, **options)]
        assert [token for token, *_ in found] == text
        for (_, ours, _), (_, theirs, _) in zip(found, wanted, strict=True):
            assert (ours is None) == (theirs is None) == (not options.get("logprobs"))
            assert ours is None or mx.array_equal(ours, theirs)
        assert any(c.plan.tree and c.accepted > 1 for c in control.cycles)
        if options.pop("logits_processors", None):
            assert text != decoded(model, PROMPT, N, **PLAIN, **options)[0]


LAYOUTS = {
    "4 bits": {"kv_bits": 4},
    "8 bits later": {"kv_bits": 8, "quantized_kv_start": len(PROMPT) + 9},
    "kept and last": {"max_kv_size": 12},
    "kept, last, 4 bits": {"max_kv_size": 12, "kv_bits": 4, "quantized_kv_start": len(PROMPT) + 5},
}


@pytest.mark.parametrize("seed", sampled([0], range(20)))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(tiny_models, layout, seed):
    """More tokens than rings of 12 and of 8 positions have slots."""
    model, n = quantizable_model(tiny_models)[0], 60
    text, plain = decoded(model, PROMPT, n, mlx_mtp.make_prompt_cache(model, **LAYOUTS[layout]), **PLAIN)
    block, control, _ = trees(model, PROMPT + text, seed, right=0.8)
    with block:
        found, cache = decoded(model, PROMPT, n, mlx_mtp.make_prompt_cache(model, **LAYOUTS[layout]), **DRAFTED)
    assert found == text
    assert_equal(cache, plain)
    assert {(c.plan.source, c.plan.tree) for c in control.cycles if c.plan.k} == SORTS


@pytest.mark.parametrize("seed", sampled([1], range(8)))
@pytest.mark.parametrize("name", sampled(["step3p5"], EVERY))
def test_recorded_cycles(subject, name, seed, recorded_at_once, monkeypatch):
    """The trees are part of the step; the same records serve other texts."""
    model, compiled = subject(name).model, {**DRAFTED, "compile_cycles": True}
    for prompt, options in ((PROMPT, {}), (PROMPT[:5], {}), (PROMPT, HOT)):
        stats = mlx_mtp.Stats()
        text, plain = decoded(model, prompt, N, **PLAIN, **options)
        block, control, _ = trees(model, prompt + text, seed, in_step=True)
        with block:
            found, cache = decoded(model, prompt, N, **compiled, **options, stats=stats)
        assert found == text
        assert_equal(cache, plain)
        assert stats.compiled_cycles > 3
        assert any(c.plan.tree and c.accepted > 1 for c in control.cycles)
        assert all(node.probability == 0.5**node.depth for c in control.cycles for own in c.nodes for node in own)


@pytest.mark.parametrize("compiled", sampled([False], [False, True]))
@pytest.mark.parametrize("name", sampled(["step3p5", "eagle"], EVERY))
def test_heads_read_the_accepted_path(subject, name, compiled, recorded_at_once):
    """Heads, which read the rows that a tree leaves, draft afterwards as from scratch."""
    s = subject(name)
    text, plain = decoded(s.model, PROMPT, N, **PLAIN)
    block, control, drafter = trees(s.model, PROMPT + text, 4, TreeHeads, in_step=True)
    with block:
        found, cache = decoded(s.model, PROMPT, N, **DRAFTED, compile_cycles=compiled)
    assert found == text
    assert_equal(cache, plain)
    assert any(c.plan.tree and c.accepted > 1 for c in control.cycles)
    if compiled:
        return
    noted = [(at.item() + 1, tokens.tolist()[0]) for at, tokens in drafter.noted]
    noted = [(known, drafts) for known, drafts in noted if known <= len(PROMPT + text)]
    assert len(noted) > 4
    for known, drafts in noted:
        assert drafts == s.scratch((PROMPT + text)[:known], len(drafts)), f"{known} tokens"


def test_pictures():
    """RoPE positions behind pictures are shifted, those of recorded cycles by an input."""
    model, parts = pictured().model, ([5, 6], A, [7, 8, 9], C, [10, 11])
    text, prompt = generated(model, parts, n=N), tokens_of(*parts)
    for compiled in (False, True):
        block, control, _ = trees(model, prompt + text, 2, right=0.8, in_step=compiled)
        with block:
            assert generated(model, parts, 15, N, compile_cycles=compiled, prompt_lookup=True) == text
        assert any(c.plan.tree and c.accepted > 1 for c in control.cycles)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapters_and_threads(tmp_path):
    path = lora.checkpoint(tmp_path / "model")
    paths = {name: lora.save(tmp_path / name, mlx_mtp.load(path)[0], seed) for seed, name in enumerate("ab")}
    model, texts = mlx_mtp.load(path, adapter_path=paths)[0], []
    for name in (None, "a", "b"):
        model.runtime.adapters.select(name)
        texts.append(decoded(model, PROMPT, N, **PLAIN)[0])
        block, control, _ = trees(model, PROMPT + texts[-1], 1, right=0.8)
        with block, ThreadPoolExecutor(2) as pool:
            found = [pool.submit(decoded, model, PROMPT, N, **DRAFTED) for _ in range(2)]
            assert [each.result(60)[0] for each in found] == texts[-1:] * 2
        assert any(c.plan.tree and c.accepted > 1 for c in control.cycles)
    assert len({*map(tuple, texts)}) == 3


class PositionDraws(Draws):
    """Rows with equal logits at one position draw the same token, as rows that share their noise do."""

    def choose_rows(self, logits, options, keys, position, fused):
        rows, (own,) = [*logits[0]], options
        at = np.array(position).reshape(-1) + (np.arange(len(rows)) if position.ndim == 1 else 0)
        known: dict = {}
        for place, row in zip(at.tolist(), rows, strict=True):
            key = place, np.array(row).tobytes()
            if key not in known:
                known[key] = super().choose_rows(row[None, None], [own], keys, position, fused)
        found = [known[place, np.array(row).tobytes()] for place, row in zip(at.tolist(), rows, strict=True)]
        return mx.concatenate(found, axis=1)


@pytest.mark.parametrize("parents", sampled([[0, 0, 0, 1]], [[0, 0, 0, 1], [0, 1, 0, 3], [0, 1, 2, 3]]))
def test_the_distribution_is_the_targets(tiny_models, monkeypatch, parents):
    """All paths of three draws of two tokens are enumerated; two siblings are equal."""
    model, plain = tiny_models(4, vocab_size=2)
    draws, found, options = PositionDraws(), {}, Sampling(temp=0.9)
    draws.stand_in(monkeypatch)
    control, prompt = Listed([Plan(k=4, tree=True)]), [1, 0, 1, 1]
    drafter = TreeDrafts().grow(model, [prompt])
    tree = Drafts(mx.array([[1, 0, 1, 0]]), parents=mx.array([parents]), levels=4)
    monkeypatch.setattr(drafter, "propose", lambda frame, run, k: tree if k else NO_DRAFTS)
    late = {"logits_processors": [LogitRules()], "temp": 0.9}  # cycles are then built late, which gives fewer paths
    with drafted_by(model, drafter, control):
        run = partial(decoded, model, prompt, 3, num_draft_tokens=4, **late)
        for (text, _), p in draws.paths(run):
            found[tuple(text)] = found.get(tuple(text), 0.0) + p
    expected = reference(plain, prompt, 3, options, [])
    assert found.keys() <= expected.keys()
    for text, p in expected.items():
        assert found.get(text, 0.0) == pytest.approx(p, abs=1e-6), text
    assert {c.accepted for c in control.cycles} >= {1, 2}


def test_the_deepest_right_path_is_accepted():
    """With random trees of three sequences, of which one may accept a single draft and one is a free slot."""
    rng, found = np.random.default_rng(0), set()
    for k in (1, 3, 7, 15) * sampled([5], [100])[0]:
        parents = np.array([[rng.integers(max(0, i - 3), i + 1) for i in range(k)] for _ in range(3)], np.int32)
        tokens, drafts = rng.integers(0, 2, (3, k + 1)), rng.integers(0, 2, (3, k))
        hidden, logprobs = rng.normal(size=(3, k + 1, 4)), [*rng.normal(size=(2, k + 1, 2)), None]
        chances = rng.uniform(size=(3, k)).astype(np.float32)
        paths = [[[0]] for _ in range(3)]
        for i, row in np.ndindex(3, k):
            paths[i].append([*paths[i][parents[i, row]], row + 1])
        levels = max(len(path) - 1 for own in paths for path in own)
        tree, given = RowTree.of(mx.array(parents), levels), (mx.array(hidden), 0, mx.array(drafts.astype(np.int32)))
        passed, limits = Passed(*given, (), tree, mx.array(chances)), [k, 1, -1]
        own = tuple(each if each is None else mx.array(each) for each in logprobs)
        run = accept_path(passed, mx.array(tokens.astype(np.int32)), own, mx.array(limits, mx.int32))
        assert (run.size, run.verified) == (levels + 1, k)
        for i, read in enumerate(run.read()):
            right = [all(drafts[i][b - 1] == tokens[i][a] for a, b in pairwise(path)) for path in paths[i]]
            best = max((path for path, kept in zip(paths[i], right, strict=True) if kept), key=len)
            accepted = min(len(best) - 1, limits[i])
            assert read.accepted == accepted
            assert read.tokens == [int(tokens[i][row]) for row in best[: accepted + 1]]
            assert [node.depth for node in read.nodes] == [len(path) - 1 for path in paths[i][1:]]
            assert [node.kept for node in read.nodes] == right[1:]
            assert [node.probability for node in read.nodes] == chances[i].tolist()
            assert run.path[i, : len(best)].tolist() == best
            assert np.allclose(run.hidden[i, : len(best)], hidden[i][best])
            assert run.drafts[i, : len(best) - 1].tolist() == [drafts[i][row - 1] for row in best[1:]]
            if i < 2:
                assert np.allclose(run.logprobs[i][: len(best)], logprobs[i][best])
            if i == 0:
                found.add(accepted)
    assert found >= {0, 1, 2, 3}
    run = accept_path(passed._replace(confidence=None), mx.array(tokens), None, None)
    assert {node.probability for read in run.read() for node in read.nodes} == {1.0}


def test_rows_of_a_tree_are_not_drawn_by_the_heads_kernel():
    """It draws with the noise of consecutive positions."""
    head = SimpleNamespace(draw=lambda *_: mx.zeros(4, mx.int32))
    logits = mx.where(mx.arange(5) == 2, 0.0, -mx.inf)
    model = SimpleNamespace(runtime=SimpleNamespace(choosing=False), choice=lambda _: head)
    model.logits = lambda hidden: mx.broadcast_to(logits, (1, 4, 5))
    for tree, token in ((None, 0), (RowTree.of(mx.array([[0, 0, 1]]), 2), 2)):
        members = [Single(Picker(Sampling(0.9), key=random_key(0)))]
        assert pick(model, mx.zeros((1, 4, 8)), 5, None, members, tree=tree)[0].tolist() == [[token] * 4]


@pytest.mark.parametrize("name", RULES)
def test_rules_of_a_row_are_those_of_its_path(name):
    """Positions up to which tokens are excluded, and ends of bad words, lie inside the trees."""
    rng, k = np.random.default_rng(1), 7
    for _ in range(sampled([5], [100])[0]):
        parents = np.array([[rng.integers(0, i + 1) for i in range(k)] for _ in range(2)])
        drafts, logits = rng.integers(0, 13, (2, k)), mx.array(rng.normal(size=(2, k + 1, 13)).astype(np.float32))
        past = [rng.integers(0, 13, len(PROMPT) + n).astype(np.int32) for n in (8, 2)]
        tree = RowTree.of(mx.array(parents), k)
        rules = [LogitRules(**RULES[name]), LogitRules(logit_bias={2: 1.5}, repetition_penalty=1.2)]
        found = changed(logits, rules, past, mx.array(drafts), None, tree)
        for i, row in np.ndindex(2, k + 1):
            path = [drafts[i][j - 1] for j in tree.ancestors[i, row, 1 : tree.depth[i, row].item() + 1].tolist()]
            own = np.array([*past[i], *path], np.int32)
            assert mx.array_equal(
                found[i, row], changed(logits[i : i + 1, row : row + 1], rules[i : i + 1], [own], None)[0, 0]
            )
