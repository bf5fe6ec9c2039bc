"""MTP heads and a block drafter in one model: both follow the target, whichever of them drafts."""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import block_drafters
import families
import mlx.core as mx
import pytest
import tiny
from forced_drafts import ForcedBlock, ForcedBoth, ForcedHeads
from plans import Listed, follow
from sweep import SWEEP, paired, sampled, sweep

import mlx_mtp
from mlx_mtp.cache.prompt_cache import PromptCache
from mlx_mtp.checkpoint.block_drafter import set_drafter
from mlx_mtp.decoding.control import Controls
from mlx_mtp.tuning.plan import Plan

# Longer than what heads with windows read of a prompt.
PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2, 4, 4, 1, 0, 3, 2, 2, 4, 1, 3, 0, 0, 1, 2, 3, 4, 2, 1, 0]
N = 64  # tokens of the first subject's text, and in a sweep of every one
HEADS, BLOCK, PLAIN = Plan("heads", 3), Plan("block", 4), Plan()
PLANS = {"H": HEADS, "B": BLOCK, "P": PLAIN}
# Every sequence of three of these plans occurs in it, also around the end.
EVERY = [PLANS[name] for name in "HHHBHHPHBBHBPHPBHPPBBBPBPPP"]
MIXED = [HEADS, BLOCK, HEADS, HEADS, Plan("lookup", 3), BLOCK, BLOCK, PLAIN, HEADS, PLAIN, BLOCK]
NAMES = sampled(["step3p5", "qwen3_5"], ["step3p5", *families.FAMILIES])


class Subject:
    """A model with both, its plain text, and the drafts that each of them makes alone, by position."""

    def __init__(self, name: str, path):
        self.n = N if SWEEP or name == NAMES[0] else 44
        if name == "step3p5":
            config = {**tiny.CONFIG, **tiny.SHORTER, "sliding_window": 16}
            self.directory = tiny.save(path / "target", config, tiny.random_weights(config))
        else:
            self.directory = families.build(name, path / "target")[0]
        alone = mlx_mtp.load_model(self.directory)
        self.drafter = block_drafters.save_for(
            path / "drafter", "dflash2", alone.no_hidden().shape[-1], alone.vocab_size
        )
        self.model = mlx_mtp.load_model(self.directory, draft_model=self.drafter)
        self.both = self.model.drafter
        self.k = {"heads": min(3, alone.max_draft_tokens), "block": 4}
        self.text = PROMPT + ours(alone, PROMPT, 0, self.n)
        self.forced = ForcedBoth(self.model, self.both.heads, self.both.block, 3)
        alone.drafter = ForcedHeads(alone)
        blocks = mlx_mtp.load_model(self.directory, draft_model=self.drafter, mtp=False)
        set_drafter(blocks, ForcedBlock(blocks.drafter.net))
        self.models = {"heads": alone, "block": blocks}
        self.alone = {source: self.drafts(model, self.k[source]) for source, model in self.models.items()}

    def drafts(self, model, k: int) -> dict[int, list[int]]:
        """Drafts by position, all of which are rejected."""
        model.drafter.force(model.vocab_size, self.text, range(len(self.text)))
        assert ours(model, PROMPT, k, self.n) == self.text[len(PROMPT) :]
        return {at: tokens for _, at, tokens in model.drafter.noted(len(self.text))}

    def force(self, wrong) -> None:
        self.forced.force(self.model.vocab_size, self.text, wrong)
        set_drafter(self.model, self.forced)

    def check(self, least: int = 3, end: int = 10**9) -> None:
        """Each noted draft equals that of its source alone, at least `least` of each source."""
        found = self.forced.noted(min(end, len(self.text) - 1))
        for source, at, tokens in found:
            assert tokens == self.alone[source][at][: len(tokens)], (source, at)
        for source in self.k:
            assert sum(name == source for name, *_ in found) >= least
        self.forced.calls.clear()

    def check_pool(self) -> None:
        """Each draft of a pool's cycles equals that of its source alone, where that drafted at the position."""
        for source, at, _, drafts in self.forced.calls:
            for position, tokens in zip(at.tolist(), drafts.tokens.tolist(), strict=True):
                assert tokens == self.alone[source].get(position, tokens)[: len(tokens)], (source, position)
        assert {source for source, *_ in self.forced.calls} >= {*self.alone}
        self.forced.calls.clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return functools.cache(lambda name: Subject(name, tmp_path_factory.mktemp("both")))


@pytest.fixture
def subject(made):
    """Subjects by name; each test starts with their models' own drafters."""

    def found(name):
        set_drafter(made(name).model, made(name).both)
        return made(name)

    return found


def ours(model, prompt, k, n=N, **options):
    options = {"adaptive": False, "prompt_lookup": False, **options}
    return [t for t, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, **options)]


def planned(s: Subject, plans: list[Plan], first: int = len(PROMPT)) -> list[Plan]:
    """The plans with at most as many drafts as each source has; force drafts of which cycles accept 0, 1, .. k."""
    plans = [Plan(p.source, min(p.k, s.k[p.source])) if p.k else p for p in plans]
    at, wrong, counts = first, set(), Counter()
    for plan in itertools.islice(itertools.cycle(plans), N):
        accepted = counts[plan] % (plan.k + 1)
        counts[plan] += 1
        wrong.add(at + accepted + 1)
        at += accepted + 1
    s.force(wrong)
    return plans


def test_every_three_plans_occur():
    around = EVERY + EVERY[:2]
    assert len({tuple(around[i : i + 3]) for i in range(len(EVERY))}) == 27


@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_the_drafts_of_each_are_those_that_it_makes_alone(subject, monkeypatch, name):
    """Whichever drafted before, after rejections of every length, in one prefill chunk and in several."""
    s = subject(name)
    control = Listed(planned(s, EVERY))
    follow(monkeypatch, control)
    stats = mlx_mtp.Stats()
    step = 2048 if name == NAMES[1] else 4
    assert ours(s.model, PROMPT, 4, prefill_step_size=step, stats=stats) == s.text[len(PROMPT) :]
    s.check(least=6)
    lengths = {(c.plan.source, c.accepted) for c in control.cycles if c.plan.k}
    assert {("heads", n) for n in range(s.k["heads"] + 1)} | {("block", n) for n in range(5)} <= lengths
    verified = {source: sum(c.verified for c in control.cycles if c.plan.source == source) for source in s.k}
    assert stats.drafted_by == verified
    assert sum(stats.accepted_by.values()) == sum(stats.accepted)


@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_each_drafts_after_trees_what_it_drafts_alone(subject, monkeypatch, name):
    """Trees of either, in which wrong drafts have siblings and children."""
    s = subject(name)
    trees = [Plan("block", 7, tree=True), Plan("heads", 3, tree=True)]
    control = Listed([trees[0], Plan("heads", s.k["heads"]), trees[1], BLOCK, PLAIN, trees[1], trees[0], BLOCK])
    s.force({*range(0, len(s.text), 5), *range(0, len(s.text), 11)})
    follow(monkeypatch, control)
    assert ours(s.model, PROMPT, 4, s.n) == s.text[len(PROMPT) :]
    accepted = {(c.plan.source, c.accepted) for c in control.cycles if c.plan.tree}
    assert {source for source, count in accepted if count} == {"heads", "block"}
    s.forced.calls = [call for call in s.forced.calls if call.drafts.parents is None]
    s.check(least=2)


def test_heads_with_windows_read_the_end_of_a_prompt_only(subject):
    """As those that draft alone; the first positions with contents show it."""
    s, starts = subject("step3p5"), []
    for model in (s.models["heads"], s.model):
        cache = mlx_mtp.make_prompt_cache(model)
        ours(model, PROMPT, 3, 2, prompt_cache=cache)
        starts.append([c.start for c in cache.heads][:3])
    assert starts[0] == starts[1]
    assert min(starts[0]) > 0


MIXES = {
    "seeded": {"temp": 1.0, "seed": 3},
    "filtered": {"temp": 0.8, "top_k": 3, "seed": 4},
    "replayed": {"compile_cycles": True},
    "processors": {"logits_processors": [lambda tokens, logits: logits + 0.5 * mx.sin(mx.arange(logits.shape[-1]))]},
    "p_min": {"draft_p_min": 0.3},
}


@pytest.mark.parametrize(
    ("name", "mix", "n"),
    sampled(
        [("step3p5", mix, 28) for mix in ("filtered", "processors", "p_min")], itertools.product(NAMES, MIXES, [48])
    ),
)
def test_the_text_is_that_of_plain_decoding(subject, monkeypatch, name, mix, n):
    s, options = subject(name), MIXES[mix]
    plain = ours(s.model, PROMPT, 0, n, **{**options, "draft_p_min": 0, "compile_cycles": False})
    sure = mix == "p_min"
    plans = [replace(p, k=min(p.k, s.k.get(p.source, 3)), p_min=sure and p.k > 0 and p.source in s.k) for p in MIXED]
    control, stats = Listed(plans), mlx_mtp.Stats()
    follow(monkeypatch, control)
    assert ours(s.model, PROMPT, 4, n, prompt_lookup=True, stats=stats, **options) == plain
    assert {c.plan.source for c in control.cycles if c.verified} == {"heads", "block", "lookup"}
    assert mix != "replayed" or stats.compiled_cycles > len(control.cycles) // 3


@sweep
@pytest.mark.parametrize("name", NAMES[1:])
def test_replayed_cycles_accept_what_built_ones_do(subject, monkeypatch, name):
    s, found = subject(name), []
    for replay in (False, True):
        control = Listed([Plan(p.source, min(p.k, s.k.get(p.source, 0))) for p in EVERY[:9]])
        with monkeypatch.context() as patch:
            follow(patch, control)
            ours(s.model, PROMPT, 4, 40, compile_cycles=replay)
        found.append([(c.plan, c.accepted) for c in control.cycles])
    assert found[0] == found[1]
    # Few kinds, whatever drafted before: with heads 2 per number of drafts, of blocks or of heads.
    rows = Counter(kind.rows for _, kind in s.model.runtime.recorder.seen if kind.drafts)
    assert rows.keys() == {1 + s.both.others["heads"], 16}


class Watching(Listed):
    """Notes the largest number of rows that wait in a cache."""

    cache, most = None, 0

    def observe(self, cycle) -> None:
        super().observe(cycle)
        self.most = max(self.most, sum(rows.shape[1] for rows in self.cache.backlog))


@pytest.mark.parametrize(
    ("name", "idle"), sampled(zip(NAMES, (PLAIN, BLOCK), strict=False), itertools.product(NAMES, (PLAIN, BLOCK)))
)
def test_both_read_a_pause(subject, monkeypatch, name, idle):
    """More rows than wait unread, without drafts or with blocks only, are read together; few are kept."""
    s = subject(name)
    monkeypatch.setattr("mlx_mtp.cache.absorb.MOST_UNREAD", 8)
    monkeypatch.setattr("mlx_mtp.cache.aside.MOST_UNREAD", 8)
    plans = [HEADS, BLOCK, *[idle] * (14 if idle is PLAIN else 6), BLOCK, HEADS, *[PLAIN] * 5, HEADS, BLOCK, HEADS]
    control = Watching(planned(s, plans))
    follow(monkeypatch, control)
    control.cache = mlx_mtp.make_prompt_cache(s.model)
    n = min(50, s.n)
    assert ours(s.model, PROMPT, 4, n, prompt_cache=control.cache) == s.text[len(PROMPT) :][:n]
    assert control.most <= 8 + 2 * 5
    s.check(least=3)


@pytest.mark.parametrize(
    ("name", "stop"), paired(NAMES, sampled([(0, 8), (2, 12)], itertools.product(range(3), range(7, 14))))
)
def test_stop_save_load_rewind_and_continue(subject, monkeypatch, tmp_path, name, stop):
    s, (first, n) = subject(name), stop
    text = s.text[len(PROMPT) :]
    cache = mlx_mtp.make_prompt_cache(s.model)
    follow(monkeypatch, Listed(planned(s, EVERY[first:])))
    assert ours(s.model, PROMPT, 4, n, prompt_cache=cache) == text[:n]
    mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
    snapshot = cache.snapshot()
    loaded = mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", s.model)
    for i, each in enumerate((cache, loaded, cache)):
        if i == 2:
            cache.rewind(snapshot)
        follow(monkeypatch, Listed(planned(s, [HEADS, BLOCK, BLOCK, HEADS], len(PROMPT) + n)))
        assert ours(s.model, text[n - 1 : n], 4, 14, prompt_cache=each) == text[n : n + 14]
        s.check(least=2)


@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
def test_a_pool_drafts_blocks_and_its_sequences_continue_alone(subject, monkeypatch, name):
    s = subject(name)
    text, first = s.text, len(PROMPT)
    prompts = [PROMPT, text[: first + 5], PROMPT[20:]]
    plain = [text[first : first + 14], text[first + 5 : first + 19], ours(s.model, PROMPT[20:], 0, 14)]
    stats, found, caches = mlx_mtp.Stats(), [[] for _ in prompts], {}
    for replay in (False, True):
        batch = mlx_mtp.BatchGenerator(
            s.model, num_draft_tokens=4, adaptive=False, stats=stats, compile_cycles=replay
        )
        batch.insert(prompts, [14, 9, 14])
        found = [[] for _ in prompts]
        while responses := batch.next_generated():
            for response in responses:
                found[response.uid].append(response.token)
                caches[response.uid] = response.prompt_cache
        assert found == [plain[0], plain[1][:9], plain[2]]
    assert set(stats.drafted_by) == {"block"}
    follow(monkeypatch, Listed(planned(s, [HEADS, BLOCK, PLAIN, HEADS], first + 14)))
    assert (
        ours(s.model, text[first + 13 : first + 14], 4, 14, prompt_cache=caches[0]) == text[first + 14 : first + 28]
    )
    s.check(least=2)


def test_few_rows_wait_in_a_pool(subject, monkeypatch):
    """Sequences of a pool read them together, too, and draft after it as they do alone."""
    s, most = subject("step3p5"), []
    monkeypatch.setattr("mlx_mtp.cache.absorb.MOST_UNREAD", 8)
    planned(s, [BLOCK])
    control = Listed([BLOCK, *[PLAIN] * 40, BLOCK, HEADS, BLOCK])
    monkeypatch.setattr("mlx_mtp.decoding.control.Controls.control", lambda *_: control)
    push = PromptCache.push
    monkeypatch.setattr(PromptCache, "push", lambda c, rows: push(c, rows) or most.append(c.pending_rows))
    prompts, found, batch = [PROMPT, s.text[: len(PROMPT) + 3]], [[], []], mlx_mtp.BatchGenerator(s.model)
    batch.insert(prompts, [52, 52])
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    assert found == [s.text[len(prompt) :][:52] for prompt in prompts]
    assert 8 < max(most[len(prompts) :]) <= 8 + 16  # without the prompts
    assert {c.plan.source for c in control.cycles if c.verified} == {"heads", "block"}
    s.check_pool()


def test_recorded_steps_are_few(subject, monkeypatch, recorded_at_once):
    """One per length of blocks, and two per length of heads: after heads and after blocks."""
    s = subject("step3p5")
    s.model.runtime.recorder = None
    plans = [HEADS, HEADS, BLOCK, BLOCK, PLAIN, HEADS, PLAIN, BLOCK]
    follow(monkeypatch, Listed(planned(s, plans)))
    assert ours(s.model, PROMPT, 15, 24, compile_cycles=True) == s.text[len(PROMPT) :][:24]
    kinds = [kind for _, kind in s.model.runtime.recorder.cycles]
    rows = sorted((kind.plan.source, kind.rows) for kind in kinds if kind.plan.k)
    assert rows == [("block", 16), ("heads", 4), ("heads", 16)]
    assert len(kinds) == 4


@pytest.mark.parametrize("name", sampled(NAMES[:1], NAMES))
@pytest.mark.parametrize("replay", [False, True])
def test_both_draft_in_a_pool(subject, monkeypatch, name, replay):
    s, first = subject(name), len(PROMPT)
    control = Listed(planned(s, EVERY))
    monkeypatch.setattr("mlx_mtp.decoding.control.Controls.control", lambda *_: control)
    prompts, lengths = [PROMPT, s.text[: first + 3], s.text[: first + 1]], [52, 40, 52]
    batch, found = mlx_mtp.BatchGenerator(s.model, compile_cycles=replay), [[], [], []]
    batch.insert(prompts, lengths)
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    assert found == [s.text[len(prompt) :][:n] for prompt, n in zip(prompts, lengths, strict=True)]
    assert {c.plan.source for c in control.cycles if c.verified} == {"heads", "block"}
    assert len({(c.plan.source, c.accepted) for c in control.cycles if c.verified}) > 8
    if not replay:
        s.check_pool()


def test_the_controller_of_a_pool_can_choose_both(subject):
    s = subject("step3p5")
    control = Controls(s.model, adaptive=True, p_min=True).control(2, 6)
    assert {source: plans[-1].k for source, plans in control.own.items()} == {"block": 6, "heads": 3}
    assert {*Controls(s.model, adaptive=True).control(2, 2).own} == {"block", "heads"}
    assert Controls(s.model, adaptive=False).control(2, 6).plan().source == "block"
    batch, found = mlx_mtp.BatchGenerator(s.model, num_draft_tokens=6, draft_p_min=0.1), [[], []]
    batch.insert([PROMPT, s.text[: len(PROMPT) + 3]], [24, 24])
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    assert found == [s.text[len(PROMPT) :][:24], s.text[len(PROMPT) + 3 :][:24]]


def test_the_controller_chooses_and_fixed_numbers_are_the_blocks(subject):
    s = subject("step3p5")
    assert (s.model.max_draft_tokens, s.both.others) == (15, {"heads": 3})
    assert [c.start for c in mlx_mtp.make_prompt_cache(s.model).like_new().heads] == [0, 1, 2, 0, 0]
    text, stats = s.text[len(PROMPT) :], mlx_mtp.Stats()
    assert [t for t, *_ in mlx_mtp.generate_step(PROMPT, s.model, max_tokens=20, stats=stats)] == text[:20]
    assert stats.num_draft_tokens == 15
    fixed = mlx_mtp.Stats()
    assert ours(s.model, PROMPT, 6, 12, stats=fixed) == text[:12]
    assert set(fixed.drafted_by) == {"block"}
