"""Heads and small models draft trees: their nodes are the most probable paths by a computation without caches."""

import functools
import heapq

import drafters
import eagle_scratch
import families
import mlx.core as mx
import pytest
from plans import Listed, follow
from scratch import logits_along
from subjects import PROMPT, subjects

import mlx_mtp
from mlx_mtp.decoding import tree_levels
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.sampling import Picker, key_at
from mlx_mtp.tuning.plan import Plan

HEADS = ["step3p5", "glm4_moe", "eagle", "mimo_v2_flash"]  # chained, recycled, another model's, chained to the target
SMALL = [("llama_sliding", "nemotron_h"), ("qwen3_5", "llama_sliding")]  # (target, small model)
TREES = [Plan("heads", 7, tree=True), Plan("heads", 2), Plan("heads", 3, tree=True), Plan()]
LEVELS = 3


class Small:
    """A tiny target and a small model, with mlx-lm's plain form of that."""

    k = 15

    def __init__(self, target: str, small: str, path):
        def written(name, where, seed):
            if name in drafters.HEADLESS:
                return families.headless(where, drafters.HEADLESS[name], seed)
            directory, _, plain = families.build(name, where, seed)
            return directory, plain

        directory, self.plain = written(small, path / "small", 1)
        self.model = mlx_mtp.load_model(written(target, path / "target", 0)[0], draft_model=directory)

    def logits(self, known: list[int], path: tuple[int, ...]) -> mx.array:
        return self.plain(mx.array([[*known, *path]]))[0, -1]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    """A subject by name, with `logits(known tokens, path)` of the draft after a path, computed without a cache."""
    heads = subjects(tiny_models, tmp_path_factory)

    @functools.cache
    def make(name):
        if isinstance(name, tuple):
            return Small(*name, tmp_path_factory.mktemp("small"))
        found = heads(name)
        found.logits = functools.partial(logits_of_heads, found)
        return found

    return make


def logits_of_heads(subject, known: list[int], path: tuple[int, ...]) -> mx.array:
    given = known, list(path), len(path) + 1
    if subject.name == "eagle":
        options = {"layer": "midlayer", "counts": subject.model.spec.capture, "new": False}
        return [*eagle_scratch.logits_along(subject.plain, subject.weights, *given, **options)][-1]
    return [*logits_along(subject.model, subject.plain, *given)][-1]


def best_paths(score, levels: int, k: int) -> dict[tuple[int, ...], float]:
    """The k most probable paths of at most `levels` tokens. score(path): log-probabilities of the next token."""
    found, queue = {}, [(0.0, ())]
    while len(found) <= k:
        cost, path = heapq.heappop(queue)
        found[path] = -cost
        if len(path) < levels:
            for token, logprob in enumerate(score(path).tolist()):
                heapq.heappush(queue, (cost - logprob, (*path, token)))
    del found[()]
    return found


def paths_of(drafts, row: int = 0) -> dict[tuple[int, ...], float]:
    """The logarithms of the probabilities of a drafted tree, by path."""
    paths, found = [()], {}
    each = (drafts.tokens, drafts.parents, drafts.confidence)
    for token, parent, chance in zip(*(part[row].tolist() for part in each), strict=True):
        assert 0 <= parent < len(paths)
        paths.append((*paths[parent], token))
        found[paths[-1]] = mx.log(mx.array(chance)).item()
    return found


def watched(monkeypatch, model):
    """(the target's positions, drafts) of each tree that the model's drafter makes."""
    calls, drafter = [], drafter_of(model)
    real = drafter.propose

    def propose(frame, run, k):
        drafts = real(frame, run, k)
        if frame.plan.tree and k:
            calls.append((frame.cache.layers[0].offset, drafts))
        return drafts

    monkeypatch.setattr(model, "drafter", drafter)
    monkeypatch.setattr(drafter, "propose", propose)
    return calls


def text_of(monkeypatch, model, plans, n=24, cache=None, prompt=PROMPT, stats=None, **options):
    """The answer's tokens with these plans; () for plain decoding."""
    with monkeypatch.context() as patched:
        if plans:
            follow(patched, Listed(plans))
        options |= {"num_draft_tokens": model.max_draft_tokens if plans else 0, "prompt_lookup": False}
        steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, prompt_cache=cache, stats=stats, **options)
        return [token for token, *_ in steps]


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("name", [*HEADS, *SMALL])
def test_a_tree_is_made_of_the_most_probable_paths(subject, monkeypatch, name, temp):
    made, k = subject(name), 7
    model = made.model
    monkeypatch.setattr(tree_levels, "SHAPES", {1: (LEVELS, k)})
    calls = watched(monkeypatch, model)
    key = mlx_mtp.decoding.sampling.random_key(5)
    text = PROMPT + text_of(monkeypatch, model, [Plan("heads", k, tree=True)], temp=temp, seed=5)
    levels = min(LEVELS, len(model.mtp)) if name in ("step3p5", "mimo_v2_flash") else LEVELS
    seen = [(offset.item() + 1, drafts) for offset, drafts in calls]
    seen = [(known, drafts) for known, drafts in seen if known <= len(text)]
    assert len(seen) > 4
    for known, drafts in seen[1::4]:

        def score(path, known=known):
            logits = made.logits(text[:known], path)
            if temp:
                noise = mx.random.gumbel(logits.shape, key=mx.random.split(key_at(key, known + len(path)))[1])
                logits = (logits - mx.logsumexp(logits)) / temp + noise
            return logits - mx.logsumexp(logits)

        expected, found = best_paths(score, levels, k), paths_of(drafts)
        assert found == pytest.approx(expected, abs=2e-3), f"{known} tokens"
        assert drafts.levels <= levels


@pytest.mark.parametrize("name", [*HEADS, *SMALL])
@pytest.mark.parametrize(
    "options",
    [{}, {"temp": 0.8, "seed": 3, "top_k": 4, "top_p": 0.9}, {"compile_cycles": True, "temp": 0.8, "seed": 1}],
    ids=["greedy", "sampled", "recorded"],
)
def test_the_text_is_that_of_plain_decoding(subject, monkeypatch, name, options):
    model, stats = subject(name).model, mlx_mtp.Stats()
    same = {key: value for key, value in options.items() if key != "compile_cycles"}
    plain = text_of(monkeypatch, model, (), **same)
    assert text_of(monkeypatch, model, TREES, stats=stats, **options) == plain
    assert stats.cycles < len(plain)
    assert bool(stats.compiled_cycles) == ("compile_cycles" in options)


@pytest.mark.parametrize("name", [*HEADS, *SMALL])
def test_the_next_drafts_are_those_after_chains(subject, monkeypatch, name):
    """A tree leaves the drafter's caches as a chain does: the chains after it are those computed from scratch."""
    made = subject(name)
    model, drafter, calls = made.model, drafter_of(made.model), []
    real = drafter.propose

    def propose(frame, run, k):
        drafts = real(frame, run, k)
        if k and not frame.plan.tree:
            calls.append((frame.cache.layers[0].offset, drafts.tokens))
        return drafts

    monkeypatch.setattr(model, "drafter", drafter)
    monkeypatch.setattr(drafter, "propose", propose)
    plans = [Plan("heads", 7, tree=True), Plan("heads", 3, tree=True), Plan("heads", min(2, made.k))]
    text = PROMPT + text_of(monkeypatch, model, plans, n=30)
    seen = [(offset.item() + 1, drafts.tolist()[0]) for offset, drafts in calls if offset.item() < len(text)]
    assert len(seen) > 3
    for known, drafts in seen:
        for i, token in enumerate(drafts):
            assert mx.argmax(made.logits(text[:known], tuple(drafts[:i]))).item() == token, f"{known} tokens"
