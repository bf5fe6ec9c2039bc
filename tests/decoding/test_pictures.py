"""Prompts with pictures: the text of a cacheless model, whatever is drafted, cut, replayed, batched or reused."""

import itertools

import mlx.core as mx
import pytest
import seeing
from cache_files import rewritten, sealed
from compile_mode import ENABLED, set_mode
from lanes import LANES, lanes_apart
from picture_prompts import TWIN, A, B, C, Vision, generated, pictured, tokens_of
from prefix_requests import LARGE, serve
from sweep import SWEEP, paired, sampled

import mlx_mtp
from mlx_mtp.cache.file import saved_prefix
from mlx_mtp.models import qwen3_5
from mlx_mtp.pictures.rows import Picture
from mlx_mtp.serve.job import prefill
from mlx_mtp.serve.prefix_files import PrefixFiles
from mlx_mtp.serve.prefixes import Chunking

N = 8
PROMPTS = {
    "text": ([5, 6, 7, 8, 9, 10, 11],),
    "last": ([5, 6, 7, 8], B),
    "two": ([5, 6], A, [7, 8, 9], C, [10, 11]),
    "twin": ([5, 6], TWIN, [7, 8, 9], C, [10, 11]),
    "adjacent": (A, TWIN, C, B, [7]),
}
WAYS = [(0, 2048), (3, 1), (1, 3), (2, 2048), (0, 1), (3, 7)]  # numbers of drafts, chunks


@pytest.fixture(scope="module")
def models():
    model, reference = pictured()
    return (
        model,
        reference,
        {name: reference.greedy(parts, N, generated(model, parts, n=N)) for name, parts in PROMPTS.items()},
    )


def test_texts_differ(models):
    *_, texts = models
    assert len({tuple(text) for text in texts.values()}) == len(texts)


@pytest.mark.parametrize(("name", "way"), paired(PROMPTS, WAYS))
def test_text_of_the_reference_for_every_chunk_and_number_of_drafts(models, name, way):
    model, _, texts = models
    k, chunk = way
    assert generated(model, PROMPTS[name], k, n=N, prefill_step_size=chunk) == texts[name]


def test_a_mixture_of_experts_has_the_text_of_the_reference():
    model, reference = pictured(moe=True)
    for name in sampled(["adjacent"], PROMPTS):
        text = reference.greedy(PROMPTS[name], N, generated(model, PROMPTS[name], n=N))
        for k, chunk in sampled([(2, 3)], WAYS):
            assert generated(model, PROMPTS[name], k, n=N, prefill_step_size=chunk, compile_cycles=True) == text


@pytest.mark.parametrize("k", [0, 2])
def test_replayed_cycles_take_the_shift_as_an_input(models, k, monkeypatch, recorded_at_once):
    """Conversations with other shifts, and without any, replay each other's cycles."""
    model, _, texts = models
    if SWEEP:
        set_mode(ENABLED)  # on a CPU: a C++ compiler makes a hundred kernels
    monkeypatch.setattr(model.runtime, "recorder", None)
    recorded = []
    for name in ("text", "two", "adjacent", "last", "text"):
        stats = mlx_mtp.Stats()
        assert generated(model, PROMPTS[name], k, n=N, compile_cycles=True, stats=stats) == texts[name], name
        assert stats.compiled_cycles > 0
        recorded.append(stats.compiled_shapes > 0)
    assert recorded == [True, True, False, False, False]  # once without a shift, and once for all shifts


def batched(model, prompts, **options):
    batch = mlx_mtp.BatchGenerator(model, adaptive=False, **options)
    pictures = [[part for part in parts if isinstance(part, Picture)] for parts in prompts]
    uids = batch.insert([tokens_of(*parts) for parts in prompts], [N] * len(prompts), pictures=pictures)
    found = {uid: [] for uid in uids}
    while responses := batch.next_generated():
        for response in responses:
            found[response.uid].append(response.token)
    batch.close()
    return [found[uid] for uid in uids]


@pytest.mark.parametrize("options", [{"num_draft_tokens": 0}, {"num_draft_tokens": 2, "compile_cycles": True}])
def test_sequences_of_a_batch_have_their_own_shifts(models, options):
    model, _, texts = models
    names = ["two", "text", "adjacent"]
    found = batched(model, [PROMPTS[name] for name in names], prefill_step_size=4, **options)
    assert found == [texts[name] for name in names]


def test_pools_with_a_shift_and_without_have_recorded_cycles_of_their_own(models, monkeypatch, recorded_at_once):
    """MLX would record a second cycle for an input more, and its memory would not be counted."""
    model, *_ = models
    monkeypatch.setattr(model.runtime, "recorder", None)
    plain, recorded = [7] * len(tokens_of(*PROMPTS["two"])), []
    for parts in ((plain,), PROMPTS["two"], (plain,)):
        batched(model, [parts] * 2, num_draft_tokens=0, compile_cycles=True)
        recorded.append(len(model.runtime.recorder.cycles))
    assert recorded[1:] == [2 * recorded[0]] * 2


TURNS = [([5, 6], A, [7]), ([8], B, TWIN, [9, 10]), ([11, 12],)]


@pytest.fixture(scope="module")
def conversation(models):
    """Three turns and their answers of seven tokens by the reference; every prompt continues the one before."""
    model, reference, _ = models
    parts, answers = [], []
    for turn in TURNS:
        parts += turn
        answers.append(reference.greedy(parts, 7, generated(model, parts, n=7)))
        parts.append(answers[-1])
    return answers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(pictures=[[2, 5, 2], [15, 5, 2]]), "its list of pictures does not match its tokens"),
        (lambda s: s["pictures"].pop(), "its list of pictures does not match its tokens"),
        (lambda s: s.pop("pictures"), "its tokens are not the model's"),
        (lambda s: s["tokens"].pop(3), "the picture at token 2 is"),
        (lambda s: s["tokens"].__setitem__(3, -(2**63) - 1), "its tokens are not the model's"),
        (lambda s: s.update(vision="00"), "whose vision tower or settings this model does not have"),
        *[
            (lambda s, images=images: s.update(opening={"prompt": "", "images": images}), "not a list of pictures")
            for images in (
                [7],
                [["zz", [1, 5, 2]]],
                [[1, [1, 5, 2]]],
                [["00", [1, 5]]],
                [["00", [2, 5, 2]]],
                [["00", [1, 5.0, 2]]],
                [["00", [1, 5, 0]]],
            )
        ],
    ],
)
def test_files_whose_pictures_do_not_fit_are_refused(models, tmp_path, change, message):
    model, *_ = models
    generated(model, PROMPTS["two"], n=1, prompt_cache=(cache := mlx_mtp.make_prompt_cache(model)))
    mlx_mtp.save_prompt_cache(tmp_path / "cache", cache)
    damaged = sealed(tmp_path / "damaged", rewritten((tmp_path / "cache").read_bytes(), change))
    with pytest.raises(ValueError, match=message):
        mlx_mtp.load_prompt_cache(damaged, model)
    if message == "not a list of pictures":
        with pytest.raises(ValueError, match="its prompt prefix is not valid"):
            saved_prefix(damaged)


def test_a_file_with_pictures_of_another_lane_is_refused(models, tmp_path):
    """It has no images to encode again."""
    model, *_ = models
    with lanes_apart(model):
        for made, used in itertools.product(LANES, LANES):
            model.runtime.lane, cache = made, mlx_mtp.make_prompt_cache(model)
            generated(model, PROMPTS["two"], n=1, prompt_cache=cache)
            mlx_mtp.save_prompt_cache(tmp_path / "cache", cache)
            model.runtime.lane = used
            if used == made:
                assert mlx_mtp.load_prompt_cache(tmp_path / "cache", model).tokens == cache.tokens
                continue
            message = f"in the lane '{made}' and not '{used}'; load the model with kernels='{made}', or make the file"
            with pytest.raises(ValueError, match=message):
                mlx_mtp.load_prompt_cache(tmp_path / "cache", model)


@pytest.mark.parametrize("k", [0, 2])
def test_later_turns_continue_a_cache(models, conversation, k, tmp_path):
    """Also one that went back over a picture, one from a file, a copy, and heads that begin behind a picture."""
    model, *_ = models
    cache, last, marks = mlx_mtp.make_prompt_cache(model), [], []
    for turn, answer in zip(TURNS, conversation, strict=True):
        marks.append(cache.snapshot())
        assert generated(model, (last, *turn), k if turn != TURNS[0] else 0, n=7, prompt_cache=cache) == answer
        last = answer[-1:]
    whole, again = cache.copy(), cache
    more = generated(model, (last, [13]), 0, n=2, prompt_cache=cache.copy())
    again.rewind(marks[1])
    for turn, answer, before in zip(TURNS[1:], conversation[1:], conversation, strict=False):
        mlx_mtp.save_prompt_cache(tmp_path / "cache", again)
        again = mlx_mtp.load_prompt_cache(tmp_path / "cache", model)
        assert generated(model, (before[-1:], *turn), k, n=7, prompt_cache=again) == answer
    assert again.tokens == whole.tokens
    assert generated(model, (last, [13]), k, n=2, prompt_cache=whole) == more


def test_prefix_tree_shares_text_and_pictures(models, tmp_path, monkeypatch):
    """Chunks end at pictures: one of equal size shares nothing, the same one is neither read nor encoded again."""
    model, _, texts = models
    steps = [("two", 0, [A, C]), ("twin", 2, [TWIN, C]), ("two", 25, []), ("twin", 25, []), ("two", 25, [])]
    for i, (name, reused, encoded) in enumerate(steps):
        if i in (0, 3):  # a new server, the second one with the first one's files
            served = serve(model, chunking=Chunking(4), files=PrefixFiles(tmp_path, LARGE))
        monkeypatch.setattr(model.runtime, "vision", vision := Vision())
        prompt = tokens_of(*PROMPTS[name])
        served.files.load(served.tree, prompt)
        cache = served.tree.take(prompt, len(prompt))
        assert cache.offset == reused
        cache.name_pictures(encoded)
        list(prefill(served, cache, prompt, (2,)))
        served.files.save(served.tree)
        rest = {"prompt_cache": cache, "max_tokens": N, "num_draft_tokens": 2, "adaptive": False}
        assert [t for t, *_ in mlx_mtp.generate_step(prompt[cache.offset :], model, **rest)] == texts[name]
        assert vision.encoded == encoded


def primitives(model, rows, *, counted, shift=0):
    """Return the sorted names of the operations that read `rows` tokens behind a text.

    counted: who counts positions, "host" or "device".
    """
    cache, names = mlx_mtp.make_prompt_cache(model), []
    generated(model, PROMPTS["text"], prompt_cache=cache, n=1)
    if counted == "device":
        cache.to_device()
    for c in cache.layers:
        c.shift = shift

    def note(event):
        if event["type"] == "primitive":
            names.append(event["name"])

    mx.export_function(note, lambda tokens: model.hidden(tokens, cache.layers), mx.zeros((1, rows), mx.int32))
    return sorted(names)


def test_text_has_the_operations_of_a_model_that_knows_no_pictures(models, tmp_path, monkeypatch):
    model, *_ = models
    monkeypatch.setattr(qwen3_5.Model, "OURS", (qwen3_5.GatedDeltaNet,))
    monkeypatch.setattr(qwen3_5.Model, "axes", ())
    blind = mlx_mtp.load_model(seeing.build(tmp_path)[0])
    for counted, rows in (("host", 1), ("host", 3), ("device", 1), ("device", 3)):
        text = primitives(blind, rows, counted=counted)
        assert primitives(model, rows, counted=counted) == text
    shifted = primitives(model, 3, counted="device", shift=mx.array([-4]))
    assert shifted == sorted([*text, "Add"])  # once for all layers


@pytest.mark.parametrize(
    ("parts", "pictures", "options", "message"),
    [
        (([5], A, [6], B), [A], {}, r"picture 2 of the prompt, .* is not among them"),
        (([5], A, [6], TWIN), [A, B], {}, r"picture 2 of the prompt, .* is not among them"),
        (([5], A.tokens[:-1], [6]), [A], {}, "the picture at token 1 is not followed by its other rows"),
        (([5], A.tokens[:-1]), [A], {}, "ends inside picture 1"),
        (([5, -7],), [A], {}, r"picture 1 of the prompt, .* is not among them"),
        (([5, -(2**63) - 1],), [A], {}, "prompt: "),
    ],
)
def test_prompts_whose_pictures_do_not_fit_are_refused(models, parts, pictures, options, message):
    model, *_ = models
    with pytest.raises(ValueError, match=message):
        mlx_mtp.generate_step(tokens_of(*parts), model, pictures=pictures, **options)
    batch = mlx_mtp.BatchGenerator(model)
    with pytest.raises(ValueError, match=message):
        batch.insert([tokens_of(*parts)], pictures=[pictures])


def test_a_model_without_a_tower_refuses_pictures(models, monkeypatch):
    model, *_ = models
    monkeypatch.setattr(model.runtime, "vision", None)
    monkeypatch.setattr(model.runtime, "blind", "this model has no vision tower")
    with pytest.raises(ValueError, match="vision tower"):
        mlx_mtp.generate_step([1], model, pictures=[A])
    with pytest.raises(ValueError, match="not a token id"):
        mlx_mtp.generate_step(A.tokens, model)
