"""Draft with a small model: the text is that of plain decoding, drafts are those of its forward over all tokens."""

import drafters
import families
import mlx.core as mx
import prefix_requests
import pytest
from plans import Listed, follow
from sweep import SWEEP, paired, sampled, sweep

import mlx_mtp
from mlx_mtp.cache.pieces import checkpoint_of, cut, join
from mlx_mtp.decoding.drafters.small_model import MOST, SmallModel
from mlx_mtp.tuning.plan import Plan

PROMPTS = [[1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2], [3, 3, 1], [2]]  # the last: nothing is read before the first draft
TARGETS = ["qwen3_5", "llama_sliding", "nemotron_h"]
SMALL = ["nemotron_h", "qwen3_5", "llama_sliding"]
EVERY = sorted({*families.FAMILIES, *drafters.HEADLESS})
TOKENS = 14 if SWEEP else 7
PAIRS = paired(sampled(TARGETS, EVERY), sampled(SMALL, EVERY))


def written(name, path, seed=0, **changes):
    """(checkpoint directory, mlx-lm's plain model)"""
    if name == "gemma3_text":
        changes["sliding_window_pattern"] = 3
    if name in drafters.HEADLESS:
        return families.headless(path, {**drafters.HEADLESS[name], **changes}, seed)
    directory, _, plain = families.build(name, path, seed, **changes)
    return directory, plain


class Watched(SmallModel):
    """Notes (the target's positions, members, drafts) of each call that drafts."""

    def __init__(self, model):
        super().__init__(model.drafter.small, model.vocab_size)
        self.calls: list = []
        model.drafter = self

    def propose(self, frame, run, k):
        drafts = super().propose(frame, run, k)
        if k:
            self.calls.append((frame.cache.layers[0].offset, [*frame.members], drafts.tokens))
        return drafts

    def lone(self, text):
        """(tokens before, drafts) of the calls within a text that was decoded alone."""
        found = [(offset.item() + 1, drafts.tolist()[0]) for offset, _, drafts in self.calls]
        return [(text[:known], drafts) for known, drafts in found if known <= len(text)]


def scratch(plain, known: list[int], drafts: list[int], own: int = families.V) -> list[int]:
    """The choice at each draft's place by a cacheless forward of mlx-lm's model, which has `own` tokens.

    They equal the drafts if each of these is the choice after all tokens before it.
    """
    read = mx.array([[min(token, own - 1) for token in (*known, *drafts[:-1])]])
    return mx.argmax(plain(read)[0, len(known) - 1 :, : families.V], axis=-1).tolist()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(model, mlx-lm's plain small model) by the names of both families."""
    found: dict = {}

    def make(target, small):
        if (target, small) not in found:
            path = tmp_path_factory.mktemp("small")
            directory, plain = written(small, path / "small", 1)
            target = written(target, path / "target")[0]
            found[target, small] = mlx_mtp.load_model(target, draft_model=directory), plain
        model, plain = found[target, small]
        model.drafter = SmallModel(model.drafter.small, model.vocab_size)
        return model, plain

    return make


def alone(model, prompt, k, n=TOKENS, **options):
    options = {"adaptive": False, **options}
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, **options)
    return [token for token, _, _ in steps]


def together(model, k, n=TOKENS, prompts=PROMPTS, **options):
    texts = [[] for _ in prompts]
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=k, adaptive=False, **options)
    batch.insert(prompts, [n] * len(prompts), seeds=list(range(len(prompts))))
    while responses := batch.next_generated():
        for response in responses:
            texts[response.uid].append(response.token)
    return texts


@pytest.mark.parametrize(
    ("names", "k"), [(pair, k) for pair in sampled(PAIRS[:1], PAIRS) for k in sampled([2], range(1, MOST + 1))]
)
def test_the_text_is_that_of_plain_decoding(made, names, k):
    model, _ = made(*names)
    for options in sampled([{"temp": 1.0}], [{}, {"temp": 1.0}]):
        seeds = [options and {"seed": i} for i in range(3)]
        plain = [alone(model, p, 0, **options, **seed) for p, seed in zip(PROMPTS, seeds, strict=True)]
        stats = mlx_mtp.Stats()
        drafted = [alone(model, p, k, stats=stats, **options, **s) for p, s in zip(PROMPTS, seeds, strict=True)]
        assert drafted == plain
        assert stats.drafted[0] > 0
        assert together(model, k, **options) == plain


@pytest.mark.parametrize("names", PAIRS[1:2] if len(PAIRS) < 9 else PAIRS)
@pytest.mark.parametrize("k", sampled([MOST], range(1, MOST + 1)))
def test_replayed_cycles_and_the_most_drafts(made, names, k):
    model, _ = made(*names)
    prompts = sampled(PROMPTS[:2], PROMPTS)
    plain = [alone(model, p, 0, temp=1.0, seed=i) for i, p in enumerate(prompts)]
    assert alone(model, PROMPTS[0], k, temp=1.0, seed=0, compile_cycles=True) == plain[0]
    assert together(model, k, prompts=prompts, temp=1.0, compile_cycles=True) == plain


@pytest.mark.parametrize("names", sampled(PAIRS[2:], PAIRS))
def test_drafts_are_those_of_a_forward_over_the_whole_text(made, monkeypatch, names):
    """Alone, behind pauses and in a pool, whatever was rejected before."""
    model, plain = made(*names)
    watched = Watched(model)
    follow(monkeypatch, Listed([Plan("heads", 3), Plan("heads", 1), Plan(), Plan(), Plan("lookup", 2)]))
    for prompt in (PROMPTS[0], PROMPTS[2]):
        watched.calls.clear()
        found = watched.lone(prompt + alone(model, prompt, 3, 24 if SWEEP else 16, prompt_lookup=True))
        assert len(found) > 5
        for known, drafts in found:
            assert drafts == scratch(plain, known, drafts)
    watched.calls.clear()
    texts = [p + t for p, t in zip(PROMPTS, together(model, 3, 10), strict=True)]
    pooled = [
        (texts[member.uid][: position + 1], row)
        for offset, members, drafts in watched.calls
        for member, position, row in zip(members, offset.tolist(), drafts.tolist(), strict=True)
        if hasattr(member, "uid") and position < len(texts[member.uid])
    ]
    assert len(pooled) > 8
    for known, drafts in pooled:
        assert len(drafts) == 3
        assert drafts == scratch(plain, known, drafts)


@sweep
@pytest.mark.parametrize("names", sampled([("qwen3", "llama_sliding")], PAIRS))
def test_a_conversation_goes_on_from_files_snapshots_copies_and_pieces(made, tmp_path, names):
    model, plain = made(*names)
    truth = alone(model, PROMPTS[0], 0, 24)
    watched = Watched(model)
    for n, k in ((1, 3), (6, 3), (6, 0)):
        cache = mlx_mtp.make_prompt_cache(model)
        first = alone(model, PROMPTS[0], k, n, prompt_cache=cache)
        assert cache.offset == len(PROMPTS[0]) + n - 1
        assert sum(rows.nbytes for rows in cache.backlog) <= cache.offset  # hidden rows do not wait
        file = tmp_path / f"{n}.safetensors"
        mlx_mtp.save_prompt_cache(file, cache)
        pieces = [cut(cache, (0, cache.offset), (0, cache.primed))]
        joined = join(mlx_mtp.make_prompt_cache(model), pieces, checkpoint_of(cache), cache.tokens, 0)
        snapshot = cache.snapshot()
        for kept in (cache, cache.copy(), mlx_mtp.load_prompt_cache(file, model), joined):
            watched.calls.clear()
            assert first + alone(model, first[-1:], 3, 10, prompt_cache=kept) == truth[: n + 10]
            for known, drafts in watched.lone(PROMPTS[0] + truth):
                assert drafts == scratch(plain, known, drafts)
        cache.rewind(snapshot)
        assert first + alone(model, first[-1:], 2, 10, prompt_cache=cache) == truth[: n + 10]


def test_trimmed_caches_go_on(made):
    model, plain = made("qwen3", "llama_sliding")
    cache = mlx_mtp.make_prompt_cache(model)
    text = PROMPTS[0] + alone(model, PROMPTS[0], 3, 12, prompt_cache=cache)
    assert cache.trim(5) == 5
    watched = Watched(model)
    at = cache.offset
    assert text[: at + 1] + alone(model, text[at : at + 1], 3, 9, prompt_cache=cache)[:4] == text[: at + 5]
    assert watched.lone(text)
    for known, drafts in watched.lone(text):
        assert drafts == scratch(plain, known, drafts)


FORMS = [{"kv_bits": 8, "mtp_kv_bits": 4}, {"kv_bits": 4, "quantized_kv_start": 16}, {"max_kv_size": 12}]


@pytest.mark.parametrize("options", sampled(FORMS[:1], FORMS))
def test_other_forms_of_keys_and_values(wide, options):
    options = {"kv_group_size": 32, **options} if "kv_bits" in options else options
    plain = alone(wide, PROMPTS[0], 0, **options)
    assert alone(wide, PROMPTS[0], 4, **options) == plain
    assert together(wide, 4, prompts=PROMPTS[:1], **options) == [plain]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model and its small one whose head sizes can be quantized."""
    path = tmp_path_factory.mktemp("wide")
    small = written("llama_sliding", path / "small", 1, head_dim=32)[0]
    return mlx_mtp.load_model(written("qwen3", path / "target", head_dim=32)[0], draft_model=small)


@sweep
def test_drafts_that_it_is_unsure_of_are_not_verified(made):
    model, _ = made(*PAIRS[1])
    plain = alone(model, PROMPTS[0], 0)
    all_of, sure = mlx_mtp.Stats(), mlx_mtp.Stats()
    assert alone(model, PROMPTS[0], 6, stats=all_of) == plain
    assert alone(model, PROMPTS[0], 6, stats=sure, draft_p_min=0.5) == plain
    assert sum(sure.drafted) < sum(all_of.drafted)
    assert together(model, 6, draft_p_min=0.5) == [alone(model, p, 0) for p in PROMPTS]


def test_the_target_as_its_own_small_model_is_always_right(tmp_path):
    directory, _ = written("qwen3_5", tmp_path)
    model = mlx_mtp.load_model(directory, draft_model=directory)
    for options in ({}, {"temp": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3}):
        stats = mlx_mtp.Stats()
        alone(model, PROMPTS[0], 5, 13, stats=stats, **options)
        assert set(stats.acceptance) == {1.0}


@pytest.mark.parametrize("vocab_size", sampled([11], [11, 17]))
def test_rows_that_one_vocabulary_lacks(tmp_path, vocab_size):
    small, plain = written("llama_sliding", tmp_path / "small", 1, vocab_size=vocab_size)
    model = mlx_mtp.load_model(written("qwen3", tmp_path / "target")[0], draft_model=small)
    prompt = [12, *PROMPTS[0], 12]
    for options in ({}, {"temp": 1.0, "seed": 2}):
        truth = alone(model, prompt, 0, **options)
        watched = Watched(model)
        assert alone(model, prompt, 4, **options) == truth
        for known, drafts in watched.lone(prompt + truth):
            assert all(token < families.V for token in drafts)
            assert options or drafts == scratch(plain, known, drafts, vocab_size)


def test_a_server_reuses_beginnings(made, letters_as_tokenizer):
    model, _ = made("qwen3_5", "nemotron_h")
    first, second = prefix_requests.prompts(model.vocab_size)
    fresh = prefix_requests.generate(prefix_requests.serve(model), second)
    served = prefix_requests.serve(model)
    prefix_requests.generate(served, first, turns=(18,))
    again = prefix_requests.generate(served, second, turns=(18,))
    assert again[0] == fresh[0]
    assert again[1] > 0
