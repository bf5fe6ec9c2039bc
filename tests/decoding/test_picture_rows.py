"""Rows of pictures in heads, histories, kernels' routes, cache layouts, trims and the turns of a batch."""

from contextlib import nullcontext
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import tiny
from picture_prompts import TWIN, A, B, C, Vision, generated, pictured, tokens_of
from stand_in import standing_in, switched_on

import mlx_mtp
from mlx_mtp.decoding.drafters.lookup import Copied
from mlx_mtp.decoding.history import TokenHistory
from mlx_mtp.layers.prompt_rows import PromptRows
from mlx_mtp.pictures.rows import Picture, mark_ids, places_in, positions_of
from mlx_mtp.tuning import kernel_sites

PROMPT = ([5, 6], A, [7, 8, 9], C, TWIN, [10, 11])


@pytest.fixture(scope="module")
def model():
    return pictured().model


@pytest.fixture(scope="module")
def text(model):
    """Return the tokens after PROMPT, decoded without drafts."""
    return generated(model, PROMPT, 0)


def whole_pass(model, tokens):
    """Return a cache that has read tokens and pictures in one pass, and the embeddings and positions of all rows."""
    vision, places = model.vision, places_in(tokens)
    embeddings = model.embed(mx.array(mark_ids(tokens, vision.mark))[None], None)
    for place, picture in zip(places, (A, C, TWIN), strict=True):
        embeddings[:, place.first : place.end] = vision.features(picture)
    positions, cache = mx.array(positions_of(places, 0, len(tokens))), mlx_mtp.make_prompt_cache(model)
    rows = model.hidden(mx.array([[0] * len(tokens)]), cache.layers, PromptRows(embeddings, positions))
    return rows, embeddings, positions, cache


@pytest.mark.parametrize(("chunk", "late"), [(1, False), (4, False), (2048, False), (2, True)])
def test_heads_read_the_next_rows_feature_at_the_targets_position(model, chunk, late):
    """late: the heads begin after the prompt, in chunks of their own."""
    tokens = tokens_of(*PROMPT)
    rows, embeddings, positions, whole = whole_pass(model, tokens)
    (head,), (kv,), n = model.mtp, whole.heads, len(tokens) - 1
    kv.axes = positions[:, :n]
    head(embeddings[:, 1:], model.capture(rows[:, :n]), kv)
    cache = mlx_mtp.make_prompt_cache(model)
    first = generated(model, PROMPT, 0 if late else 1, n=1, prompt_cache=cache, prefill_step_size=chunk)
    assert cache.primed == (0 if late else n)
    if late:
        generated(model, (first,), 1, n=2, prompt_cache=cache, prefill_step_size=chunk)
    for found, expected in zip(cache.heads[0].parts, kv.parts, strict=True):
        assert mx.allclose(found[:, :, :n], expected[:, :, :n], atol=1e-5)
    for found, expected in zip(cache.layers[3].parts, whole.layers[3].parts, strict=True):
        assert mx.allclose(found[:, :, : n + 1], expected[:, :, : n + 1], atol=1e-5)


def test_heads_that_start_later_read_stored_features_or_marks(model, text, monkeypatch):
    """Drafts differ, the text does not."""
    monkeypatch.setattr(model.runtime, "vision", Vision())
    for forgetful in (False, True):
        cache = mlx_mtp.make_prompt_cache(model)
        first = generated(model, PROMPT, 0, n=3, prompt_cache=cache)
        if forgetful:
            model.vision.known.clear()
        assert first + generated(model, (first[-1:],), 2, n=9, prompt_cache=cache) == text


def test_rows_with_equal_axes_have_the_bits_of_text(model):
    rope, x = model.layers[3].self_attn.rope, mx.random.normal((1, 2, 5, 32))
    places = mx.array([7, 3, 90, 4, 2000])
    for dtype in (mx.float32, mx.bfloat16):
        rows = x.astype(dtype)
        turned = rope(rows, offset=mx.broadcast_to(places, (3, 5)))
        for i, place in enumerate(places.tolist()):
            alone = rope(rows[:, :, i : i + 1], offset=place)
            assert mx.array_equal(turned[:, :, i : i + 1], alone)


def test_routes_of_kernels_place_rows_alike(model, text):
    """With sites of attention and of norms with RoPE on for all rows, by their references on a CPU."""
    other = pictured.__wrapped__().model
    for site in kernel_sites.place(other):
        if site.op.startswith(("verify_attention", "norm_rope")):
            site.rows = frozenset(site.every_count)
    for k, chunk, replayed in ((0, 2048, False), (2, 2, True)):
        assert generated(other, PROMPT, k, prefill_step_size=chunk, compile_cycles=replayed) == text


@pytest.mark.parametrize("layout", [{"kv_bits": 8, "mtp_kv_bits": 4}, {"max_kv_size": 14}, {"temp": 1.0, "seed": 5}])
def test_layouts_and_draws_do_not_depend_on_drafts(model, layout):
    assert generated(model, PROMPT, 3, prefill_step_size=4, **layout) == generated(model, PROMPT, 0, **layout)


def test_quantized_during_a_picture(model):
    layout = {"kv_bits": 8, "quantized_kv_start": 6}
    assert generated(model, PROMPT, 3, **layout) == generated(model, PROMPT, 0, prefill_step_size=3, **layout)
    cache = mlx_mtp.make_prompt_cache(model, kv_bits=8, quantized_kv_start=99)
    generated(model, PROMPT, 0, n=1, prompt_cache=cache)
    cache.quantize_at(99)
    assert {c.shift for c in cache.layers} == {cache.next_shift}


def test_processors_get_ids_of_marks(model, text):
    seen = []

    def note(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    assert generated(model, PROMPT, 2, logits_processors=[note]) == text
    ids = mark_ids(tokens_of(*PROMPT), model.vision.mark)
    assert seen[0] == ids
    assert all(tokens[: len(ids)] == ids for tokens in seen)


def test_lookup_neither_matches_nor_drafts_pictures():
    start, answer = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4]
    exact = tokens_of(start, A, [7, 8, 9, 10], [99, 7, 8, 9, 10])  # 99 is the mark's id
    history = TokenHistory(mark_ids(exact, 99), exact)
    assert history.exact() == exact
    assert history.matched() == 4  # not the picture's last row, which has the id of a mark in the text
    again = tokens_of(A, [7, 8, 9, 10], A, [7, 8, 9, 10])
    assert TokenHistory(mark_ids(again, 99), again).matched() == 4
    history.extend(answer)
    assert history.exact(len(exact) + 2) == exact + answer[:2]
    (length, begin), *_ = history.matches(len(exact) + len(answer))
    assert (length, begin) == (4, 4)
    copied = Copied.of(history, len(exact) + 4, [(length, begin)], mx.array([5]), mx.array([0]), 4)
    assert copied.chain().tolist() == copied.tree()[0][0].tolist() == [6, 0, 0, 0]


def test_text_embeddings_alone_and_a_trim_into_a_picture(tmp_path):
    """A model without axes: pictures have the positions of text; a trim drops a picture as a whole."""
    config = {**tiny.CONFIG, **tiny.SHORTER, "vocab_size": 272}
    model = mlx_mtp.load_model(tiny.save(tmp_path, config, tiny.random_weights(config)))
    width = model.no_hidden().shape[-1]
    model.runtime.vision = vision = Vision()
    vision.known = {p: mx.random.normal((p.rows, width), key=mx.random.key(p.rows)) for p in (A, B, C, TWIN)}
    text = generated(model, PROMPT, 0)
    embeddings = [vision.known[p] if isinstance(p, Picture) else model.embed(mx.array(p), None) for p in PROMPT]
    rows = PromptRows(mx.concatenate(embeddings)[None])
    hidden = model.hidden(mx.array([[0] * len(tokens_of(*PROMPT))]), mlx_mtp.make_prompt_cache(model).layers, rows)
    assert int(mx.argmax(model.logits(hidden)[0, -1])) == text[0]
    assert generated(model, PROMPT, 2, prefill_step_size=3) == text
    generated(model, PROMPT, 1, n=1, prompt_cache=(cache := mlx_mtp.make_prompt_cache(model)))
    whole, kept = tokens_of(*PROMPT), tokens_of([5, 6], A, [7, 8, 9])
    assert cache.trim(len(whole) - len(kept) - 4) == len(whole) - len(kept)
    assert cache.tokens == kept
    assert generated(model, (C, TWIN, [10, 11]), 2, prompt_cache=cache) == text


def test_features_held_of_another_picture_are_not_read(model):
    """A generation that ends inside a picture leaves its features in the cache."""
    cache = mlx_mtp.make_prompt_cache(model)
    cache.features = TWIN.words, model.vision.features(TWIN)
    text, other = (generated(model, (picture, [7]), 0) for picture in (A, TWIN))
    assert generated(model, (A, [7]), 0, prompt_cache=cache) == text != other


def test_images_are_held_until_their_rows_are_read(model):
    cache, pictures = mlx_mtp.make_prompt_cache(model), [replace(picture, image="pixels") for picture in (A, C)]
    steps = mlx_mtp.generate_step(tokens_of([5], A, [6], C, [7]), model, pictures=pictures, prompt_cache=cache)
    assert [picture.image for picture in cache.pictures.values()] == ["pixels"] * 2
    next(steps)
    assert [picture.image for picture in cache.pictures.values()] == [None] * 2
    assert cache.features is None


@pytest.mark.parametrize("stored", [True, False])
def test_a_failed_graph_loses_no_picture_whose_features_are_stored(model, text, stored, monkeypatch):
    """The prompt is read again into new caches; without stored features the message states why that fails."""
    launches = iter(range(10**6))
    other = switched_on(pictured.__wrapped__().model)
    monkeypatch.setattr(other.vision, "known", dict(model.vision.known))
    features = type(other.vision).features

    def read(picture):
        if picture.image is None and not stored:
            raise ValueError("its features are no longer stored")
        return features(other.vision, picture)

    monkeypatch.setattr(other.vision, "features", read)
    parts = [replace(part, image="pixels") if isinstance(part, Picture) else part for part in PROMPT]
    failing = standing_in(lambda op, _: "evaluate" if op == "add_norm" and next(launches) == 60 else None)
    lost = pytest.raises(ValueError, match=r"the prompt cannot be read again \(its features are no longer stored\)")
    with failing, pytest.warns(UserWarning, match="it is built again"), nullcontext() if stored else lost:
        assert generated(other, parts, 2) == text


def test_others_decode_while_a_picture_is_encoded(model, monkeypatch):
    """One part of the encoding a turn, then the rows; a picture without an image ends its own sequence."""
    monkeypatch.setattr(model.runtime, "vision", Vision())
    batch = mlx_mtp.BatchGenerator(model, adaptive=False, num_draft_tokens=0, prefill_step_size=64)
    (first,) = batch.insert([[5, 6, 7]], [40])
    batch.next()
    (second,) = batch.insert([tokens_of(*PROMPT[:2])], [2], pictures=[[A]])
    turns = []
    while second not in (turns[-1][1] if turns else []):
        progress, responses = batch.next()
        turns.append((len(progress), [response.uid for response in responses]))
    assert all(first in uids for _, uids in turns)
    assert [read for read, _ in turns] == [1, 0, 1]  # the text and a part of the encoding, the other part, the rows
    assert model.vision.encoded == [A]
    monkeypatch.setattr(model.vision, "stages", model.vision.known.pop)
    (third,) = batch.insert([tokens_of(C, [3])], [2], pictures=[[C]])
    batch.next()
    with pytest.raises(KeyError):
        batch.next()
    assert batch.failed == third
    assert [response.uid for response in batch.next()[1]] == [first]
    batch.close()


def test_a_sequence_that_leaves_a_pool_keeps_its_shift(model, text):
    batch = mlx_mtp.BatchGenerator(model, adaptive=False, num_draft_tokens=1)
    uids = batch.insert([tokens_of(*PROMPT), tokens_of(B, [4])], [4, 12], pictures=[[A, C, TWIN], [B]])
    found = {uid: [] for uid in uids}
    caches = {}
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
            if response.finish_reason:
                caches[response.uid] = response.prompt_cache
    batch.close()
    assert found[uids[1]] == generated(model, (B, [4]), 0)
    last = found[uids[0]][-1:]
    rest = generated(model, (last,), 2, n=8, prompt_cache=caches[uids[0]])
    assert found[uids[0]] + rest == text
    assert np.sign(caches[uids[0]].next_shift) == -1
