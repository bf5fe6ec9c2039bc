"""A reused prefix never changes a response, and the memory of the prefix cache is bounded."""

import weakref

import block_drafters
import families
import mlx.core as mx
import numpy as np
import pytest
import tiny
from prefix_requests import generate, left, prompts, rows_alike, serve
from sweep import sampled

import mlx_mtp
from mlx_mtp.cache.pieces import has_rows
from mlx_mtp.serve.job import DecodeRequest, Job, answer, prefill_next, prefill_tail
from mlx_mtp.serve.prefix_files import PrefixFiles
from mlx_mtp.serve.prefixes import Chunking

pytestmark = pytest.mark.usefixtures("letters_as_tokenizer")
SEEDED = {"temp": 0.8, "seed": 3}
KINDS = ["qwen3_5"]  # gated delta; the first model has windows


@pytest.fixture(scope="module", params=["step3p5", *sampled(KINDS, [*sorted(families.FAMILIES), "heads and block"])])
def model(request, tmp_path_factory, tiny_models):
    if request.param == "step3p5":
        return tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]
    path = tmp_path_factory.mktemp("family")
    if request.param != "heads and block":
        return mlx_mtp.load_model(families.build(request.param, path)[0])
    target = tiny.save(path / "target", config := {**tiny.CONFIG, "vocab_size": 40}, tiny.random_weights(config))
    drafter = block_drafters.save_for(path / "drafter", "dflash2", config["hidden_size"], 40)
    return mlx_mtp.load_model(target, draft_model=drafter)


@pytest.mark.parametrize("sampling", sampled([SEEDED], [{}, SEEDED]))
def test_a_response_does_not_depend_on_the_prefix_cache(model, sampling):
    first, second = prompts(model.vocab_size)
    fresh = generate(serve(model), second, **sampling)
    served = serve(model)
    generate(served, first, turns=(18,), **sampling)
    again = generate(served, second, turns=(18,), **sampling)
    assert fresh[1] == 0
    assert again == (fresh[0], 16)
    assert generate(served, second, **sampling) == (fresh[0], 24)


def test_states_after_reuse_equal_those_of_a_full_prefill_bitwise(model):
    first, second = prompts(model.vocab_size)
    caches = []
    for before in ([], [first]):
        served = serve(model)
        for prompt in [*before, second]:
            generate(served, prompt, turns=(18,))
        caches.append(served.tree.take(second, 32))
    for a, b in zip(caches[0].caches, caches[1].caches, strict=True):
        assert a.start == b.start
        for x, y in zip(a.parts, b.parts, strict=True):
            assert mx.array_equal(x, y)
    assert caches[0].tokens == caches[1].tokens == second[:24]
    assert caches[0].primed == caches[1].primed


def test_decoded_rows_are_stored_if_they_equal_prefilled_ones(model):
    """With MLX's own BLAS the bits of rows do not depend on the shape, so keys, values and states are equal."""
    prompt, _ = prompts(model.vocab_size)
    served, fresh = serve(model), serve(model)
    served.tree.decoded = rows_alike(model, served.tree.blank, 24)
    cache = left(answer(served, Job(DecodeRequest(prompt, (), 14), lambda event: None), lambda: False))
    text = [*cache.tokens, *range(5)]
    assert len(text) == len(prompt) + 13 + 5
    reads = [list(prefill_next(served, text, cache)), list(prefill_next(fresh, text))]
    assert reads == ([[40]] if served.tree.decoded else [list(range(24, 44, 4))]) + [list(range(4, 44, 4))]
    a, b = served.tree.take(text, 64), fresh.tree.take(text, 64)
    assert a.tokens == b.tokens == text[:40]
    for x, y in zip(a.layers, b.layers, strict=True):
        assert x.start == y.start
        assert all(map(mx.array_equal, x.parts, y.parts))


def test_a_repeated_prompt_is_not_prefilled_again(model, tmp_path):
    """If decoded rows may be stored, all tokens but the last are; longer prompts reuse them, files lack them."""
    prompt, _ = prompts(model.vocab_size)
    longer = [*prompt, 1, 2, 3]
    fresh, served = [generate(serve(model), text)[0] for text in (prompt, longer)], serve(model)
    served.tree.decoded = rows_alike(model, served.tree.blank, 24)
    assert generate(served, prompt) == (fresh[0], 0)
    assert list(prefill_tail(served, prompt)) == [22] * served.tree.decoded
    assert generate(served, prompt) == (fresh[0], 22 if served.tree.decoded else 20)
    assert list(prefill_tail(served, prompt)) == []
    assert generate(served, longer) == (fresh[1], 22 if served.tree.decoded else 20)
    assert generate(served, [*longer, 4])[1] == 24
    files = PrefixFiles(tmp_path, 1 << 30)
    files.save(served.tree)
    assert sorted(map(len, files.known.values())) == [24]


def test_the_end_of_a_prompt_is_prefilled_in_one_pass_if_rows_are_alike(tmp_path, monkeypatch):
    """Its chunks are cut from the cache after decoding; otherwise each costs a pass before the first token."""
    model = mlx_mtp.load_model(families.build("glm4_moe", tmp_path)[0])
    prompt, chunking = [*range(10), *range(11), 12, 1], Chunking(16, 2, frozenset({12}))
    longer, fresh, served = [*prompt, *prompt], serve(model, chunking=chunking), serve(model, chunking=chunking)
    served.tree.decoded = rows_alike(model, served.tree.blank, 24)
    assert served.tree.decoded
    hidden, passes = type(model).hidden, []
    monkeypatch.setattr(type(model), "hidden", lambda self, x, c: passes.append(x.shape[1]) or hidden(self, x, c))
    counts = []
    for each in (fresh, served):
        passes.clear()
        counts.append(
            [
                generate(each, prompt)[0],
                passes[: passes.index(3)],
                list(prefill_tail(each, prompt)),
                generate(each, longer),
            ]
        )
    (text, read, end, (then, cached)), alike = counts
    assert (read, end, cached) == ([16, 5, 2], [], 21)
    assert alike == [text, [16, 7], [22], (then, 22)]


def test_a_finished_request_keeps_no_cache(tiny_models):
    """Python frees reference cycles late, and each would keep megabytes."""
    job = Job(DecodeRequest([1, 2, 3], (), 4), lambda event: None)
    cache = weakref.ref(left(answer(serve(tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]), job, lambda: False)))
    assert cache() is None


def test_a_model_whose_rows_depend_on_their_number_prefills_its_answers(model, monkeypatch):
    blank, hidden = serve(model).tree.blank, type(model).hidden
    monkeypatch.setattr(type(model), "hidden", lambda self, x, c: hidden(self, x, c) + (x.shape[1] > 8) * 1e-6)
    assert not rows_alike(model, blank, 24)


def test_sequences_continue_only_at_checkpoints(tiny_models):
    """Windows have wrapped at position 18: without a turn there, the second prompt finds no checkpoint."""
    model = tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]
    first, second = prompts(40)
    served = serve(model)
    assert not served.tree.is_stateless
    generate(served, first)
    assert generate(served, second)[1] == 0


@pytest.mark.parametrize("model", ["step3p5"], indirect=True)
def test_turns_end_chunks(model):
    """A prompt with the same turns up to a position continues from there."""
    ends = Chunking(8, 3, frozenset({7}))
    assert ends.cuts([1, 1, 7, 1, 1, 7, 1, *range(20, 29), 7, 1]) == [5, 13, 16]
    first = [*range(20, 25), 7, *range(10, 14), 7, 1]
    second = [*first[:11], 2, 3, 4, 7, 1]
    fresh, served = generate(serve(model, chunking=ends), second), serve(model, chunking=ends)
    generate(served, first, turns=(5,))
    assert generate(served, second) == (fresh[0], 10)
    assert generate(served, [*first[:5], 9, *second[6:]])[1] == 0  # the next token determines whether a chunk ends


def test_rows_can_be_cut_anywhere_without_states(tmp_path):
    model = mlx_mtp.load_model(families.build("glm4_moe", tmp_path)[0])
    served = serve(model)
    assert all(has_rows(c) for c in served.tree.blank.caches)
    first, second = prompts(model.vocab_size)
    generate(served, first)
    assert generate(served, second)[1] == 16


def test_quantized_caches_are_reused_as_they_are(tiny_models):
    model = tiny_models(vocab_size=40, **tiny.TWO_LAYERS, head_dim=32, attention_other_setting={
        **tiny.CONFIG["attention_other_setting"], "head_dim": 32})[0]  # fmt: skip
    layout = {"kv_bits": 8, "mtp_kv_bits": 8, "kv_group_size": 32}
    first, second = prompts(40)
    fresh, served = generate(serve(model, **layout), second), serve(model, **layout)
    generate(served, first, turns=(18,))
    assert generate(served, second, turns=(18,)) == (fresh[0], 16)


def test_the_least_recently_used_leaves_are_evicted_above_the_limit(tiny_models):
    model = tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 40, 20).tolist() for _ in range(6)]
    one = serve(model)
    generate(one, texts[0])
    served = serve(model, limit=int(3.5 * one.tree.nbytes))
    for text in texts[:3]:
        generate(served, text)
    generate(served, texts[0])
    for text in texts[3:5]:
        generate(served, text)
        assert served.tree.nbytes <= served.tree.limit
    held = [served.tree.covered(text) for text in texts]
    assert held[0] == held[4] == 16
    assert held[1] == held[5] == 0
    assert served.tree.nbytes == sum(c.nbytes for leaf in served.tree.leaves() for c in leaf.path())
    nothing = serve(model, limit=0)
    generate(nothing, texts[0])
    assert nothing.tree.nbytes == nothing.tree.chunks == 0
