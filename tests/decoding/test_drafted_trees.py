"""Heads and small models draft trees: their nodes are the most probable paths by a computation without caches."""

import functools
import heapq
from types import SimpleNamespace

import drafters
import eagle_scratch
import families
import mlx.core as mx
import pytest
from picture_prompts import A, C, generated, pictured, tokens_of
from plans import Listed, follow
from scratch import logits_along
from subjects import PROMPT, subjects

import mlx_mtp
from mlx_mtp.decoding import build, tree_levels
from mlx_mtp.decoding.control import Controls
from mlx_mtp.decoding.draft_sampling import Choosers, LogitRow
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.logit_rules import LogitRules
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.sampling import Picker, Sampling, key_at, random_key
from mlx_mtp.decoding.tree_choice import Beam
from mlx_mtp.tuning.plan import Plan

# chained, recycled, another model's, chained to the target; of chained ones two heads draft
HEADS = ["step3p5", "glm4_moe", "eagle", "mimo_v2_flash"]
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
    return [*logits_along(subject.model, subject.plain, *given, heads=2)][-1]


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
        options |= {"num_draft_tokens": min(2, model.max_draft_tokens) if plans else 0, "prompt_lookup": False}
        steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, prompt_cache=cache, stats=stats, **options)
        return [token for token, *_ in steps]


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("name", [*HEADS, *SMALL])
def test_a_tree_is_made_of_the_most_probable_paths(subject, monkeypatch, name, temp):
    made, k = subject(name), 7
    model = made.model
    monkeypatch.setattr(tree_levels, "SHAPES", {1: (LEVELS, k, 1.3)})
    calls = watched(monkeypatch, model)
    key = random_key(5)
    text = PROMPT + text_of(monkeypatch, model, [Plan("heads", k, tree=True)], temp=temp, seed=5)
    seen = [(offset.item() + 1, drafts) for offset, drafts in calls]
    seen = [(known, drafts) for known, drafts in seen if known <= len(text)]
    assert len(seen) > 4
    for known, drafts in seen[1::4]:

        def score(path, known=known):
            logits = made.logits(text[:known], path)
            if temp:
                noise = mx.random.gumbel(logits.shape, key=mx.random.split(key_at(key, known + len(path)))[1])
                logits = (logits - mx.logsumexp(logits)) / temp + noise
            else:
                logits = logits * 1.3
            return logits - mx.logsumexp(logits)

        expected, found = best_paths(score, LEVELS, k), paths_of(drafts)
        assert found == pytest.approx(expected, abs=2e-3), f"{known} tokens"
        assert drafts.levels <= LEVELS


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


def test_the_text_with_penalties(subject, monkeypatch):
    model, rules = subject("glm4_moe").model, LogitRules(repetition_penalty=1.4, presence_penalty=0.3)
    for options in ({}, {"temp": 1.2, "seed": 2}):
        options["logits_processors"] = [rules]
        stats = mlx_mtp.Stats()
        plain = text_of(monkeypatch, model, (), **options)
        assert text_of(monkeypatch, model, TREES, stats=stats, **options) == plain
        assert stats.accepted


def together(model, prompts, n=20, pictures=None, **options):
    texts = [[] for _ in prompts]
    batch = mlx_mtp.BatchGenerator(model, **options)
    batch.insert(prompts, [n + 3 * i for i in range(len(prompts))], seeds=[*range(len(prompts))], pictures=pictures)
    while responses := batch.next_generated():
        for response in responses:
            texts[response.uid].append(response.token)
    return texts


@pytest.mark.parametrize("options", [{}, {"temp": 0.9, "compile_cycles": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*HEADS, *SMALL])
def test_sequences_of_a_pool(subject, monkeypatch, name, options):
    """Each sequence has its own tree, of the most probable paths after its own tokens, and its plain text."""
    made, prompts, k = subject(name), [PROMPT, [3, 3, 1], [2, 0]], 5
    model, calls = made.model, []
    monkeypatch.setattr(tree_levels, "SHAPES", {1: (2, k, 1.0)})
    plain = together(model, prompts, num_draft_tokens=0, **options)
    drafter = drafter_of(model)
    real = drafter.propose

    def propose(frame, run, k):
        drafts = real(frame, run, k)
        if frame.plan.tree and k and not options:
            calls.append((frame.cache.layers[0].offset, [*frame.members], drafts))
        return drafts

    monkeypatch.setattr(model, "drafter", drafter)
    monkeypatch.setattr(drafter, "propose", propose)
    control = Listed([Plan("heads", k, tree=True), Plan("heads", 1)])
    monkeypatch.setattr(Controls, "control", lambda *_: control)
    assert together(model, prompts, num_draft_tokens=2, **options) == plain
    assert any(cycle.plan.tree and cycle.accepted for cycle in control.cycles)
    for offsets, members, drafts in calls[1:6:2]:
        for row, (offset, member) in enumerate(zip(offsets.tolist(), members, strict=True)):
            if member is None:
                assert drafts.confidence[row].tolist() == [0] * k
            elif offset < len(member.history.tokens):
                known = member.history.tokens[: offset + 1].tolist()
                score = functools.partial(log_softmax, made, known)
                assert paths_of(drafts, row) == pytest.approx(best_paths(score, 2, k), abs=2e-3)


def test_sequences_behind_pictures(monkeypatch):
    """The drafter's RoPE positions are shifted by each sequence's own pictures."""
    model, prompts = pictured().model, [([5, 6], A, [7, 8]), (C, [4]), ([3, 2],)]
    control = Listed([Plan("heads", 7, tree=True), Plan("heads", 1)])
    monkeypatch.setattr(Controls, "control", lambda *_: control)
    tokens, pictures = [tokens_of(*parts) for parts in prompts], [[A], [C], []]
    found = together(model, tokens, pictures=pictures, num_draft_tokens=1)
    assert found == [generated(model, parts, n=20 + 3 * i) for i, parts in enumerate(prompts)]
    assert any(cycle.plan.tree and cycle.accepted for cycle in control.cycles)


def log_softmax(made, known: list[int], path: tuple[int, ...]) -> mx.array:
    logits = made.logits(known, path)
    return logits - mx.logsumexp(logits)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_the_first_node_is_the_coupled_draft_that_a_mask_allows(filters):
    mx.random.seed(4)
    logits, position = mx.random.normal((2, 40)) * 2, mx.array([7, 30])
    pickers = [Picker(Sampling(temp, **filters), key=random_key(i)) for i, temp in enumerate((0.9, 0.0))]
    members = [Single(picker) for picker in pickers]
    allowed = mx.array([[[0b1110, 0], [-1, -1]]])
    model = SimpleNamespace(runtime=SimpleNamespace(choosing=True))
    for masks, depth in ((None, 0), (allowed, 0), (allowed, 1)):
        choose = Choosers(model, members, masks)
        chances, tokens = choose.best(LogitRow(logits, None, 40), position, depth, 6)
        chain = Choosers(model, members, None if depth else masks)(LogitRow(logits, None, 40), position, 0)
        best = mx.take_along_axis(tokens[:, 0], mx.argmax(chances[:, 0], axis=-1, keepdims=True), axis=-1)
        assert best.tolist() == chain.token.tolist()
        if masks is not None and depth == 0:
            assert {t for t, c in zip(tokens[0, 0].tolist(), chances[0, 0].tolist(), strict=True) if c > -100} <= {
                1,
                2,
                3,
            }
        assert mx.all(mx.exp(chances).sum(axis=-1) <= 1 + 1e-5)


@pytest.mark.parametrize("vocab", [3, 7, 60])
def test_a_beam_as_wide_as_the_tree_has_the_most_probable_paths(vocab):
    """Also where a level has fewer candidates than the beam is wide."""
    n, k, levels, paths = 2, 6, 3, [[()], [()]]

    def score(path, row):
        logits = 2 * mx.random.normal((vocab,), key=mx.random.key(hash((row, path)) % 2**31))
        return logits - mx.logsumexp(logits)

    beam = Beam(n, k)
    for _ in range(levels):
        scores = mx.stack([mx.stack([score(path, row) for path in paths[row]]) for row in range(n)])
        beam.extend(scores, mx.broadcast_to(mx.arange(vocab), scores.shape))
        came, tokens = beam.came.tolist(), beam.tokens.tolist()
        paths = [
            [(*paths[row][i], token) for i, token in zip(came[row], tokens[row], strict=True)] for row in range(n)
        ]
    drafts = beam.best(k)
    for row in range(n):
        expected = best_paths(functools.partial(score, row=row), levels, k)
        assert paths_of(drafts, row) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("room", [0, 2, 4])
def test_trees_have_as_many_rows_as_copies_fit(subject, monkeypatch, room):
    """Trees of heads, of copies and of both become smaller ones, or chains of one draft; the text stays."""
    model, stats = subject("glm4_moe").model, mlx_mtp.Stats()
    plain = text_of(monkeypatch, model, ())
    monkeypatch.setattr(build, "rows_with_room", lambda _: room)
    plans = [Plan("heads", 7, tree=True, stem=True), Plan("heads", 7, tree=True), Plan("lookup", 7, tree=True)]
    assert text_of(monkeypatch, model, plans, stats=stats) == plain
    assert max(stats.lengths) == max(1, room - 1)
    assert bool(stats.trees) == (room > 2)


@pytest.mark.parametrize("start", [12, 13, 14, 18])
def test_trees_end_where_caches_are_quantized(tiny_models, monkeypatch, start):
    """The cycle before has fewer drafts: one or more of a tree, also of one with copies."""
    (model, _), how = tiny_models(2, head_dim=32), {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    plans = [
        Plan("heads", 7, tree=True, stem=True),
        Plan("heads", 7, tree=True),
        Plan("heads", 3, tree=True, stem=True),
    ]
    plain = text_of(monkeypatch, model, (), **how)
    for order in (plans, plans[::-1]):
        assert text_of(monkeypatch, model, order, **how) == plain
