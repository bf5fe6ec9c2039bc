"""A prompt cache's file of another lane is read again as a prompt, and one of another model is refused."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import families
import mlx.core as mx
import pytest
from cache_files import rewritten, sealed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lanes import LANES, lanes_apart
from sweep import SWEEP, sampled

import mlx_mtp
from mlx_mtp.cache.file import read_prompt_cache
from mlx_mtp.cache.prompt_prefix import PromptPrefix

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]
LAYOUTS = [
    {},
    {"kv_bits": 8, "mtp_kv_bits": 4, "kv_group_size": 32},
    {"kv_bits": 4, "quantized_kv_start": 14, "kv_group_size": 32},
    {"max_kv_size": 6},
]
CASE = {
    "made": st.sampled_from((*LANES, None)),  # None: a file of an earlier version, which states no lane
    "used": st.sampled_from(LANES),
    "same": st.sampled_from((True, True, True, False)),
    "layout": st.sampled_from(LAYOUTS),
    "n": st.integers(0, 9),
    "drafts": st.tuples(st.integers(0, 3), st.integers(0, 3)),
    "chunk": st.sampled_from((None, 1, 3, 8)),
}
QUANTIZED = {"layout": LAYOUTS[2], "n": 6, "drafts": (2, 3), "chunk": None}


def generated(model, prompt, n, k, **options):
    steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, **options)
    return [token for token, *_ in steps]


def saved(model, file, lane, n, k, **layout):
    """Save the cache of a generation of n tokens in a lane, None: without stating it; return the cache."""
    model.runtime.lane, cache = lane or "exact", mlx_mtp.make_prompt_cache(model, **layout)
    generated(model, PROMPT, n, k, prompt_cache=cache)
    cache.prefix = PromptPrefix("a text")
    mlx_mtp.save_prompt_cache(file, cache)
    if lane is None:
        sealed(file, rewritten(file.read_bytes(), lambda state: state.pop("lane")))
    return cache


def prefilled(model, tokens, chunk, **layout):
    """Return the cache of a prefill, as an answer that follows finds it."""
    cache = mlx_mtp.make_prompt_cache(model, **layout)
    generated(model, tokens, 0, model.max_draft_tokens, prompt_cache=cache, prefill_step_size=chunk)
    cache.quantize_at(cache.offset)
    return cache


def check_loaded(model, file, made, k, chunk=None, **layout):
    """Check that a loaded cache has the rows, and continues with the text, of `made` or of a prefill in this lane.

    made: the cache that was saved in the model's lane; in another lane only its tokens count.
    """
    fits = made[0] == model.runtime.lane
    expected = made[1] if fits else prefilled(model, made[1].tokens, chunk, **layout)
    with pytest.MonkeyPatch.context() as patch:
        if fits:
            patch.setattr(type(model), "hidden", None)  # nothing is computed
        found = mlx_mtp.load_prompt_cache(file, model, prefill_step_size=chunk)
    if not fits:  # both are quantized by the answer that follows, if not before
        found.quantize_at(found.offset)
    pairs = [(c.used(), own.used()) for c, own in zip(found.caches, expected.caches, strict=True)]
    assert all(mx.array_equal(a, b) for own, other in pairs for a, b in zip(own, other, strict=True))
    assert (found.tokens, found.primed, found.layout) == (expected.tokens, expected.primed, expected.layout)
    assert found.prefix == PromptPrefix("a text")
    assert generated(model, [1], 4, k, prompt_cache=found) == generated(model, [1], 4, k, prompt_cache=expected)


@pytest.fixture(scope="module")
def models(tiny_models):
    """Return two models of one type, by whether it is the one that makes files."""
    return {same: tiny_models(seed, head_dim=32, vocab_size=5)[0] for same, seed in ((True, 2), (False, 3))}


@settings(max_examples=150 if SWEEP else 6, deadline=None)
@given(**CASE)
@example(made="exact", used="matrix", same=True, **QUANTIZED)
@example(made="matrix", used="exact", same=True, **QUANTIZED)
@example(made="exact", used="matrix", same=True, **{**QUANTIZED, "n": 4, "drafts": (0, 0)})
@example(made=None, used="matrix", same=True, **{**QUANTIZED, "chunk": 3, "layout": {}})
@example(made="exact", used="matrix", same=False, **QUANTIZED)
def test_every_lane_of_file_and_model(models, tmp_path_factory, made, used, same, layout, n, drafts, chunk):
    file, own, model = tmp_path_factory.mktemp("saved") / "cache", models[True], models[same]
    with lanes_apart(*models.values()):
        cache = saved(own, file, made, n, drafts[0], **layout)
        model.runtime.lane = used
        if same:
            return check_loaded(model, file, (made or "exact", cache), drafts[1], chunk, **layout)
        with pytest.raises(ValueError, match="made with another model"):
            mlx_mtp.load_prompt_cache(file, model)


@pytest.mark.parametrize("name", sampled(["qwen3_5"], ["qwen3_5", "deepseek_v3", "glm_moe_dsa_shared", "nemotron_h"]))
def test_states_and_latents_of_another_lane(name, tmp_path):
    model = mlx_mtp.load_model(families.build(name, tmp_path)[0])
    with lanes_apart(model):
        cache = saved(model, tmp_path / "cache", "exact", 6, 1)
        model.runtime.lane = "matrix"
        check_loaded(model, tmp_path / "cache", ("exact", cache), 1)


def test_only_files_of_the_lane_exact_are_for_earlier_versions(models, tmp_path):
    found = {}
    with lanes_apart(models[True]):
        for lane in LANES:
            saved(models[True], tmp_path / lane, lane, 1, 0)
            rewritten((tmp_path / lane).read_bytes(), lambda state, lane=lane: found.update({lane: state}))
    assert {lane: (state["format"], state["lane"]) for lane, state in found.items()} == {
        "exact": (2, "exact"),
        "matrix": (4, "matrix"),
    }
    assert found["exact"]["model"] == found["matrix"]["model"]


@pytest.mark.parametrize("others", [*itertools.product((True, False), repeat=2)])
def test_all_ranks_read_again_if_one_does(models, tmp_path, monkeypatch, others):
    model = models[True]
    own = {"rank": 0, "size": 3, "file": Path, "combined": str, "gather_values": lambda value: [value, *others]}
    monkeypatch.setattr(model.runtime, "ranks", SimpleNamespace(**own))
    with lanes_apart(model):
        mlx_mtp.save_prompt_cache(tmp_path / "cache", mlx_mtp.make_prompt_cache(model))
        assert read_prompt_cache(tmp_path / "cache", model)[1] == all(others)
        model.runtime.lane = "matrix"
        assert not read_prompt_cache(tmp_path / "cache", model)[1]


def test_a_prompt_is_read_again_in_chunks(models, tmp_path, monkeypatch):
    model, file, hidden, sizes = models[True], tmp_path / "cache", type(models[True]).hidden, []
    with lanes_apart(model):
        saved(model, file, "exact", 1, 0)
        model.runtime.lane = "matrix"
        noted = lambda self, tokens, *more: (sizes.append(tokens.size), hidden(self, tokens, *more))[1]  # noqa: E731
        monkeypatch.setattr(type(model), "hidden", noted)
        mlx_mtp.load_prompt_cache(file, model, prefill_step_size=4)
        assert sizes == [4, 4, 3]


def test_a_prompt_that_cannot_be_read_again_is_refused(models, tmp_path, monkeypatch):
    model, file = models[True], tmp_path / "cache"
    with lanes_apart(model):
        saved(model, file, "exact", 1, 0)
        model.runtime.lane = "matrix"
        monkeypatch.setattr("mlx_mtp.decoding.prompt_file.check_prompt", refuse_memory)
        with pytest.raises(ValueError, match=r"of another lane, and its prompt cannot be read again \(too large\)"):
            mlx_mtp.load_prompt_cache(file, model)
        assert mlx_mtp.load_prompt_cache(file, model, check_memory=False).offset == len(PROMPT)
        with pytest.raises(ValueError, match="prefill_step_size=0"):
            mlx_mtp.load_prompt_cache(file, model, prefill_step_size=0)


def refuse_memory(*_, ignore):
    if not ignore:
        raise ValueError("too large")
